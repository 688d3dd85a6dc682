"""FusedSGD against torch.optim.SGD."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import OptimizerError
from deepspeed_c.ops.sgd import FusedSGD
from tests.ops.interchange import check_interchange, check_parity, fresh_params, train

CASES = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "maximize": True},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("check", [check_parity, check_interchange])
def test_as_torch(check, options):
    check(lambda p: FusedSGD(p, **options), lambda p: torch.optim.SGD(p, **options))


def test_momentum_that_begins_later_starts_at_the_gradient():
    def late(cls):
        def make(params):
            optimizer = cls(params, lr=0.1, momentum=0.9, dampening=0.5)
            for p in params[:2]:
                p.grad = torch.ones(p.shape)
            optimizer.step()  # the others have no gradient yet
            return optimizer

        return make

    check_parity(late(FusedSGD), late(torch.optim.SGD))


def test_without_momentum_there_is_no_buffer():
    params = fresh_params()
    optimizer = FusedSGD(params, lr=0.1)
    train(optimizer, params, range(2))
    assert all(set(optimizer.state[p]) == {"step"} for p in params)


def test_nesterov_needs_momentum_and_no_dampening():
    for options in ({}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(OptimizerError, match="nesterov"):
            FusedSGD(fresh_params(), nesterov=True, **options)
