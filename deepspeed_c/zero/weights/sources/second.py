"""Second shards: near ranks keep elements a second time, so that most gathers stay among them (hpZ of ZeRO++, arXiv
2306.10209, section 3.2).

[Note: one crossing] The first gather after a write goes over all ranks that hold the shards. Each rank then keeps its
slice of the bucket, and the slices of near ranks make up the whole. Until the next write all gathers join these slices,
so no element crosses the link between hosts a second time. Second shards are copies, with the same bits.

[Note: reads of joint memory] Near ranks that share memory keep their second slices there, and a further gather copies
nothing. A rank writes its slice at the end of the first gather. It waits for its near ranks once before it reads. No
rank can still read older elements when the slice is written: the first gather ends only after all ranks have begun it,
and each has let go of older elements before it began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.joint_memory import JointMemory
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.joint import JointShards
from deepspeed_c.zero.weights.sources.ranks import RankShards
from deepspeed_c.zero.weights.sources.source import GatherCost, Means, WeightSource, lasting

__all__ = ["NearRanks", "SecondShards"]


class NearRanks(NamedTuple):
    """The ranks that keep the second shards of a unit together."""

    comm: Collectives
    joint: JointMemory | None
    """Memory that they share, with a part for each bucket; None if they send second slices to one another."""


class _SentSlices(RankShards):
    """Second slices in memory of each rank. Near ranks send them to one another."""

    def __init__(self, unit: Unit, bucket: int, label: str, means: Means, near: Collectives) -> None:
        super().__init__(unit, bucket, label, means)
        self._near = near
        self.own: torch.Tensor | None = None

    @property
    def _comm(self) -> Collectives:
        return self._near

    def keep(self, whole: torch.Tensor) -> None:
        """Keeps this rank's second slice of the whole bucket."""
        mine = self._near.own_slice(whole)
        if self.own is None:
            with lasting():
                self.own = torch.empty_like(mine)
        self.own.copy_(mine)

    def _put_own(self, buffer: torch.Tensor) -> None:
        self._near.own_slice(buffer).copy_(self.own)

    def lends(self, buffer: torch.Tensor | None) -> bool:
        """Whether the buffer is memory of this object, and not of the pool."""
        return False


class _JointSlices(JointShards):
    """Second slices in memory that near ranks share."""

    def __init__(self, unit: Unit, bucket: int, label: str, means: Means, near: NearRanks) -> None:
        super().__init__(unit, bucket, label, means, near.joint)
        self._near = near.comm
        self._is_seen = False  # the near ranks have written their slices
        with torch.inference_mode(False):
            self.own = near.joint.slice(bucket).view(unit.dtype)

    def keep(self, whole: torch.Tensor) -> None:
        """Keeps this rank's second slice of the whole bucket."""
        self.own.copy_(self._near.own_slice(whole))
        self._is_seen = False

    def start(self, buffer: torch.Tensor | None) -> torch.Tensor:
        if not self._is_seen:
            self._near.barrier(label=f"second shards of {self.label}")
            self._is_seen = True
        if buffer is None or self.lends(buffer):
            return self._whole
        return buffer.copy_(self._whole)

    def lends(self, buffer: torch.Tensor | None) -> bool:
        """Whether the buffer is memory of this object, and not of the pool."""
        return buffer is self._whole


class SecondShards(WeightSource):
    """The elements of ``first`` for the first gather after a write, and of second slices of ``near`` for all further
    gathers."""

    def __init__(self, first: WeightSource, near: NearRanks) -> None:
        super().__init__(first.unit, first.bucket, first.label, first.means)
        self.near, self._first = near.comm, first
        place = self.unit, self.bucket, self.label, self.means
        self._second = _SentSlices(*place, near.comm) if near.joint is None else _JointSlices(*place, near)
        self.read_in = near.joint
        self._is_fresh = False  # the first gather after the last write has begun
        self._filling: torch.Tensor | None = None  # the buffer of that gather, until it has ended

    @property
    def cost(self) -> GatherCost:
        first = self._first.cost
        # The memory is that of the first gather, so that a lease does not depend on what has been gathered before.
        return first._replace(received=self._second.cost.received) if self._is_fresh else first

    @property
    def second(self) -> torch.Tensor | None:
        return self._second.own if self._is_fresh and self._filling is None else None

    def stale(self) -> None:
        self._is_fresh = False

    def move_in(self) -> None:
        self._first.move_in()

    def read_ahead(self) -> None:
        if not self._is_fresh:
            self._first.read_ahead()

    def start(self, buffer: torch.Tensor | None) -> torch.Tensor:
        if buffer is not None:
            self.finish(buffer)
        if self._is_fresh:
            return self._second.start(buffer)
        is_lent = self._second.lends(buffer)
        self._filling = self._first.start(None if is_lent else buffer)
        self._is_fresh = True
        return buffer if is_lent else self._filling

    def finish(self, buffer: torch.Tensor) -> None:
        if self._filling is None:
            self._second.finish(buffer)
            return
        filled, self._filling = self._filling, None
        self._first.finish(filled)
        self._second.keep(filled)
        if filled is not buffer:
            self._first.let_go(filled)
            self._second.start(buffer)

    def views(self, buffer: torch.Tensor, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        return self._lender(buffer).views(buffer, make)

    def let_go(self, buffer: torch.Tensor) -> None:
        self._lender(buffer).let_go(buffer)

    def _lender(self, buffer: torch.Tensor) -> WeightSource:
        return self._second if self._second.lends(buffer) else self._first
