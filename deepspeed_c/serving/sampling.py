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
    """Most new tokens, at least 1. An end token counts."""
    rules: sample.Rules = _NO_RULES
    seed: int = 0
    """From 0 to 2^62 - 1. The random number of a token is a function of the seed and of the token's place."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer. Their text is not part of it."""
    n_least: int = 0
    """Number of new tokens before an end token can be chosen."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. Its text ends before the string."""
    continues: bool = False
    """New tokens are decoded behind the prompt. False: as a text of their own, which may lack a space in front."""
