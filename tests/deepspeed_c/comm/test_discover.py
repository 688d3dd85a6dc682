"""comm/discover.py: the rank and place of a process, from the variables that each launcher sets."""

from __future__ import annotations

import sys
import types

import pytest

from deepspeed_c.comm.discover import DEFAULT_PORT, LaunchPlace, discover, first_host, local_rank_of
from deepspeed_c.errors import CommError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}


def test_nothing_set_is_one_process():
    assert discover({})[:5] == (0, 1, 0, None, None)


def test_torchrun():
    assert discover(TORCHRUN) == LaunchPlace(3, 8, 1, "node7", 1234, "environment")
    assert discover({**TORCHRUN, **OPEN_MPI})[:2] == (3, 8), "what a launcher for torch says wins over MPI's"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, 1, "127.0.0.1", DEFAULT_PORT)),
        ({**OPEN_MPI, "MASTER_ADDR": "a"}, (1, 2, 1, "a", DEFAULT_PORT)),
        ({**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, (1, 2, 1, "10.0.0.4", DEFAULT_PORT)),
        ({**OPEN_MPI, "AZ_BATCHAI_MPI_MASTER_NODE": "b"}, (1, 2, 1, "b", DEFAULT_PORT)),
        (
            {
                f"MV2_COMM_WORLD_{k}": v
                for k, v in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items()
            },
            (0, 2, 0, "127.0.0.1", DEFAULT_PORT),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (1, 2, 1, "127.0.0.1", DEFAULT_PORT),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, (1, 2, None, "a", DEFAULT_PORT)),
        (SLURM, (5, 8, 1, "gpu07", 12000 + 4711)),
        ({**SLURM, "MASTER_PORT": "77", "MASTER_ADDR": "x"}, (5, 8, 1, "x", 77)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else next(iter(value)),
)
def test_other_launchers(environ, expected):
    assert discover(environ)[:5] == expected


def test_a_given_port_wins_over_slurms():
    assert discover(SLURM, distributed_port=40001).master_port == 40001


def test_slurm_ports_stay_in_range_and_differ_for_neighbours():
    ports = [discover({**SLURM, "SLURM_JOB_ID": str(job)}).master_port for job in (0, 1, 19999, 20000, 123456789)]
    assert all(12000 <= port < 32000 for port in ports) and ports[0] != ports[1]


def test_a_batch_script_without_srun_is_one_process():
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a"}
    assert discover(batch)[:3] == (0, 1, 0)


def test_without_discovery_only_rank_and_world_size_count():
    assert discover(OPEN_MPI, auto_mpi_discovery=False)[:2] == (0, 1)
    assert discover(TORCHRUN, auto_mpi_discovery=False)[:2] == (3, 8)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, r"RANK is set \(0\) and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE is set \(2\) and RANK is not"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 does not exist in a world of 8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one'"),
        ({**TORCHRUN, "RANK": ""}, "RANK is ''"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, the host of rank 0, is not set"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR, the host of rank 0, is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR, the host of rank 0, is not set"),
    ],
)
def test_mistakes_are_named(environ, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommError, match=message) as caught:
        discover(environ)
    assert caught.value.fix


def test_one_process_needs_no_master():
    assert discover({"RANK": "0", "WORLD_SIZE": "1"})[:5] == (0, 1, 0, None, None)


def test_mpi_is_asked_where_mpi4py_is(monkeypatch):
    comm = types.SimpleNamespace(bcast=lambda value, root: f"host-of-{root}")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=comm)))
    assert discover(OPEN_MPI).master_addr == "host-of-0"


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


def test_local_rank_of():
    assert local_rank_of({}) == 0
    assert local_rank_of({"LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == 2
    assert local_rank_of(SLURM) == 1
    with pytest.raises(CommError, match="LOCAL_RANK is 'x'"):
        local_rank_of({"LOCAL_RANK": "x"})
