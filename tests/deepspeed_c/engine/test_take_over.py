"""A second ``initialize`` over a model takes it over from an engine that still lives, with one warning, at every
stage."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import StateError
from tests.log_lines import LogLines
from tests.ranks import on_ranks, run_ranks
from tests.toys import ODD_WIDTH, odd_net
from tests.training import update, whole_weights

RATE = 0.1


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, ODD_WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def config_of(stage: int) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}


def wrapped(net: nn.Module) -> nn.Module:
    """A module around the model of an engine, as wrappers of adapters are."""
    outer = nn.Sequential(net, nn.Linear(3, 3))
    with torch.no_grad():
        outer[1].weight.copy_(torch.eye(3))
        outer[1].bias.zero_()
    return outer.requires_grad_(True)


def made_twice(rank: int, world: int, stage: int, kind: str) -> tuple[float, list[str]]:
    net, want = odd_net(), odd_net()
    with LogLines(logging.WARNING) as warnings:
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        first = deepspeed_c.initialize(model=net, optimizer=optimizer, config=config_of(stage))[0]
        update(first, first(batch(0, rank)).square().sum())
        first.backward(first(batch(9, rank)).square().sum())  # this gradient is dropped with its engine
        model = wrapped(net) if kind == "wrapped" else net
        if kind != "same optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        second = deepspeed_c.initialize(model=model, optimizer=optimizer, config=config_of(stage))[0]
        with pytest.raises(StateError, match="the engine is closed"):
            first(batch(0, rank))
        update(second, second(batch(1, rank)).square().sum())
        got = whole_weights(net)
        second.close()
    for step in range(2):
        for r in range(world):
            (want(batch(step, r)).square().sum() / world).backward()
        with torch.no_grad():
            for p in want.parameters():
                p -= RATE * p.grad
                p.grad = None
    worst = max((got[name] - p.detach()).abs().max().item() for name, p in want.named_parameters())
    return worst, [text for text in warnings.lines if "given to another" in text]


@pytest.mark.parametrize("kind", ["again", "same optimizer", "wrapped"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_the_second_engine_takes_over(world: int, stage: int, kind: str) -> None:
    for worst, told in run_ranks(world, made_twice, stage, kind):
        assert worst < 1e-6, worst
        assert len(told) == 1, told


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1)
def test_engines_that_share_a_part_are_refused(rank: int, world: int, stage: int) -> None:
    shared, first_head, second_head = (nn.Linear(ODD_WIDTH, ODD_WIDTH) for _ in range(3))
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    config = {**config_of(stage), **optimizer}
    first = deepspeed_c.initialize(model=nn.Sequential(shared, first_head), config=config)[0]
    with pytest.raises(StateError, match="trained by another engine"):
        deepspeed_c.initialize(model=nn.Sequential(shared, second_head), config=config)
    update(first, first(batch(0, rank)).sum())
    first.close()


def by_the_callers_optimizer(rank: int, world: int, stage: int) -> list[str]:
    """Returns the warnings. ``zero_grad`` of the caller's optimizer still takes effect."""
    net, want = odd_net(), odd_net()
    with LogLines(logging.WARNING) as warnings:
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        engine = deepspeed_c.initialize(model=net, optimizer=optimizer, config=config_of(stage))[0]
        engine.backward(engine(batch(5, rank)).square().sum())
        optimizer.zero_grad()
        engine.backward(engine(batch(0, rank)).square().sum())
        if stage:
            optimizer.step()
            optimizer.step()
        engine.step()
        got = whole_weights(net)
        engine.close()
    want(batch(0, rank)).square().sum().backward()
    for name, p in want.named_parameters():
        assert torch.allclose(got[name], p.detach() - RATE * p.grad, atol=1e-6), name
    assert "step" not in optimizer.__dict__ and "zero_grad" not in optimizer.__dict__
    return [text for text in warnings.lines if "does nothing" in text]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_was_taken_acts_or_says_so(stage: int) -> None:
    (told,) = run_ranks(1, by_the_callers_optimizer, stage)
    assert len(told) == (stage > 0) and all("SGD" in text and "engine.step()" in text for text in told)
