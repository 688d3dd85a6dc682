"""Elements that lie whole in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_c.comm.transports.joint_memory import JointMemory
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.source import GatherCost, Means, WeightSource

__all__ = ["JointShards"]


class JointShards(WeightSource):
    """Each rank writes its slice of the bucket into joint memory (``comm/transports/joint_memory.py``), where all ranks
    read the whole bucket in place (``comm.zero_copy_gather``). Nothing is sent, and no rank waits for another one,
    except around writes."""

    is_collective = False

    def __init__(self, unit: Unit, bucket: int, label: str, means: Means, joint: JointMemory | None = None) -> None:
        """joint: memory with a part for each bucket; the unit's own by default."""
        super().__init__(unit, bucket, label, means)
        self.shared = self.read_in = joint or unit.joint
        with torch.inference_mode(False):
            self._whole = self.read_in.whole(bucket).view(unit.dtype)
        self._views: list[torch.Tensor] = []

    @classmethod
    def serves(cls, unit: Unit, bucket: int, means: Means) -> bool:
        return unit.joint is not None

    @property
    def cost(self) -> GatherCost:
        return GatherCost(0, 0)

    def start(self, buffer: torch.Tensor | None) -> torch.Tensor:
        return self._whole

    def views(self, buffer: torch.Tensor, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        if not self._views:
            self._views = make(buffer)
        return self._views
