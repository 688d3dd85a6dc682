"""Tensor-parallel stages whose column layers and row layers were made by hand, and lie in one stage or in two."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer
from deepspeed_c.inject.ranks import MOST_ENTERED
from deepspeed_c.pipe import LayerSpec, PipelineModule, PipelineParallelGrid
from deepspeed_c.pipe.topology import PipeModelDataParallelTopology
from tests.ranks import run_ranks
from tests.training import config, descend, engine_of

WIDTH, N_HIDDEN, N, STEPS = 5, 7, 3, 4


class Up(nn.Module):
    """Its output is this rank's part. It keeps the weak references of its inputs."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up = LinearLayer(nn.Linear(WIDTH, N_HIDDEN), group) if group else nn.Linear(WIDTH, N_HIDDEN)
        self.given: list[weakref.ref] = []

    def forward(self, x):
        self.given.append(weakref.ref(x))
        return torch.tanh(self.up(x))

    def n_alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.given)


class Down(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.down = LinearAllreduce(nn.Linear(N_HIDDEN, WIDTH), group) if group else nn.Linear(N_HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(x)


def specs(group: Any) -> list[LayerSpec]:
    ends = LayerSpec(nn.Linear, WIDTH, WIDTH)
    return [ends, LayerSpec(Up, group), LayerSpec(Down, group), ends, LayerSpec(Up, group), LayerSpec(Down, group)]


def batches_of(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, 2, 3, WIDTH, generator=generator)) for _ in range(N)]


def plain_run() -> list[float]:
    built = []
    for i, spec in enumerate(specs(None)):
        torch.manual_seed(1234 + i)
        built.append(spec.build())
    model = nn.Sequential(*built)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [
        descend(optimizer, sum(nn.functional.mse_loss(model(x), y) for x, y in batches_of(step)) / N)
        for step in range(STEPS)
    ]
    return losses


def train(rank: int, world: int, first_of_second: int, schedule: str) -> tuple[list[float], list[int]]:
    """(losses, the number of living inputs of column layers after each step)."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    group = PipelineParallelGrid(topology).get_model_parallel_group()
    net = PipelineModule(
        specs(group),
        topology=topology,
        loss_fn=nn.MSELoss(),
        seed_layers=True,
        partition_method=[0, first_of_second, 6],
        schedule=schedule,
    )
    engine = engine_of(net, config(rows=2, accumulate=N, gradient_clipping=0.0))
    columns = [module for module in net.modules() if isinstance(module, Up)]
    losses, alive = [], []
    with engine:
        for step in range(STEPS):
            losses.append(float(engine.train_batch(iter(batches_of(step)))))
            alive.append(sum(module.n_alive() for module in columns))
    return losses, alive


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("first_of_second", [2, 3], ids=["columns end a stage", "rows end a stage"])
def test_no_input_outlives_its_batch(first_of_second: int, schedule: str) -> None:
    expected = plain_run()
    for losses, alive in run_ranks(4, train, first_of_second, schedule):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert max(alive) <= 1, alive  # a rank may still hold the input of its last message


def forwards_alone(rank: int, world: int) -> int:
    module = Up(torch.distributed.group.WORLD)
    for _ in range(3 * MOST_ENTERED):
        module(torch.randn(2, WIDTH, requires_grad=True))
    return module.n_alive()


def test_forwards_without_a_backward_are_forgotten() -> None:
    assert max(run_ranks(2, forwards_alone)) <= MOST_ENTERED
