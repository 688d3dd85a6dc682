"""Layers of DeepSpeed's class ``MoE`` in an engine on two ranks against one process with all experts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import deepspeed_c
from tests.deepspeed_c.moe.test_dispatch import N_EXPERTS
from tests.deepspeed_c.moe.test_layer import HIDDEN, MLP, make
from tests.ranks import run_ranks

STEPS = 3


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.moe = nn.Linear(HIDDEN, HIDDEN), layer

    def forward(self, x: Tensor) -> Tensor:
        out, l_aux, _ = self.moe(self.first(x))
        return out.square().mean() + 0.1 * l_aux


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))


def layer_of(ep_size: int, rank: int) -> nn.Module:
    """The layer with this rank's experts of the same whole layer."""
    whole = make(N_EXPERTS, 2, drop_tokens=False)
    n_local = N_EXPERTS // ep_size
    layer = make(N_EXPERTS, 2, drop_tokens=False, ep_size=ep_size, expert=MLP())
    mine, theirs = layer.deepspeed_moe, whole.deepspeed_moe
    mine.gate.load_state_dict(theirs.gate.state_dict())
    first = rank % ep_size * n_local
    for i, expert in enumerate(mine.experts.deepspeed_experts):
        expert.load_state_dict(theirs.experts.deepspeed_experts[first + i].state_dict())
    return layer


def train(rank: int, world: int, stage: int, ep_size: int) -> tuple[list[float], str]:
    model = Model(layer_of(ep_size, rank))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=[*model.parameters()], config=config)
    losses = []
    for step in range(STEPS):
        loss = engine(batch(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    name = model.moe.deepspeed_moe.name
    engine.close()
    return losses, name


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_one_process(stage, ep_size):
    found = run_ranks(2, train, stage, ep_size)
    model = Model(copy.deepcopy(layer_of(1, 0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        losses = [model(batch(rank, step)) for rank in range(2)]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        optimizer.step()
        for rank, (ours, name) in enumerate(found):
            assert abs(ours[step] - losses[rank].item()) < 1e-5 * abs(losses[rank].item()), (step, rank, ours, losses)
            assert name == "moe.deepspeed_moe", name
