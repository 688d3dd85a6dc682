"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

from deepspeed_c.ops import sample

__all__ = ["FinishReason", "Grammar", "SamplingParams"]


_NO_RULES = sample.Rules()


class FinishReason(enum.Enum):
    """Why an answer has ended."""

    STOP = "stop"
    """By an end token, or by a stop string."""
    LENGTH = "length"
    """By the limit of its tokens."""


class Grammar(Protocol):
    """The form of one answer, such as JSON of a schema. One object serves one request."""

    def mask(self, logits: torch.Tensor) -> None:
        """Sets the logits, float [words], of all tokens that cannot come next to -inf."""

    def accept(self, token: int) -> None:
        """Takes a token that was chosen; end tokens too."""


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
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Numbers that are added to the logits of some tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer has already."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the answer has it."""
    n_top: int | None = None
    """Events have the log-probability of their token, and of so many most probable ones. None: they have none."""
    grammar: Grammar | None = None
    shown: tuple[tuple[int, str], ...] = ()
    """(token, text) of special tokens that decoding hides, and whose text is part of this answer."""
    continues: bool = False
    """New tokens are decoded behind the prompt. False: as a text of their own, which may lack a space in front."""
