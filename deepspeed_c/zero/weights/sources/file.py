"""Elements whose shards are kept in a file of each rank."""

from __future__ import annotations

import torch

from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.ranks import RankShards
from deepspeed_c.zero.weights.sources.source import Means

__all__ = ["FileShards"]


class FileShards(RankShards):
    """Each rank keeps its slice of the bucket in a file (``offload_param`` to NVMe). The slice is read ahead of the
    gather, and sent as any other slice."""

    @classmethod
    def serves(cls, unit: Unit, bucket: int, means: Means) -> bool:
        return unit.weights.has_slices

    def move_in(self) -> None:
        self.unit.weights.move_in(self.bucket)

    def read_ahead(self) -> None:
        self.unit.weights.read_ahead(self.bucket)

    def start(self, buffer: torch.Tensor | None) -> torch.Tensor:
        with self.unit.weights.open(self.bucket, writes=False):
            return super().start(buffer)
