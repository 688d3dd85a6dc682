"""Rows on their way to the ranks of their experts and back: counts first, then one message to each rank, of exactly the
rows that it needs.

The messages are operators (``deepspeed_c::moe_exchange_*``). So a budget of activations knows that the layer sends, and
lets all ranks run it again or none (``recompute/operators.py``). ``ranks`` is the number of a ``Collectives``
(``comm/numbered.py``). Counts and sizes of the forward serve the backward, which sends gradients along the same ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.numbered import collectives_of, number_of
from deepspeed_c.errors import RoutingError
from deepspeed_c.ops import moe as ops
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.recompute.once import once

__all__ = ["Way", "find_way", "from_experts", "report_failure", "to_experts"]

_FAILED = -1


class Way(NamedTuple):
    """The rows that this rank exchanges with the ranks of a layer's experts, by rank."""

    comm: Collectives
    name: str  # of the layer
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    counts: list[int]  # received rows of each of this rank's experts
    by_expert: Tensor | None  # order of received rows by expert; None: they are in that order
    by_rank: Tensor | None  # the inverse


def _exchange_counts(counts: Tensor, ranks: int, label: str) -> Tensor:
    comm = collectives_of(ranks)
    received = torch.empty_like(counts)
    each = [counts.numel() // comm.world_size] * comm.world_size
    comm.all_to_all(counts, received, each, each, label=label).wait()
    return received


def _exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: int, label: str) -> Tensor:
    comm, width = collectives_of(ranks), rows.shape[1]
    out = rows.new_empty((sum(received), width))
    in_splits, out_splits = [n * width for n in sent], [n * width for n in received]
    comm.all_to_all(rows.contiguous().view(-1), out.view(-1), in_splits, out_splits, label=label).wait()
    return out


def _fake_counts(counts: Tensor, ranks: int, label: str) -> Tensor:
    return torch.empty_like(counts)


def _fake_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: int, label: str) -> Tensor:
    return rows.new_empty((sum(received), rows.shape[1]))


_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
for _schema, _kernel, _fake in (
    ("moe_exchange_counts(Tensor counts, int ranks, str label) -> Tensor", _exchange_counts, _fake_counts),
    (
        "moe_exchange_rows(Tensor rows, SymInt[] sent, SymInt[] received, int ranks, str label) -> Tensor",
        _exchange_rows,
        _fake_rows,
    ),
):
    _LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _device)
    _LIBRARY.impl(_name, _fake, "Meta")

_ops = torch.ops.deepspeed_c


def find_way(comm: Collectives, counts: Tensor, name: str) -> Way:
    """Exchange the numbers of rows. Collective.

    counts: rows for each expert of all ranks, int64, experts of rank 0 first. Raises RoutingError on all ranks if one
    of them has called ``report_failure``.
    """
    n_ranks = comm.world_size
    table = once(lambda: _ops.moe_exchange_counts(counts, number_of(comm), f"counts of tokens to experts of {name}"))
    rows = table.view(n_ranks, -1).tolist()
    for rank, row in enumerate(rows):
        if _FAILED in row:
            raise RoutingError(
                f"rank {comm.global_ranks[rank]} has raised an error before it sent its tokens",
                where=f"{name}, rank {comm.global_rank}",
                fix=f"see the error of rank {comm.global_ranks[rank]}",
            )
    sent = counts.view(n_ranks, -1).sum(1).tolist()
    received = [sum(row) for row in rows]
    by_expert, by_rank = _orders(rows, counts.device)
    return Way(comm, name, sent, received, [sum(column) for column in zip(*rows)], by_expert, by_rank)


def report_failure(comm: Collectives, n_experts: int, device: torch.device, name: str) -> None:
    """Tell the other ranks, in place of ``find_way``, that this rank cannot go on, so that none of them waits. device:
    the tokens' device.
    """
    counts = torch.full((n_experts,), _FAILED, dtype=torch.int64, device=device)
    _ops.moe_exchange_counts(counts, number_of(comm), f"counts of tokens to experts of {name}")


def _orders(rows: list[list[int]], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The order by expert of rows that are sorted by rank and then by expert, and its inverse."""
    n_ranks, n_experts = len(rows), len(rows[0])
    if n_experts == 1:
        return None, None
    sizes = torch.tensor(rows, dtype=torch.int64)
    begins = (sizes.flatten().cumsum(0) - sizes.flatten()).view(n_ranks, n_experts).t().flatten()
    sizes = sizes.t().flatten()
    moves = begins - (sizes.cumsum(0) - sizes)
    order = torch.arange(int(sizes.sum())) + moves.repeat_interleave(sizes)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return order.to(device), inverse.to(device)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way, is_return: bool) -> Tensor:
        ctx.way, ctx.is_return = way, is_return
        sent, received = (way.received, way.sent) if is_return else (way.sent, way.received)
        label = f"tokens {'from' if is_return else 'to'} experts of {way.name}"
        return once(lambda: _ops.moe_exchange_rows(rows, sent, received, number_of(way.comm), label))

    @staticmethod
    @first_derivative_only("an exchange of tokens between ranks of experts")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        way = ctx.way
        sent, received = (way.sent, way.received) if ctx.is_return else (way.received, way.sent)
        label = f"gradients {'to' if ctx.is_return else 'from'} experts of {way.name}"
        return _ops.moe_exchange_rows(grad, sent, received, number_of(way.comm), label), None, None


def to_experts(rows: Tensor, way: Way) -> Tensor:
    """Send ``rows`` [rows, hidden], sorted by expert, and return the rows of this rank's experts, sorted by expert and
    then by rank. Differentiable, collective; so is the gradient.
    """
    received = _Exchange.apply(rows, way, False)
    return received if way.by_expert is None else ops.permute_rows(received, way.by_expert)


def from_experts(rows: Tensor, way: Way) -> Tensor:
    """Send the experts' results back; the order of ``to_experts`` is undone. Differentiable, collective."""
    sorted_by_rank = rows if way.by_rank is None else ops.permute_rows(rows, way.by_rank)
    return _Exchange.apply(sorted_by_rank, way, True)
