"""Attention around a ring. Outputs and gradients equal those of one plain process in fp64, and bytes equal the formula.
Work and bad input are tested too."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError, DeepSpeedCError
from deepspeed_c.sequence import SequenceCut, plan_ring, ring_attention
from tests.deepspeed_c.sequence.attention_oracle import plain_attention
from tests.ranks import on_ranks, run_ranks

WIDTH = 8


@dataclass
class Case:
    """The sizes, the order and the mask of a call of attention."""

    n_tokens: int
    order: str = "zigzag"
    ends: tuple[int, ...] = ()
    heads: tuple[int, int] = (4, 2)
    batch: int = 2
    is_causal: bool = True
    window: int = 0
    dtype: torch.dtype = torch.float64
    value_width: int = WIDTH
    scale: float | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    has_sinks: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """Queries, keys, values, the gradient of the output, and sinks. They are whole, in fp64, and the same on all
        ranks."""
        random = torch.Generator().manual_seed(self.n_tokens)
        n_heads, n_keys = self.heads
        shapes = [(n_heads, WIDTH), (n_keys, WIDTH), (n_keys, self.value_width), (n_heads, self.value_width)]
        made = [torch.randn(self.batch, n, self.n_tokens, width, generator=random) for n, width in shapes]
        return [x.to(self.dtype).double() for x in (*made, torch.randn(n_heads, generator=random))]

    def parts(self, cut: SequenceCut, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(queries, keys, values and any sinks, the gradient of the output) of a rank."""
        *tensors, sinks = self.tensors()
        *inputs, grad = [cut.take(x, rank, dim=2).to(self.dtype) for x in tensors]
        return [x.requires_grad_() for x in (*inputs, *([sinks.to(self.dtype)] if self.has_sinks else []))], grad

    def options(self, inputs: list[torch.Tensor]) -> dict[str, Any]:
        """Named arguments of an attention of ``inputs``."""
        named = {name: getattr(self, name) for name in ("is_causal", "window", "scale", "documents")}
        return {**named, "sinks": inputs[3] if self.has_sinks else None}

    def expected(self) -> list[torch.Tensor]:
        """The output, and the gradients of queries, keys, values and sinks."""
        *tensors, grad, sinks = self.tensors()
        inputs = [x.requires_grad_() for x in (*tensors, sinks)]
        out = plain_attention(
            *inputs[:3],
            self.documents or [self.ends] * self.batch,
            self.is_causal,
            self.window,
            self.scale,
            inputs[3] if self.has_sinks else None,
        )
        found = torch.autograd.grad(out, inputs if self.has_sinks else inputs[:3], grad)
        return [out.detach(), *found]


def of_ring(rank: int, world: int, cases: list[Case]) -> list[tuple[list[torch.Tensor], dict[str, int]]]:
    """The results of this rank for each case, and the bytes that it sent."""
    comm = Collectives()
    results = []
    for case in cases:
        cut = SequenceCut(case.n_tokens, world, case.order, document_ends=case.ends)
        inputs, grad = case.parts(cut, rank)
        comm.ledger.reset_totals()
        out = ring_attention(*inputs[:3], comm, cut, **case.options(inputs))
        sent = {"forward": _wire(comm)}
        found = torch.autograd.grad(out, inputs, grad)
        sent["all"] = _wire(comm)
        assert out.dtype == case.dtype and all(x.dtype == case.dtype for x in found)
        results.append(([out.detach().double(), *(x.double() for x in found)], sent))
    return results


def _wire(comm: Collectives) -> int:
    return sum(total.wire_bytes for total in comm.ledger.totals.values())


CASES = [
    *(Case(n, order) for n in (1, 2, 3, 16, 61) for order in ("zigzag", "contiguous")),
    *(Case(29, order, is_causal=False, heads=(3, 1)) for order in ("zigzag", "contiguous")),
    *(
        Case(40, order, window=w, is_causal=c)
        for order, w, c in itertools.product(("zigzag", "contiguous"), (1, 7), (True, False))
    ),
    *(Case(37, order, ends=(3, 4, 20, 37), heads=(4, 4)) for order in ("zigzag", "contiguous", "documents")),
    Case(37, ends=(30, 37), window=5),
    Case(24, documents=((24,), (5, 24)), batch=2),
    Case(24, documents=((), (), (1, 2, 24), (1, 2, 24)), batch=4, is_causal=False),
    Case(31, value_width=5),
    Case(31, value_width=11, scale=0.25),
    Case(33, has_sinks=True, window=9),
    Case(48, dtype=torch.float32),
    Case(48, dtype=torch.float32, has_sinks=True, ends=(20, 48)),
    Case(48, dtype=torch.bfloat16),
    Case(45, dtype=torch.float16, window=11),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_compute_what_one_process_computes(world: int) -> None:
    results = run_ranks(world, of_ring, CASES)
    for i, case in enumerate(CASES):
        cut = SequenceCut(case.n_tokens, world, case.order, document_ends=case.ends)
        expected = case.expected()
        for j, whole in enumerate(expected):
            parts = [results[rank][i][0][j] for rank in range(world)]
            found = sum(parts) if j == 4 else cut.join(parts, dim=2)  # the gradient of sinks is a sum over ranks
            allowed = TOLERANCES[case.dtype] * max(1.0, float(whole.abs().max()) if whole.numel() else 1.0)
            assert (found - whole).abs().max() <= allowed, f"{case}, tensor {j}"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_sent_is_the_formula(world: int) -> None:
    """Keys are sent on as long as a later rank needs them, in both passes. Gradients are sent in fp32 or more
    precisely, in one message a hop."""
    results = run_ranks(world, of_ring, CASES)
    for i, case in enumerate(CASES):
        if case.documents is not None:
            continue
        plan = plan_ring(
            SequenceCut(case.n_tokens, world, case.order, document_ends=case.ends),
            is_causal=case.is_causal,
            window=case.window,
        )
        bytes_of = case.dtype.itemsize
        for rank in range(world):
            width = max(WIDTH, case.value_width)
            sent = plan.wire_elems(rank, case.heads[1], width)
            n_bytes = results[rank][i][1]
            assert n_bytes["forward"] == case.batch * sent.keys * bytes_of, case
            assert n_bytes["all"] == case.batch * (2 * sent.keys * bytes_of + sent.grads * max(bytes_of, 4)), case


def test_the_formula_for_whole_rings_and_for_neighbours() -> None:
    """Numbers by hand. In a whole ring a rank sends each part except one. With a window no longer than a part, only the
    neighbour needs a part."""
    plan = plan_ring(SequenceCut(64, 4, "zigzag"))
    assert [plan.wire_elems(rank, 2, 8) for rank in range(4)] == [(3 * 16 * 2 * 2 * 8, 3 * 16 * 2 * 2 * 8)] * 4
    near = plan_ring(SequenceCut(64, 4, "contiguous"), window=16)
    assert near.travel == (1, 1, 1, 0)
    whole = plan_ring(SequenceCut(64, 4, "contiguous"))
    assert whole.travel == (3, 2, 1, 0)
    assert plan_ring(SequenceCut(64, 4, "documents", document_ends=(10, 30, 64))).travel == (0, 0, 0, 0)


def test_work_is_even_in_zigzag_and_not_in_contiguous_order() -> None:
    for n_tokens in (1000, 4096, 10007):
        for n_ranks in (1, 2, 3, 4, 8):
            work = plan_ring(SequenceCut(n_tokens, n_ranks, "zigzag")).work
            assert sum(work) == n_tokens * (n_tokens + 1) // 2
            mean = sum(work) / n_ranks
            assert all(abs(of_rank - mean) <= 0.02 * mean for of_rank in work)
    work = plan_ring(SequenceCut(4096, 4, "contiguous")).work
    assert work[3] / (sum(work) / 4) == pytest.approx(1.75, rel=1e-3)


def refused(rank: int, world: int) -> list[str]:
    """The errors that this rank gets for calls that do not fit. Nothing is sent."""
    comm, cut = Collectives(), SequenceCut(10, world)
    comm.ledger.reset_totals()
    n = cut.tokens[rank]

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    q, k = tensor(1, 4, n, 8), tensor(1, 2, n, 8)
    calls = [
        lambda: ring_attention(q, k, k, comm, SequenceCut(10, world + 1)),
        lambda: ring_attention(q, k, k, comm, SequenceCut(12, world)),
        lambda: ring_attention(q[0], k, k, comm, cut),
        lambda: ring_attention(q, k[..., :4], k, comm, cut),
        lambda: ring_attention(q, tensor(1, 3, n, 8), tensor(1, 3, n, 8), comm, cut),
        lambda: ring_attention(q, k.double(), k, comm, cut),
        lambda: ring_attention(q.int(), k.int(), k.int(), comm, cut),
        lambda: ring_attention(q, k, k, comm, cut, window=-3),
        lambda: ring_attention(q, k, k, comm, cut, documents=[(10,), (10,)]),
        lambda: ring_attention(q, k, k, comm, cut, documents=[(4, 9)]),
        lambda: ring_attention(
            q, k, k, comm, SequenceCut(10, world, "documents", document_ends=(5, 10)), documents=[(10,)]
        ),
        lambda: ring_attention(q, k, k, comm, cut, sinks=torch.zeros(2)),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except DeepSpeedCError as error:
            said.append(str(error))
    assert _wire(comm) == 0
    return said


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    expected = [
        "over 3 ranks, the ring has 2",
        "5 tokens, the cut of 12 over 2 gives it 6",
        r"\(4, 5, 8\), \(1, 2, 5, 8\)",
        r"\(1, 2, 5, 4\)",
        "4 query heads do not divide among 3",
        "float32, torch.float64",
        "int32",
        "window of -3",
        "2 sequences, the batch has 1",
        "ends at 9, the sequence has 10",
        "deals whole documents",
        r"\(2,\) for 4 heads",
    ]
    for said in run_ranks(2, refused):
        for text, pattern in zip(said, expected, strict=True):
            with pytest.raises(ConfigError, match=pattern):
                raise ConfigError(text)


def test_a_row_of_ranks_is_one_rank_of_the_ring() -> None:
    with pytest.raises(ConfigError, match=r"rows of 2 ranks[^.]*\n.*parts\(\)"):
        plan_ring(SequenceCut(64, 4, n_inner=2))


@pytest.mark.parametrize("wish", ["shm", "off"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_buffers_of_a_ring_are_used_again_only_when_nobody_reads_them(rank: int, world: int, wish: str) -> None:
    """Two calls are alive at once, and their backwards run twice. Buffers are used again meanwhile, and the results
    stay those of each call alone, over gloo, with new buffers.
    """
    n, n_keys = 1021, 3
    cut = SequenceCut(n, world)
    random = torch.Generator().manual_seed(rank)

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(1, n_keys, cut.tokens[rank], 16, generator=random).requires_grad_() for _ in range(3)]

    calls = [tensors(), tensors()]
    grad = torch.randn(calls[0][0].shape, generator=random)
    expected = []
    for inputs in calls:
        out = ring_attention(*inputs, Collectives(), cut)
        expected.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    comm = Collectives()
    comm.use_shared_memory(wish)
    sizes = []
    for _ in range(3):
        outs = [ring_attention(*inputs, comm, cut) for inputs in calls]
        for i in (1, 0, 0, 1):
            found = torch.autograd.grad(outs[i], calls[i], grad, retain_graph=True)
            for got, want in zip([outs[i].detach(), *found], expected[i], strict=True):
                assert torch.equal(got, want)
        sizes.append(comm.outgoing.n_bytes)
    assert len(set(sizes)) == 1 and sizes[0] > 0
