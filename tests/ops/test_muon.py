"""Muon: the orthogonalisation against a singular value decomposition, the parameter groups, and the two halves of a
step over pieces of tensors.
"""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import OptimizerError, StateError
from deepspeed_c.ops import reference
from deepspeed_c.ops.muon import Muon, newton_schulz
from tests.ops.interchange import assert_equal


def params_of(*shapes):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (17, 17), (32, 100), (100, 32)])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_is_its_polynomial_on_singular_values(shape, steps):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    torch.testing.assert_close(
        newton_schulz(matrix, steps).double(), reference.newton_schulz(matrix.double(), steps), rtol=1e-3, atol=2e-4
    )


def test_singular_values_end_up_near_one():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.linalg.svdvals(newton_schulz(torch.randn(64, 96), dtype=dtype))
        assert 0.6 < float(values.min()) and float(values.max()) < 1.3, (dtype, values.min(), values.max())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (6, 3, 2, 2)])
def test_step_is_momentum_then_orthogonalisation(shape, nesterov):
    (param,) = params_of(shape)
    want = param.detach().double()
    momentum = torch.zeros_like(want)
    optimizer = Muon([param], lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    h = reference.Hyper(lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    rows = shape[0]
    columns = param.numel() // rows
    for _ in range(4):
        param.grad = torch.randn(shape)
        optimizer.step()
        momentum, update = reference.muon_momentum(param.grad.double(), momentum, h)
        update = reference.newton_schulz(update.reshape(rows, -1)).reshape(shape) * max(1.0, rows / columns) ** 0.5
        want = reference.muon_apply(want, update, h)
    torch.testing.assert_close(param.detach().double(), want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].double(), momentum, rtol=1e-5, atol=1e-6)


def test_everything_else_is_adamw():
    mine, theirs = params_of((4, 5), (5,), ()), params_of((4, 5), (5,), ())
    a = Muon(mine, lr=0.02, adam_lr=0.003, weight_decay=0.1)
    b = torch.optim.AdamW(theirs[1:], lr=0.003, weight_decay=0.1)
    for seed in range(4):
        torch.manual_seed(seed)
        for p, q in zip(mine, theirs):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    assert_equal([p.detach() for p in mine[1:]], [p.detach() for p in theirs[1:]], "AdamW part")
    assert set(a.state[mine[0]]) == {"step", "momentum_buffer"}
    assert set(a.state[mine[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_groups_are_split_by_what_fits():
    matrix, vector, head, bias = params_of((4, 5), (5,), (6, 5), (6,))
    optimizer = Muon(
        [{"params": [matrix, vector], "lr": 0.5}, {"params": [head, bias], "use_muon": False, "lr": 0.1}],
        lr=0.02,
        adam_lr=0.003,
    )
    facts = [(g["use_muon"], g["lr"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups]
    assert facts == [(True, 0.5, [(4, 5)]), (False, 0.003, [(5,)]), (False, 0.1, [(6, 5), (6,)])]
    named = Muon([("w", matrix), ("b", vector)])
    assert [g["use_muon"] for g in named.param_groups] == [True, False]
    with pytest.raises(OptimizerError, match="fewer than two dimensions"):
        optimizer.add_param_group({"params": params_of((3,)), "use_muon": True})
    with pytest.raises(OptimizerError, match="ns_steps"):
        Muon([matrix], ns_steps=0)


@pytest.mark.parametrize("cut", [0, 1, 77, 160])
def test_halves_over_pieces_are_the_whole_step(cut):
    (whole,) = params_of((16, 10))
    flat = whole.detach().clone().view(-1)
    pieces = [torch.nn.Parameter(flat[:cut].clone()), torch.nn.Parameter(flat[cut:].clone())]
    a = Muon([whole], lr=0.02, weight_decay=0.1)
    b = Muon([whole], lr=0.02, weight_decay=0.1)
    b.param_groups[0]["params"] = pieces
    copies = [torch.zeros(p.shape, dtype=torch.bfloat16) for p in pieces]
    for seed in range(3):
        torch.manual_seed(seed)
        whole.grad = torch.randn(16, 10)
        grads = [whole.grad.view(-1)[:cut] * 8.0, whole.grad.view(-1)[cut:] * 8.0]
        a.step()
        b.begin_step()
        update = torch.zeros(160)
        b.momentum_tensors(0, pieces, grads, [update[:cut], update[cut:]], 0.125)
        matrix = b.orthogonalize(update.view(16, 10)).view(-1)
        b.apply_tensors(0, pieces, [matrix[:cut], matrix[cut:]], copies)
    assert torch.equal(torch.cat([p.detach() for p in pieces]), whole.detach().view(-1))
    assert all(torch.equal(c, p.detach().bfloat16()) for c, p in zip(copies, pieces))
    with pytest.raises(StateError, match="not open"):
        b.apply_tensors(0, pieces, [matrix[:cut], matrix[cut:]], copies)


def test_empty_and_zero_matrices_pass():
    empty, zero = params_of((0, 4), (3, 4))
    optimizer = Muon([empty, zero], lr=0.1)
    empty.grad, zero.grad = torch.zeros(0, 4), torch.zeros(3, 4)
    before = zero.detach().clone()
    optimizer.step()
    assert torch.equal(zero, before)
