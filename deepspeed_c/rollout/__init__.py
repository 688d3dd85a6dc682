"""Rollouts: a model in training, or a server with its weights, writes text for the next step (docs/rollouts.md).

Names, fields and defaults come from ``deepspeed.runtime.rollout``.
"""

from __future__ import annotations

from deepspeed_c.rollout.base import RolloutBatch, RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig
from deepspeed_c.rollout.hybrid import HybridEngineRollout, HybridEngineRolloutConfig
from deepspeed_c.rollout.openai import OpenAIRollout, OpenAIRolloutConfig
from deepspeed_c.rollout.registry import build_rollout, register_rollout
from deepspeed_c.rollout.turns import MemoryTurns, TurnCost
from deepspeed_c.rollout.verify import Difference, verify_rollout

__all__ = [
    "Difference",
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "MemoryTurns",
    "OpenAIRollout",
    "OpenAIRolloutConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "TurnCost",
    "build_rollout",
    "register_rollout",
    "verify_rollout",
]
