"""checkpointing/operators.py: an output that was overwritten is not kept, by whichever of its aliases that happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.checkpointing.operators import KeptOutputs, Measurement
from deepspeed_c.errors import RecomputeError
from deepspeed_c.inject.exchange import sum_
from tests.ranks import run_ranks

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda y: y.relu_(),
    "by a view": lambda y: y[0].zero_(),
    "by an alias without a graph": lambda y: y.detach().mul_(2),
    "by data": lambda y: torch.relu_(y.view(-1, y.shape[-1])),
    "out=": lambda y: torch.add(y.detach(), 1, out=y.detach()),
}


class Layer(nn.Module):
    """Three dimensions come out of ``_unsafe_view`` where there is no bias."""

    def __init__(self, bias: bool, write: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.write = nn.Linear(4, 6, bias=bias), nn.Linear(6, 4, bias=bias), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.write:
            with torch.no_grad():
                WRITES[self.write](y)
        return self.down(torch.tanh(y))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("write", ["", *WRITES])
def test_what_was_overwritten_may_not_be_kept(write: str, bias: bool) -> None:
    layer, x = Layer(bias, write), torch.randn(2, 3, 4)
    with (measurement := Measurement("layer", layer, [x], set())):
        layer(x)
    assert [operator.may_keep for operator in measurement.done().operators] == [not write, True]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_overwritten_after_the_layer_is_an_error(write: str, bias: bool) -> None:
    layer, x = Layer(bias, ""), torch.randn(2, 3, 4)
    kept = KeptOutputs("layer", [0, 1])
    with kept.recording():
        out = layer(x)
    with torch.no_grad():
        WRITES[write](out)
    with pytest.raises(RecomputeError, match="operator 1 .* was overwritten"), kept.replaying():
        layer(x)


def test_what_is_kept_is_given_again() -> None:
    layer, x = Layer(False, ""), torch.randn(2, 3, 4)
    kept = KeptOutputs("layer", [0])
    with kept.recording():
        first = layer(x)
    with torch.no_grad():
        layer.up.weight.zero_()
    with kept.replaying():
        assert torch.equal(layer(x), first)


def summed_body(rank: int, world: int) -> list[bool]:
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0] as engine:
        layer, x = nn.Linear(4, 6, bias=False), torch.randn(2, 3, 4)
        with (measurement := Measurement("layer", layer, [x], set())), torch.no_grad():
            sum_(layer(x), engine._comm, "test")
        return [operator.may_keep for operator in measurement.done().operators]


def test_a_sum_over_ranks_in_place_overwrites() -> None:
    assert run_ranks(2, summed_body) == [[False]] * 2
