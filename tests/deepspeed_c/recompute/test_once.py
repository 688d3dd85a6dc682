"""Results that a layer asks for once: each is computed in the forward only, in either flavour, in nested layers and in
two passes over one graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import RecomputeError
from deepspeed_c.recompute.once import once
from deepspeed_c.recompute.recomputer import Recomputer


def checkpoint(function: Callable, x: torch.Tensor, *, is_reentrant: bool = False) -> torch.Tensor:
    return Recomputer(ActivationCheckpointing()).run(function, (x,), {}, is_reentrant=is_reentrant)


FLAVOURS = {"hooked": checkpoint, "reentrant": partial(checkpoint, is_reentrant=True)}


class _Sent(torch.autograd.Function):
    """Adds a number that grows with each call: a message that must not be sent twice."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        def send() -> torch.Tensor:
            _Sent.calls += 1
            return x.detach() * _Sent.calls

        out = once(send)
        ctx.factor = out.detach().flatten()[0] / x.detach().flatten()[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


def layer(x: torch.Tensor) -> torch.Tensor:
    n = once(lambda: 2)
    return torch.tanh(_Sent.apply(torch.exp(x)) * n) * torch.sin(_Sent.apply(x * x))


def run(function: Callable, *, passes: int = 1) -> tuple[torch.Tensor, torch.Tensor, int]:
    _Sent.calls = 0
    x = torch.linspace(0.1, 0.7, 5).requires_grad_()
    out = function(x)
    for i in range(passes):
        x.grad = None
        out.sum().backward(retain_graph=i + 1 < passes)
    return out.detach(), x.grad, _Sent.calls


@pytest.mark.parametrize("flavour, passes", [("hooked", 1), ("hooked", 2), ("reentrant", 1), ("reentrant", 2)])
def test_a_result_is_computed_in_the_forward_only(flavour: str, passes: int) -> None:
    want = run(layer, passes=passes)
    got = run(lambda x: FLAVOURS[flavour](layer, x), passes=passes)
    for a, b in zip(got, want):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), (flavour, got, want)


@pytest.mark.parametrize("outer", FLAVOURS)
@pytest.mark.parametrize("inner", FLAVOURS)
def test_layers_within_layers(outer: str, inner: str) -> None:
    def nested(call_outer: Callable, call_inner: Callable) -> Callable:
        return lambda x: call_outer(lambda y: layer(call_inner(layer, y)) + y, x)

    want = run(nested(lambda f, x: f(x), lambda f, x: f(x)))
    got = run(nested(FLAVOURS[outer], FLAVOURS[inner]))
    for a, b in zip(got, want):
        # Gradients of one tensor are added in another order.
        assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-6), (outer, inner, got, want)


def test_without_a_layer_that_is_run_again_nothing_is_kept() -> None:
    numbers = iter(range(3))
    assert [once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


def test_an_overwritten_result_is_an_error() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(_Sent.apply(x).mul_(2))

    with pytest.raises(RecomputeError, match="result 0 of an exchange, which is kept, was overwritten"):
        run(lambda x: checkpoint(writes, x))


def test_more_exchanges_than_in_the_forward_are_an_error() -> None:
    n_runs = 0

    def grows(x: torch.Tensor) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        for _ in range(n_runs):
            x = torch.exp(_Sent.apply(x))
        return x

    with pytest.raises(RecomputeError, match="exchanged tokens 1 times in forward, and more often"):
        run(lambda x: checkpoint(grows, x))
