"""Every operator's schema, fake kernel and behaviour under torch.compile's tracing, by torch.library.opcheck."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c import ops  # noqa: F401  (registers the operators)
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
    targets = torch.tensor([3, -1, 0])
    yield "cross_entropy_rows_", "cross_entropy_rows_", (torch.rand(3, 5), targets, torch.zeros(3, 4))
    logits, log_sum = torch.rand(3, 5).bfloat16(), torch.full((3,), 2.0)
    yield "cross_entropy_grad_", "cross_entropy_grad_", (logits, targets, log_sum, torch.ones(3), 0.1, 9)


@pytest.mark.parametrize("op, arguments", [pytest.param(op, args, id=name) for name, op, args in cases()])
def test_opcheck(op, arguments):
    torch.library.opcheck(getattr(torch.ops.deepspeed_c, op).default, arguments)


def test_every_operator_is_covered():
    covered = {op for _, op, _ in cases()}
    registered = {
        name.removeprefix("deepspeed_c::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("deepspeed_c::")
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
