"""Masks over whole sequences of which ranks hold parts: they say which tokens may attend to each other. One exchange a
forward gathers their data.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ModelError, RankMismatchError
from deepspeed_c.sequence.plans import SequenceCut

__all__ = ["WholeSequences", "check_order", "valid_tokens"]


class WholeSequences:
    """Positions and padding of the tokens of all ranks. The constructor is a collective.

    positions: int [batch, tokens of this rank]. A position that is not one above the previous position begins a new
    document, unless the model was given a mask. valid: bool of the same shape, False for padding; None: no padding.

    Raises RankMismatchError on all ranks where the shapes differ between ranks. With other shapes a gather would wait
    for bytes that no rank sends."""

    def __init__(
        self, comm: Collectives, positions: torch.Tensor, valid: torch.Tensor | None, *, has_mask: bool
    ) -> None:
        _check_shapes(comm, *positions.shape)
        packed = positions.to(torch.int64) * 4 + 2 * int(has_mask)
        packed = packed + (1 if valid is None else valid.to(torch.int64))
        parts = comm.all_gather_list(packed.contiguous(), label="positions of whole sequences")
        whole = torch.cat(parts, 1)
        self.tokens = tuple(part.shape[1] for part in parts)
        self.positions = whole >> 2
        """[batch, all tokens]."""
        valid = (whole & 1).bool()
        self.valid: torch.Tensor | None = None if bool(valid.all()) else valid
        """[batch, all tokens], False for padding; None where there is none."""
        steps = self.positions.diff(dim=1) != 1
        self.documents: torch.Tensor | None = None
        """[batch, all tokens]: the number of each token's document; None where each row is one document."""
        if self.valid is None and not bool((whole & 2).any()) and bool(steps.any()):
            self.documents = torch.nn.functional.pad(steps.cumsum(1), (1, 0))
        self._masks: dict[tuple[bool, int | None], torch.Tensor | None] = {}

    @property
    def n_tokens(self) -> int:
        """Number of tokens of a whole sequence."""
        return self.positions.shape[1]

    def needs_mask(self, *, is_causal: bool, window: int | None) -> bool:
        """Whether causality alone does not decide which tokens attend to each other."""
        is_narrow = is_causal and window is not None and window < self.n_tokens
        return self.valid is not None or self.documents is not None or is_narrow

    def mask(self, *, is_causal: bool, window: int | None) -> torch.Tensor | None:
        """bool [batch, 1, all tokens, all tokens], True where the first token attends to the second; None where
        causality alone decides. window: a token attends to so many tokens up to and including itself.
        """
        if not self.needs_mask(is_causal=is_causal, window=window):
            return None
        key = is_causal, window
        if key not in self._masks:
            self._masks[key] = self._make_mask(is_causal, window)
        return self._masks[key]

    def _make_mask(self, is_causal: bool, window: int | None) -> torch.Tensor:
        at = torch.arange(self.n_tokens, device=self.positions.device)
        ahead = at[:, None] - at[None, :]
        allowed = (ahead >= 0) if is_causal else torch.ones_like(ahead, dtype=torch.bool)
        if is_causal and window is not None:
            allowed = allowed & (ahead < window)
        allowed = allowed.expand(self.positions.shape[0], -1, -1)
        if self.documents is not None:
            allowed = allowed & (self.documents[:, :, None] == self.documents[:, None, :])
        if self.valid is not None:
            allowed = allowed & self.valid[:, None, :]
        return allowed[:, None]


def _check_shapes(comm: Collectives, batch: int, n_local: int) -> None:
    # This runs in each forward: a rank whose shape is unchanged cannot know that another rank's shape has changed.
    shapes = [divmod(both, 1 << 32) for both in comm.gather_numbers((batch << 32) + n_local, label="shapes of batches")]
    other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        ours, theirs = (f"{n} sequences of {length} tokens" for n, length in (shapes[0], shapes[other]))
        raise RankMismatchError(
            f"rank {comm.global_ranks[0]} has {ours}, and rank {comm.global_ranks[other]} {theirs}",
            where="attention over ranks",
            fix="give the ranks of a sequence equal parts of the same sequences (UlyssesSPDataLoaderAdapter does, and"
            " fills up lengths that ranks do not divide)",
        )


def check_order(whole: WholeSequences, order: str, n_inner: int, where: str) -> None:
    """Raises ModelError where the ranks' tokens are not consecutive in ``order``, the order of the attention, but are
    consecutive in another order. The batch was then cut for another model.
    """
    n_ranks = len(whole.tokens)
    mine = SequenceCut(whole.n_tokens, n_ranks, order, n_inner)
    if _follow(whole, mine):
        return
    rows = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
    for other in (SequenceCut(whole.n_tokens, n_ranks, name, n) for name in ("contiguous", "zigzag") for n in rows):
        if other.tokens == whole.tokens and _follow(whole, other):
            raise ModelError(
                f"the tokens of its ranks lie in the order {other.order!r}, and its attention has the order {order!r}",
                where=where,
                fix="cut its batches for it: UlyssesSPDataLoaderAdapter(..., model=engine)",
            )


def _follow(whole: WholeSequences, cut: SequenceCut) -> bool:
    """Whether positions, in the order of ``cut``, are consecutive or begin again at 0."""
    if cut.tokens != whole.tokens:
        return False
    positions = cut.join(whole.positions.split(whole.tokens, 1), dim=1)
    return not bool(((positions.diff(dim=1) != 1) & (positions[:, 1:] != 0)).any())


def valid_tokens(mask: Any, batch: int, n_local: int) -> torch.Tensor | None:
    """Find the tokens of a rank that are not padding, from the mask that transformers has made for this rank's tokens
    alone: a token that is not padding attends to itself. bool [batch, n_local]; None where there is no mask.

    Raises ModelError for a mask with an unknown shape.
    """
    if mask is None:
        return None
    if torch.is_tensor(mask) and mask.dim() == 2 and mask.shape == (batch, n_local):
        return mask != 0
    if torch.is_tensor(mask) and mask.dim() == 4 and mask.shape[2:] == (n_local, n_local):
        attends = mask.diagonal(dim1=2, dim2=3)[:, 0]
        return (attends if mask.dtype == torch.bool else attends == 0).expand(batch, n_local)
    what = f"{type(mask).__name__} {tuple(mask.shape)}" if hasattr(mask, "shape") else type(mask).__name__
    raise ModelError(
        f"the mask is a {what}, of {batch} sequences of which this rank has {n_local} tokens",
        where="attention over ranks",
        fix="give the model an attention_mask of [batch, tokens], 0 for padding, or none; documents are told apart by"
        " position_ids that start again",
    )
