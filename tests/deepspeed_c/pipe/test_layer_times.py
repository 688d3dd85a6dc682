"""Layers dealt out by measured times: the cut is the best for these times, and nothing else changes by it."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.deepspeed_c.pipe.models import VOCABULARY, WIDTH, loss_fn, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.deepspeed_c.pipe.test_values import float_batches, many_layers
from tests.ranks import run_ranks
from tests.training import engine_of

UNIT_S = 0.02
HEAVY = 20


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class Sleeper(nn.Module):
    """Takes ``seconds`` for a forward and a backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.n_calls += 1
        return _Sleep.apply(self.dropout(x) * self.weight, self.seconds)


def sleepers(costs: list[int]) -> list[Any]:
    """Layers of every kind: a spec, a module that is built, a function, a tied pair."""
    specs: list[Any] = [LayerSpec(Sleeper, cost * UNIT_S) for cost in costs]
    specs[1] = Sleeper(costs[1] * UNIT_S)
    specs[2] = lambda x: _Sleep.apply(x, costs[2] * UNIT_S)
    for at in (0, -1):
        specs[at] = TiedLayerSpec("tied", Sleeper, costs[at] * UNIT_S, forward_fn=lambda module, x: module(x) + 1)
    return specs


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate()]


def weights_of(net: PipelineModule) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def profiled(rank: int, world: int, stages: int, costs: list[int], options: dict[str, Any]) -> Any:
    """(cut, times, whether weights and generators are those of the explicit list, whether layers have gradients)."""
    made = []
    for method in ("profile", None):
        torch.manual_seed(5)
        random.seed(5)
        specs = sleepers(costs)
        more = {"example_input": torch.ones(2, WIDTH)} if method else {}
        method = method or made[0].partitions()
        net = PipelineModule(specs, num_stages=stages, loss_fn=loss_fn, partition_method=method, **more, **options)
        made.append(net)
        net.told = weights_of(net), states(), [module.training for module in net.modules()]
    found, plain = made
    is_clean = all(param.grad is None for param in found.parameters()) and all(
        param.grad is None for spec in found.specs if isinstance(spec, nn.Module) for param in spec.parameters()
    )
    return found.partitions(), found.layer_times_ns, found.told == plain.told, is_clean, plain.layer_times_ns


def best(costs: list[int], n: int) -> int:
    """The weight of the heaviest run of the best cut of ``costs`` into n runs."""
    cuts = itertools.combinations(range(1, len(costs)), n - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


@pytest.mark.parametrize("at", [0, 2, 6])
@pytest.mark.parametrize(
    ("world", "stages", "options"),
    [(1, 1, {}), (2, 2, {}), (3, 3, {"seed_layers": True}), (2, 2, {"schedule": "zb_v"}), (4, 2, {})],
    ids=["one", "two", "three seeded", "a V", "two pipelines"],
)
def test_a_heavy_layer(world, stages, options, at):
    costs = [1] * 7
    costs[at] = HEAVY
    outcomes = run_ranks(world, profiled, stages, costs, options)
    cut, times, *_ = outcomes[0]
    n_stages = stages * (2 if options.get("schedule") else 1)
    assert len(cut) == n_stages + 1 and len(times) == len(costs)
    heaviest = max(sum(costs[a:b]) for a, b in itertools.pairwise(cut))
    assert heaviest == best(costs, n_stages), (cut, times)
    for index, (cost, ns) in enumerate(zip(costs, times, strict=True)):
        assert ns >= cost * UNIT_S * 1e9, (index, times)
    for got in outcomes:
        assert got == (cut, times, True, True, []), "ranks agree, and only the cut comes from the times"


def nested(rank: int, world: int) -> list[list[int]]:
    """Values of any kind between layers, and a batch of the model that comes out."""
    net = PipelineModule(many_layers(), num_stages=world, loss_fn=lambda x, y: (x - y).square().mean(),
                         partition_method="profile", example_input=float_batches(0)[0][0])  # fmt: skip
    ids = torch.zeros(1, 1, dtype=torch.int64)
    tied = module_of(world, partition_method="Profile", example_input=(ids,))
    with engine_of(tied, config_of(2)) as engine:
        engine.train_batch(iter(micro_batches(0, 0, 2)))
    return [net.partitions(), tied.partitions()]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_of_any_kind(world):
    outcomes = run_ranks(world, nested)
    assert all(got == outcomes[0] for got in outcomes)


class Fault(Exception):
    """An exception of a user's code."""


def raises(x: Any) -> Any:
    raise Fault("at this input")


class Unsendable:
    def __call__(self, x: Any) -> Any:
        return x, (i for i in range(3))


def refused(rank: int, world: int) -> tuple[list[str], list[Any]]:
    texts = []
    before = states()
    linear = nn.Linear(WIDTH, WIDTH)
    middle: list[Any] = [raises, LayerSpec(nn.Linear, WIDTH + 1, 3), LayerSpec(nn.Linear, "x", 3), Unsendable()]
    for layer in middle if world > 1 else middle[:-1]:
        specs = [linear, nn.Tanh(), layer, nn.Tanh(), nn.Linear(WIDTH, 1)]
        sizes = {"partition_method": "profile", "example_input": torch.ones(2, WIDTH)}
        try:
            PipelineModule(specs, num_stages=world, **sizes)
        except Exception as error:  # noqa: BLE001  the test looks at it
            texts.append(f"{type(error).__name__} {error}")
    del before[1:]
    with pytest.raises(ConfigError, match="example_input"):
        module_of(world, partition_method="profile")
    with pytest.raises(ModelError, match=r"layer 0 \(Embed\) raised IndexError"):
        module_of(world, partition_method="profile", example_input=torch.full((1, 1), VOCABULARY))
    # The ranks can still work together.
    module_of(world, partition_method="profile", example_input=torch.zeros(1, 1, dtype=torch.int64))
    return texts


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_layer_that_raises(world):
    for texts in run_ranks(world, refused):
        assert "layer 2 (raises) raised Fault: at this input" in texts[0]
        assert "layer 2 (Linear) raised RuntimeError" in texts[1]
        assert len(texts) == (4 if world > 1 else 3)
        if world > 1:
            assert "layer 2 (Unsendable) raised ModelError: a generator cannot be sent" in texts[3]
