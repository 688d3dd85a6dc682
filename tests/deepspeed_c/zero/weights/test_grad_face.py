"""``zero_grad()`` and ``param.grad = None`` drop the gradients that an engine has accumulated in the present window, as
in plain torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from deepspeed_c.utils import safe_get_full_grad
from tests.deepspeed_c.zero.gradients.test_shown import RATE, batch, make_engine
from tests.ranks import on_ranks, run_ranks
from tests.toys import ODD_WIDTH, odd_net
from tests.training import update, whole_weights


def drop(net: nn.Module, part: str, how: str) -> None:
    module = net[int(part)] if part else net
    if how == "zero_grad":
        module.zero_grad()
    elif how == "larger":
        nn.Sequential(nn.Linear(2, 2), module).zero_grad()
    elif how.startswith("optimizer"):  # and not that of the engine
        torch.optim.AdamW(module.parameters()).zero_grad(set_to_none=how == "optimizer to None")
    for p in module.parameters():
        if how == "none":
            p.grad = None
        elif how == "del":
            del p.grad


def dropping_steps(
    rank: int, world: int, stage: int, gas: int, part: str, at: int, precision: dict, how: str = "zero_grad"
) -> float:
    """The largest difference of weights from plain torch after two steps. In each step ``part`` of the model drops its
    gradients after micro-batch ``at``, and one more pass follows at the boundary."""
    net, want = odd_net(), odd_net()
    optimizer = torch.optim.SGD(want.parameters(), lr=RATE, weight_decay=0.01)
    engine = make_engine(net, gas, stage, **precision)
    for step in range(2):
        for micro in range(gas):
            for again in range(2 if micro == gas - 1 else 1):
                x = 10 * step + 2 * micro + again
                for r in range(world):
                    (want(batch(r, x)).square().sum() / (gas * world)).backward()
                engine.backward(engine(batch(rank, x).to(net[0].weight.dtype)).float().square().sum())
                if micro == at and not again:
                    drop(want, part, how)
                    drop(net, part, how)
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    got = whole_weights(net)
    engine.close()
    return max((got[name] - p.detach()).abs().max().item() for name, p in want.named_parameters())


@pytest.mark.parametrize("part", ["", "0"], ids=["model", "module"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "gas", "at"), [(1, 1, 0), (2, 1, 0), (2, 3, 0), (3, 2, 1)])
def test_later_gradients_alone_count(stage: int, world: int, gas: int, at: int, part: str):
    worst = run_ranks(world, dropping_steps, stage, gas, part, at, {})
    assert max(worst) < 2e-6, worst


@pytest.mark.parametrize("how", ["none", "del", "larger", "optimizer to None", "optimizer to 0"])
@pytest.mark.parametrize("part", ["", "0"], ids=["model", "module"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_none_in_param_grad_and_other_zero_grads_drop_too(stage: int, part: str, how: str):
    worst = run_ranks(2, dropping_steps, stage, 2, part, 0, {}, how)
    assert max(worst) < 2e-6, worst


def one_of_many(rank: int, world: int, stage: int) -> tuple[list[float], bool]:
    """``grad = None`` for one parameter, while other gradients stay; then for all parameters, one by one."""
    net = odd_net()
    engine = make_engine(net, 1, stage)
    engine.backward(engine(batch(0, 0)).square().sum())
    net[2].bias.grad = None
    sizes = [
        safe_get_full_grad(p).abs().sum().item() if safe_get_full_grad(p) is not None else 0.0 for p in net.parameters()
    ]
    engine.backward(engine(batch(0, 0)).sum() * float("nan"))
    for p in net.parameters():
        p.grad = None
    has_window = engine.optimizer.reducer.has_window
    update(engine, engine(batch(0, 0)).square().sum())
    assert engine.was_step_applied()
    engine.close()
    return sizes, has_window


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_parameter_alone(stage: int):
    sizes, has_window = run_ranks(1, one_of_many, stage)[0]
    assert sizes[-1] == 0.0 and min(sizes[:-1]) > 0.0, sizes
    assert not has_window


class Own(nn.Parameter):
    """A class of parameters that is not ours."""


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1)
def test_parameters_stay_what_they_were(rank: int, world: int, stage: int) -> None:
    net = odd_net()
    net[0].weight = Own(net[0].weight.detach())
    plain = copy.deepcopy(net)
    engine = make_engine(net, 1, stage)
    weight = net[2].weight
    assert isinstance(weight, nn.Parameter) and type(weight).__name__ == "Parameter" and weight.grad is None
    assert repr(weight) == repr(plain[2].weight)
    for copied in (
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda m: copy.deepcopy(copy.deepcopy(m)),
    ):
        other, same = copied(net), copied(plain)
        assert [type(p) for p in other.parameters()] == [type(p) for p in same.parameters()]
        other(batch(0, 0)).square().sum().backward()
        other[2].weight.grad = None
    out = torch.compile(net, backend="aot_eager", fullgraph=True)(batch(0, 0))
    assert torch.equal(out, plain(batch(0, 0)))
    assert torch.equal(torch.func.functional_call(net, dict(net.named_parameters()), (batch(0, 0),)), out)
    engine.backward(engine(batch(0, 0)).square().sum())
    engine.close()
    assert type(net[0].weight) is Own and type(weight) is nn.Parameter
    weight.grad = None
    weight.grad = torch.ones_like(weight)
    assert "_dsc_handle" not in weight.__dict__


@pytest.mark.parametrize("stage", [0, 2])
def test_fp16(stage: int):
    assert (
        run_ranks(1, dropping_steps, stage, 2, "", 0, {"fp16": {"enabled": True, "initial_scale_power": 6}})[0] < 2e-2
    )


def nan_is_dropped(rank: int, world: int, stage: int) -> bool:
    net = odd_net()
    engine = make_engine(net, 1, stage)
    engine.backward(engine(batch(0, 0)).sum() * float("nan"))
    net.zero_grad()
    update(engine, engine(batch(0, 1)).sum())
    applied = engine.was_step_applied()
    engine.close()
    return applied


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_that_was_dropped_spoils_no_step(stage: int):
    assert run_ranks(1, nan_is_dropped, stage) == [True]


@on_ranks(1)
def test_copies_and_pickles_are_plain(rank: int, world: int) -> None:
    net = odd_net()
    engine = make_engine(net, 1, 2)
    engine.backward(engine(batch(0, 0)).sum())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(batch(0, 0)).sum().backward()
        other.zero_grad()
        assert other[0].weight.grad is None and engine.optimizer.reducer.has_window
    copy.deepcopy(copy.deepcopy(net)).zero_grad()
    net.zero_grad()
    assert not engine.optimizer.reducer.has_window
    engine.close()


@on_ranks(1)
def test_modules_of_two_engines_are_left_as_they_were(rank: int, world: int) -> None:
    shared = nn.Linear(ODD_WIDTH, ODD_WIDTH).requires_grad_(False)
    nets = [nn.Sequential(shared, nn.Linear(ODD_WIDTH, 1)) for _ in range(2)]
    first, second = (make_engine(net, 1, 2) for net in nets)
    second.backward(second(batch(0, 0)).sum())
    first.close()
    shared.zero_grad()
    assert second.optimizer.reducer.has_window
    nets[1].zero_grad()
    assert not second.optimizer.reducer.has_window
    second.close()
