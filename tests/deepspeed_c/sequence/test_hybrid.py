"""Attention that cuts heads within rows of ranks and runs a ring across rows. Outputs and gradients equal those of one
plain process, for every shape of 4 ranks."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError
from deepspeed_c.sequence import SequenceCut
from deepspeed_c.sequence.hybrid import hybrid_attention, split_ranks
from tests.deepspeed_c.sequence.test_ring import TOLERANCES, Case
from tests.ranks import run_ranks

CASES = [
    Case(61),
    Case(16, "contiguous", is_causal=False, heads=(8, 2)),
    Case(3, heads=(5, 1)),
    Case(48, ends=(5, 30, 48), heads=(6, 3), window=9),
    Case(40, "documents", ends=(5, 30, 40), heads=(4, 4)),
    Case(33, has_sinks=True, value_width=5, documents=((), (7, 33))),
    Case(48, dtype=torch.bfloat16, heads=(8, 4)),
]


def of_hybrid(rank: int, world: int, n_inner: int, cases: list[Case]) -> list[list[torch.Tensor]]:
    """The results of this rank for each case."""
    ranks = split_ranks(Collectives(), n_inner)
    assert (ranks.inner.world_size, ranks.ring.world_size) == (n_inner, world // n_inner)
    results = []
    for case in cases:
        cut = SequenceCut(case.n_tokens, world, case.order, n_inner, case.ends)
        inputs, grad = case.parts(cut, rank)
        out = hybrid_attention(*inputs[:3], ranks, cut, **case.options(inputs))
        found = torch.autograd.grad(out, inputs, grad)
        results.append([out.detach().double(), *(x.double() for x in found)])
    return results


@pytest.mark.parametrize("n_inner", [1, 2, 4])
def test_rows_and_rings_compute_what_one_process_computes(n_inner: int) -> None:
    results = run_ranks(4, of_hybrid, n_inner, CASES)
    for i, case in enumerate(CASES):
        cut = SequenceCut(case.n_tokens, 4, case.order, n_inner, case.ends)
        for j, whole in enumerate(case.expected()):
            parts = [results[rank][i][j] for rank in range(4)]
            found = sum(parts) if j == 4 else cut.join(parts, dim=2)
            assert (found - whole).abs().max() <= TOLERANCES[case.dtype] * max(1.0, float(whole.abs().max())), (
                f"{case}, tensor {j}"
            )


def refused(rank: int, world: int) -> list[str]:
    """The errors that this rank gets."""
    said = []
    comm = Collectives()
    ranks = split_ranks(comm, 2)
    q = torch.zeros(1, 4, 4, 8)
    for call in (
        lambda: split_ranks(comm, 3),
        lambda: hybrid_attention(q, q, q, ranks, SequenceCut(8, 2)),
        lambda: hybrid_attention(q[:, :1], q[:, :1], q[:, :1], ranks, SequenceCut(8, 2, n_inner=2)),
        lambda: hybrid_attention(q, q, q, ranks, SequenceCut(8, 2, n_inner=2), sinks=torch.zeros(3)),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_numbers_that_do_not_fit() -> None:
    for said in run_ranks(2, refused):
        assert "rows of 3 ranks do not divide 2" in said[0]
        assert "over 2 ranks in rows of 1, the ranks are 1 rows of 2" in said[1]
        assert "1 query heads for 2 ranks" in said[2]
        assert "(3,) for 4 heads" in said[3]
