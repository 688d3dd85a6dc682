"""The ragged engine under DeepSpeed's names: sequences of any lengths in one forward (docs/concepts/inference.md)."""

from __future__ import annotations

from deepspeed_c.config.inference import DeepSpeedTPConfig
from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.inference.v2.engine import InferenceEngineV2
from deepspeed_c.inference.v2.factory import build_engine_from_ds_checkpoint, build_hf_engine
from deepspeed_c.inference.v2.scheduling import SchedulingError, SchedulingResult

__all__ = [
    "DeepSpeedTPConfig",
    "InferenceEngineV2",
    "RaggedInferenceEngineConfig",
    "SchedulingError",
    "SchedulingResult",
    "build_engine_from_ds_checkpoint",
    "build_hf_engine",
]
