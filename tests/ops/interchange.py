"""Tests that state dicts load both ways between torch.optim and our optimizers: train with one, continue with the
other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SHAPES = ((5, 3), (7,), (0,), (64, 33), ())


def fresh_params(seed: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, want)):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, msg=lambda m, i=i: f"{what}, parameter {i}: {m}")


def check_parity(ours: Maker, theirs: Maker) -> None:
    """Checks for equal weights after ten steps with each of the two optimizers."""
    a, b = fresh_params(), fresh_params()
    train(ours(a), a, range(10))
    train(theirs(b), b, range(10))
    assert_equal(a, b, "ours against torch")


def check_interchange(ours: Maker, theirs: Maker) -> None:
    """Takes five steps with one optimizer, loads its state dict into the other, and takes five more.

    The weights must equal those after ten steps of torch's. Both directions are checked.
    """
    for first, second in ((ours, theirs), (theirs, ours)):
        a, b, want = fresh_params(), fresh_params(1), fresh_params()
        begun = first(a)
        train(begun, a, range(5))
        with torch.no_grad():
            for p, q in zip(b, a):
                p.copy_(q)
        resumed = second(b)
        resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
        train(resumed, b, range(5, 10))
        train(theirs(want), want, range(10))
        assert_equal(b, want, f"{type(begun).__name__} into {type(resumed).__name__}")
