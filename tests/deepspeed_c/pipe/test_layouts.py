"""Layers that take the sequence first, [tokens, samples, width], while micro-batches begin with the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.errors import BatchSizeError
from deepspeed_c.pipe import LayerSpec, PipelineModule
from tests.ranks import run_ranks
from tests.training import config, descend, engine_of

WIDTH, N, SAMPLES, TOKENS = 5, 3, 2, 7


class Recurrent(nn.Module):
    """[tokens, samples, width] to the same. Tokens read the tokens before them, so that the order counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        return self.cell(x)[0]


def swap(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def batches_of(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, SAMPLES, TOKENS, WIDTH, generator=generator)) for _ in range(N)]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, labels.transpose(0, 1))


def train(rank: int, world: int) -> tuple[list[float], str]:
    specs: list[Any] = [swap, *(LayerSpec(Recurrent) for _ in range(4))]
    net = PipelineModule(specs, num_stages=2, loss_fn=loss_fn, seed_layers=True)
    engine = engine_of(net, config(rows=SAMPLES, accumulate=N, gradient_clipping=0.0))
    with engine:
        with pytest.raises(BatchSizeError) as caught:
            engine.train_batch((swap(x), y) for x, y in batches_of(0))
        return [float(engine.train_batch(iter(batches_of(step)))) for step in range(3)], str(caught.value)


def test_a_first_layer_transposes() -> None:
    built = []
    for i in range(1, 5):
        torch.manual_seed(1234 + i)
        built.append(Recurrent())
    model = nn.Sequential(*built)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [
        descend(optimizer, sum(loss_fn(model(swap(x)), y) for x, y in batches_of(step)) / N) for step in range(3)
    ]
    for losses, said in run_ranks(2, train):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert f"micro-batch 0 has {TOKENS} samples" in said and f"per_gpu is {SAMPLES}" in said
        assert "transposes" in said
