"""scheduled.py: the place of a pod or a node, from the variables of Kubernetes and Slurm."""

from __future__ import annotations

import socket

import pytest

from deepspeed_c.errors import CommError
from deepspeed_c.scheduled import ScheduledHost, first_host, host_of_slurm_step, pod_of

PET, INDEXED = "Kubernetes (PET_*)", "Kubernetes (JOB_COMPLETION_INDEX)"
TRAINER = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}
TRAINER |= {"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "9"}
JOB = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "5"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PET_NPROC_PER_NODE": "4", "PET_NNODES": "1"}, None),  # defaults for torchrun in a shell
        (TRAINER, (1, 2, 4, "a", 9, PET)),
        ({**TRAINER, "MASTER_ADDR": "b", "MASTER_PORT": "8"}, (1, 2, 4, "a", 9, PET)),
        ({**TRAINER, "PET_NNODES": "2:2", "PET_NPROC_PER_NODE": "gpu"}, (1, 2, None, "a", 9, PET)),
        ({**JOB, "MASTER_ADDR": "b", "MASTER_PORT": "8"}, (3, 5, None, "b", 8, INDEXED)),
        ({**JOB, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "2", "MASTER_ADDR": "b"}, (3, 4, 2, "b", None, INDEXED)),
        ({"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "5", "MASTER_ADDR": "b"}, (0, 5, None, "b", None, PET)),
        ({**JOB, "WORLD_SIZE": "1", "MASTER_ADDR": "b"}, (0, 1, None, "b", None, INDEXED)),  # each pod for itself
    ],
    ids=range(9),
)
def test_pods(environ, expected):
    found = pod_of(environ)
    print(found, expected)
    assert found == (expected and ScheduledHost(*expected))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PET_NNODES": "2"}, "PET_NODE_RANK is not set"),
        ({"PET_NNODES": "1:4"}, "PET_NODE_RANK is not set"),
        ({**TRAINER, "PET_NNODES": "1:4"}, "elastic"),
        ({**TRAINER, "PET_NNODES": "x"}, "PET_NNODES is 'x'"),
        ({**TRAINER, "PET_NODE_RANK": "2"}, "pod 2 does not exist in a job of 2"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is '0'"),
        ({**TRAINER, "PET_MASTER_PORT": "65536"}, "PET_MASTER_PORT is 65536"),
        ({"JOB_COMPLETION_INDEX": "3"}, "neither PET_NNODES nor WORLD_SIZE"),
        ({**JOB, "WORLD_SIZE": "3"}, "pod 3 does not exist in a job of 3"),
        ({**JOB, "PET_NPROC_PER_NODE": "2"}, "5 processes are not 2 on each pod"),
        ({**JOB, "JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is ''"),
    ],
    ids=range(11),
)
def test_mistakes_in_pods_are_named(environ, message):
    with pytest.raises(CommError, match=message) as caught:
        pod_of(environ)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "index", "address"),
    [
        ("train-3.workers.default.svc.cluster.local", "3", "train-0.workers.default.svc.cluster.local"),
        ("train-13", "13", "train-0"),
        ("a-3-3", "3", "a-3-0"),
        ("train-13", "3", None),
        ("node7", "3", None),
    ],
)
def test_pod_0_of_an_indexed_job_is_found_by_name(name, index, address, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    found = pod_of({"JOB_COMPLETION_INDEX": index, "WORLD_SIZE": "14"})
    print(found.master_addr, address)
    assert found.master_addr == address


STEP = {"SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}, None),  # a batch script
        (STEP, (1, 2, None, "gpu07", None, "Slurm")),
        ({**STEP, "MASTER_ADDR": "b", "MASTER_PORT": "8"}, (1, 2, None, "b", 8, "Slurm")),
        ({**STEP, "SLURM_JOB_ID": "20011"}, (1, 2, None, "gpu07", 12011, "Slurm")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, (1, 2, None, "gpu07", None, "Slurm")),
    ],
    ids=range(6),
)
def test_nodes_of_a_slurm_step(environ, expected):
    found = host_of_slurm_step(environ)
    print(found, expected)
    assert found == (expected and ScheduledHost(*expected))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[12,07]", "gpu12"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("rack[1-2]node[03-04].example.org,z", "rack1node03.example.org"),
        ("login-1,gpu[1-2]", "login-1"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_several_launchers_on_a_node_are_refused():
    with pytest.raises(CommError, match="4 tasks on 2 hosts") as caught:
        host_of_slurm_step({**STEP, "SLURM_STEP_NUM_TASKS": "4"})
    assert "--ntasks-per-node=1" in caught.value.fix
