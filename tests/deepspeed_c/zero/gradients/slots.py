"""Slots without an engine: parameters in units that have a layout and no memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from deepspeed_c.zero.gradients.slots import SlotTable
from deepspeed_c.zero.layout.unit import Slot

__all__ = ["make_slots"]


def make_slots(params: Sequence[torch.nn.Parameter], layout: Sequence[Sequence[Sequence[int]]]) -> SlotTable:
    """layout: for each unit the parameters of each of its buckets, by their place in ``params``."""
    units = []
    for buckets in layout:
        unit = SimpleNamespace(n_buckets=len(buckets), bucket_slots=[], bucket_begin=[])
        end = 0
        for b, members in enumerate(buckets):
            unit.bucket_begin.append(end)
            unit.bucket_slots.append([])
            for k in members:
                p = params[k]
                slot = Slot(p, f"p{k}", unit, len(unit.bucket_slots[b]), k, b, end, p.numel(), p.shape)
                unit.bucket_slots[b].append(slot)
                end += p.numel()
        units.append(unit)
    return SlotTable(units)
