"""Reads ranges of a logical tensor from a file that holds the whole tensor, into the caller's memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.source import Box, Read
from deepspeed_c.errors import CheckpointError

__all__ = ["fill", "fill_from_file", "read_bytes", "runs"]

# Size of the pieces in which elements are read to be converted or copied to another device.
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
    _check(read, where)
    tensor, into = read.tensor, read.into
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


def fill_from_file(read: Read, file: int, offset: int, where: str) -> None:
    """Fills ``read.into`` from an open file that has the whole tensor, in row-major order, from byte ``offset`` on.

    Memory: 8 MiB if dtype or device differ. Raises CheckpointError as ``fill`` and ``read_bytes`` do.
    """
    _check(read, where)
    into, dtype = read.into, read.tensor.dtype
    shape, box = list(read.tensor.shape), read.box
    if box is None:
        shape = [math.prod(shape)]
        box = Box((0,), (shape[0],))

    def fetch(begin: int, piece: torch.Tensor) -> None:
        wanted = [*box.start, *box.size, begin, piece.numel()]
        _raise_failure(_C.read_part(file, offset, dtype.itemsize, shape, wanted, piece.data_ptr()), where)

    if into.device.type == "cpu" and into.dtype == dtype:
        fetch(read.begin, into)
        return
    step = STAGING_BYTES // dtype.itemsize
    staging = torch.empty(min(step, into.numel()), dtype=dtype)
    with torch.no_grad():
        for at in range(0, into.numel(), step):
            piece = staging[: into.numel() - at]
            fetch(read.begin + at, piece)
            into[at : at + piece.numel()].copy_(piece)


def _check(read: Read, where: str) -> None:
    """Raises CheckpointError if the tensor does not have the elements that are to be read."""
    tensor, n_elems = read.tensor, read.into.numel()
    size = tensor.shape if read.box is None else read.box.size
    if read.box is not None and not _is_within(read.box, tensor.shape):
        raise CheckpointError(f"{read.box} is no part of shape {tensor.shape}", where=f"{where}, {tensor.name}")
    if read.begin < 0 or read.begin + n_elems > math.prod(size):
        raise CheckpointError(
            f"elements {read.begin} to {read.begin + n_elems} are asked of {math.prod(size)}",
            where=f"{where}, {tensor.name}",
        )


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
    _raise_failure(_C.read_part(file, offset, 1, [n_bytes], [0, n_bytes, 0, n_bytes], into.data_ptr()), where)


def _raise_failure(failure: tuple[int, int, int, int] | None, where: str) -> None:
    if failure is None:
        return
    begin, end, at, error = failure
    if error:
        raise CheckpointError(
            f"bytes {begin} to {end} cannot be read: {os.strerror(error)}",
            where=where,
            fix="look at the file system there",
        )
    raise CheckpointError(
        f"the file ends at byte {at}, and {end} are needed",
        where=where,
        fix="the file was cut short: copy it again",
    )
