"""Where the elements of gather units come from: one file for each kind of source, and the table of kinds."""

from __future__ import annotations

from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.sources.file import FileShards
from deepspeed_c.zero.weights.sources.joint import JointShards
from deepspeed_c.zero.weights.sources.ranks import RankShards
from deepspeed_c.zero.weights.sources.second import SecondShards
from deepspeed_c.zero.weights.sources.source import Means, WeightSource

__all__ = ["KINDS", "source_of"]

KINDS: tuple[type[WeightSource], ...] = (JointShards, FileShards, RankShards)
"""The kinds of sources. The first kind with ``serves`` is the kind of a unit's source."""


def source_of(unit: Unit, bucket: int, label: str, means: Means) -> WeightSource:
    """The source of a bucket of a sharded unit. Second shards lie around it if near ranks keep them."""
    kind = next(kind for kind in KINDS if kind.serves(unit, bucket, means))
    source = kind(unit, bucket, label, means)
    near = means.near_of(unit)
    return source if near is None else SecondShards(source, near)
