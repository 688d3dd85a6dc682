"""FusedLamb: the trust ratio, the two halves of a step over pieces of tensors, and DeepSpeed's arguments of step."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import OptimizerError, StateError
from deepspeed_c.ops import reference
from deepspeed_c.ops.lamb import FusedLamb
from deepspeed_c.ops.reference import Hyper
from tests.ops.data import bits
from tests.ops.interchange import assert_equal, fresh_params, train

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_coeff": 5.0, "min_coeff": 0.5}
HYPER = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "max_coeff": 5.0, "min_coeff": 0.5}


def test_as_the_formula_over_steps():
    params = fresh_params()
    want = [p.detach().double() for p in params]
    states = [(torch.zeros_like(w), torch.zeros_like(w)) for w in want]
    optimizer = FusedLamb(params, **OPTIONS)
    for step in range(1, 6):
        train(optimizer, params, range(step, step + 1))
        ratios = []
        for i, p in enumerate(params):
            h = Hyper(step=step, **HYPER)
            norms, _ = reference.lamb_norms(want[i], p.grad.double(), states[i], h)
            ratios.append(float(reference.trust_ratio(norms[0], norms[1], h)))
            want[i], states[i] = reference.lamb(want[i], p.grad.double(), states[i], h)
        assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-5)
    assert_equal([p.detach() for p in params], [w.float() for w in want], "LAMB")


def test_the_operator_does_what_the_halves_do():
    whole, halves = fresh_params(), fresh_params()
    optimizer = FusedLamb(halves, **OPTIONS)
    state0, state1 = ([torch.zeros_like(p) for p in whole] for _ in range(2))
    for step in range(1, 4):
        train(optimizer, halves, range(step, step + 1))
        torch.ops.deepspeed_c.optim_step_(
            *("lamb", [p.detach() for p in whole], [p.grad for p in halves], state0, state1, []),
            *(step, 0.01, 0.8, 0.95, 1e-6, 0.1, 0.0, 0.0, 0.0, 0.5, 5.0, 1.0, 1),
        )
    for i, (a, b) in enumerate(zip(whole, halves)):
        assert torch.equal(bits(a), bits(b)), f"parameter {i} differs between optim_step_ and norms + apply"


@pytest.mark.parametrize("cut", [0, 1, 500, 1000])
def test_pieces_of_a_parameter_with_summed_norms_are_the_whole(cut):
    torch.manual_seed(0)
    weight = torch.randn(1000)
    whole = torch.nn.Parameter(weight.clone())
    pieces = [torch.nn.Parameter(part.clone()) for part in (weight[:cut], weight[cut:])]
    a, b = FusedLamb([whole], **OPTIONS), FusedLamb(pieces, **OPTIONS)
    copies = [torch.zeros(p.shape, dtype=torch.bfloat16) for p in pieces]
    for seed in range(3):
        torch.manual_seed(seed)
        whole.grad = torch.randn(1000)
        grads = [whole.grad[:cut] * 2.0, whole.grad[cut:] * 2.0]
        a.step()
        b.begin_step()
        norms = torch.cat([b.norms(0, [p], [g], [], 0.5) for p, g in zip(pieces, grads)])
        ratios = b.trust_ratios(0, norms.sum(0, keepdim=True).expand(2, 2))
        for i, (p, g) in enumerate(zip(pieces, grads)):
            b.apply(0, [p], [g], [copies[i]], 0.5, ratios[i : i + 1])
    torch.testing.assert_close(torch.cat([p.detach() for p in pieces]), whole.detach(), rtol=1e-6, atol=1e-7)
    assert all(torch.equal(c, p.detach().bfloat16()) for c, p in zip(copies, pieces))
    with pytest.raises(StateError, match="not open"):
        b.apply(0, [pieces[1]], [grads[1]], [], 1.0, ratios[:1])


def test_trust_ratio_of_nothing_is_one():
    optimizer = FusedLamb(fresh_params(), **OPTIONS)
    sumsq = torch.tensor([[0.0, 4.0], [4.0, 0.0], [0.0, 0.0], [4.0, 1.0], [1e8, 1.0], [1e-8, 1.0]], dtype=torch.float64)
    assert optimizer.trust_ratios(0, sumsq).tolist() == [1.0, 1.0, 1.0, 2.0, 5.0, 0.5]


def test_deepspeeds_arguments_of_step():
    a, b = fresh_params(), fresh_params()
    first, second = FusedLamb(a, max_grad_norm=1.0, **OPTIONS), FusedLamb(b, max_grad_norm=1.0, **OPTIONS)
    grads = [torch.randn(p.shape) for p in a]
    outputs = [torch.zeros(p.shape, dtype=torch.float16) for p in a]
    # Gradients scaled by 4 have a norm of 40, so their true norm is 10, and clipping divides them by 10.
    first.step(grads=[g * 4.0 for g in grads], output_params=outputs, scale=4.0, grad_norms=[40.0])
    for p, g in zip(b, grads):
        p.grad = g / (10.0 + 1e-6)
    second.step()
    assert_equal([p.detach() for p in a], [p.detach() for p in b], "scaled and clipped")
    assert all(torch.equal(o, p.detach().half()) for o, p in zip(outputs, a))
    with pytest.raises(OptimizerError, match="lists of"):
        first.step(grads=grads[:2])


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"eps_inside_sqrt": True}])
def test_what_is_not_supported_is_refused(options):
    with pytest.raises(OptimizerError):
        FusedLamb(fresh_params(), **options)
