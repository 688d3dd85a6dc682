"""A file to measure with that has no name: however this process ends, its space is free again."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.errors import AioError
from deepspeed_c.quantity import as_binary

__all__ = ["Scratch", "scratch"]


class Scratch(NamedTuple):
    """An open file of a reserved size."""

    path: str  # opens it, in this process and its children
    n_bytes: int
    note: str  # why its device is reached through the page cache; "" when it is reached directly


@contextlib.contextmanager
def scratch(folder: str, n_bytes: int) -> Iterator[Scratch]:
    """A file of ``n_bytes``, reserved and not written, in ``folder`` for the length of the block.

    Raises AioError, which has the errno, when ``folder`` cannot be written to or has too little free space.
    """
    try:
        descriptor = _unnamed(folder)
    except OSError as error:
        raise AioError(
            f"no file can be made there: {error.strerror}",
            where=folder,
            fix="name a folder that exists and that you may write to",
            path=folder,
            errno=error.errno,
        ) from error
    try:
        _reserve(descriptor, folder, n_bytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        yield Scratch(path, n_bytes, _C.AioFile(path, _C.AIO_READ | _C.AIO_WRITE).note)
    finally:
        os.close(descriptor)


def _unnamed(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # EISDIR: a kernel, EOPNOTSUPP: a file system, without unnamed files.
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise error from None
    descriptor, path = tempfile.mkstemp(prefix=".deepspeed_c_io.", dir=folder)
    os.unlink(path)
    return descriptor


def _reserve(descriptor: int, folder: str, n_bytes: int) -> None:
    # The free space is asked for first: filling the device, if only for a moment, can hurt others.
    room = os.fstatvfs(descriptor)
    n_free = room.f_bavail * room.f_frsize
    try:
        if n_bytes > n_free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        raise AioError(
            f"{n_bytes} bytes ({as_binary(n_bytes)}) cannot be reserved, {n_free} ({as_binary(n_free)}) are free: {error.strerror}",
            where=folder,
            fix="free space there, name another folder, or measure with a smaller size",
            path=folder,
            n_bytes=n_bytes,
            errno=error.errno,
        ) from error
