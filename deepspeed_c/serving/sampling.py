"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepspeed_c.ops import sample

__all__ = ["FinishReason", "SamplingParams"]


_NO_RULES = sample.Rules()


class FinishReason(enum.Enum):
    """Why an answer has ended."""

    STOP = "stop"
    """By an end token, or by a stop string."""
    LENGTH = "length"
    """By the limit of its tokens."""


@dataclass(frozen=True)
class SamplingParams:
    """The wishes of a request. Its tokens depend on its prompt, on these and on no other request."""

    n_new: int
    """The most new tokens, at least 1; an end token is one of them."""
    rules: sample.Rules = _NO_RULES
    seed: int = 0
    """From 0 to 2^62 - 1. The random number of a token is a function of the seed and of the token's place."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer. Their text is not part of it."""
    n_least: int = 0
    """No end token is chosen as one of the first ``n_least`` new tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. It has the text before the first one that comes."""
    continues: bool = False
    """The text is that of the new tokens behind the prompt, such as with a space in front, and not of these alone."""
