"""Boxes of cut parameters against brute force over numbered elements."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from deepspeed_c.checkpoint.source import LogicalTensor
from deepspeed_c.engine.checkpoint.boxes import box_parts, plan_reads
from deepspeed_c.inject.cut import Cut, CutBox


def cut_along(shape: tuple[int, ...], dim: int, runs: list[tuple[int, int]]) -> Cut:
    """A cut that holds some indices along ``dim``: the ``runs``, each (first, number), one after another."""
    boxes, at = [], 0
    for first, n in runs:
        local, logical, size = ([0] * len(shape), [0] * len(shape), list(shape))
        local[dim], logical[dim], size[dim] = at, first, n
        boxes.append(CutBox(tuple(local), tuple(logical), tuple(size)))
        at += n
    return Cut(torch.Size(shape), tuple(boxes), 1, 0, 2, (0,))


CASES = [
    ((6,), 0, [(2, 3)]), ((6, 5), 0, [(1, 2), (4, 1)]), ((6, 5), 1, [(3, 2)]), ((4, 9), 1, [(0, 1), (3, 2), (8, 1)]),
    ((3, 4, 5), 1, [(0, 1), (2, 2)]), ((2, 3, 6), 2, [(1, 1), (4, 2)]), ((1, 7), 1, [(0, 2), (5, 2)]),
    ((5, 4), 0, [(2, 0)]), ((3, 0), 0, [(1, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dim", "runs"), CASES, ids=str)
def test_every_run_of_a_part_is_found_in_the_whole(shape, dim, runs) -> None:
    cut = cut_along(shape, dim, runs)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    local = cut.take(whole).view(-1)
    draw = random.Random(0)
    spans = list(itertools.combinations(range(local.numel() + 1), 2))
    tensor = LogicalTensor(name="w", kind="param", shape=shape, dtype=torch.int64)
    for low, high in [(0, 0), (0, local.numel()), *draw.sample(spans, min(len(spans), 40))]:
        run, n = local[low:high], 0
        for part in box_parts(cut, low, high - low):
            box = whole[tuple(slice(a, a + b) for a, b in zip(*part.box))].reshape(-1)
            assert torch.equal(part.take(run), box[part.begin : part.begin + part.numel]), (low, high, part)
            n += part.numel
        assert n == high - low
        into = torch.full_like(run, -1)
        reads, after = plan_reads(tensor, cut, low, into)
        for read in reads:
            box = whole[tuple(slice(a, a + b) for a, b in zip(*read.box))].reshape(-1)
            read.into.copy_(box[read.begin : read.begin + read.into.numel()])
        for step in after:
            step()
        assert torch.equal(into, run), (low, high)


def test_a_whole_parameter_is_its_own_box() -> None:
    (part,) = box_parts(None, 3, 4)
    assert (part.box, part.begin, part.numel, part.at) == (None, 3, 4, 0)
