"""Models of transformers whose keys go around a ring of ranks. Any number of ranks works, for any number of heads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.sequence.collectives import ranks_of
from deepspeed_c.sequence.huggingface import UlyssesSPAttentionHF
from deepspeed_c.sequence.hybrid import HybridRanks, hybrid_attention, split_ranks
from deepspeed_c.sequence.masks import WholeSequences, check_order
from deepspeed_c.sequence.plans import SequenceCut

__all__ = ["RingSPAttentionHF"]

# Possible arguments of attention functions that a block's kernel does not support.
_UNKNOWN = ("softcap", "head_mask", "dropout")


class RingSPAttentionHF(UlyssesSPAttentionHF):
    """An attention function of transformers whose keys and values go around a ring of ranks. The ring may consist of
    rows of ranks; ranks of a row exchange heads.

    Each rank has the tokens that ``SequenceCut(tokens, ranks, order, n_inner)`` gives it. Documents are recognised by
    positions that begin again at 0; padding, on either side, is a separate document. Where the tokens of a rank are
    whole sequences, the model's original core attention is used: in generation, and in evaluation on request.
    """

    order: ClassVar[str] = "zigzag"
    """Order of the batches: ``zigzag`` or ``contiguous``."""
    n_inner: ClassVar[int] = 1
    """Number of ranks of a row. A subclass with a number above 1 is a hybrid."""

    def __init__(self, attn: Any, batch_size: int, attn_head_count: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(attn, batch_size, attn_head_count, *args, **kwargs)
        self._ranks: HybridRanks | None = None
        self._layout: tuple[WholeSequences, SequenceCut, list[tuple[int, ...]]] | None = None

    def forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``UlyssesSPAttentionHF.forward``. Also raises ModelError for dropout, for capped scores, and for positions
        that are not consecutive in ``order``.
        """
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        given = self._of_heads(module, kwargs, 0, query.shape[1], query.shape[1])
        for name in _UNKNOWN:
            if given.get(name):
                raise ModelError(
                    f"gives attention {name} {given[name]}, which a ring does not do",
                    where=type(module).__name__,
                    fix='set it to 0 in the model\'s configuration, or use the attention "ulysses"',
                )
        whole = self._sequences(module, query, attention_mask, kwargs)
        cut, documents = self._lay_out(module, whole)
        if self._ranks is None:
            self._ranks = split_ranks(ranks_of(self.process_group), self.n_inner)
        said = given.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if said is None else said)
        window = given.get("sliding_window")
        sinks = given.get("s_aux", given.get("sinks"))
        out = hybrid_attention(
            query,
            key,
            value,
            self._ranks,
            cut,
            is_causal=is_causal,
            window=window if is_causal and window else 0,
            scale=given.get("scaling"),
            documents=documents,
            sinks=sinks,
        )
        out = out.permute(0, 2, 1, 3).contiguous()
        if whole.valid is not None:
            # A query of padding at the front attends to nothing, and its output is 0. The output of padding at the end
            # is never read.
            mine = whole.valid.split(whole.tokens, 1)[self.sp_rank]
            out = out.masked_fill(~mine[:, :, None, None], 0.0)
        return out, None

    def _check_order(self, module: torch.nn.Module, whole: WholeSequences) -> None:
        check_order(whole, self.order, self.n_inner, type(module).__name__)

    def _heads_fit(self, n_heads: int, n_key_heads: int) -> None:
        """Checks nothing, because a ring works with any heads. The exchange within a row checks them."""

    def _lay_out(self, module: torch.nn.Module, whole: WholeSequences) -> tuple[SequenceCut, list[tuple[int, ...]]]:
        """The cut of a forward's sequences over ranks, and the ends of their documents. They are computed once a
        forward.
        """
        if self._layout is not None and self._layout[0] is whole:
            return self._layout[1:]
        cut = SequenceCut(whole.n_tokens, self.world_size, self.order, self.n_inner)
        if whole.tokens != cut.tokens:
            raise ModelError(
                f"ranks have {list(whole.tokens)} tokens of each sequence, the order {self.order!r} gives them"
                f" {list(cut.tokens)}",
                where=type(module).__name__,
                fix="cut batches by SequenceCut, as the adapter of the same order does",
            )
        positions = cut.join(whole.positions.split(whole.tokens, 1), dim=1)
        valid = None if whole.valid is None else cut.join(whole.valid.split(whole.tokens, 1), dim=1)
        documents = [self._ends(module, row, None if valid is None else valid[i]) for i, row in enumerate(positions)]
        self._layout = whole, cut, documents
        return cut, documents

    def _ends(self, module: torch.nn.Module, positions: torch.Tensor, valid: torch.Tensor | None) -> tuple[int, ...]:
        n_tokens = positions.numel()
        is_edge = positions.diff() != 1
        if valid is not None:
            is_edge = valid[1:] != valid[:-1]
            if int(is_edge.sum()) > 2 or (int(is_edge.sum()) == 2 and bool(valid[0])):
                raise ModelError(
                    "has padding between the tokens of a sequence",
                    where=type(module).__name__,
                    fix="pad sequences at one end, or pack documents and let their positions begin again at 0",
                )
        elif self.has_mask_of_model:
            is_edge = torch.zeros_like(is_edge)
        else:
            wrong = torch.nonzero(is_edge & (positions[1:] != 0)).flatten()
            if wrong.numel():
                at = int(wrong[0])
                raise ModelError(
                    f"positions go from {int(positions[at])} to {int(positions[at + 1])} at token {at + 1}, in the"
                    f" order {self.order!r}",
                    where=type(module).__name__,
                    fix="let the adapter cut batches in the order of the attention, and positions of a document count"
                    " from 0",
                )
        ends = (torch.nonzero(is_edge).flatten() + 1).tolist()
        return (*ends, n_tokens) if ends else ()
