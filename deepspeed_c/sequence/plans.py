"""Plans of csrc/seq for the tokens and heads of each rank, and the cutting of tensors according to these plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError

__all__ = ["ORDERS", "ExchangePlan", "HeadPlan", "SequenceCut", "TokenRun", "plan_exchange", "plan_heads"]

ORDERS = {"contiguous": _C.SEQ_CONTIGUOUS, "zigzag": _C.SEQ_ZIGZAG, "documents": _C.SEQ_DOCUMENTS}
"""Name of an order -> its number in dsc/seq.h."""


class TokenRun(NamedTuple):
    """Tokens that are consecutive both in the whole sequence and among the rank's tokens."""

    local_begin: int
    """The first token, counted in the rank's tokens."""
    begin: int
    """The first token, counted in the whole sequence."""
    n_tokens: int
    """At least 1."""


@dataclass(frozen=True)
class SequenceCut:
    """The distribution of one sequence over ranks. Every rank computes the same result, without communication.

    Raises ConfigError for numbers that do not fit together.
    """

    n_tokens: int
    """Number of tokens of the whole sequence. It may be 0, and below the number of ranks."""
    n_ranks: int
    """Number of ranks that share the sequence."""
    order: str = "zigzag"
    """``contiguous``, ``zigzag`` (the same causal work for all ranks) or ``documents`` (no document is cut)."""
    n_inner: int = 1
    """Number of ranks of a row. Ranks of a row exchange heads and share one part of the sequence; 1: each rank has a
    part.
    """
    document_ends: tuple[int, ...] = ()
    """For a packed sequence: the index after each document's last token, increasing; the last is n_tokens. (): one
    document.
    """

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"order is {self.order!r}", where="SequenceCut", fix=f"write one of {', '.join(ORDERS)}")
        _ = self._document_parts, self._runs_of_first

    @property
    def n_parts(self) -> int:
        """Number of parts of the sequence that go around a ring: one for each row of ranks."""
        return self.n_ranks // self.n_inner

    def runs(self, rank: int) -> tuple[TokenRun, ...]:
        """The runs of ``rank``, increasing both in the sequence and on the rank; () if the rank has no tokens."""
        try:
            found = _C.seq_runs(
                self.n_tokens,
                ORDERS[self.order],
                self.n_ranks,
                rank,
                self.n_inner,
                list(self.document_ends),
                self._document_parts,
            )
        except ValueError as error:
            raise ConfigError(str(error), where="SequenceCut", fix="see dsc/seq.h for what fits") from error
        return tuple(TokenRun(*run) for run in found)

    def local_tokens(self, rank: int) -> int:
        """Number of tokens of ``rank``."""
        return sum(run.n_tokens for run in self.runs(rank))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(self.local_tokens(rank) for rank in range(self.n_ranks))

    def parts(self) -> SequenceCut:
        """The cut in which each row of ranks counts as one rank: its rank i has the tokens of all ranks of row i."""
        return SequenceCut(self.n_tokens, self.n_parts, self.order, 1, self.document_ends)

    def positions(self, rank: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [local tokens]: the position of each of ``rank``'s tokens in the whole sequence."""
        runs = [torch.arange(run.begin, run.begin + run.n_tokens, device=device) for run in self.runs(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)

    def document_positions(self, rank: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [local tokens]: the position of each token in its document, as in position_ids of packed sequences."""
        places = self.positions(rank, device=device)
        if not self.document_ends:
            return places
        ends = torch.tensor(self.document_ends, device=device)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        return places - begins[torch.bucketize(places, ends, right=True)]

    def take(self, whole: torch.Tensor, rank: int, dim: int = -1) -> torch.Tensor:
        """``rank``'s tokens of ``whole``, as a new tensor. Dimension ``dim`` of ``whole`` has n_tokens elements."""
        if whole.shape[dim] != self.n_tokens:
            raise ConfigError(
                f"dimension {dim} of {tuple(whole.shape)} has {whole.shape[dim]} tokens, the cut is of {self.n_tokens}",
                where="SequenceCut.take",
                fix="make the cut for the length of this batch",
            )
        runs = self.runs(rank)
        if not runs:
            return whole.narrow(dim, 0, 0).clone()
        return torch.cat([whole.narrow(dim, run.begin, run.n_tokens) for run in runs], dim)

    def join(self, parts: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor:
        """Join the parts of all ranks, in the order of ranks, to the whole sequence. This is the inverse of ``take``."""
        sizes = tuple(part.shape[dim] for part in parts)
        if sizes != self.tokens:
            raise ConfigError(
                f"ranks have {list(sizes)} tokens, the cut gives them {list(self.tokens)}",
                where="SequenceCut.join",
                fix="give the tensor of each rank, in their order",
            )
        shape = list(parts[0].shape)
        shape[dim] = self.n_tokens
        whole = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            for run in self.runs(rank):
                whole.narrow(dim, run.begin, run.n_tokens).copy_(part.narrow(dim, run.local_begin, run.n_tokens))
        return whole

    @cached_property
    def _document_parts(self) -> list[int]:
        if self.order != "documents":
            return []
        try:
            return list(_C.seq_deal(list(self.document_ends), self.n_ranks // max(self.n_inner, 1)))
        except ValueError as error:
            raise ConfigError(str(error), where="SequenceCut", fix="let the ends of documents increase") from error

    @cached_property
    def _runs_of_first(self) -> tuple[TokenRun, ...]:
        return self.runs(0)


class HeadPlan(NamedTuple):
    """The heads of all tokens that one rank computes, where ranks exchange tokens for heads."""

    query_begin: int
    query_end: int
    """The rank's query heads: [query_begin, query_end) of all query heads."""
    key_begin: int
    key_end: int
    """Key and value heads that are sent to the rank: [key_begin, key_end) of all key heads."""
    group: int
    """Number of consecutive query heads on this rank that attend to one key head."""
    keys: tuple[int, ...]
    """For each such group of query heads: the index of its key head among the key heads that are sent to the rank."""

    @property
    def n_queries(self) -> int:
        """Number of the rank's query heads, at least 1."""
        return self.query_end - self.query_begin

    @property
    def n_keys(self) -> int:
        """Number of key heads that are sent to the rank, at least 1."""
        return self.key_end - self.key_begin

    @property
    def repeats_keys(self) -> bool:
        """Whether attention needs the key heads as selected by ``keys``, and not just all of them in order."""
        return self.keys != tuple(range(self.n_keys))


def plan_heads(n_heads: int, n_key_heads: int, n_ranks: int, rank: int) -> HeadPlan:
    """The heads of ``rank``: query heads, divided as evenly as possible, and the key heads that they attend to.

    Raises ConfigError where a rank would have no query head, and where the key heads do not divide the query heads.
    """
    try:
        *numbers, keys = _C.seq_heads(n_heads, n_key_heads, n_ranks, rank)
    except ValueError as error:
        raise ConfigError(
            str(error),
            where="heads over ranks",
            fix='use at most as many ranks as heads, or attention "ring" or "hybrid"',
        ) from error
    return HeadPlan(*numbers, tuple(keys))


class ExchangePlan(NamedTuple):
    """Elements that one rank exchanges with each rank, including itself, for one sequence. The index of each list is a
    rank.
    """

    sent: list[int]
    """Sent: queries, keys and values of this rank's tokens, for the heads of each rank."""
    received: list[int]
    """Received: queries, keys and values of this rank's heads, for the tokens of each rank."""
    returned: list[int]
    """Sent back: outputs of this rank's heads, for the tokens of each rank."""
    got: list[int]
    """Received back: outputs for this rank's tokens, of the heads of each rank."""


def plan_exchange(
    n_heads: int, n_key_heads: int, tokens: Sequence[int], rank: int, *, query_width: int, value_width: int
) -> ExchangePlan:
    """Plan the exchange of ``rank``. tokens: number of tokens of each rank. query_width: number of elements of a query
    or key head for one token.

    Raises ConfigError as ``plan_heads`` does, and where a number does not fit 64 bits.
    """
    try:
        return ExchangePlan(*_C.seq_exchange(n_heads, n_key_heads, query_width, value_width, list(tokens), rank))
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            str(error),
            where="heads over ranks",
            fix='use at most as many ranks as heads, or attention "ring" or "hybrid"',
        ) from error
