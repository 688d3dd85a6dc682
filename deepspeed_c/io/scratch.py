"""A file without a name, for measurements. Its space is freed when this process ends, also after a kill."""

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

    path: str  # path that opens the file, in this process and its children
    n_bytes: int
    note: str  # why transfers go through the page cache; "" if they go to the device directly


@contextlib.contextmanager
def scratch(folder: str, n_bytes: int) -> Iterator[ScratchFile]:
    """A file of ``n_bytes`` in ``folder`` that exists inside the context. Its space is reserved, but not written.

    Raises AioError, with the errno, if ``folder`` is not writable or has too little free space.
    """
    descriptor = unnamed_file(folder, n_bytes)
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        yield ScratchFile(path, n_bytes, _C.AioFile(path, _C.AIO_READ | _C.AIO_WRITE).note)
    finally:
        os.close(descriptor)
