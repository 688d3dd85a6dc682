"""Maps the elements of a parameter that is cut over tensor-parallel ranks to boxes of the checkpoint's logical tensor.
Boxes are written and read by range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from deepspeed_c.checkpoint.source import Box, LogicalTensor, Read
from deepspeed_c.inject.cut import Cut, CutBox

__all__ = ["BoxPart", "box_parts", "plan_reads"]


class BoxPart(NamedTuple):
    """Elements [begin, begin + numel) of ``box`` in row-major order, and their places in a run of a rank's part. A run
    is a contiguous range of the part's elements."""

    box: Box | None
    """None: the whole logical tensor."""
    begin: int
    numel: int
    at: int | torch.Tensor
    """The elements' places in the run: the first place if they are contiguous, otherwise the place of each, int64
    [numel]."""

    def take(self, run: torch.Tensor) -> torch.Tensor:
        """The elements from the run, flat; a view if they are contiguous."""
        if isinstance(self.at, torch.Tensor):
            return run[self.at.to(run.device)]
        return run.narrow(0, self.at, self.numel)

    def put(self, run: torch.Tensor, values: torch.Tensor) -> None:
        """Writes ``values`` to the elements' places in the run."""
        if isinstance(self.at, torch.Tensor):
            run.index_copy_(0, self.at.to(run.device), values.to(device=run.device, dtype=run.dtype))
        else:
            self.take(run).copy_(values)


def box_parts(cut: Cut | None, begin: int, numel: int) -> Iterator[BoxPart]:
    """The boxes of the logical tensor that contain elements [begin, begin + numel) of a rank's part, counted in
    row-major order.

    The elements of a box have the same order in the part and in the box, so a run of the part holds a contiguous range
    of the box.
    """
    if cut is None:
        yield BoxPart(None, begin, numel, 0)
        return
    shape = tuple(cut.local_shape)
    for box in cut.boxes:
        first, last = (_n_before(at, shape, box) for at in (begin, begin + numel))
        if last > first or (numel == 0 and box is cut.boxes[0]):
            yield BoxPart(
                Box(box.logical_offset, box.size), first, last - first, _places(first, last, shape, box, begin)
            )


def _n_before(at: int, shape: Sequence[int], box: CutBox) -> int:
    """The number of elements of ``box`` that come before element ``at`` of a tensor of ``shape``."""
    if at >= math.prod(shape):
        return math.prod(box.size)
    n = 0
    for dim, (offset, size) in enumerate(zip(box.local_offset, box.size)):
        stride, at_within = math.prod(shape[dim + 1 :]), math.prod(box.size[dim + 1 :])
        index, at = divmod(at, stride)
        n += min(max(index - offset, 0), size) * at_within
        if not offset <= index < offset + size:
            break
    return n


def _places(first: int, last: int, shape: Sequence[int], box: CutBox, begin: int) -> int | torch.Tensor:
    """The places of elements [first, last) of ``box`` in a run that begins at element ``begin`` of a tensor of
    ``shape``."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(box.local_offset, strides))
    # The last dimension in which the box is narrower than the tensor. From this dimension on, elements of the box are
    # contiguous.
    narrow = max((dim for dim, size in enumerate(box.size) if size != shape[dim]), default=0)
    row = math.prod(box.size[narrow:])
    if math.prod(box.size[:narrow]) <= 1:
        return start + first - begin
    index = torch.arange(first, last)
    within, rows = index % row, index // row
    place = within + start - begin
    for dim in reversed(range(narrow)):
        place += rows % box.size[dim] * strides[dim]
        rows = rows // box.size[dim]
    return place


def plan_reads(
    tensor: LogicalTensor, cut: Cut | None, begin: int, into: torch.Tensor
) -> tuple[list[Read], list[Callable[[], None]]]:
    """(reads, functions to call afterwards) that fill the flat tensor ``into`` with this rank's part of ``tensor``,
    from the part's element ``begin`` on."""
    reads: list[Read] = []
    after: list[Callable[[], None]] = []
    for part in box_parts(cut, begin, into.numel()):
        if isinstance(part.at, torch.Tensor):
            held = torch.empty(part.numel, dtype=tensor.dtype)
            after.append(partial(part.put, into, held))
        else:
            held = part.take(into)
        reads.append(Read(tensor, part.begin, held, part.box))
    return reads, after
