"""Compares the formulas of ops/reference.py with torch.optim in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepspeed_c.ops import reference
from deepspeed_c.ops.reference import Hyper

CASES = {
    "adam": (
        Hyper(lr=0.1, beta1=0.8, beta2=0.95, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "adamw": (Hyper(lr=0.1, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    "adagrad": (
        Hyper(lr=0.1, eps=1e-10, lr_decay=0.2, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.2, weight_decay=0.1),
    ),
    "sgd": (
        Hyper(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("maximize", [False, True])
def test_formula_is_torchs(kind, maximize):
    hyper, make = CASES[kind]
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = make([param])
    optimizer.param_groups[0]["maximize"] = maximize
    mine = param.detach().clone()
    states = tuple(torch.zeros_like(mine) for _ in range(reference.STEPS[kind][1]))
    for step in range(1, 6):
        param.grad = torch.randn(50, dtype=torch.float64)
        mine, states = reference.step(
            kind, mine, param.grad, states, dataclasses.replace(hyper, step=step, maximize=maximize)
        )
        optimizer.step()
        torch.testing.assert_close(mine, param.detach(), rtol=1e-12, atol=1e-12)


def test_gradient_scale_and_sign():
    grad = torch.tensor([2.0, -4.0])
    assert Hyper(grad_scale=0.5).gradient(grad).tolist() == [1.0, -2.0]
    assert Hyper(grad_scale=0.5, maximize=True).gradient(grad).tolist() == [-1.0, 2.0]
