"""Makes I/O transfers fail in tests of code that uses the I/O engine. The backend csrc/aio/fault.c is built for the
tests and replaces "auto".

    from tests.aio_faults import faults

    def test_a_full_disk(tmp_path):
        with faults(full_at=1 << 20) as broken:
            ...                                 # every engine that is made with "auto" (or "fault") in here
            broken.set()                        # from now on nothing is wrong, for engines that are in use, too
            assert broken.counts()["n_failures"] > 0

A plan has the fields of ``struct dsc_aio_fault_plan`` (csrc/aio/fault.h). A plan applies to one process, so each rank
calls `faults`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import subprocess
from collections.abc import Iterator

import pytest

from deepspeed_c import _C
from tests.run_c import CSRC, ROOT, compiler, missing_tools

__all__ = ["Faults", "faults"]

SOURCE = ROOT / "tests" / "aio_faults.c"


class _Plan(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64), ("short_chance", ctypes.c_int32), ("passing_chance", ctypes.c_int32),
        ("failure_chance", ctypes.c_int32), ("failure_err", ctypes.c_int32), ("late_chance", ctypes.c_int32),
        ("refusal_chance", ctypes.c_int32), ("reorders", ctypes.c_bool), ("takes_part", ctypes.c_bool),
        ("refuses_direct", ctypes.c_bool), ("pretends", ctypes.c_bool), ("flip_chance", ctypes.c_int32),
        ("delay_us", ctypes.c_int32), ("bad_begin", ctypes.c_int64), ("bad_end", ctypes.c_int64),
        ("bad_err", ctypes.c_int32), ("full_at", ctypes.c_int64), ("dies_after", ctypes.c_int64),
    ]  # fmt: skip


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("n_transfers", "n_short", "n_passing", "n_failures", "n_flipped")]


class Faults:
    """The current faults, and the counts of faults since `faults` was entered."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._before = self._read()

    def set(self, **plan: int) -> None:
        """Replaces the plan, also for engines in use. Without arguments no further transfer fails."""
        unknown = plan.keys() - {name for name, _ in _Plan._fields_}
        if unknown:
            raise TypeError(f"no such fields of a plan: {sorted(unknown)}")
        self._library.aio_faults_set(ctypes.byref(_Plan(**plan)))

    def counts(self) -> dict[str, int]:
        now = self._read()
        return {name: now[name] - self._before[name] for name in now}

    def _read(self) -> dict[str, int]:
        counts = _Counts()
        self._library.aio_faults_counts(ctypes.byref(counts))
        return {name: getattr(counts, name) for name, _ in _Counts._fields_}


@contextlib.contextmanager
def faults(*, is_auto: bool = True, **plan: int) -> Iterator[Faults]:
    """Applies the plan to engines that the block creates as "fault", and with ``is_auto`` also to those created as
    "auto". Skips the test if there is no compiler.
    """
    reason = missing_tools()
    if reason is not None:
        pytest.skip(reason)
    library = _library()
    found = Faults(library)
    found.set(**plan)
    _plug(ctypes.addressof(ctypes.c_char.in_dll(library, "aio_faults_backend")), is_auto)
    try:
        yield found
    finally:
        _plug(None, False)
        found.set()


def _plug(backend: int | None, is_auto: bool) -> None:
    """Calls dsc_aio_plug_backend through the extension's library.

    A build in place exports the C ABI of the cores; a wheel does not (setup.py).
    """
    plug = ctypes.CDLL(_C.__file__).dsc_aio_plug_backend
    plug.argtypes, plug.restype = (ctypes.c_void_p, ctypes.c_bool), None
    plug(backend, is_auto)


@functools.cache
def _library() -> ctypes.CDLL:
    folder = CSRC / "build" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "aio_faults.so"
    sources = [SOURCE, *(CSRC / "aio" / name for name in ("fault.c", "fault.h", "backend.h", "transfer.h"))]
    with open(folder / ".aio_faults.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources):
            partial = path.with_suffix(".partial")
            command = [
                *compiler().split(),
                *("-shared", "-fPIC", "-fvisibility=hidden", "-std=c11", "-D_GNU_SOURCE", "-O1", "-g1"),
                *("-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{CSRC / 'include'}"),
                *(str(SOURCE), "-o", str(partial), "-lpthread"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr
            partial.replace(path)
    library = ctypes.CDLL(str(path))
    library.aio_faults_plan_bytes.restype = ctypes.c_int64
    n_bytes = library.aio_faults_plan_bytes()
    assert n_bytes == ctypes.sizeof(_Plan), (
        f"struct dsc_aio_fault_plan has {n_bytes} bytes, _Plan {ctypes.sizeof(_Plan)}"
    )
    return library
