"""The choice of the next token, from logits in host memory (``dsc/sample.h``).

The rules apply in the order of transformers' logits processors: repetition penalty (arXiv 1909.05858), temperature,
top-k, top-p (arXiv 1904.09751), min-p (arXiv 2407.01082). A row's result depends on its own logits, rules, earlier
words, seed and position: its bits are the same beside any other rows, on any number of threads and on any instruction
set. All functions raise ValueError, before anything is computed, for shapes that do not fit, a rule out of its range,
an earlier word that the vocabulary does not have, a row with NaN or inf (the first place is named), and a row of -inf
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)

__all__ = ["Rules", "probabilities", "tokens"]

_ops = torch.ops.deepspeed_c


class Rules(NamedTuple):
    """The rules of one row. The defaults change nothing."""

    temperature: float = 1.0
    """At least 0. 0: the first of the largest logits has probability 1."""
    top_k: int = 0
    """Keeps so many largest logits and all equals of the last one. 0: all."""
    top_p: float = 1.0
    """Above 0 and at most 1. Keeps the fewest words whose probabilities add up to it; of equal logits the first ones."""
    min_p: float = 0.0
    """From 0 to 1. Keeps words with at least this share of the largest probability."""
    repetition_penalty: float = 1.0
    """Above 0. Divides logits of earlier words, or multiplies them where they are negative."""


def tokens(
    logits: Tensor,
    rules: Sequence[Rules],
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    earlier: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one word of each row: (words, log_probs), int64 [rows] and float32 [rows].

    ``logits``: float32, bfloat16 or float16 [rows, words]. ``seeds`` and ``positions``: int64, one for each row. A
    row's random number is a function of both, so an engine gives a sequence a seed, and a token its position, from 0 to
    2^62 - 1. ``earlier``: int64, the words that each row already has, for the penalty. ``log_probs`` has the logarithm
    of each word's probability in the distribution that the rules leave, 0 with temperature 0.
    """
    numbers = (torch.as_tensor(values, dtype=torch.int64) for values in (seeds, positions))
    return _ops.sample_tokens(logits, _table(rules), *numbers, *_joined(earlier))


def probabilities(logits: Tensor, rules: Sequence[Rules], earlier: Sequence[Tensor] | None = None) -> Tensor:
    """The distributions from which ``tokens`` draws, float32 [rows, words]."""
    return _ops.sample_probabilities(logits, _table(rules), *_joined(earlier))


def _table(rules: Sequence[Rules]) -> Tensor:
    return torch.tensor(rules, dtype=torch.float64).view(-1, len(Rules._fields))


def _joined(earlier: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """The number of earlier words of each row, and all of these words."""
    if earlier is None:
        return None, None
    words = torch.cat(list(earlier)) if earlier else torch.zeros(0, dtype=torch.int64)
    return torch.tensor([len(row) for row in earlier], dtype=torch.int64), words
