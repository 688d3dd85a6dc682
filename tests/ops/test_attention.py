"""Compares ``nn.attention`` with its formula over all pairs of tokens in float64 and with torch's attention, and limits
its memory.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from deepspeed_c.ops import nn, reference
from tests.ops.data import DTYPES, bits, normal, on_each_setup

# out is rounded once to its dtype, and this error enters the gradients.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def heads(*shape, seed, dtype=torch.float32):
    n = torch.Size(shape).numel()
    return normal(n, seed, dtype).view(shape).requires_grad_()


def slopes(n_heads):
    return 2.0 ** -torch.arange(1, n_heads + 1).float()


def documents(n_batch, n_keys):
    """The document of each token: padding first, then documents of 13 tokens."""
    return (torch.arange(n_keys) // 13 - 1).expand(n_batch, n_keys)


def close(got, wanted, dtype, what):
    size = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got.detach().double(), wanted.detach(), rtol=0, atol=TOLERANCE[dtype] * size, msg=what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n_heads, n_kv_heads, n_queries, n_keys, dim, value_dim", [(4, 2, 5, 9, 8, 8), (2, 1, 130, 130, 33, 20)]
)
def test_rules(dtype, n_heads, n_kv_heads, n_queries, n_keys, dim, value_dim):
    for causal, window, cap, has_slopes, has_documents, has_sinks in itertools.product(
        (False, True), (0, 1, 17), (0.0, 5.0), *[(False, True)] * 3
    ):
        q = heads(2, n_queries, n_heads, dim, seed=1, dtype=dtype).transpose(1, 2)
        k = heads(2, n_kv_heads, n_keys, dim, seed=2, dtype=dtype)
        v = heads(2, n_kv_heads, n_keys, value_dim, seed=3, dtype=dtype)
        given = [q, k, v] + [heads(n_heads, seed=4)] * has_sinks
        rules = {
            "alibi_slopes": slopes(n_heads) if has_slopes else None,
            "documents": documents(2, n_keys) if has_documents else None,
        }
        out, lse = nn.attention(
            *given[:3], causal=causal, window=window or None, soft_cap=cap or None, sinks=given[3] if has_sinks else None,
            return_lse=True, **rules,
        )  # fmt: skip
        wide = [x.detach().double().requires_grad_() for x in given]
        wanted, wanted_lse = reference.nn_attention(
            *wide[:3], wide[3] if has_sinks else None, *rules.values(), dim**-0.5, causal, window, cap
        )
        what = f"causal {causal}, window {window}, cap {cap}, {has_slopes}, {has_documents}, {has_sinks}"
        is_seen = wanted_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, is_seen) and out.dtype == dtype, what
        close(out, wanted, dtype, what)
        close(lse[is_seen], wanted_lse[is_seen], torch.float32, what)
        gradient, of_lse = normal(out.numel(), 5, dtype).view(out.shape), normal(lse.numel(), 6).view(lse.shape)
        of_lse = of_lse * is_seen
        got = torch.autograd.grad((out, lse), given, (gradient, of_lse))
        formula = torch.autograd.grad(
            (wanted, wanted_lse.masked_fill(~is_seen, 0)), wide, (gradient.double(), of_lse.double()), allow_unused=True
        )
        for i, (mine, theirs) in enumerate(zip(got, formula)):
            close(mine, torch.zeros_like(wide[i]) if theirs is None else theirs, dtype, f"gradient {i}: {what}")


def test_it_is_torchs_own():
    q, k, v = heads(2, 4, 70, 16, seed=1), heads(2, 2, 70, 16, seed=2), heads(2, 2, 70, 16, seed=3)
    for causal in (False, True):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(nn.attention(q, k, v, causal=causal), wanted, rtol=1e-5, atol=1e-5)
    distance = torch.arange(70)[:, None] - torch.arange(70)
    mask = (-slopes(4)[:, None, None] * distance.abs()).masked_fill((distance < 0) | (distance >= 20), -torch.inf)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    got = nn.attention(q, k, v, causal=True, window=20, alibi_slopes=slopes(4))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_gradients_of_the_formula():
    """The formula that serves as the operator's reference has the right gradients."""
    q, k, v, sinks = (normal(n, n).double().view(shape).requires_grad_() for n, shape in
                      ((40, (1, 2, 5, 4)), (28, (1, 1, 7, 4)), (21, (1, 1, 7, 3)), (2, (2,))))  # fmt: skip
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])

    def formula(q, k, v, sinks):
        return reference.nn_attention(q, k, v, sinks, slopes(2).double(), ids, 0.5, True, 3, 2.0)

    assert torch.autograd.gradcheck(formula, (q, k, v, sinks))


def test_parts_of_the_keys_merge_by_their_log_sums():
    q, k, v = heads(1, 2, 9, 8, seed=1), heads(1, 2, 30, 8, seed=2), heads(1, 2, 30, 8, seed=3)
    whole, lse = nn.attention(q, k, v, return_lse=True)
    parts = [nn.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 11), (11, 30))]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (part - merged_lse).exp()[..., None] for out, part in parts)
    torch.testing.assert_close(merged_lse, lse)
    torch.testing.assert_close(merged, whole)
    wanted = torch.autograd.grad(whole.square().sum(), (q, k, v))
    for got, expected in zip(torch.autograd.grad(merged.square().sum(), (q, k, v)), wanted):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_queries_that_see_nothing_are_zero():
    q, k, v = heads(1, 1, 6, 4, seed=1), heads(1, 1, 3, 4, seed=2), heads(1, 1, 3, 4, seed=3)
    out, lse = nn.attention(q, k, v, causal=True, return_lse=True)
    out.sum().backward()
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == -torch.inf).all() and (q.grad[:, :, :3] == 0).all()
    assert (out[:, :, 3:] != 0).all() and torch.isfinite(k.grad).all() and torch.isfinite(v.grad).all()


def test_the_same_bits_for_any_thread_count_and_instruction_set():
    q, k, v = (heads(2, n, 150, 40, seed=n, dtype=torch.bfloat16) for n in (4, 2, 2))

    def run():
        out = nn.attention(q, k, v, causal=True, window=70, soft_cap=4.0, alibi_slopes=slopes(4))
        found = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
        return tuple(bytes(bits(tensor.contiguous()).numpy()) for tensor in found)

    assert len(set(on_each_setup(run).values())) == 1


def test_memory_grows_with_the_tokens():
    """A window over 60,000 tokens, forward and backward: one byte a pair of tokens would be 3.6 GB."""
    n_tokens = 60_000
    q, k, v = (heads(1, 1, n_tokens, 8, seed=seed) for seed in (1, 2, 3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        kept: list[int] = []
        out = nn.attention(q, k, v, causal=True, window=100)
    assert sum(kept) < 5 * q.nbytes
    out.sum().backward()
    alone = nn.attention(q[:, :, 150:251], k[:, :, 150:251], v[:, :, 150:251], causal=True, window=100)
    torch.testing.assert_close(alone[:, :, 99:], out[:, :, 249:251])


ONE = torch.ones(1, 2, 3, 4)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: nn.attention(ONE[0], ONE, ONE), "q must be [batch, heads, tokens, dim]"),
        (lambda: nn.attention(ONE, ONE.half(), ONE), "k is of float16, unlike q"),
        (lambda: nn.attention(ONE, ONE, ONE[:, :, :2]), "v is [1, 2, 2, 4]; [1, 2, 3, 4] fits the others"),
        (lambda: nn.attention(ONE, ONE.repeat(1, 2, 1, 1), ONE.repeat(1, 2, 1, 1)), "2 heads of q cannot share 4 heads"),
        (lambda: nn.attention(*[torch.ones(1, 1, 1, 300)] * 3), "head_dim is 300, must be 1 to 256"),
        (lambda: nn.attention(ONE, ONE, ONE, window=0), "window is 0, must be at least 1"),
        (lambda: nn.attention(ONE, ONE, ONE, soft_cap=-1.0), "soft_cap is -1.0, must be positive"),
        (lambda: nn.attention(ONE, ONE, ONE, sinks=torch.ones(3)), "sinks has 3 elements; 2 belong to q"),
        (lambda: nn.attention(ONE, ONE, ONE, alibi_slopes=torch.ones(3)), "alibi_slopes has 3 elements; 2 belong"),
        (lambda: nn.attention(ONE, ONE, ONE, documents=torch.ones(2, 3)), "documents must be contiguous and [1, 3]"),
    ],
)  # fmt: skip
def test_refusals(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def test_compiled_in_one_graph():
    def block(q, k, v):
        return nn.attention(q, k, v, causal=True, window=3, soft_cap=2.0)

    q, k, v = (heads(1, 2, 9, 8, seed=seed) for seed in (1, 2, 3))
    assert torch.equal(torch.compile(block, backend="aot_eager", fullgraph=True)(q, k, v), block(q, k, v))
