"""Inputs of a bucket's update that need other ranks' pieces as well: whole matrices or norms, as the base optimizer's
declaration (``scope``) says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.ops.scope import Shards, declaration
from deepspeed_c.ops.sums import N_LIMBS, value_of_limbs
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.states.entries import Entry

__all__ = ["WholeMatrices", "matrices_in_step", "sum_norms"]

Key = tuple[Unit, int]


class WholeMatrices:
    """The parameters of a bucket as whole matrices (``ops.scope.Matrices``), in one flat fp32 buffer of the bucket's
    size. If tensor-parallel ranks hold parts of the matrices, memory also holds one whole logical matrix at a time."""

    def __init__(self, unit: Unit, bucket: int, entries: Sequence[Entry]) -> None:
        self._unit, self._bucket = unit, bucket
        self._begin, self._entries = unit.bucket_begin[bucket], entries
        self._whole = torch.zeros(unit.bucket_numel(bucket), dtype=torch.float32, device=unit.device)
        own = {bucket: unit.own_slice(self._whole, bucket)}
        self.mine = [entry.part_of(own) for entry in entries]

    def gather(self) -> Iterator[torch.Tensor]:
        unit = self._unit
        unit.comm.all_gather(self._whole).wait()
        if not unit.has_parts:
            yield from (entry.fragment.slot.view(self._whole, self._begin) for entry in self._entries)
            return
        mine = {entry.fragment.slot for entry in self._entries}
        # Every matrix of the bucket is put together on every rank, because other tensor-parallel ranks may own pieces
        # of any of them.
        for slot in unit.bucket_slots[self._bucket]:
            matrix = self._put_together(slot)
            if slot in mine:
                yield matrix

    def _put_together(self, slot: Slot) -> torch.Tensor:
        """The whole logical matrix, put together from the parts of the tensor-parallel ranks."""
        cut = slot.cut
        whole = torch.zeros(cut.logical_shape, dtype=torch.float32, device=self._whole.device)
        if cut.rank == cut.copies[0]:
            cut.put(slot.view(self._whole, self._begin), whole)
        self._unit.parts.sum_disjoint_bits(whole, label=f"whole matrix of {slot.name}")
        return whole

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        entry = self._entries[index]
        cut, fragment = entry.fragment.slot.cut, entry.fragment
        part = whole if cut is None else cut.take(whole)
        return part.reshape(-1).narrow(0, fragment.begin, fragment.numel).view(entry.param.shape)


def matrices_in_step(order: Sequence[Key], base: torch.optim.Optimizer, units: Sequence[Unit]) -> list[Key]:
    """``order``, with some buckets moved to its end: the buckets of matrices that are put together over tensor-parallel
    ranks. These are sorted from the unit's first bucket to its last.

    If ranks hold parts of different sizes, their buckets have different boundaries. In this order all ranks still come
    to the same matrix at the same time."""
    declared = declaration(base)
    apart = {unit for unit in units if unit.has_parts and declared.scope_of_group(unit.group) == "matrix"}
    last = sorted((key for key in order if key[0] in apart), key=lambda key: (units.index(key[0]), key[1]))
    return [*(key for key in order if key[0] not in apart), *last]


def sum_norms(
    base: torch.optim.Optimizer,
    buckets: Iterable[tuple[Key, Sequence[Entry], Shards]],
    units: Sequence[Unit],
    comm: Collectives,
    *,
    is_exact: bool = False,
) -> dict[Key, torch.Tensor]:
    """Sums of squares over whole parameters. If ``units`` are cut, or hold parts of logical tensors, the pieces of a
    parameter lie on several ranks of ``comm``. The sum then takes one small collective. is_exact: the sums do not
    depend on how parameters are cut (``same_bits``).

    Returns float64 [entries of the bucket, 2] for each bucket, on the host.
    """
    is_cut = any(unit.is_cut or unit.has_parts for unit in units)
    # Numbered in order of registration, because tensor-parallel ranks with parts of different sizes have different
    # buckets.
    slots = sorted((slot for unit in units for slot in unit.slots), key=lambda slot: slot.order)
    numbers = {slot: number for number, slot in enumerate(slots)}
    table = torch.zeros(len(slots), 2, N_LIMBS if is_exact else 1, dtype=torch.float64)
    places: dict[Key, list[int]] = {}
    for key, entries, shards in buckets:
        at = places[key] = [numbers[entry.fragment.slot] for entry in entries]
        # ``norms`` also updates the moments, so every rank calls it, even if the result of another rank's copy counts.
        sums = base.exact_norms(*shards[:5]) if is_exact else base.norms(*shards[:5]).unsqueeze(-1)
        norms = sums.to(table)
        table[at] = norms if key[0].speaks or not is_cut else torch.zeros_like(norms)
    if is_cut:
        table = torch.tensor(comm.sum_numbers(table.view(-1).tolist()), dtype=torch.float64).view(table.shape)
    values = torch.tensor([_value_of(limbs) for limbs in table.flatten(0, 1).tolist()], dtype=torch.float64).view(-1, 2)
    return {key: values[at] for key, at in places.items()}


def _value_of(limbs: list[float]) -> float:
    """A sum of squares from its limbs, NaN if an element is not finite; a single number stands for itself."""
    if len(limbs) == 1:
        return limbs[0]
    return math.nan if min(limbs) < 0 else value_of_limbs(limbs)
