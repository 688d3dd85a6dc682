"""What the update of a bucket gets to see beyond this rank's pieces of it, by what the base optimizer declares of
itself (``scope``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.ops.scope import Shards
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.states.entries import Entry

__all__ = ["WholeMatrices", "sum_norms"]

Key = tuple[Unit, int]


class WholeMatrices:
    """The parameters of a bucket as whole matrices (``ops.scope.Matrices``), in one flat buffer of the bucket's size
    in fp32."""

    def __init__(self, unit: Unit, bucket: int, entries: Sequence[Entry]) -> None:
        self._unit, self._begin, self._entries = unit, unit.bucket_begin[bucket], entries
        self._whole = torch.zeros(unit.bucket_numel(bucket), dtype=torch.float32, device=unit.device)
        own = {bucket: unit.own_slice(self._whole, bucket)}
        self.mine = [entry.part_of(own) for entry in entries]

    def gather(self) -> list[torch.Tensor]:
        self._unit.comm.all_gather(self._whole).wait()
        return [entry.fragment.slot.view(self._whole, self._begin) for entry in self._entries]

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        entry = self._entries[index]
        return whole.reshape(-1).narrow(0, entry.fragment.begin, entry.fragment.numel).view(entry.param.shape)


def sum_norms(
    base: torch.optim.Optimizer,
    buckets: Iterable[tuple[Key, Sequence[Entry], Shards]],
    units: Sequence[Unit],
    comm: Collectives,
) -> dict[Key, torch.Tensor]:
    """Sums of squares over whole parameters. Where ``units`` are cut, or have parts of parameters, their pieces lie on
    several ranks of ``comm``, and it is one small collective.

    Returns float64 [entries of the bucket, 2] for each bucket, on the host.
    """
    is_cut = any(unit.is_cut or unit.has_parts for unit in units)
    # In order of registration: where tensor-parallel ranks have parts of other sizes, units have other buckets.
    slots = sorted((slot for unit in units for slot in unit.slots), key=lambda slot: slot.order)
    numbers = {slot: number for number, slot in enumerate(slots)}
    table = torch.zeros(len(slots), 2, dtype=torch.float64)
    places: dict[Key, list[int]] = {}
    for key, entries, shards in buckets:
        at = places[key] = [numbers[entry.fragment.slot] for entry in entries]
        # This pass writes the moments, so every rank makes it, also where another one's copy is what counts.
        norms = base.norms(*shards[:5]).to(table.device)
        table[at] = norms if key[0].speaks or not is_cut else torch.zeros_like(norms)
    if is_cut:
        table = torch.tensor(comm.sum_numbers(table.view(-1).tolist()), dtype=torch.float64).view(-1, 2)
    return {key: table[at] for key, at in places.items()}
