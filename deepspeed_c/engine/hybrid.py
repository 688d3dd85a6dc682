"""The hybrid engine: a training engine that checks prompts before it generates, and says where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from typing_extensions import Self

from deepspeed_c.engine.engine import DeepSpeedEngine
from deepspeed_c.engine.generate import GenerationCost
from deepspeed_c.engine.prompts import check_length, check_padding
from deepspeed_c.observe.record import StepRecord

__all__ = ["DeepSpeedHybridEngine", "RoundTimes"]


class RoundTimes:
    """The time of rounds of generation and training, from one log line to the next.

    Time begins with the first switch to evaluation. Training is the time from a switch to training to the end of the
    last step before the next switch, without any generation in it.

    cost: returns the cost of all generation so far, on this rank. n_ranks: number of ranks with prompts of their own.
    clock: returns seconds.
    """

    def __init__(
        self, cost: Callable[[], GenerationCost], n_ranks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cost, self._n_ranks, self._clock = cost, n_ranks, clock
        self._reported = cost()
        self._began: float | None = None
        self._trains_since: float | None = None
        self._training_s = 0.0
        self._n_samples, self._seconds = 0, 0.0  # over all lines

    def switch(self, *, is_training: bool) -> None:
        """Called where the model begins to train, or to evaluate."""
        if self._began is None and not is_training:
            self._began, self._reported = self._clock(), self._cost()
        self._trains_since = self._seconds_without_generation() if is_training and self._began is not None else None

    def end_step(self) -> None:
        if self._trains_since is not None:
            now = self._seconds_without_generation()
            self._training_s += now - self._trains_since
            self._trains_since = now

    def lines(self) -> list[str]:
        """The log line of the time since the last one; none if nothing was generated in it."""
        cost = self._cost().minus(self._reported)
        if self._began is None or not cost.total_s:
            return []
        self.end_step()
        now = self._clock()
        end_to_end_s, n_samples = now - self._began, cost.n_prompts * self._n_ranks
        parts = {
            "gather": cost.lease_s,
            "generate": cost.total_s - cost.lease_s,
            "training": self._training_s,
            "other": end_to_end_s - cost.total_s - self._training_s,
        }
        text = ", ".join(f"{name}={s:.2f} s ({100 * s / end_to_end_s:.1f} %)" for name, s in parts.items())
        self._n_samples += n_samples
        self._seconds += end_to_end_s
        self._began, self._reported, self._training_s = now, self._cost(), 0.0
        rate, mean = n_samples / end_to_end_s, self._n_samples / self._seconds
        return [f"E2E latency={end_to_end_s:.2f} s, {text}, samples/s={rate:.4g} (mean {mean:.4g})"]

    def _seconds_without_generation(self) -> float:
        return self._clock() - self._cost().total_s


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """The engine of a model that trains and generates in turn, for ``"hybrid_engine": {"enabled": true}``.

    Every engine generates (docs/concepts/generation-while-training.md). In this one ``generate`` and
    ``module.generate`` also refuse prompts that cannot be continued: longer than ``max_out_tokens`` with their new
    tokens, padded on the right, or with a hole in their mask. That is a StateError before any collective. If a line of
    a step is due (``steps_per_print``) and the model has generated since the last one, a line of latencies follows.

    No layer is replaced for generation, and LoRA is not fused: its factors are applied in each forward, so switches
    between training and generation never round the base weights.
    """

    is_lora_fused = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times = RoundTimes(lambda: self._generation.cost, self.dp_world_size)

    def train(self, mode: bool = True) -> Self:
        """As of any engine. ``eval()`` begins a round, ``train()`` begins its training."""
        super().train(mode)
        self._times.switch(is_training=mode)
        return self

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As of any engine."""
        super().step(lr_kwargs)
        self._times.end_step()

    def _lines(self, record: StepRecord) -> list[str]:
        return [*super()._lines(record), *self._times.lines()]

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
            self.module,
            args,
            kwargs,
            limit,
            f"max_out_tokens, which is {limit}",
            "set hybrid_engine.max_out_tokens to that number or more, cut the prompt, or ask for fewer new tokens",
        )
        check_padding(self.module, args, kwargs)
