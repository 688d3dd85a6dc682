"""Parametrizations of torch (weight norm, spectral norm, orthogonal matrices) on sharded parameters. They can be
registered, and they train as in one plain process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import deepspeed_c
from deepspeed_c.zero import GatheredParameters, Init
from tests.ranks import on_ranks, run_ranks
from tests.toys import Chain
from tests.training import config, update, whole_weights

RATE, STEPS = 0.1, 3
NORMS = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


def make() -> nn.Module:
    return Chain(torch.tanh, inp=nn.Linear(6, 7), mid=nn.Linear(7, 7), out=nn.Linear(7, 3))


def config_of(stage: int) -> dict:
    return config(stage, zero={"stage3_param_persistence_threshold": 0}, rows=2, gradient_clipping=0.0, lr=RATE)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_net(norm: str) -> nn.Module:
    torch.manual_seed(1)
    net = make()
    NORMS[norm](net.mid)
    return net


def made(way: str, norm: str, start: nn.Module) -> nn.Module:
    if way == "plain":
        return copy.deepcopy(start)
    with Init(config_dict_or_path=config_of(3)):
        net = make()
        if way == "in init":
            NORMS[norm](net.mid)
    if way == "gathered":
        with GatheredParameters(net.mid.weight, modifier_rank=0):
            NORMS[norm](net.mid)
    with GatheredParameters(list(net.parameters()), modifier_rank=0), torch.no_grad():
        for p, q in zip(net.parameters(), start.parameters(), strict=True):
            p.copy_(q)
    for p, q in zip(net.buffers(), start.buffers(), strict=True):
        p.copy_(q)
    return net


def trained(rank: int, world: int, way: str, norm: str) -> dict[str, float]:
    want = plain_net(norm)
    net = made(way, norm, want)
    engine = deepspeed_c.initialize(model=net, model_parameters=net.parameters(), config=config_of(3))[0]
    for step in range(STEPS):
        # Each rank makes one power iteration a forward, from the same buffers. So plain torch starts each rank's
        # forward from ``before``.
        before = {name: buffer.clone() for name, buffer in want.named_buffers()}
        for r in range(world):
            for name, buffer in want.named_buffers():
                buffer.copy_(before[name])
            (want(batch(step, r)).square().sum() / world).backward()
        with torch.no_grad():
            for p in want.parameters():
                p -= RATE * p.grad
                p.grad = None
        update(engine, engine(batch(step, rank)).square().sum())
    got = whole_weights(net)
    engine.close()
    off = {name: (got[name] - p.detach()).abs().max().item() for name, p in want.named_parameters()}
    assert set(got) == set(off)
    return {name: error for name, error in off.items() if not error < 2e-5}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("way", ["plain", "in init", "gathered"])
@pytest.mark.parametrize("world", [1, 2])
def test_trains_as_one_process(world: int, way: str, norm: str) -> None:
    assert run_ranks(world, trained, way, norm) == [{}] * world


@on_ranks(2)
def test_a_parameter_that_is_made_of_one_is_whole_and_its_own(rank: int, world: int) -> None:
    with Init(config_dict_or_path=config_of(3)):
        layer = nn.Linear(5, 3)
    with GatheredParameters(layer.weight):
        value = layer.weight.detach().clone()
        made = nn.Parameter(layer.weight, requires_grad=False)
    assert type(made) is nn.Parameter and torch.equal(made, value) and not made.requires_grad
    assert layer.weight.ds_status.name == "NOT_AVAILABLE" and not hasattr(made, "ds_status")
