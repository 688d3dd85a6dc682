"""A file to measure with that has no name: however this process ends, its space is free again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.ops.aio import unnamed_file

__all__ = ["ScratchFile", "scratch"]


class ScratchFile(NamedTuple):
    """An open file of a reserved size."""

    path: str  # opens it, in this process and its children
    n_bytes: int
    note: str  # why its device is reached through the page cache; "" when it is reached directly


@contextlib.contextmanager
def scratch(folder: str, n_bytes: int) -> Iterator[ScratchFile]:
    """A file of ``n_bytes``, reserved and not written, in ``folder`` for the length of the block.

    Raises AioError, which has the errno, when ``folder`` cannot be written to or has too little free space.
    """
    descriptor = unnamed_file(folder, n_bytes)
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        yield ScratchFile(path, n_bytes, _C.AioFile(path, _C.AIO_READ | _C.AIO_WRITE).note)
    finally:
        os.close(descriptor)
