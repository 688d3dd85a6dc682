"""The one table of ZeRO stages and the states that they shard (arXiv 1910.02054, section 5)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["STAGES", "Sharding", "ZeroStageEnum"]


class ZeroStageEnum(IntEnum):
    """DeepSpeed's names of the stages. Pickles in DeepSpeed's checkpoints refer to them."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class Sharding(NamedTuple):
    """The model states that are cut over the data-parallel ranks. Everything else is a copy on each."""

    optimizer: bool  # master weights and moments
    gradients: bool  # reduced gradients: each micro-batch is reduced straight into the owned shard
    parameters: bool  # the weights themselves


STAGES: dict[int, Sharding] = {
    0: Sharding(optimizer=False, gradients=False, parameters=False),
    1: Sharding(optimizer=True, gradients=False, parameters=False),
    2: Sharding(optimizer=True, gradients=True, parameters=False),
    3: Sharding(optimizer=True, gradients=True, parameters=True),
}
