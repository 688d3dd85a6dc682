"""Stages without anything to train, and layers that recompute themselves, train as in one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.pipe import LayerSpec, PipelineModule
from tests.deepspeed_c.pipe.models import WIDTH, Block
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.ranks import run_ranks
from tests.training import descend_together

N, STEPS, N_LAYERS = 5, 3, 6
CLIP = 0.5


class Reentrant(Block):
    """Only its second half is recomputed."""

    def forward(self, x):
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), self.norm(x), use_reentrant=True)


class OurReentrant(Block):
    def forward(self, x):
        checkpoint = deepspeed_c.checkpointing.checkpoint
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), self.norm(x))


def squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def batches(step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)) for _ in range(N)]


def is_frozen(name: str, frozen: set[int]) -> bool:
    return int(name.split(".")[0]) in frozen


def plain(kind: type[nn.Module], frozen: set[int], clip: float) -> tuple[list[float], dict[str, Any]]:
    model = nn.Sequential()
    for i in range(N_LAYERS):
        torch.manual_seed(1234 + i)
        model.append(kind(WIDTH))
    for name, param in model.named_parameters():
        param.requires_grad_(not is_frozen(name, frozen))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = sum(squares(model(x), y) for x, y in batches(step)) / N
        descend_together(optimizer, [loss], clip)
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(
    rank: int, world: int, kind: type[nn.Module], frozen: set[int], schedule: str, zero: int, clip: float, folder: str
) -> Any:
    net = PipelineModule([LayerSpec(kind, WIDTH) for _ in range(N_LAYERS)], num_stages=world, loss_fn=squares,
                         seed_layers=True, schedule=schedule, partition_method="uniform")  # fmt: skip
    for name, param in net.named_parameters():
        param.requires_grad_(not is_frozen(name, frozen))
    section = {"use_reentrant": kind is OurReentrant}
    config = config_of(N, zero_optimization={"stage": zero}, gradient_clipping=clip, activation_checkpointing=section)
    given = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed_c.initialize(model=net, model_parameters=given, config=config)
    with engine:
        losses = [float(engine.train_batch(iter(batches(step)))) for step in range(STEPS - 1)]
        if folder:
            engine.save_checkpoint(folder)
            engine.train_batch(iter(batches(7)))
            engine.load_checkpoint(folder)
        losses.append(float(engine.train_batch(iter(batches(STEPS - 1)))))
        return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


def check(outcome: list[Any], expected: tuple[list[float], dict[str, Any]]) -> None:
    weights: dict[str, Any] = {}
    for losses, mine in outcome:
        assert losses == pytest.approx(expected[0], rel=2e-6)
        weights |= mine
    assert weights.keys() == expected[1].keys()
    for name, value in weights.items():
        assert float((value - expected[1][name]).abs().max()) <= 2e-6, name


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_stage_without_anything_to_train(tmp_path, schedule, stage, zero):
    frozen = {2 * stage, 2 * stage + 1}
    clip = CLIP if zero == 1 else 0.0
    outcome = run_ranks(3, train, Block, frozen, schedule, zero, clip, str(tmp_path) if stage == 1 else "")
    check(outcome, plain(Block, frozen, clip))


def test_one_stage_trains_alone():
    frozen = {0, 1, 4, 5}
    check(run_ranks(3, train, Block, frozen, "1f1b", 1, 0.0, ""), plain(Block, frozen, 0.0))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("kind", [Reentrant, OurReentrant])
def test_layers_that_recompute_themselves(kind, schedule):
    check(run_ranks(2, train, kind, set(), schedule, 1, 0.0, ""), plain(Reentrant, set(), 0.0))
