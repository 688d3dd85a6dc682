"""Hooks on parameters see the gradients of the loss divided by the accumulation steps, as in a hand-written loop. The
values that hooks return are used."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.deepspeed_c.zero.gradients.test_shown import batch, make_engine
from tests.ranks import run_ranks
from tests.toys import odd_net
from tests.training import whole_weights

LIMIT = 0.05
WAYS = ("engine.backward", "engine.scale", "loss.backward")


def clamp(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-LIMIT, LIMIT)


def clamped_steps(rank: int, world: int, stage: int, gas: int, way: str, when: str) -> float:
    """The largest difference of weights from plain torch after two steps in which hooks clamp gradients."""
    net, want = odd_net(), odd_net()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1, weight_decay=0.01)
    want[0].weight.register_hook(clamp)
    want[2].bias.register_hook(clamp)
    if when == "before":
        net[0].weight.register_hook(clamp), net[2].bias.register_hook(clamp)
    engine = make_engine(net, gas, stage)
    if when == "after":
        net[0].weight.register_hook(clamp), net[2].bias.register_hook(clamp)
    for step in range(2):
        total = {n: torch.zeros_like(p) for n, p in want.named_parameters()}
        for micro in range(gas):
            for r in range(world):
                (want(batch(r, 5 * step + micro)).square().sum() / gas).backward()
                for name, p in want.named_parameters():
                    total[name] += p.grad / world
                    p.grad = None
            loss = engine(batch(rank, 5 * step + micro)).square().sum()
            if way == "engine.backward":
                engine.backward(loss)
            else:
                (engine.scale(loss) if way == "engine.scale" else loss).backward()
            engine.step()
        for name, p in want.named_parameters():
            p.grad = total[name]
        optimizer.step()
        optimizer.zero_grad()
    got = whole_weights(net)
    engine.close()
    return max((got[name] - p.detach()).abs().max().item() for name, p in want.named_parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "gas", "when"), [(1, 3, "before"), (2, 2, "after"), (2, 1, "before")])
def test_hooks_clamp_as_in_a_hand_written_loop(stage: int, world: int, gas: int, when: str, way: str):
    worst = run_ranks(world, clamped_steps, stage, gas, way, when)
    assert max(worst) < 1e-6, worst


def differentiated(rank: int, world: int, stage: int) -> bool:
    net = odd_net()
    want = copy.deepcopy(net)
    engine = make_engine(net, 2, stage)
    got = torch.autograd.grad(engine(batch(0, 0)).sum(), list(net.parameters()))
    expected = torch.autograd.grad(want(batch(0, 0)).sum(), list(want.parameters()))
    is_same = all(torch.equal(g, e) for g, e in zip(got, expected))
    is_left_alone = (
        all(p.grad is None for p in net.parameters()) and engine.is_gradient_accumulation_boundary() is False
    )
    engine.close()
    return is_same and is_left_alone


@pytest.mark.parametrize("stage", [0, 2])
def test_autograd_grad_is_no_pass(stage: int):
    assert run_ranks(1, differentiated, stage) == [True]
