"""The choice of the next tokens of a rollout. Each sample has its own seed, so neither its neighbours nor the order of
rows change its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_c.ops import sample
from deepspeed_c.rollout.base import SamplingConfig

__all__ = ["SeededChoice", "log_probs_of"]


def log_probs_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logarithms of softmax(logits / temperature), float32 [rows, words]. 0 or less: of softmax(logits)."""
    return torch.log_softmax(logits.float() if temperature <= 0 else logits.float() / temperature, -1)


class SeededChoice:
    """Draws tokens of samples.

    seeds: int64 [samples], from 0 to 2^62 - 1.
    """

    def __init__(self, sampling: SamplingConfig, seeds: torch.Tensor) -> None:
        self._temperature, self._seeds = sampling.temperature, seeds
        top_k, temperature = max(sampling.top_k, 0), max(sampling.temperature, 0.0)
        self._rules = sample.Rules(temperature=temperature, top_k=top_k, top_p=sampling.top_p)

    def __call__(
        self, logits: torch.Tensor, samples: Sequence[int], positions: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """The next token of some samples, and its entry of ``log_probs_of``. logits: [samples, words]. positions: the
        number of tokens that each response has already."""
        logits = logits.cpu()
        words, _ = sample.tokens(logits, [self._rules] * len(logits), self._seeds[list(samples)], positions)
        log_probs = log_probs_of(logits, self._temperature).gather(1, words[:, None])[:, 0]
        return words.tolist(), log_probs.tolist()
