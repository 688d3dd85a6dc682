"""Tokens for heads: the exchange around attention. It gives each rank some heads of all tokens, and sends the outputs
back (DeepSpeed-Ulysses, arXiv 2309.14509).

Queries, keys and values are sent together. A token's row holds the heads that go to one rank, one after another. So the
data from all ranks is one tensor [tokens, batch, row], and queries, keys and values are views of it: after packing they
are not copied again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError
from deepspeed_c.ops.autocast import cast_by_autocast
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.sequence.plans import HeadPlan, plan_heads

__all__ = ["Shapes", "gather_heads", "gather_tokens", "return_heads", "return_tokens", "send_heads", "send_tokens"]


class Shapes(NamedTuple):
    """Sizes of one exchange. They are the same on all ranks, except ``rank``."""

    n_heads: int
    n_key_heads: int
    query_width: int
    """Number of elements of one query or key head."""
    value_width: int
    tokens: tuple[int, ...]
    """Number of tokens of each rank."""
    rank: int

    @property
    def plans(self) -> tuple[HeadPlan, ...]:
        """The heads of each rank."""
        return _plans(self.n_heads, self.n_key_heads, len(self.tokens))

    @property
    def plan(self) -> HeadPlan:
        """The heads of this rank."""
        return self.plans[self.rank]

    @property
    def n_local(self) -> int:
        """Number of tokens of this rank."""
        return self.tokens[self.rank]

    def row(self, rank: int) -> tuple[int, int, int]:
        """Number of elements of one token's queries, keys and values for ``rank``."""
        plan = self.plans[rank]
        return plan.n_queries * self.query_width, plan.n_keys * self.query_width, plan.n_keys * self.value_width


@lru_cache(maxsize=64)
def _plans(n_heads: int, n_key_heads: int, n_ranks: int) -> tuple[HeadPlan, ...]:
    return tuple(plan_heads(n_heads, n_key_heads, n_ranks, rank) for rank in range(n_ranks))


def gather_tokens(
    comm: Collectives, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: Sequence[int] | None = None
) -> tuple[Shapes, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchanges this rank's tokens of all heads for this rank's heads of all tokens. Differentiable, collective.

    query: [tokens, batch, heads, width]. key: the same with key heads, whose number divides the number of heads. value:
    as key, with any width. All have one dtype. Autocast casts them to its dtype, as for torch's attention. tokens:
    number of tokens of each rank; default: this rank's number on all ranks. Returns the sizes of the exchange, and
    query, key and value as [all tokens, batch, heads of this rank, width]. Query head i attends to the key head
    ``plan.keys[i // plan.group]``.

    Raises ConfigError, before anything is sent, for shapes that do not fit together, and where there are more ranks
    than heads.
    """
    query, key, value = cast_by_autocast(query, key, value)
    _check(query, key, value)
    tokens = tuple(tokens or [query.shape[0]] * comm.world_size)
    shapes = Shapes(query.shape[2], key.shape[2], query.shape[3], value.shape[3], tokens, comm.rank)
    if shapes.n_local != query.shape[0]:
        raise ConfigError(
            f"this rank has {query.shape[0]} tokens, and is said to have {shapes.n_local}",
            where="attention over ranks",
            fix="give the position_ids of the same tokens",
        )
    _ = shapes.plans
    return (shapes, *_GatherTokens.apply(comm, shapes, query, key, value))


def gather_heads(comm: Collectives, shapes: Shapes, out: torch.Tensor) -> torch.Tensor:
    """The way back from ``gather_tokens``. out: outputs of this rank's heads, [all tokens, batch, heads of this rank,
    value width]. Returns this rank's tokens of all heads, [tokens, batch, heads, value width]. Differentiable,
    collective."""
    expected = sum(shapes.tokens), shapes.plan.n_queries, shapes.value_width
    if (out.shape[0], *out.shape[2:]) != expected:
        raise ConfigError(
            f"attention gave {tuple(out.shape)}, not [tokens, batch, heads, width] of {expected[0]} tokens,"
            f" {expected[1]} heads and width {expected[2]}",
            where="attention over ranks",
            fix="use an attention whose output has the queries' heads and the values' width",
        )
    return _GatherHeads.apply(comm, shapes, out)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    fits = (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and key.shape[2] == value.shape[2]
        and query.shape[3] == key.shape[3]
        and query.dtype == key.dtype == value.dtype
    )
    if not fits:
        shapes = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (query, key, value)]
        raise ConfigError(
            f"query, key and value are {', '.join(shapes)}",
            where="attention over ranks",
            fix="give them the same tokens, batch and dtype, and keys the width of queries and the heads of values",
        )


def _send(
    comm: Collectives, flat: torch.Tensor, out: torch.Tensor, to: Sequence[int], of: Sequence[int], label: str
) -> None:
    comm.all_to_all(flat.view(-1), out.view(-1), to, of, label=label).wait()


def _new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _pack_heads(shapes: Shapes, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Packs [this rank's tokens, batch, row for rank 0], then the same for rank 1, and so on, into one flat tensor."""
    n_local, batch = query.shape[:2]
    rows = [shapes.row(rank) for rank in range(len(shapes.tokens))]
    flat = _new(query, n_local * batch * sum(map(sum, rows)))
    begin = 0
    for plan, row in zip(shapes.plans, rows):
        block = flat[begin : begin + n_local * batch * sum(row)].view(n_local, batch, sum(row))
        begin += block.numel()
        for part, whole, first, last in zip(
            block.split(row, -1),
            (query, key, value),
            (plan.query_begin, plan.key_begin, plan.key_begin),
            (plan.query_end, plan.key_end, plan.key_end),
        ):
            part.unflatten(-1, (last - first, whole.shape[3])).copy_(whole[:, :, first:last])
    return flat


def _views(shapes: Shapes, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of this rank's heads, as views of [all tokens, batch, row]."""
    plan = shapes.plan
    counts = plan.n_queries, plan.n_keys, plan.n_keys
    parts = rows.split(shapes.row(shapes.rank), -1)
    query, key, value = (part.unflatten(-1, (n, part.shape[-1] // n)) for part, n in zip(parts, counts))
    return query, key, value


def _blocks(shapes: Shapes, batch: int) -> tuple[list[int], list[int]]:
    """Numbers of elements of queries, keys and values that this rank sends to each rank, and receives from each."""
    mine = sum(shapes.row(shapes.rank))
    sent = [shapes.n_local * batch * sum(shapes.row(rank)) for rank in range(len(shapes.tokens))]
    return sent, [n * batch * mine for n in shapes.tokens]


def send_tokens(
    comm: Collectives, shapes: Shapes, of_tokens: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of ``gather_tokens`` for (query, key, value), outside of a graph."""
    batch = of_tokens[0].shape[1]
    rows = _new(of_tokens[0], sum(shapes.tokens), batch, sum(shapes.row(shapes.rank)))
    sent, got = _blocks(shapes, batch)
    _send(comm, _pack_heads(shapes, *of_tokens), rows, sent, got, "queries, keys and values")
    return _views(shapes, rows)


def return_tokens(comm: Collectives, shapes: Shapes, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the inputs of ``send_tokens``, computed from ``grads`` of its outputs."""
    batch = grads[0].shape[1]
    rows = _new(grads[0], sum(shapes.tokens), batch, sum(shapes.row(shapes.rank)))
    for place, grad in zip(_views(shapes, rows), grads):
        place.copy_(grad)
    sent, got = _blocks(shapes, batch)
    flat = _new(rows, sum(sent))
    _send(comm, rows, flat, got, sent, "gradients of queries, keys and values")
    n_local = shapes.n_local
    widths = shapes.query_width, shapes.query_width, shapes.value_width
    heads = shapes.n_heads, shapes.n_key_heads, shapes.n_key_heads
    wholes = [_new(rows, n_local, batch, n, width) for n, width in zip(heads, widths)]
    written = [0, 0, 0]  # heads [0, written) have a gradient; gradients of key heads that several ranks have are summed
    for rank, (plan, block) in enumerate(zip(shapes.plans, flat.split(sent))):
        row = shapes.row(rank)
        bounds = (
            (plan.query_begin, plan.query_end),
            (plan.key_begin, plan.key_end),
            (plan.key_begin, plan.key_end),
        )
        for i, part in enumerate(block.view(n_local, batch, sum(row)).split(row, -1)):
            first, last = bounds[i]
            part = part.unflatten(-1, (last - first, widths[i]))
            again = max(min(written[i], last) - first, 0)
            if again:
                wholes[i][:, :, first : first + again] += part[:, :, :again]
            if first + again < last:
                wholes[i][:, :, first + again : last] = part[:, :, again:]
            written[i] = max(written[i], last)
    return wholes


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Collectives, shapes: Shapes, *of_tokens: torch.Tensor):
        ctx.comm, ctx.shapes = comm, shapes
        return send_tokens(comm, shapes, of_tokens)

    @staticmethod
    @first_derivative_only("an exchange of sequence ranks")
    def backward(ctx: Any, *grads: torch.Tensor):
        return None, None, *return_tokens(ctx.comm, ctx.shapes, grads)


def _output_blocks(shapes: Shapes, batch: int) -> tuple[list[int], list[int]]:
    """Numbers of elements of outputs that this rank sends to each rank, and receives from each."""
    mine = shapes.plan.n_queries * shapes.value_width
    sent = [n * batch * mine for n in shapes.tokens]
    return sent, [shapes.n_local * batch * plan.n_queries * shapes.value_width for plan in shapes.plans]


def send_heads(comm: Collectives, shapes: Shapes, out: torch.Tensor) -> torch.Tensor:
    """The result of ``gather_heads``, outside of a graph."""
    batch = out.shape[1]
    sent, got = _output_blocks(shapes, batch)
    flat = _new(out, sum(got))
    _send(comm, out.contiguous(), flat, sent, got, "outputs of attention")
    whole = _new(out, shapes.n_local, batch, shapes.n_heads, shapes.value_width)
    for plan, block in zip(shapes.plans, flat.split(got)):
        place = whole[:, :, plan.query_begin : plan.query_end]
        place.copy_(block.view(place.shape))
    return whole


def return_heads(comm: Collectives, shapes: Shapes, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of the input of ``send_heads``, computed from ``grad`` of its output."""
    batch = grad.shape[1]
    sent, got = _output_blocks(shapes, batch)
    flat = _new(grad, sum(got))
    for plan, block in zip(shapes.plans, flat.split(got)):
        part = grad[:, :, plan.query_begin : plan.query_end]
        block.view(part.shape).copy_(part)
    out = _new(grad, sum(shapes.tokens), batch, shapes.plan.n_queries, shapes.value_width)
    _send(comm, flat, out, got, sent, "gradients of outputs of attention")
    return out


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Collectives, shapes: Shapes, out: torch.Tensor):
        ctx.comm, ctx.shapes = comm, shapes
        return send_heads(comm, shapes, out)

    @staticmethod
    @first_derivative_only("an exchange of sequence ranks")
    def backward(ctx: Any, grad: torch.Tensor):
        return None, None, return_heads(ctx.comm, ctx.shapes, grad)
