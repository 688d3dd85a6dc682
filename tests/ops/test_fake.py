"""torch.library.opcheck tests every operator's schema, fake kernel and behaviour under the tracing of torch.compile."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.ops import divergence, kv, moe, nn, quant  # noqa: F401  (register operators, and gradients of some)
from tests.ops.data import optimizer_kinds

HYPER = (2, 0.01, 0.9, 0.999, 1e-8, 0.1, 0.9, 0.0, 0.0, 0.01, 10.0, 1.0, 1)


def lists(n_states, has_copies):
    def make(dtype=torch.float32):
        return [torch.rand(n, dtype=torch.float32).to(dtype) for n in (3, 17)]

    return (
        make(),
        make(torch.bfloat16),
        make(),
        make() if n_states == 2 else [],
        make(torch.bfloat16) if has_copies else [],
    )


def cases():
    for kind, n_states, needs_norms in optimizer_kinds():
        for has_copies in (False, True):
            name = f"{kind}{'-copies' if has_copies else ''}"
            yield f"optim_step_-{name}", "optim_step_", (kind, *lists(n_states, has_copies), *HYPER)
        if needs_norms:
            arguments = lists(n_states, True)
            yield f"optim_norms_-{kind}", "optim_norms_", (kind, *arguments, *HYPER)
            yield f"optim_apply_-{kind}", "optim_apply_", (kind, *arguments, *HYPER, torch.ones(2, dtype=torch.float64))
    f32, b16 = lists(2, True)[0], lists(2, True)[1]
    yield "muon_momentum_", "muon_momentum_", (b16, f32, lists(2, True)[0], 0.9, 0.5, 2)
    codes = [[torch.randint(0, 100, (n,), dtype=dtype) for n in (3, 17)] for dtype in (torch.int8, torch.uint8)]
    scales = [[torch.rand(1) for _ in (3, 17)] for _ in range(2)]
    operands = (f32, b16, *codes, lists(2, True)[4], *scales)
    yield "optim_step_q8_", "optim_step_q8_", ("adamw", *operands, *HYPER)
    yield "q8_quantize_", "q8_quantize_", (f32[1], codes[1][1], scales[1][1])
    yield "q8_dequantize_", "q8_dequantize_", (codes[0][1], scales[0][1], 2, torch.zeros(9))
    yield "muon_apply_", "muon_apply_", (f32, lists(2, True)[0], lists(2, True)[4], 0.1, 0.01)
    yield "flat_sumsq", "flat_sumsq", ([*f32, *b16],)
    yield "flat_reduce_", "flat_reduce_", ([torch.rand(9), torch.rand(9)], 0.5, True, torch.rand(9).bfloat16())
    yield "flat_scale_", "flat_scale_", (f32, 0.5)
    yield "flat_cast_", "flat_cast_", (torch.rand(9), torch.zeros(9, dtype=torch.float16))
    yield "flat_zero_", "flat_zero_", ([torch.rand(9), torch.ones(2, 3, dtype=torch.int8)],)
    levels = [torch.rand(9) for _ in range(3)]
    yield "tree_push_", "tree_push_", (levels, 3, [torch.rand(9), torch.rand(9).bfloat16()])
    yield "tree_sum_", "tree_sum_", (torch.zeros(9).half(), levels, 5, 0.2)
    yield "flat_exact_squares", "flat_exact_squares", ([*f32, *b16],)
    targets = torch.tensor([3, -1, 0])
    yield "cross_entropy_rows_", "cross_entropy_rows_", (torch.rand(3, 5), targets, torch.zeros(3, 4))
    logits, log_sum = torch.rand(3, 5).bfloat16(), torch.full((3,), 2.0)
    yield "cross_entropy_grad_", "cross_entropy_grad_", (logits, targets, log_sum, torch.ones(3), 0.1, 9)
    yield (
        "attention_merge_",
        "attention_merge_",
        (torch.zeros(2, 5, 3), torch.zeros(2, 5), torch.ones(2, 2, 3).bfloat16(), torch.ones(2, 2), 2, 1),
    )
    yield from nn_cases()
    yield from moe_cases()
    yield from quant_cases()
    yield from kv_cases()
    yield from sample_cases()


def kv_cases():
    """A row with one token that is new of 18, and a row of two."""
    blocks = (torch.rand(4, 2, 8, kv.BLOCK_TOKENS).half(), torch.rand(4, 2, kv.BLOCK_TOKENS, 5).half())
    tables = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    rows = (torch.tensor([1, 2]), torch.tensor([18, 2]), tables)
    yield "kv_write", "kv_write", (torch.rand(3, 2, 8).half(), torch.rand(3, 2, 5).half(), *blocks, *rows)
    q, rules = torch.rand(4, 3, 8).half().transpose(0, 1), (torch.tensor([3, 0]), torch.rand(4), torch.rand(4))
    yield "kv_attention", "kv_attention", (q, *blocks, *rows, *rules, 0.3, True, 3, 2.0)
    yield "kv_attention-plain", "kv_attention", (q, *blocks, *rows, None, None, None, 0.3, False, 0, 0.0)


def sample_cases():
    logits, rules = torch.rand(2, 9).bfloat16(), torch.tensor([[1, 3, 0.9, 0.1, 1.2], [0, 0, 1, 0, 1]]).double()
    earlier, numbers = (torch.tensor([1, 2]), torch.tensor([8, 0, 0])), (torch.tensor([-1, 2]), torch.tensor([0, 5]))
    yield "sample_tokens", "sample_tokens", (logits, rules, *numbers, *earlier)
    yield "sample_probabilities", "sample_probabilities", (logits, rules, None, None)


def quant_cases():
    x, scales, zeros = torch.rand(3, 11), torch.rand(3, 3), torch.zeros(3, 3, dtype=torch.int8)
    yield "quant_fake", "quant_fake", (x.bfloat16().requires_grad_(), "e4m3", 4, True, 1, None, 0)
    yield "quant_fake-random", "quant_fake", (x.clone().requires_grad_(), "int8", 0, False, 0, 7, 5)
    yield "quant_fake_with", "quant_fake_with", (x.clone().requires_grad_(), scales, zeros, "int4", 4)
    yield "quant_quantize", "quant_quantize", (x, "int4", 4, False, 0, None, 0)
    yield "quant_quantize-symmetric", "quant_quantize", (x, "e5m2", 0, True, 3, None, 0)
    codes = torch.zeros(3, 8, dtype=torch.uint8)
    yield "quant_dequantize_", "quant_dequantize_", (codes, scales, zeros, "int4", 4, torch.zeros(3, 11).half())
    words, bias = torch.randint(-(2**31), 2**31 - 1, (3, 2), dtype=torch.int32), torch.rand(3).requires_grad_()
    yield "quant_packed_linear", "quant_packed_linear", (x[:2].clone().requires_grad_(), words, scales, bias, 4, 4)
    operands = (x[0, :7].clone().requires_grad_(), words, scales[:, :1].bfloat16(), None, 8, 0)
    yield "quant_packed_linear-row", "quant_packed_linear", operands


def moe_cases():
    logits, indices = torch.rand(5, 4), torch.tensor([[0, 3], [3, -1], [1, 0], [-1, -1], [3, 2]], dtype=torch.int32)
    yield "moe_route", "moe_route", (logits, 2, True, torch.rand(4), 2, 1)
    yield "moe_route_", "moe_route_", (logits, None, False, 1, 1, indices.clone(), torch.zeros(1).long())
    yield "moe_uniform_", "moe_uniform_", (torch.zeros(9), 3, 5)
    yield "moe_place", "moe_place", (indices, 4, 2, "choice", None)
    yield "moe_place-priority", "moe_place", (indices, 4, 2, "priority", torch.rand(5, 2))
    yield "moe_sort", "moe_sort", (indices, 4)
    order, inverse, _ = torch.ops.deepspeed_c.moe_sort(indices, 4)
    x, rows = torch.rand(5, 3).bfloat16(), torch.rand(7, 3).bfloat16()
    weights, permutation = torch.rand(5, 2), torch.tensor([3, 1, 0, 2, 6, 5, 4])
    yield "moe_gather", "moe_gather", (x.clone().requires_grad_(), order, 2, inverse)
    yield "moe_permute", "moe_permute", (rows.clone().requires_grad_(), permutation)
    yield "moe_combine", "moe_combine", (rows.clone().requires_grad_(), inverse, weights.clone().requires_grad_())
    yield "moe_combine-plain", "moe_combine", (rows.clone().requires_grad_(), inverse, None)
    yield "moe_combine_backward", "moe_combine_backward", (x, rows, inverse, weights, True)


def nn_cases():
    def make(*shape, dtype=torch.bfloat16, needs_grad=True):
        return torch.rand(*shape).to(dtype).requires_grad_(needs_grad)

    x, weight, bias = make(3, 5), make(5), make(5)
    still = make(3, 5, needs_grad=False)
    sums = (torch.rand(3), torch.rand(3))
    scores, angles = make(2, 3, 4, 5), (torch.rand(1, 3, 2), torch.rand(1, 3, 2))
    keep = torch.rand(2, 1, 1, 5).gt(0.2).expand(2, 3, 4, 5)
    yield "nn_norm", "nn_norm", (x, None, weight, bias, 1e-5, False)
    yield "nn_norm-rms", "nn_norm", (x, make(3, 5), weight.detach().float().requires_grad_(), None, 1e-5, True)
    yield "nn_norm_backward", "nn_norm_backward", (still, still, still, None, *sums, False, False, True, bias.detach())
    yield "nn_bias_act", "nn_bias_act", (x, bias, "gelu")
    yield "nn_bias_act_backward", "nn_bias_act_backward", (still, still, None, "silu", True)
    yield "nn_gated", "nn_gated", (x, make(3, 5), "silu")
    yield "nn_gated-halves", "nn_gated", (make(2, 3, 8), None, "gelu_tanh")
    yield "nn_gated_backward", "nn_gated_backward", (still, make(3, 10, needs_grad=False), None, "relu")
    yield "nn_dropout", "nn_dropout", (x, bias, make(3, 5), 0.3, 7)
    yield "nn_dropout_backward", "nn_dropout_backward", (still, 0.3, 7, True)
    seed = torch.tensor(7)
    yield "nn_drawn_dropout", "nn_drawn_dropout", (x, bias, make(3, 5), 0.3, seed)
    yield "nn_drawn_dropout_backward", "nn_drawn_dropout_backward", (still, 0.3, seed, True)
    yield "nn_rotary", "nn_rotary", (make(2, 4, 3, 6).transpose(1, 2), *angles, False, False)
    weight = torch.rand(4, 5).to(x.dtype)
    yield "nn_product", "nn_product", (x, weight.t().clone().requires_grad_(), None)
    yield "nn_product-bias", "nn_product", (x, weight.t(), torch.rand(4).to(x.dtype).requires_grad_())
    yield "nn_product-batch", "nn_product", (make(2, 3, 5), make(2, 4, 5).mT, None)
    yield "nn_layers", "nn_layers", (still, [weight, weight[:3]], [None, weight[0, :3]])
    yield "nn_softmax", "nn_softmax", (scores, keep, 0.5, True)
    yield "nn_softmax_backward", "nn_softmax_backward", (scores.detach(), scores.detach(), 0.5)
    yield "nn_divergence", "nn_divergence", (x, still.float(), torch.tensor([1, 0, 1], dtype=torch.uint8), 0.3, 0.5)
    losses, found = torch.ops.deepspeed_c.nn_divergence(still, still, None, 0.3, 0.5)
    yield "nn_divergence_backward", "nn_divergence_backward", (losses, still, still, None, found, 0.3, 0.5)
    q, k, v = make(2, 5, 4, 8).transpose(1, 2), make(2, 2, 6, 8), make(2, 2, 6, 3)
    rules = (torch.rand(4), torch.rand(4), torch.zeros(2, 6, dtype=torch.int32), 0.3, True, 3, 2.0)
    yield "nn_attention", "nn_attention", (q, k, v, rules[0].clone().requires_grad_(), *rules[1:])
    yield "nn_attention-plain", "nn_attention", (q, k, make(2, 2, 6, 8), None, None, None, 0.3, False, 0, 0.0)
    out, lse = torch.rand(2, 4, 5, 3).bfloat16(), torch.rand(2, 4, 5)
    operands = (q.detach(), k.detach(), v.detach())
    yield "nn_attention_backward", "nn_attention_backward", (out, lse, *operands, out.clone(), lse.clone(), *rules)


@pytest.mark.parametrize("op, arguments", [pytest.param(op, args, id=name) for name, op, args in cases()])
def test_opcheck(op, arguments):
    torch.library.opcheck(getattr(torch.ops.deepspeed_c, op).default, arguments)


# Operators that are registered in Python. opcheck covers those of tensor-parallel layers in inject/test_overlap.py and
# those of compiled graphs in compile/test_operators.py; those of experts need ranks (moe/test_dispatch.py).
IN_PYTHON = tuple(f"deepspeed_c::{name}_" for name in ("tp", "moe_exchange", "zero"))


def test_every_operator_is_covered():
    covered = {op for _, op, _ in cases()}
    registered = {
        name.removeprefix("deepspeed_c::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("deepspeed_c::") and not name.startswith(IN_PYTHON)
    }
    assert registered == covered


def test_compiled_graph_mutates_what_eager_does():
    def step(param, grad, m, v):
        torch.ops.deepspeed_c.optim_step_("adamw", [param], [grad], [m], [v], [], *HYPER)
        return param + 1, torch.ops.deepspeed_c.flat_sumsq([param])

    eager = [torch.rand(17) for _ in range(4)]
    compiled = [t.clone() for t in eager]
    want = step(*eager)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled)
    for a, b in zip((*got, *compiled), (*want, *eager)):
        assert torch.equal(a, b)
