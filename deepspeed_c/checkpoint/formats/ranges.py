"""Reads ranges of a logical tensor from a file that holds the whole tensor, into the caller's memory.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator

import torch

from deepspeed_c.checkpoint.source import Box, Read
from deepspeed_c.errors import CheckpointError

__all__ = ["fill", "read_bytes", "runs"]

# Size of the pieces in which elements are read if they must be converted or copied to another device.
STAGING_BYTES = 8 << 20


def runs(shape: tuple[int, ...], box: Box | None, begin: int, n_elems: int) -> Iterator[tuple[int, int]]:
    """(first element, count) of each stretch of the row-major tensor that elements [begin, begin + n_elems) of ``box``
    lie in, in order.
    """
    if n_elems == 0:
        return
    cut = -1
    if box is not None:
        cut = max((d for d in range(len(shape)) if box.size[d] != shape[d]), default=-1)
    if cut < 0:
        yield begin, n_elems
        return
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    run_elems = box.size[cut] * strides[cut]
    end = begin + n_elems
    while begin < end:
        rest, within = divmod(begin, run_elems)
        first = box.start[cut] * strides[cut] + within
        for d in reversed(range(cut)):
            rest, i = divmod(rest, box.size[d])
            first += (box.start[d] + i) * strides[d]
        count = min(run_elems - within, end - begin)
        yield first, count
        begin += count


def fill(read: Read, fetch: Callable[[int, torch.Tensor], None], where: str) -> None:
    """Fills ``read.into``; ``fetch(first, into)`` puts the tensor's elements from ``first`` on into a flat CPU tensor
    of its dtype.

    Memory: that of ``fetch``, and 8 MiB if dtype or device differ. Raises CheckpointError for a range that the tensor
    does not have.
    """
    tensor, into = read.tensor, read.into
    size = tensor.shape if read.box is None else read.box.size
    if read.box is not None and not _is_within(read.box, tensor.shape):
        raise CheckpointError(f"{read.box} is no part of shape {tensor.shape}", where=f"{where}, {tensor.name}")
    if read.begin < 0 or read.begin + into.numel() > math.prod(size):
        raise CheckpointError(
            f"elements {read.begin} to {read.begin + into.numel()} are asked of {math.prod(size)}",
            where=f"{where}, {tensor.name}",
        )
    is_direct = into.device.type == "cpu" and into.dtype == tensor.dtype
    step = STAGING_BYTES // tensor.dtype.itemsize
    at = 0
    with torch.no_grad():
        for first, count in runs(tensor.shape, read.box, read.begin, into.numel()):
            if is_direct:
                fetch(first, into[at : at + count])
                at += count
                continue
            for begin in range(first, first + count, step):
                piece = torch.empty(min(step, first + count - begin), dtype=tensor.dtype)
                fetch(begin, piece)
                into[at : at + piece.numel()].copy_(piece)
                at += piece.numel()


def _is_within(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(box.size) == len(shape) and all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(box.start, box.size, shape, strict=True)
    )


def read_bytes(file: int, offset: int, into: torch.Tensor, where: str) -> None:
    """Reads the bytes at ``offset`` of an open file into a flat, contiguous CPU tensor, without a copy.

    Raises CheckpointError when the file ends before or cannot be read.
    """
    n_bytes = into.numel() * into.dtype.itemsize
    if n_bytes == 0:
        return
    # The tensor's own memory: a buffer of Python would have to be copied, and numpy knows no bfloat16.
    view = memoryview((ctypes.c_char * n_bytes).from_address(into.data_ptr())).cast("B")
    done = 0
    while done < n_bytes:
        try:
            n = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"bytes {offset} to {offset + n_bytes} cannot be read: {error.strerror}",
                where=where,
                fix="look at the file system there",
            ) from error
        if n == 0:
            raise CheckpointError(
                f"the file ends at byte {offset + done}, and {offset + n_bytes} are needed",
                where=where,
                fix="the file was cut short: copy it again",
            )
        done += n
