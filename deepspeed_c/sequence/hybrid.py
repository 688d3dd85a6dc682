"""Attention over ranks in two directions: ranks of a row exchange tokens for heads, and rows pass keys around a ring.

A row may be a host, for example. Then the exchange of heads, which sends much data, does not use the slow links between
hosts, and the ring sends during the computation. With rows of one rank this is a plain ring. With one row of all ranks
it is DeepSpeed-Ulysses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_c.comm.axes import SP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import new_group_of
from deepspeed_c.errors import ConfigError
from deepspeed_c.sequence.exchange import gather_heads, gather_tokens
from deepspeed_c.sequence.plans import SequenceCut
from deepspeed_c.sequence.ring import ring_attention

__all__ = ["HybridRanks", "hybrid_attention", "split_ranks"]


class HybridRanks(NamedTuple):
    """The ranks that share a sequence, from the view of one rank."""

    inner: Collectives
    """Collectives of the rank's row: neighbours, which exchange heads."""
    ring: Collectives
    """Collectives of the ranks with the same place in their rows."""


def split_ranks(comm: Collectives, n_inner: int) -> HybridRanks:
    """Arranges the ranks of ``comm`` in rows of ``n_inner`` neighbours. Collective.

    Raises ConfigError for rows that do not divide the ranks.
    """
    n_ranks = comm.world_size
    if n_inner < 1 or n_ranks % n_inner:
        raise ConfigError(
            f"rows of {n_inner} ranks do not divide {n_ranks}", where="split_ranks", fix="use a divisor of the ranks"
        )
    if n_inner == 1:
        return HybridRanks(comm.alone(), comm)
    if n_inner == n_ranks:
        return HybridRanks(comm, comm.alone())
    row, place = divmod(comm.rank, n_inner)
    members = (range(row * n_inner, (row + 1) * n_inner), range(place, n_ranks, n_inner))
    groups = [new_group_of([comm.global_ranks[rank] for rank in ranks]) for ranks in members]
    return HybridRanks(comm.part(groups[0], SP), comm.part(groups[1], SP))


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: HybridRanks,
    cut: SequenceCut,
    *,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Arguments and result are as for ``ring_attention``.

    cut: the cut over all ranks, with the number of ranks of a row as ``n_inner``. Raises ConfigError, before anything
    is sent, as ``ring_attention`` does, and where a row has more ranks than there are heads.
    """
    inner, ring = ranks
    if (cut.n_inner, cut.n_ranks) != (inner.world_size, inner.world_size * ring.world_size):
        raise ConfigError(
            f"the cut is over {cut.n_ranks} ranks in rows of {cut.n_inner}, the ranks are {ring.world_size} rows of"
            f" {inner.world_size}",
            where="hybrid_attention",
            fix="make the cut with n_inner ranks of a row",
        )
    begin = ring.rank * inner.world_size
    tokens = cut.tokens[begin : begin + inner.world_size]
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ConfigError(
            f"sinks have shape {tuple(sinks.shape)} for {q.shape[1]} heads",
            where="hybrid_attention",
            fix="give one a head",
        )
    shapes, *gathered = gather_tokens(inner, *(x.permute(2, 0, 1, 3) for x in (q, k, v)), tokens)
    plan = shapes.plan
    if plan.repeats_keys:
        heads = torch.tensor(plan.keys, device=q.device)
        gathered[1:] = [x.index_select(2, heads) for x in gathered[1:]]
    out = ring_attention(
        *(x.permute(1, 2, 0, 3) for x in gathered),
        ring,
        cut.parts(),
        is_causal=is_causal,
        window=window,
        scale=scale,
        documents=documents,
        sinks=None if sinks is None else sinks[plan.query_begin : plan.query_end],
    )
    return gather_heads(inner, shapes, out.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
