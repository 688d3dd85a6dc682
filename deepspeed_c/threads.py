"""Chooses the threads and the instruction set of passes over host memory for the C cores."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from deepspeed_c.cgroups import least
from deepspeed_c.env import Env, read_env
from deepspeed_c.errors import ConfigError

__all__ = ["decide", "fair_part", "leave", "number", "one_torch_thread", "quota", "take_back"]

VARIABLES = ("DSC_NUM_THREADS", "LOCAL_WORLD_SIZE", "DSC_CPU_ISA")

# The fractions of this rank's processors that running engines use for updates, if backward runs at the same time as
# updates. There is one pool of threads in a process.
_parts: list[float] = []


def _core() -> ModuleType:
    """The compiled module. It needs torch, and programs read ``number`` without it."""
    from deepspeed_c import _C

    return _C


def decide() -> int:
    """Chooses the instruction set and returns the number of threads of the pool. The binding calls it at the first
    operator on host tensors, and after ``pool_resize(0)``.

    Raises ConfigError if an environment variable requests too many threads or an unavailable instruction set.
    """
    core = _core()
    env = read_env({name: value for name, value in os.environ.items() if name in VARIABLES})
    if env.cpu_isa is not None:
        try:
            core.cpu_isa_force(env.cpu_isa)
        except NotImplementedError as error:
            raise ConfigError(f"is {env.cpu_isa!r}: {error}", where="DSC_CPU_ISA", fix="unset it") from error
    _decide_again_after_fork()
    n_threads = number(env, core.POOL_MAX_THREADS)
    return max(1, int(n_threads * min(_parts))) if _parts else n_threads


def leave(part: float) -> None:
    """Gives updates the fraction ``part`` of this rank's processors until ``take_back``. A backward that runs at the
    same time has the other processors.

    An engine calls this before it makes states, because the threads that will update a state must be the first to write
    to it.
    """
    _parts.append(part)
    _core().pool_resize(0)


def take_back(part: float) -> None:
    """Ends one ``leave`` with this ``part``. Passes over host memory then use all of this rank's processors again,
    unless ``leave`` of another engine is in effect.
    """
    _parts.remove(part)
    _core().pool_resize(0)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Context in which torch's operators run on the calling thread alone; afterwards its ``torch.get_num_threads()`` is
    as before, also after an exception.

    After an operator of many elements, threads of OpenMP spin for some milliseconds on the processors that the pool
    needs for the next product. ``torch.set_num_threads`` would also set the number of each thread that calls torch for
    the first time meanwhile. OpenMP's own function sets it for the calling thread. A torch without OpenMP has no
    spinning threads, and stays as it is.
    """
    import torch

    set_number = _openmp_setter()
    if set_number is None:
        yield
        return
    n_threads = torch.get_num_threads()  # the first call in a thread sets its number, so it comes before ours
    set_number(1)
    try:
        yield
    finally:
        set_number(n_threads)


@functools.cache
def _openmp_setter() -> Callable[[int], object] | None:
    import torch

    if not torch.backends.openmp.is_available():
        return None
    library = ctypes.PyDLL(None)  # torch loads its OpenMP for the whole process
    if not hasattr(library, "omp_set_num_threads"):
        return None
    return ctypes.PYFUNCTYPE(None, ctypes.c_int)(("omp_set_num_threads", library))


def number(env: Env, most: int) -> int:
    """Number of threads of this rank: ``DSC_NUM_THREADS``, or this rank's share of the host's processors; at most
    ``most``.

    The launcher is the parent process. If it has bound a rank to separate processors, the rank gets all of them. Ranks
    that share processors divide them.
    """
    if env.num_threads is not None:
        if env.num_threads > most:
            raise ConfigError(
                f"is {env.num_threads}",
                where="DSC_NUM_THREADS",
                fix=f"set it to a whole number from 1 to {most}, or unset it",
            )
        return env.num_threads
    own = _processors_of(os.getpid())
    return min(fair_part(len(own), len(own | _processors_of(os.getppid(), own)), quota(), env.local_world_size), most)


def fair_part(n_own: int, n_launcher: int, n_quota: int | None, n_ranks: int) -> int:
    """Number of processors for one of ``n_ranks`` ranks. ``n_own``: processors in the rank's mask; ``n_launcher``:
    processors in the launcher's mask or the rank's mask; ``n_quota``: from :func:`quota`.
    """
    n_shared = n_launcher if n_quota is None else min(n_launcher, n_quota)
    return min(n_own, max(n_shared // n_ranks, 1))


def quota(root: str = "/") -> int | None:
    """Number of processors whose time the control groups of this process allow it to use, rounded up; None without a
    limit.

    The least limit of the process's groups and of all groups above them counts, in both versions of control groups. In
    a container the path of a group may be a path of the host: a missing folder counts as no limit. Tests pass another
    folder as ``root``.
    """
    return least("cpu", _limit_of_version_2, _limit_of_version_1, root)


def _limit_of_version_2(folder: Path) -> int | None:
    quota_us, period_us = folder.joinpath("cpu.max").read_text().split()
    return _processors_for(int(quota_us), int(period_us))


def _limit_of_version_1(folder: Path) -> int | None:
    return _processors_for(*(int(folder.joinpath(f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")))


def _processors_for(quota_us: int, period_us: int) -> int | None:
    return -(-quota_us // period_us) if quota_us > 0 and period_us > 0 else None


def _processors_of(pid: int, otherwise: set[int] | None = None) -> set[int]:
    """The processors that a whole process may run on, rather than one of its threads; ``otherwise`` if the kernel does
    not report them.
    """
    if pid > 0:  # 0: the parent is in another container
        try:
            return os.sched_getaffinity(pid)
        except OSError:
            pass
    return set(range(os.cpu_count() or 1)) if otherwise is None else otherwise


@functools.cache
def _decide_again_after_fork() -> None:
    """Chooses again in a child process, which may be bound to other processors."""
    os.register_at_fork(after_in_child=functools.partial(_core().pool_resize, 0))
