"""The memory of summed gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed_c import _C
from deepspeed_c.config.stages import Sharding
from deepspeed_c.zero.gradients.bucket import Bucket, GradientPools
from deepspeed_c.zero.gradients.slots import SlotTable
from deepspeed_c.zero.gradients.summing import Summing
from deepspeed_c.zero.gradients.tree import TreeSum

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot, Unit

__all__ = ["GradientSums"]


class GradientSums:
    """The sums of the gradients of ``units``, one buffer or two for each unit.

    ``results``: this rank's part of the sums of each bucket, by unit. ``n_bytes``: the memory of each unit's sums.
    ``views``: for each parameter whose sum every rank has whole, in the parameter's dtype, a view of it; callers find
    it in ``param.grad``. ``pools``: the memory of gradients on their way to the sums.
    """

    def __init__(self, units: Sequence[Unit], sharding: Sharding, summing: Summing, pools: GradientPools) -> None:
        self.units, self.summing, self.pools = list(units), summing, pools
        self.n_bytes: dict[Unit, int] = {}
        self._wholes: dict[Unit, torch.Tensor] = {}
        self._shards: dict[Unit, torch.Tensor] = {}
        self.views: dict[Slot, torch.Tensor] = {}
        for unit in self.units:
            dtype, in_place = summing.dtype_of(unit), summing.is_in_place(unit)
            if (sharding.gradients and not in_place) or unit.states.is_apart:
                self._shards[unit] = unit.states.new_zeros(unit.shard_elems, dtype)
            if not sharding.gradients or in_place:
                self._wholes[unit] = unit.new_zeros(unit.flat_elems, dtype)
            self.n_bytes[unit] = sum(sums[unit].nbytes for sums in (self._shards, self._wholes) if unit in sums)
            if summing.settings.n_grains is not None:
                self.n_bytes[unit] += TreeSum.planned_bytes(unit, summing.n_ranks, summing.settings.n_grains)
            if not sharding.optimizer and unit not in self._shards and dtype == unit.dtype:
                # ``data`` gives each view a version counter of its own: it shows whether a caller has written to this
                # gradient.
                self.views.update({slot: slot.view(self._wholes[unit]).data for slot in unit.slots})
        self.results = {unit: [self._result(unit, b) for b in range(unit.n_buckets)] for unit in self.units}

    def _whole(self, unit: Unit, bucket: int) -> torch.Tensor | None:
        return unit.bucket_view(self._wholes[unit], bucket) if unit in self._wholes else None

    def _result(self, unit: Unit, bucket: int) -> torch.Tensor:
        if unit in self._shards:
            return unit.shard_slice(self._shards[unit], bucket)
        return unit.own_slice(self._whole(unit, bucket), bucket)

    def make_buckets(self, slots: SlotTable, path: _C.GradientPath) -> list[Bucket]:
        """The buckets that collect the gradients of ``slots`` and store their sums here, by number."""
        return [
            Bucket(
                unit,
                b,
                number,
                path=path,
                whole=self._whole(unit, b),
                result=self.results[unit][b],
                pools=self.pools,
                summing=self.summing,
            )
            for number, (unit, b) in enumerate(slots.buckets)
        ]

    def squares(self, units: Iterable[Unit]) -> list[float]:
        """[sum of squares, non-finite elements] of this rank's part of the sums of ``units``."""
        results = [r for unit in units for r in self.results[unit] if r.numel()]
        return torch.ops.deepspeed_c.flat_sumsq(results).tolist() if results else [0.0, 0.0]

    def exact_squares(self, units: Iterable[Unit]) -> list[int]:
        """The limbs (``ops.sums``) of the sum of squares of this rank's part of the sums of ``units``, and the number
        of non-finite elements."""
        results = [r for unit in units for r in self.results[unit] if r.numel()]
        return torch.ops.deepspeed_c.flat_exact_squares(results).tolist()

    def first_nonfinite(self) -> tuple[str, int, int] | None:
        """(name, inf elements, NaN elements) of the first parameter with such elements in this rank's results. It reads
        the results once."""
        for unit in self.units:
            results = self.results[unit]
            for fragment in sorted(unit.fragments, key=lambda f: f.slot.order):
                piece = unit.piece(results, fragment)
                n_inf, n_nan = int(piece.isinf().sum()), int(piece.isnan().sum())
                if n_inf or n_nan:
                    return fragment.slot.name, n_inf, n_nan
        return None

    def clear(self) -> None:
        """Frees the sums, and the buffers that are not in use."""
        self.pools.staging.clear()
        self.results.clear()
        self.views.clear()
        self._wholes.clear()
        self._shards.clear()
