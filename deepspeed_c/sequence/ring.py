"""Attention of one sequence that is cut over ranks. Keys and values go around a ring during the computation.

Each rank keeps its queries. At every hop it computes its queries' attention to the keys that it holds. Meanwhile it
sends these keys to the next rank and receives others. The results are merged by their log-sum-exp (arXiv 2310.01889).
In the backward keys and values go around once more. Their gradients follow them one hop behind, and then return to
their own rank in one message. ``plan_ring`` gives the work of each rank, the skipped hops and the traffic beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import ConfigError
from deepspeed_c.ops.attention_parts import merge_
from deepspeed_c.ops.autocast import cast_by_autocast
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.sequence.blocks import block_attention, block_attention_backward
from deepspeed_c.sequence.plans import SequenceCut
from deepspeed_c.sequence.ring_plan import BAND, CAUSAL, Block, RingPlan, plan_ring

__all__ = ["ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: Collectives,
    cut: SequenceCut,
    *,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks: [batch, heads, tokens, value width], q's dtype.

    q: [batch, heads, tokens, width]; k: [batch, key heads, tokens, width]; v: [batch, key heads, tokens, value width].
    They are this rank's part of the sequences by ``cut``, with positions applied. The number of key heads divides the
    number of heads. float64, float32, bfloat16 or float16, all three the same; autocast casts them to its dtype, as for
    torch's attention. Results of hops are merged in float32 at least. comm: the ranks of the ring, as many as in the
    cut.

    window: a query sees keys at a distance below this number of tokens; 0: at any distance. scale: factor of the
    scores, by default width^-0.5. documents: the ends of the documents, for each sequence of the batch, if sequences
    differ; by default the cut's documents. sinks: [heads], for each head a logit that takes part in every softmax and
    adds nothing to the output.

    Every rank of the ring calls this, and its backward, in the same order. Raises ConfigError, before anything is sent,
    for shapes that do not fit the cut and one another.
    """
    q, k, v = cast_by_autocast(q, k, v)
    _check(q, k, v, comm, cut, sinks)
    call = _RingCall(
        comm, _rows(cut, q.shape[0], documents, is_causal, window), q.shape[-1] ** -0.5 if scale is None else scale
    )
    value_width = v.shape[-1]
    width = max(q.shape[-1], value_width)
    # Torch's kernel requires one width for all three; zeros add nothing to a score.
    q, k, v = (x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    out = _Ring.apply(q, k, v, sinks, call)
    return out if value_width == width else out[..., :value_width]


class _Rows(NamedTuple):
    """Sequences of the batch that have the same documents."""

    rows: slice
    plan: RingPlan


class _RingCall:
    """State of one call of attention except its tensors: the ranks, the plans, the scale."""

    def __init__(self, comm: Collectives, rows: list[_Rows], scale: float) -> None:
        self.comm, self.rows, self.scale = comm, rows, scale
        self.tokens = rows[0].plan.cut.tokens
        self.travel = [max(hops) for hops in zip(*(plan.travel for _, plan in rows), strict=True)]

    def blocks(self, source: int) -> Iterator[tuple[slice, Block, RingPlan]]:
        """This rank's work on the keys of ``source``: the rows of the batch, the block and its plan."""
        for rows, plan in self.rows:
            for block in plan.blocks(self.comm.rank, source):
                yield rows, block, plan

    def keys(self, own: Tensor) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield (hop, rank whose keys these are, keys and values) for every hop, while the next hop's keys are under
        way.

        own: [2, batch, key heads, tokens, width], this rank's keys and values, contiguous. A yielded tensor is
        overwritten two hops later. It is None if the keys do not go as far as this rank.
        """
        comm, n, last = self.comm, self.comm.world_size, max(self.travel)
        shapes = [(*own.shape[:3], tokens, own.shape[4]) for tokens in self.tokens]
        largest = max((_numel(shape) for shape, hops in zip(shapes, self.travel, strict=True) if hops), default=0)
        buffers = [comm.outgoing.take(largest, own.dtype, own.device) for _ in range(min(last, 2))]
        held = own.view(-1)
        for hop in range(last + 1):
            part, coming = (comm.rank - hop) % n, (comm.rank - hop - 1) % n
            work, incoming = Work.done(), held
            if hop < last:
                sent = held if self.travel[part] > hop else held[:0]
                incoming = buffers[hop % 2][: _numel(shapes[coming]) if self.travel[coming] > hop else 0]
                work = comm.shift(sent, incoming, 1, label="keys and values of a ring")
            yield hop, part, held.view(shapes[part]) if self.travel[part] >= hop else None
            work.wait()
            held = incoming
        for buffer in buffers:
            comm.outgoing.give(buffer)

    def stacked(self, k: Tensor, v: Tensor) -> Tensor:
        """This rank's keys and then its values, one-dimensional, in a buffer of ``Collectives.outgoing``."""
        lent = self.comm.outgoing.take(2 * k.numel(), k.dtype, k.device)
        torch.stack([k, v], out=lent.view(2, *k.shape))
        return lent


class _Gradients:
    """Sums of gradients of keys and values. They follow the keys and values around the ring, and then return to their
    rank.
    """

    def __init__(self, call: _RingCall, home: Tensor) -> None:
        """home: gradient of this rank's own keys and values, contiguous. The returned sums are added to it."""
        self._call, self._home = call, home
        self._empty = home.new_empty(0)
        self._onward, self._gone, self._so_far = Work.done(), self._empty, self._empty
        self._homeward: list[tuple[Work, Tensor]] = []
        self._returned = self._empty

    def take(self, numel: int) -> Tensor:
        """A buffer for ``numel`` elements, uninitialised. The object gives it back to ``Collectives.outgoing``."""
        if not numel:
            return self._empty
        return self._call.comm.outgoing.take(numel, self._home.dtype, self._home.device)

    def _give(self, buffer: Tensor) -> None:
        if buffer.numel():
            self._call.comm.outgoing.give(buffer)

    def pass_on(self, hop: int, part: int, sums: Tensor | None) -> None:
        """Add the sums of the previous ranks for ``part`` to ``sums``. Send the result to the next rank, or to the
        part's own rank.

        hop: at least 1. sums: a tensor of ``take`` with this rank's sums; None if the part does not go as far as this
        rank.
        """
        comm, travel = self._call.comm, self._call.travel
        self._onward.wait()
        self._give(self._gone)
        flat = self._empty if sums is None else sums
        if sums is not None and self._so_far.numel():
            flat += self._so_far
        self._give(self._so_far)
        self._gone = self._so_far = self._empty
        if max(travel) > hop:
            coming = (comm.rank - hop - 1) % comm.world_size
            shape = (*self._home.shape[:3], self._call.tokens[coming], self._home.shape[4])
            self._so_far = self.take(_numel(shape) if travel[coming] > hop else 0)
            self._gone = flat if travel[part] > hop else self._empty
            self._onward = comm.shift(self._gone, self._so_far, 1, label="gradients of a ring")
        if hop in travel:
            is_back = travel[comm.rank] == hop
            received = self.take(self._home.numel()) if is_back else self._empty
            sent = flat if travel[part] == hop else self._empty
            work = comm.shift(sent, received, -hop, label="gradients of a ring, to their rank")
            self._homeward.append((work, sent))
            self._returned = received if is_back else self._returned

    def finish(self) -> None:
        """Add the gradients that have returned to this rank."""
        for work, sent in self._homeward:
            work.wait()
            self._give(sent)
        if self._returned.numel():
            self._home.view(-1).add_(self._returned)
        self._give(self._returned)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _RingCall) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        log_sum = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        lent = call.stacked(k, v)
        own = lent.view(2, *k.shape)
        q = q if q.stride(-1) == 1 else q.contiguous()
        for _, source, held in call.keys(own):
            for rows, block, plan in call.blocks(source) if held is not None else ():
                keys, values = held
                part, part_log_sum = block_attention(
                    _queries(q, rows, block),
                    _keys(keys, rows, block),
                    _keys(values, rows, block),
                    scale=call.scale,
                    **_mask(block, plan, q),
                )
                whole = out[rows].flatten(0, 1), log_sum[rows].flatten(0, 1)
                merge_(*whole, part.flatten(0, 1), part_log_sum.flatten(0, 1), block.query_begin)
        call.comm.outgoing.give(lent)
        if sinks is not None:
            with_sinks = torch.logaddexp(log_sum, sinks.to(wide)[:, None])
            out *= torch.exp(log_sum - with_sinks).unsqueeze(-1)
            log_sum = with_sinks
        out = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, log_sum)
        return out

    @staticmethod
    @first_derivative_only("ring attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _RingCall = ctx.call
        q, k, v, sinks, out, log_sum = ctx.saved_tensors
        lent = call.stacked(k, v)
        own = lent.view(2, *k.shape)
        grad = grad.contiguous()
        grad_q = torch.zeros(q.shape, dtype=log_sum.dtype, device=q.device)
        home = torch.zeros(own.shape, dtype=log_sum.dtype, device=q.device)
        gradients = _Gradients(call, home)

        def compute(source: int, held: Tensor, sums: Tensor, heads: _Heads) -> None:
            keys, values = held[:, :, heads.keys]
            for rows, block, plan in call.blocks(source):
                found = block_attention_backward(
                    _queries(grad[:, heads.queries], rows, block),
                    _queries(q[:, heads.queries], rows, block),
                    _keys(keys, rows, block),
                    _keys(values, rows, block),
                    _queries(out[:, heads.queries], rows, block),
                    _queries(log_sum[:, heads.queries], rows, block),
                    scale=call.scale,
                    **_mask(block, plan, q),
                )
                _queries(grad_q[:, heads.queries], rows, block).add_(found[0])
                for of_part, part in zip(sums[:, :, heads.keys], found[1:], strict=True):
                    _keys(of_part, rows, block).add_(part)

        every = _Heads(slice(None), slice(None))
        at_first, at_last = _in_two(q.shape[1], own.shape[2]) if max(call.travel) else (every, None)
        for hop, source, held in call.keys(own):
            if hop == 0:
                if q[:, at_first.queries].numel():
                    compute(source, own, home, at_first)
                continue
            sums = None
            if held is not None:
                sums = gradients.take(held.numel()).zero_()
                compute(source, held, sums.view(held.shape), every)
            gradients.pass_on(hop, source, sums)
        if at_last is not None:
            compute(call.comm.rank, own, home, at_last)
        call.comm.outgoing.give(lent)
        gradients.finish()
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            of_sinks = torch.exp(sinks.to(log_sum.dtype)[:, None] - log_sum)
            grad_sinks = -(of_sinks * (grad * out).sum(-1, dtype=log_sum.dtype)).sum((0, 2)).to(sinks.dtype)
        return grad_q.to(q.dtype), *home.to(q.dtype), grad_sinks, None


class _Heads(NamedTuple):
    """Query heads, and the key heads that they attend to."""

    queries: slice
    keys: slice


def _in_two(n_heads: int, n_keys: int) -> tuple[_Heads, _Heads]:
    """Split heads into two parts. In a backward, one part treats this rank's own keys first, the other treats them
    last.

    The first part is computed while the keys of the first hop come in, the last part while the gradients of the last
    hop return. In 16 bits these gradients are twice as many bytes as the keys.
    """
    group = n_heads // n_keys
    if n_keys == 1:
        n = round(n_heads / 3)
        return _Heads(slice(0, n), slice(None)), _Heads(slice(n, None), slice(None))
    n = max(1, round(n_keys / 3))
    return _Heads(slice(0, n * group), slice(0, n)), _Heads(slice(n * group, None), slice(n, None))


def _queries(tensor: Tensor, rows: slice, block: Block) -> Tensor:
    return tensor[rows, :, block.query_begin : block.query_end]


def _keys(tensor: Tensor, rows: slice, block: Block) -> Tensor:
    return tensor[rows, :, block.key_begin : block.key_end]


def _mask(block: Block, plan: RingPlan, q: Tensor) -> dict[str, Any]:
    """Arguments for ``block_attention`` that say which keys each query of a block sees."""
    if block.kind != BAND:
        return {"is_causal": block.kind == CAUSAL}
    queries = torch.arange(block.query_begin, block.query_end, device=q.device) - block.query_begin + block.shift
    keys = torch.arange(block.key_end - block.key_begin, device=q.device)
    distance = queries[:, None] - keys
    is_hidden = distance < 0 if plan.is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if plan.window:
        is_hidden |= distance.abs() >= plan.window
    return {"mask": torch.zeros(distance.shape, dtype=q.dtype, device=q.device).masked_fill_(is_hidden, -torch.inf)}


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _rows(
    cut: SequenceCut, batch: int, documents: Sequence[Sequence[int]] | None, is_causal: bool, window: int
) -> list[_Rows]:
    if documents is None:
        return [_Rows(slice(None), plan_ring(cut, is_causal=is_causal, window=window))]
    if len(documents) != batch:
        raise ConfigError(
            f"documents are given for {len(documents)} sequences, the batch has {batch}",
            where="ring_attention",
            fix="give the ends of the documents of each sequence, () for one document",
        )
    if cut.order == "documents":
        raise ConfigError(
            "the cut deals whole documents, and documents of each sequence are given besides",
            where="ring_attention",
            fix='leave documents out, or cut in the order "zigzag"',
        )
    every = [tuple(ends) for ends in documents]
    starts = [i for i in range(batch) if i == 0 or every[i] != every[i - 1]]
    return [
        _Rows(
            slice(begin, end), plan_ring(replace(cut, document_ends=every[begin]), is_causal=is_causal, window=window)
        )
        for begin, end in zip(starts, [*starts[1:], batch], strict=True)
    ]


def _check(q: Tensor, k: Tensor, v: Tensor, comm: Collectives, cut: SequenceCut, sinks: Tensor | None) -> None:
    if cut.n_ranks != comm.world_size:
        raise ConfigError(
            f"the cut is over {cut.n_ranks} ranks, the ring has {comm.world_size}",
            where="ring_attention",
            fix="make the cut for the ranks of the ring; that of a hybrid by its parts()",
        )
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    is_fitting = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[-1] == k.shape[-1]
    if not is_fitting or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"queries, keys and values are {shapes}",
            where="ring_attention",
            fix="give [batch, heads, tokens of this rank, width], of one batch and the same tokens",
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"{q.shape[1]} query heads do not divide among {k.shape[1]} key heads",
            where="ring_attention",
            fix="give as many key heads as divide the query heads",
        )
    if q.shape[2] != cut.tokens[comm.rank]:
        raise ConfigError(
            f"rank {comm.rank} has {q.shape[2]} tokens, the cut of {cut.n_tokens} over {cut.n_ranks} gives it"
            f" {cut.tokens[comm.rank]}",
            where="ring_attention",
            fix="cut every tensor of the sequence by cut.take",
        )
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ConfigError(
            f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}",
            where="ring_attention",
            fix="give one floating dtype",
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ConfigError(
            f"sinks have shape {tuple(sinks.shape)} for {q.shape[1]} heads",
            where="ring_attention",
            fix="give one a head",
        )
