"""The requests of a load and the time of each: a function of the seed, so that all servers get the same load.

Arrivals, lengths and words are drawn from streams of their own: another rate changes no prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from deepspeed_c.errors import ConfigError

__all__ = ["Lengths", "Load", "PlannedRequest", "parse_lengths"]

_ARRIVALS, _PROMPT_LENGTHS, _ANSWER_LENGTHS, _WORDS, _PROBE = range(5)
# Words that most vocabularies have as one token.
_TEXT = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he", "his",
    "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were", "all", "her",
    "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no", "more", "if", "out", "so",
    "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other", "time", "new", "some", "could",
]  # fmt: skip


class Lengths(NamedTuple):
    """Numbers of tokens, from ``low`` to ``high``, each equally often."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


class PlannedRequest(NamedTuple):
    """A request that will be sent."""

    number: int
    at_s: float
    """Seconds after the begin."""
    n_prompt: int
    """Tokens of the prompt; words if prompts are text."""
    n_new: int
    """Tokens to ask for."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An open loop: requests arrive as a Poisson process, whether or not earlier ones have been answered."""

    rate: float
    """Requests a second on average. Infinity: all at once."""
    n_requests: int
    prompt_tokens: Lengths
    new_tokens: Lengths
    seed: int
    n_words: int
    """Ids in prompts are below this number."""
    is_text: bool = False
    """Prompts are words rather than ids."""

    def plan(self) -> list[PlannedRequest]:
        """All requests, in the order of their times. The gaps are exponential, also the one before the first."""
        gaps = self._draws(_ARRIVALS).exponential(1 / self.rate, self.n_requests)
        n_prompt, n_new = (
            self._draws(stream).integers(lengths.low, lengths.high, self.n_requests, endpoint=True)
            for stream, lengths in ((_PROMPT_LENGTHS, self.prompt_tokens), (_ANSWER_LENGTHS, self.new_tokens))
        )
        rows = zip(np.cumsum(gaps).tolist(), n_prompt.tolist(), n_new.tolist(), strict=True)
        return [PlannedRequest(number, *row) for number, row in enumerate(rows)]

    def prompt(self, request: PlannedRequest) -> list[int] | str:
        """The prompt of a planned request. Its words are random, so that a server with a prefix cache finds none."""
        return self._prompt(self._draws(_WORDS, request.number), request.n_prompt)

    def probe(self) -> list[int] | str:
        """A prompt that is none of the load's, for a request before it."""
        return self._prompt(self._draws(_PROBE), self.prompt_tokens.low)

    def _prompt(self, draws: np.random.Generator, n: int) -> list[int] | str:
        if self.is_text:
            return " ".join(_TEXT[i] for i in draws.integers(len(_TEXT), size=n))
        return draws.integers(self.n_words, size=n).tolist()

    def _draws(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])


def parse_lengths(text: str, where: str) -> Lengths:
    """The range of "32:512", or the one length of "32". Raises ConfigError, with the place ``where``."""
    first, colon, last = text.partition(":")
    words = [first, last] if colon else [first, first]
    if not all(word.isascii() and word.isdigit() for word in words) or not 1 <= int(words[0]) <= int(words[1]):
        raise ConfigError(
            f"{text!r} is no range of lengths",
            where=where,
            fix="write LEAST:MOST, such as 32:512, or one number; 1 is the least of all",
        )
    return Lengths(int(words[0]), int(words[1]))
