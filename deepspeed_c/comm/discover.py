"""Finds this process's place in the job, from variables that the launcher left in the environment. This module does not
import torch.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from deepspeed_c.errors import CommError

__all__ = ["DEFAULT_PORT", "LAUNCHERS", "LaunchPlace", "Launcher", "discover", "first_host", "local_rank_of"]

DEFAULT_PORT = 29500  # as in torch.distributed and DeepSpeed

# Slurm jobs that share a node must not share a port. So the port is computed from the job's id, below Linux's ephemeral
# range (32768...).
_SLURM_PORT_BEGIN, _SLURM_PORT_END = 12000, 32000


class LaunchPlace(NamedTuple):
    """One process among the processes of a job."""

    rank: int
    world_size: int
    local_rank: int | None  # None: the launcher does not say, so ranks have to count the ranks of their host
    master_addr: str | None  # host of rank 0; None only for one process
    master_port: int | None
    source: str  # the launcher's name, for messages


class Launcher(NamedTuple):
    """The variables that one kind of launcher sets to tell a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    is_explicit: bool = (
        False  # set by a person or a launcher for torch: half of it is a mistake; others may be left-overs
    )


LAUNCHERS = (
    Launcher("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", is_explicit=True),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # The variables of the Slurm step, not of the job. In a batch script that starts python without srun, SLURM_PROCID
    # is 0 and SLURM_NTASKS is the size of the allocation, but there is only one process.
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_LOCAL_TASKS"),
)


def discover(
    environ: Mapping[str, str], *, distributed_port: int = DEFAULT_PORT, auto_mpi_discovery: bool = True
) -> LaunchPlace:
    """The place given by the first launcher of ``LAUNCHERS`` that left its variables. Without any, this is the only
    process.

    ``distributed_port`` is used where the environment names no port. With ``auto_mpi_discovery`` False, only RANK and
    WORLD_SIZE are read. Raises ``CommError`` when the variables are incomplete, malformed or contradict each other.
    """
    for launcher in LAUNCHERS:
        if not (launcher.is_explicit or auto_mpi_discovery):
            continue
        has_rank, has_world = launcher.rank in environ, launcher.world_size in environ
        if has_rank and has_world:
            return _placement(launcher, environ, distributed_port)
        if launcher.is_explicit and has_rank != has_world:
            there, missing = launcher.rank, launcher.world_size
            if has_world:
                there, missing = missing, there
            raise CommError(
                f"{there} is set ({environ[there]}) and {missing} is not",
                where="environment",
                fix=f"set both (torchrun and the deepspeed_c launcher do), or unset {there} to run one process",
            )
    return LaunchPlace(0, 1, 0, None, None, "no launcher: one process")


def local_rank_of(environ: Mapping[str, str]) -> int:
    """This process's number on its host, from the first launcher that gives one; 0 when none does."""
    for launcher in LAUNCHERS:
        if launcher.local_rank in environ:
            return _integer(environ, launcher.local_rank, 0)
    return 0


def _placement(launcher: Launcher, environ: Mapping[str, str], distributed_port: int) -> LaunchPlace:
    rank = _integer(environ, launcher.rank, 0)
    world_size = _integer(environ, launcher.world_size, 1)
    if rank >= world_size:
        raise CommError(
            f"rank {rank} does not exist in a world of {world_size} processes",
            where=f"{launcher.rank}={rank}, {launcher.world_size}={world_size}",
            fix=f"ranks run from 0 to {world_size - 1}; start every process with its own",
        )
    local_rank = _integer(environ, launcher.local_rank, 0) if launcher.local_rank in environ else None
    if world_size == 1:
        return LaunchPlace(rank, world_size, local_rank or 0, None, None, launcher.name)
    port = _port(launcher, environ, distributed_port)
    return LaunchPlace(rank, world_size, local_rank, _master(launcher, environ, world_size), port, launcher.name)


def _integer(environ: Mapping[str, str], name: str, minimum: int) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < minimum:
        raise CommError(
            f"{name} is {environ[name]!r}", where="environment", fix=f"set it to a whole number, {minimum} or more"
        )
    return int(text)


def _port(launcher: Launcher, environ: Mapping[str, str], distributed_port: int) -> int:
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT", 1)
        if port > 65535:
            raise CommError(f"MASTER_PORT is {port}", where="environment", fix="ports run from 1 to 65535")
        return port
    if launcher.name == "Slurm" and distributed_port == DEFAULT_PORT and "SLURM_JOB_ID" in environ:
        return _SLURM_PORT_BEGIN + _integer(environ, "SLURM_JOB_ID", 0) % (_SLURM_PORT_END - _SLURM_PORT_BEGIN)
    return distributed_port


def _master(launcher: Launcher, environ: Mapping[str, str], world_size: int) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if launcher.name == "Slurm":
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if hosts:
            return first_host(hosts)
    if not launcher.is_explicit:
        if environ.get("AZ_BATCH_MASTER_NODE"):  # Azure ML, "host:port"
            return environ["AZ_BATCH_MASTER_NODE"].split(":")[0]
        if environ.get("AZ_BATCHAI_MPI_MASTER_NODE"):
            return environ["AZ_BATCHAI_MPI_MASTER_NODE"]
        on_host = launcher.local_world_size
        if on_host in environ and _integer(environ, on_host, 1) == world_size:
            return "127.0.0.1"
        host = _ask_mpi()
        if host is not None:
            return host
    raise CommError(
        f"{world_size} processes were started by {launcher.name}, and MASTER_ADDR, the host of rank 0, is not set",
        where="environment",
        fix="set MASTER_ADDR (and MASTER_PORT) on every process, start with torchrun or the deepspeed_c launcher"
        + ("" if launcher.is_explicit else ", or install mpi4py"),
    )


def _ask_mpi() -> str | None:
    """The host name of rank 0, through MPI itself, where mpi4py is installed."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD.bcast(socket.gethostname(), root=0)


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: ``gpu[07-09,12],login`` gives ``gpu07``."""
    depth, end = 0, len(nodelist)
    for i, c in enumerate(nodelist):
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            end = i
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodelist[:end])
