"""Finds this process's place in the job, from variables that the launcher left in the environment. This module does not
import torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from deepspeed_c.env import RUN_TOKEN
from deepspeed_c.errors import CommError
from deepspeed_c.scheduled import DEFAULT_PORT, environ_integer, environ_port, first_host, pod_of, port_of_slurm_job

__all__ = ["DEFAULT_PORT", "LAUNCHERS", "LaunchPlace", "Launcher", "discover", "local_rank_of", "number_given"]


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


# Set for ranks that torchrun or the deepspeed_c launcher has started, perhaps inside a Slurm step or under mpirun.
_STARTED = ("TORCHELASTIC_RUN_ID", RUN_TOKEN)


def discover(
    environ: Mapping[str, str], *, distributed_port: int = DEFAULT_PORT, auto_mpi_discovery: bool = True
) -> LaunchPlace:
    """The place given by the first launcher of ``LAUNCHERS`` that left its variables, or else by Kubernetes. Without
    any, this is the only process.

    ``distributed_port`` is used where the environment names no port. With ``auto_mpi_discovery`` False, only RANK and
    WORLD_SIZE are read. Raises ``CommError`` when the variables are incomplete, malformed or contradict each other.
    """
    found = [launcher for launcher in LAUNCHERS if launcher.is_explicit or auto_mpi_discovery]
    found = [launcher for launcher in found if launcher.rank in environ and launcher.world_size in environ]
    if found and found[0].is_explicit:
        _check_pod(environ)
        if len(found) > 1:
            _compare(found[0], found[1], environ)
    elif auto_mpi_discovery and not found and (place := _place_of_pod(environ, distributed_port)):
        return place
    else:
        _check_explicit(environ)
    if not found:
        if auto_mpi_discovery and "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
            raise CommError(
                f"PMIX_RANK is set ({environ['PMIX_RANK']}), and no variable says how many processes there are",
                where="environment",
                fix="set RANK and WORLD_SIZE on every process; or start with mpirun, srun, torchrun or the deepspeed_c "
                "launcher",
            )
        return LaunchPlace(0, 1, 0, None, None, "no launcher: one process")
    launcher = found[0]
    if launcher.name == "PMI" and _is_pmi_of_slurm(environ):
        launcher = found[-1]
    return _placement(launcher, environ, distributed_port)


def _check_explicit(environ: Mapping[str, str]) -> None:
    """Raises ``CommError`` if only one of RANK and WORLD_SIZE is set."""
    launcher = LAUNCHERS[0]
    has_rank, has_world = launcher.rank in environ, launcher.world_size in environ
    if has_rank == has_world:
        return
    there, missing = launcher.rank, launcher.world_size
    if has_world:
        there, missing = missing, there
    raise CommError(
        f"{there} is set ({environ[there]}) and {missing} is not",
        where="environment",
        fix=f"set both (torchrun and the deepspeed_c launcher do), or unset {there} to run one process",
    )


def _compare(launcher: Launcher, other: Launcher, environ: Mapping[str, str]) -> None:
    """Raises ``CommError`` if two launchers give this process different ranks of the same number of processes.

    With another number of processes the variables are of another level: torchrun in a Slurm step with one task a host.
    """
    if any(environ.get(name) for name in _STARTED):
        return
    ours, theirs = (
        (environ_integer(environ, each.rank, 0), environ_integer(environ, each.world_size, 1))
        for each in (launcher, other)
    )
    if ours[1] == theirs[1] > 1 and ours[0] != theirs[0]:
        raise CommError(
            f"{launcher.rank} says that this is rank {ours[0]} of {ours[1]}, and {other.name} says rank {theirs[0]}",
            where=f"{launcher.rank}={ours[0]}, {launcher.world_size}={ours[1]}, {other.rank}={theirs[0]}, "
            f"{other.world_size}={theirs[1]}",
            fix=f"unset {launcher.rank} and {launcher.world_size} (left over in the shell?), or {other.rank}",
        )


def _is_pmi_of_slurm(environ: Mapping[str, str]) -> bool:
    """Whether ``srun --mpi=pmi2`` has set the PMI variables, and not an mpirun that Slurm has started. Hydra's mpirun
    also numbers the ranks of a host."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    return "MPI_LOCALRANKID" not in environ and (environ["PMI_RANK"], environ["PMI_SIZE"]) == tuple(
        environ.get(name) for name in names
    )


def _place_of_pod(environ: Mapping[str, str], distributed_port: int) -> LaunchPlace | None:
    """The place of the only process of a pod, or None outside of Kubernetes' training jobs."""
    if "RANK" in environ:
        return None
    pod = pod_of(environ)
    if pod is None:
        return None
    _check_pod(environ)
    if pod.n_hosts == 1:
        return LaunchPlace(0, 1, 0, None, None, pod.source)
    if pod.master_addr is None:
        raise _no_address(pod.n_hosts, pod.source, is_mpi=False)
    return LaunchPlace(pod.index, pod.n_hosts, 0, pod.master_addr, pod.master_port or distributed_port, pod.source)


def _check_pod(environ: Mapping[str, str]) -> None:
    """Raises ``CommError`` if this pod should have several processes, and no launcher has started this one. A launcher
    sets LOCAL_RANK."""
    if "LOCAL_RANK" in environ or "PET_NODE_RANK" not in environ:
        return
    n_ranks = environ.get("PET_NPROC_PER_NODE", "")
    if n_ranks.isdecimal() and int(n_ranks) > 1:
        raise CommError(
            f"the job asks for {n_ranks} processes a pod, and this one was started without a launcher",
            where=f"PET_NPROC_PER_NODE={n_ranks}",
            fix="start the script with torchrun or `deepspeed_c --no_ssh`, or set PET_NPROC_PER_NODE to 1",
        )


def local_rank_of(environ: Mapping[str, str]) -> int:
    """This process's number on its host, from the first launcher that gives one; 0 when none does."""
    for launcher in LAUNCHERS:
        if launcher.local_rank in environ:
            return environ_integer(environ, launcher.local_rank, 0)
    return 0


def number_given(environ: Mapping[str, str], fact: str, default: int) -> int:
    """The number that the environment, or else Open MPI, gives for ``fact``, a field of ``Launcher``."""
    names = [getattr(launcher, fact) for launcher in LAUNCHERS[:2]]
    return int(next((environ[name] for name in names if name in environ), default))


def _placement(launcher: Launcher, environ: Mapping[str, str], distributed_port: int) -> LaunchPlace:
    rank = environ_integer(environ, launcher.rank, 0)
    world_size = environ_integer(environ, launcher.world_size, 1)
    if rank >= world_size:
        raise CommError(
            f"rank {rank} does not exist in a world of {world_size} processes",
            where=f"{launcher.rank}={rank}, {launcher.world_size}={world_size}",
            fix=f"ranks run from 0 to {world_size - 1}; start every process with its own",
        )
    local_rank = environ_integer(environ, launcher.local_rank, 0) if launcher.local_rank in environ else None
    if local_rank is None and launcher.is_explicit and "PET_NODE_RANK" in environ:
        local_rank = 0  # the only process of its pod; with the network of a host, pods share the host's name
    if world_size == 1:
        return LaunchPlace(rank, world_size, local_rank or 0, None, None, launcher.name)
    port = _port(launcher, environ, distributed_port)
    return LaunchPlace(rank, world_size, local_rank, _master(launcher, environ, world_size), port, launcher.name)


def _port(launcher: Launcher, environ: Mapping[str, str], distributed_port: int) -> int:
    if "MASTER_PORT" in environ:
        return environ_port(environ, "MASTER_PORT")
    if launcher.name == "Slurm" and distributed_port == DEFAULT_PORT and "SLURM_JOB_ID" in environ:
        return port_of_slurm_job(environ)
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
        if on_host in environ and environ_integer(environ, on_host, 1) == world_size:
            return "127.0.0.1"
        host = _ask_mpi()
        if host is not None:
            return host
    raise _no_address(world_size, launcher.name, is_mpi=not launcher.is_explicit)


def _no_address(world_size: int, source: str, *, is_mpi: bool) -> CommError:
    return CommError(
        f"{world_size} processes were started by {source}, and MASTER_ADDR, the host of rank 0, is not set",
        where="environment",
        fix="set MASTER_ADDR (and MASTER_PORT) on every process, start with torchrun or the deepspeed_c launcher"
        + (", or install mpi4py" if is_mpi else ""),
    )


def _ask_mpi() -> str | None:
    """The host name of rank 0, through MPI itself, where mpi4py is installed."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD.bcast(socket.gethostname(), root=0)
