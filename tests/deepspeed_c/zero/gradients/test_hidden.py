"""Gradients that callers assign where the engine does not show its own are errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_c import errors
from deepspeed_c.zero.gradients.hidden import HiddenGradients
from tests.deepspeed_c.zero.gradients.slots import make_slots
from tests.deepspeed_c.zero.gradients.test_shown import batch, make_engine
from tests.ranks import on_ranks

WIDTH = 7


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1)
def test_assigned_gradients_are_errors(rank: int, world: int, stage: int) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine = make_engine(net, 1, stage)
    engine.backward(engine(batch(0, 0)).sum())
    net[1].bias.grad = torch.ones(1)
    with pytest.raises(errors.StateError, match=r"param\.grad of 1\.bias was assigned[\s\S]*safe_set_full_grad"):
        engine.step()
    with pytest.raises(errors.StateError, match=r"param\.grad of 1\.bias"):
        engine.backward(engine(batch(0, 1)).sum())
    net[1].bias.grad = None
    engine.zero_grad()
    engine.backward(engine(batch(0, 1)).sum())
    engine.step()
    assert engine.was_step_applied()
    engine.close()


class Answering(nn.Parameter):
    """A parameter that counts the reads that torch asks it about."""

    n_asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Answering.n_asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_check_asks_no_parameter() -> None:
    params = [Answering(torch.zeros(2)) for _ in range(200)]
    hidden = HiddenGradients(make_slots(params, [[list(range(200))]]))
    Answering.n_asked = 0
    hidden.check("engine.step")
    assert Answering.n_asked == 0
    params[150].grad = torch.ones(2)
    with pytest.raises(errors.StateError, match=r"(?s)param\.grad of p150 was assigned.*safe_set_full_grad"):
        hidden.check("engine.step")
