"""The place of this host or pod in its job, from variables that Kubernetes' operators and Slurm leave in the
environment. This module does not import torch.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from deepspeed_c.errors import CommError

__all__ = [
    "DEFAULT_PORT",
    "ScheduledHost",
    "environ_integer",
    "environ_port",
    "expand_nodelist",
    "first_host",
    "host_of_slurm_step",
    "pod_of",
    "port_of_slurm_job",
]

DEFAULT_PORT = 29500  # as in torch.distributed and DeepSpeed
PET = "Kubernetes (PET_*)"
INDEXED_JOB = "Kubernetes (JOB_COMPLETION_INDEX)"
SLURM = "Slurm"

# Slurm jobs that share a node must not share a port. So the port is computed from the job's id, below Linux's ephemeral
# range (32768...).
SLURM_PORT_BEGIN, SLURM_PORT_END = 12000, 32000

# A name in a Slurm node list, with numbers in brackets.
_NODES = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"


class ScheduledHost(NamedTuple):
    """One host (a pod, a node of a Slurm step) among the hosts of a job."""

    index: int
    n_hosts: int
    n_ranks: int | None  # processes on each host; None: the scheduler leaves it to the launcher
    master_addr: str | None  # address of host 0; None: unknown
    master_port: int | None
    source: str  # the scheduler's name, for messages


def pod_of(environ: Mapping[str, str]) -> ScheduledHost | None:
    """The place of this pod, or None outside of such pods.

    Kubeflow's PyTorchJob and Trainer set PET_NODE_RANK and PET_NNODES. In the pods of an indexed Job, Kubernetes sets
    JOB_COMPLETION_INDEX, and PET_NNODES or WORLD_SIZE has to say how many pods there are. Raises ``CommError`` when the
    variables are incomplete, malformed or contradict each other.
    """
    if "PET_NODE_RANK" not in environ and "JOB_COMPLETION_INDEX" not in environ:
        if environ.get("PET_NNODES", "1") == "1":
            return None
        raise CommError(
            f"PET_NNODES is {environ['PET_NNODES']}, and PET_NODE_RANK is not set",
            where="environment",
            fix="start the script with torchrun, which finds the other pods; or set PET_NODE_RANK on each pod",
        )
    variable = "PET_NODE_RANK" if "PET_NODE_RANK" in environ else "JOB_COMPLETION_INDEX"
    index = environ_integer(environ, variable, 0)
    n_ranks = _ranks_of_pod(environ)
    n_pods, counted = _count_of_pods(environ, variable, n_ranks or 1)
    if variable == "JOB_COMPLETION_INDEX" and n_pods == 1:
        index = 0  # each pod of the Job trains alone
    if index >= n_pods:
        raise CommError(
            f"pod {index} does not exist in a job of {n_pods} pods",
            where=f"{variable}={index}, {counted}={environ[counted]}",
            fix=f"pods run from 0 to {n_pods - 1}; set {counted} to the number of the job's pods",
        )
    address = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR") or _first_pod(environ)
    port = next((environ_port(environ, n) for n in ("PET_MASTER_PORT", "MASTER_PORT") if environ.get(n)), None)
    return ScheduledHost(index, n_pods, n_ranks, address, port, PET if counted == "PET_NNODES" else INDEXED_JOB)


def _ranks_of_pod(environ: Mapping[str, str]) -> int | None:
    """PET_NPROC_PER_NODE if it is a number. Torchrun, which reads it too, also takes auto, cpu and gpu."""
    name = "PET_NPROC_PER_NODE"
    if environ.get(name, "auto") in ("auto", "cpu", "gpu", "xpu"):
        return None
    return environ_integer(environ, name, 1)


def _count_of_pods(environ: Mapping[str, str], variable: str, n_ranks: int) -> tuple[int, str]:
    """(number of pods, the variable that says so)."""
    if "PET_NNODES" in environ:
        least, _, most = environ["PET_NNODES"].partition(":")
        if most and most != least:
            raise CommError(
                f"PET_NNODES is {environ['PET_NNODES']!r}: the job is elastic",
                where="environment",
                fix="start the script with torchrun, which waits for its pods",
            )
        return environ_integer({"PET_NNODES": least}, "PET_NNODES", 1), "PET_NNODES"
    if "WORLD_SIZE" in environ:
        world_size = environ_integer(environ, "WORLD_SIZE", 1)
        if world_size % n_ranks:
            raise CommError(
                f"{world_size} processes are not {n_ranks} on each pod",
                where=f"WORLD_SIZE={world_size}, PET_NPROC_PER_NODE={n_ranks}",
                fix="set WORLD_SIZE to the number of processes of all pods",
            )
        return world_size // n_ranks, "WORLD_SIZE"
    raise CommError(
        f"{variable} is set ({environ[variable]}), and neither PET_NNODES nor WORLD_SIZE gives the number of pods",
        where="environment",
        fix="set WORLD_SIZE in the pod's template to the number of completions, or to 1 if every pod trains alone",
    )


def _first_pod(environ: Mapping[str, str]) -> str | None:
    """The name of pod 0 of an indexed Job: this pod's name, which ends in its index, with the index 0."""
    index = environ.get("JOB_COMPLETION_INDEX")
    # With a headless Service the full name, which other pods can look up: train-3.workers.default.svc.cluster.local
    host, dot, domain = socket.getfqdn().partition(".")
    if index is None or not host.endswith(f"-{index}"):
        return None
    return host[: -len(index)] + "0" + dot + domain


def host_of_slurm_step(environ: Mapping[str, str]) -> ScheduledHost | None:
    """The place of this host in its Slurm step; None outside of a step. Raises ``CommError`` if the step has several
    tasks on a host."""
    if not {"SLURM_NODEID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"} <= environ.keys():
        return None
    n_tasks, n_hosts = environ.get("SLURM_STEP_NUM_TASKS"), environ["SLURM_STEP_NUM_NODES"]
    if n_tasks is not None and n_tasks != n_hosts:
        raise CommError(
            f"the step has {n_tasks} tasks on {n_hosts} hosts, and a launcher is one task on each",
            where=f"SLURM_STEP_NUM_TASKS={n_tasks}, SLURM_STEP_NUM_NODES={n_hosts}",
            fix="start it with srun --ntasks-per-node=1; or the script itself, as in `srun python train.py`",
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    return ScheduledHost(
        environ_integer(environ, "SLURM_NODEID", 0),
        environ_integer(environ, "SLURM_STEP_NUM_NODES", 1),
        None,
        environ.get("MASTER_ADDR") or (first_host(hosts) if hosts else None),
        environ_port(environ, "MASTER_PORT")
        if environ.get("MASTER_PORT")
        else (port_of_slurm_job(environ) if "SLURM_JOB_ID" in environ else None),
        SLURM,
    )


def port_of_slurm_job(environ: Mapping[str, str]) -> int:
    """A port for rank 0, the same on all hosts of the job."""
    return SLURM_PORT_BEGIN + environ_integer(environ, "SLURM_JOB_ID", 0) % (SLURM_PORT_END - SLURM_PORT_BEGIN)


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list."""
    return expand_nodelist(nodelist)[0]


def expand_nodelist(text: str) -> list[str]:
    """The names of a Slurm node list.

    >>> expand_nodelist("gpu[07-09,12],login")
    ['gpu07', 'gpu08', 'gpu09', 'gpu12', 'login']
    """
    if not re.fullmatch(rf"{_NODES}(,{_NODES})*", text):
        raise CommError(
            f"{text!r} is no list of nodes", where="environment", fix="correct Slurm's variables, or unset them"
        )
    return [name for pattern in re.finditer(_NODES, text) for name in _expand(pattern[0])]


def _expand(pattern: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", pattern)
    if match is None:
        yield pattern
        return
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(match[3]):
                yield f"{match[1]}{number:0{len(first)}}{rest}"


def environ_integer(environ: Mapping[str, str], name: str, minimum: int) -> int:
    """The variable as a whole number. Raises ``CommError`` if it is none, or below ``minimum``."""
    text = environ[name].strip()
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < minimum:
        raise CommError(
            f"{name} is {environ[name]!r}", where="environment", fix=f"set it to a whole number, {minimum} or more"
        )
    return int(text)


def environ_port(environ: Mapping[str, str], name: str) -> int:
    """The variable as a port. Raises ``CommError`` if it is none."""
    port = environ_integer(environ, name, 1)
    if port > 65535:
        raise CommError(f"{name} is {port}", where="environment", fix="ports run from 1 to 65535")
    return port
