"""Attention of a block, with its log-sum-exp. Both ways to compute it are compared with autograd of the plain formula
in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.sequence import blocks

MASK = torch.zeros(7, 9).masked_fill(torch.ones(7, 9, dtype=torch.bool).triu(3), -torch.inf)


def test_autocast_rounds_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast is off in a backward, so a rounded product in the forward would belong to other scores."""
    monkeypatch.setattr(blocks, "_HAS_KERNEL", frozenset())
    q, k, v = (torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    wanted = blocks.block_attention(q, k, v, scale=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        got = blocks.block_attention(q, k, v, scale=0.3)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs), f"off by {(mine - theirs).abs().max()}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_keys", [4, 2, 1])
@pytest.mark.parametrize("kind", ["whole", "causal", "mask"])
@pytest.mark.parametrize("way", ["kernel", "formula"])
def test_a_block_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n_keys: int, kind: str, way: str
) -> None:
    random = torch.Generator().manual_seed(n_keys)
    n_queries = 9 if kind == "causal" else 7
    q, grad = (torch.randn(2, 4, n_queries, 8, generator=random).to(dtype).double() for _ in range(2))
    k, v = (torch.randn(2, n_keys, 9, 8, generator=random).to(dtype).double() for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = {"whole": torch.zeros(n_queries, 9), "causal": torch.full((9, 9), -torch.inf).triu(1), "mask": MASK}[
        kind
    ].double()
    scores = q @ k.repeat_interleave(4 // n_keys, 1).mT * 0.3 + mask
    whole = scores.softmax(-1) @ v.repeat_interleave(4 // n_keys, 1)
    expected = torch.autograd.grad(whole, inputs, grad)
    if way == "formula":
        monkeypatch.setattr(blocks, "_HAS_KERNEL", frozenset())
    how: dict[str, Any] = {
        "scale": 0.3,
        "is_causal": kind == "causal",
        "mask": MASK.to(dtype) if kind == "mask" else None,
    }
    given = [x.detach().to(dtype) for x in inputs]
    out, log_sum = blocks.block_attention(*given, **how)
    found = blocks.block_attention_backward(grad.to(dtype), *given, out, log_sum, **how)
    allowed = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 6e-2}[dtype]
    assert out.dtype == dtype and log_sum.dtype == torch.promote_types(dtype, torch.float32)
    assert (out - whole).abs().max() < allowed
    assert (log_sum - torch.logsumexp(scores, -1)).abs().max() < allowed
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype and (got - want).abs().max() < allowed * max(1.0, float(want.abs().max()))
