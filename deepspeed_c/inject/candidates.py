"""The columns of a cut output layer that can become the next token: each rank sends its largest logits alone.

The result has the width of the vocabulary, and -inf in all other columns. Its only reader is a decoding loop that takes
the largest logit of a row, or that first drops every logit below the k-th largest (``decoding.py``). Both give the same
tokens from this result and from whole logits. If that cannot be told from the logits that were sent, logits are
gathered whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from deepspeed_c.inject import exchange
from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["Choice", "ColumnGather", "Returned", "gather_candidates", "last_position"]

# Logits travel as float32, which holds these dtypes exactly.
_EXACT = (torch.float32, torch.bfloat16, torch.float16)
_SENT_BYTES = 8  # a candidate is the logit as float32 and its column as int32


class Choice(NamedTuple):
    """How a decoding loop chooses among the logits of a row."""

    n_best: int
    """Logits below the ``n_best``-th largest are dropped, and logits equal to it are kept. 0: the first column of the
    largest logit is chosen."""
    scales: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    """Functions that the loop applies to float32 logits before it compares them. They are monotonic, and may make
    different logits equal."""


class Returned(NamedTuple):
    """The logits that the output layer has returned in a forward."""

    logits: torch.Tensor
    is_whole: bool
    version: int | None
    """The version of ``logits``; None for tensors of inference mode, which have none."""
    last: torch.Tensor | None
    """A copy of the last position, if copies are made."""


class ColumnGather:
    """Gathers the columns of one output layer. An open gather sends only candidates for ``choice``."""

    def __init__(self) -> None:
        self.is_open = False
        self.choice: Choice | None = None  # None: logits are gathered whole
        self.copies = False
        self.returned: list[Returned] = []

    def open(self, choice: Choice | None, *, copies: bool) -> None:
        """Until ``close``, gather for ``choice`` and record all results."""
        self.is_open, self.choice, self.copies, self.returned = True, choice, copies, []

    def close(self) -> list[Returned]:
        """Gather whole logits from now on. Returns the record since ``open``."""
        returned, self.returned, self.is_open = self.returned, [], False
        return returned

    def gather(self, x: torch.Tensor, sizes: list[int], ranks: TensorRanks, label: str) -> torch.Tensor:
        """``TensorRanks.gather``, or ``gather_candidates`` where that is allowed and is less to send."""
        # Compiled code may run in another order than the record, and cannot look at values.
        if not self.is_open or torch.compiler.is_compiling():
            return ranks.gather(x, sizes, label)
        found = None
        if self.choice is not None and not (x.requires_grad and torch.is_grad_enabled()):
            found = gather_candidates(x, sizes, ranks, self.choice, label)
        logits = ranks.gather(x, sizes, label) if found is None else found
        version = None if logits.is_inference() else logits._version
        last = last_position(logits).clone() if self.copies else None
        self.returned.append(Returned(logits, found is None, version, last))
        return logits


def gather_candidates(
    x: torch.Tensor, sizes: list[int], ranks: TensorRanks, choice: Choice, label: str
) -> torch.Tensor | None:
    """Logits [..., sum of ``sizes``] with the candidates of all ranks and -inf elsewhere, the same on all ranks. ``x``
    [..., sizes[rank]] has this rank's columns. Of three dimensions [batch, positions, columns], only the last position
    gets candidates.

    None, on all ranks alike, if whole logits have to be gathered: they are less to send, or a column that was not sent
    could be as large as the ``n_best``-th largest logit.
    """
    # [Note: one more] Each rank sends one logit more than ``n_best``. If this last one is below the n_best-th largest
    # of all ranks, so is every column that the rank has not sent. Otherwise such a column may be equal, and be kept.
    n_sent = min(choice.n_best + 1, max(sizes))
    last = last_position(x)
    rows = last.reshape(math.prod(last.shape[:-1]), sizes[ranks.rank])
    is_less = n_sent * _SENT_BYTES < max(sizes) * x.element_size()
    if x.dtype not in _EXACT or not rows.shape[0] or not is_less:
        return None
    n_own, begin = min(n_sent, rows.shape[1]), sum(sizes[: ranks.rank])
    sent = torch.zeros((rows.shape[0], n_sent, 2), dtype=torch.int32, device=x.device)
    if n_own:
        # Unlike topk, max returns the first of equal logits.
        logits, columns = rows.max(-1, keepdim=True) if n_sent == 1 else rows.topk(n_own)
        sent[:, :n_own, 0] = logits.float().view(torch.int32)
        sent[:, :n_own, 1] = (columns + begin).int()
    n_of_ranks = [n_sent] * len(sizes)
    of_ranks = exchange.wait(exchange.gather_start(sent, n_of_ranks, 1, ranks.comm, f"candidates of {label}"))
    found = torch.cat([part[:, : min(n_sent, size)] for part, size in zip(of_ranks, sizes, strict=True)], dim=1)
    logits = found[..., 0].contiguous().view(torch.float32)
    if choice.n_best and not _are_enough(logits, n_sent, sizes, choice):
        return None
    columns = found[..., 1].long()
    best = x.new_full((rows.shape[0], sum(sizes)), -torch.inf).scatter_(1, columns, logits.to(x.dtype))
    if x.dim() != 3:
        return best.view(*x.shape[:-1], sum(sizes))
    if x.shape[1] == 1:
        return best.unsqueeze(1)
    whole = x.new_full((*x.shape[:-1], sum(sizes)), -torch.inf)
    whole[:, -1] = best
    return whole


def _are_enough(logits: torch.Tensor, n_sent: int, sizes: list[int], choice: Choice) -> bool:
    """Whether every column that was not sent is below the ``n_best``-th largest logit ([Note: one more])."""
    ends, end = [], 0
    for size in sizes:
        end += min(n_sent, size)
        if size > n_sent:
            ends.append(end - 1)
    if not ends:
        return True
    for scale in choice.scales:
        logits = scale(logits)
    least = logits.topk(choice.n_best, dim=-1).values[:, -1:]
    return bool((logits[:, ends] < least).all())  # NaN is not below anything


def last_position(x: torch.Tensor) -> torch.Tensor:
    """[batch, 1, columns] of [batch, positions, columns]. Tensors of other dimensions have no positions."""
    return x[:, -1:] if x.dim() == 3 else x
