"""Elements that the ranks of the unit's group send to one another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_c.comm.work import Work
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.source import GatherCost, Means, WeightSource, lasting

__all__ = ["RankShards"]


class RankShards(WeightSource):
    """Each rank of the unit's group keeps one slice of the bucket in its device's memory, and sends it to the others in
    one all-gather. The group is all data-parallel ranks, or with MiCS the ranks of one copy of the shards."""

    def __init__(self, unit: Unit, bucket: int, label: str, means: Means) -> None:
        super().__init__(unit, bucket, label, means)
        self._work: Work | None = None

    @classmethod
    def serves(cls, unit: Unit, bucket: int, means: Means) -> bool:
        return True

    @property
    def cost(self) -> GatherCost:
        n_ranks = self._comm.world_size
        return GatherCost(self._n_bytes * (n_ranks - 1) // n_ranks, self._n_bytes)

    def start(self, buffer: torch.Tensor | None) -> torch.Tensor:
        if buffer is not None:
            self.finish(buffer)
        unit, means = self.unit, self.means
        with means.stream.open(unit.device), lasting():
            filled = buffer
            if filled is None:
                filled = means.pool.take(unit.bucket_numel(self.bucket), unit.dtype, unit.device)
            try:
                self._put_own(filled)
                self._work = self._comm.all_gather(filled, use_broadcast=means.use_broadcast, label=self.label)
            except BaseException:
                if buffer is None:
                    means.pool.give(filled)
                raise
        return filled

    def _put_own(self, buffer: torch.Tensor) -> None:
        """Copies this rank's slice to its place in the buffer."""
        self.unit.own_slice(buffer, self.bucket).copy_(self.unit.param_slice(self.bucket))

    def finish(self, buffer: torch.Tensor) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with lasting():
                work.wait()
                self.means.stream.hand_over(buffer)

    def views(self, buffer: torch.Tensor, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        return self.means.pool.views(buffer, self, make)

    def let_go(self, buffer: torch.Tensor) -> None:
        self.means.pool.give(buffer)
