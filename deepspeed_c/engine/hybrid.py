"""The hybrid engine: a training engine that checks prompts before it generates."""

from __future__ import annotations

from typing import Any

from deepspeed_c.engine.engine import DeepSpeedEngine
from deepspeed_c.engine.prompts import check_length, check_padding, prompts_of

__all__ = ["DeepSpeedHybridEngine"]


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """The engine of a model that trains and generates in turn, for ``"hybrid_engine": {"enabled": true}``.

    Every engine generates (docs/concepts/generation-while-training.md). In this one ``generate`` and
    ``module.generate`` also refuse prompts that cannot be continued: longer than ``max_out_tokens``, padded on the
    right, or with a hole in their mask. That is a StateError before any collective.

    No layer is replaced for generation, and LoRA is not fused: its factors are applied in each forward, so switches
    between training and generation never round the base weights.
    """

    is_lora_fused = False

    def fuse_lora_weight(self) -> None:
        """Does nothing. Generation applies LoRA's factors; adding them to the weights would round."""

    def unfuse_lora_weight(self) -> None:
        """Does nothing, as ``fuse_lora_weight``."""

    def unfuse_lora_weight_non_pinned(self) -> None:
        """Does nothing, as ``fuse_lora_weight``."""

    def retake_inference_cache(self) -> None:
        """Does nothing. The cache of keys and values belongs to one ``generate`` and ends with it."""

    def _check_prompts(self, args: tuple, kwargs: dict[str, Any]) -> None:
        limit = self._config.hybrid_engine.max_out_tokens
        check_length(
            prompts_of(args, kwargs),
            limit,
            f"max_out_tokens, which is {limit}",
            "set hybrid_engine.max_out_tokens to that number or more, or cut the prompt",
        )
        check_padding(self.module, args, kwargs)
