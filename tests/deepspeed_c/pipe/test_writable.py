"""Stages that begin with a layer which writes to its input train as the same layers do without writing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_c.errors import StageError
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.pipe.writable import copied, writable
from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES, config_of
from tests.ranks import run_ranks
from tests.training import descend, engine_of

WIDTH, STEPS, N = 6, 2, 4


class Shift(nn.Module):
    """(x + bias, y - 1) of (x, y), and relu of the first. A second run on the same memory gives something else."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.bias, self.in_place = nn.Parameter(torch.randn(WIDTH)), in_place

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = value
        if self.in_place:
            # Through a view, too: it is a view of the leaf that was received.
            x.view(-1, WIDTH).add_(self.bias)
            return x.relu_(), y.sub_(1)
        return torch.relu(x + self.bias), y - 1


class Mix(nn.Module):
    """Its output is kept for its backward (tanh), so it must not be overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = value
        return torch.tanh(self.linear(x) + 0.1 * y), y


def layers_of(cut: list[int]) -> list[nn.Module]:
    """Layers of which the first of each stage write to their inputs."""
    torch.manual_seed(7)
    return [layer for i in range(0, 8, 2) for layer in (Shift(in_place=i in cut), Mix())]


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return ((outputs[0] - labels + outputs[1].mean()) ** 2).mean()


def batches() -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(3, 2, WIDTH, generator=generator) for _ in range(N)]
    return [((x, y), labels) for x, y, labels in made]


def plain_run() -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """(losses of steps, the loss of an evaluation, weights) of torch in one process. Nothing is overwritten."""
    net = nn.Sequential(*layers_of([]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = [
        descend(optimizer, sum(loss_of(net(inputs), labels) for inputs, labels in batches()) / N) for _ in range(STEPS)
    ]
    with torch.no_grad():
        evaluation = sum(float(loss_of(net(inputs), labels)) for inputs, labels in batches()) / N
    return losses, evaluation, {name: p.detach() for name, p in net.named_parameters()}


RECOMPUTED: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"activation_checkpoint_interval": 1},
    "recomputed in pairs": {"activation_checkpoint_interval": 2},
    **{
        f"by torch, {'' if reentrant else 'not '}reentrant": {
            "activation_checkpoint_interval": 1,
            "activation_checkpoint_func": partial(checkpoint, use_reentrant=reentrant),
        }
        for reentrant in (False, True)
    },
}


def train(rank: int, world: int, how: str, schedule: str, limit: int | None) -> Any:
    more = SCHEDULES[schedule]
    is_deep = "virtual_stages" in more or schedule in ("zb_v", "dualpipe_v")
    n_stages = world * (2 if is_deep else 1)
    cut = [8 // n_stages * stage for stage in range(n_stages + 1)]
    net = PipelineModule(layers_of(cut), num_stages=world, loss_fn=loss_of, schedule=schedule,
                         partition_method=cut, **RECOMPUTED[how], **more)  # fmt: skip
    config = config_of(N, **({"pipeline": {"activation_bytes_limit": limit}} if limit else {}))
    config["train_micro_batch_size_per_gpu"] = 2
    engine = engine_of(net, config)
    data = batches()  # the same tensors in each step
    with engine:
        losses = [float(engine.train_batch(iter(data))) for _ in range(STEPS)]
        evaluation = float(engine.eval_batch(iter(data)))
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    is_intact = all(torch.equal(a, b) for (x, _), (y, _) in zip(data, batches(), strict=True) for a, b in zip(x, y))
    return losses, evaluation, weights, is_intact


def check(outcome: list[Any]) -> None:
    losses, evaluation, weights = plain_run()
    seen = set()
    for got, evaluated, mine, is_intact in outcome:
        assert got == pytest.approx(losses, rel=1e-5), (got, losses)
        assert evaluated == pytest.approx(evaluation, rel=1e-5), (evaluated, evaluation)
        for name, value in mine.items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )
            seen.add(name)
        assert is_intact, "the loader's tensors were overwritten"
    assert seen == set(weights)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["kept", "recomputed in pairs"])
def test_every_schedule(how, schedule):
    check(run_ranks(2, train, how, schedule, None))


@pytest.mark.parametrize("how", RECOMPUTED)
def test_every_kind_of_recomputation_on_one_rank(how):
    check(run_ranks(1, train, how, "zb_v", None))


def token_body(rank: int, world: int) -> str:
    """Numbers of words have no gradient: with a reentrant function the embedding would never be trained."""
    reentrant = partial(checkpoint, use_reentrant=True)
    net = module_of(1, activation_checkpoint_interval=1, activation_checkpoint_func=reentrant)
    engine = engine_of(net, config_of(N))
    with engine, pytest.raises(StageError) as caught:
        engine.train_batch(iter(micro_batches(0, 0, N)))
    return str(caught.value)


def test_a_recomputation_without_a_backward_is_an_error():
    (text,) = run_ranks(1, token_body)
    assert "layers 0 to 0 have parameters to train" in text and "use_reentrant=False" in text, text


def test_the_forward_that_measures_memory_overwrites_no_data():
    check(run_ranks(2, train, "kept", "zb_v", 1 << 20))


def test_a_leaf_can_be_written_to():
    """Gradients against torch, of a leaf in the middle of a buffer as a link receives it."""
    buffer = torch.linspace(-2, 2, 40)
    leaf, weights = buffer.as_strided((3, 4), (4, 1), 14).requires_grad_(), torch.arange(12.0).view(3, 4)
    other = leaf.detach().clone().requires_grad_()
    (torch.relu(other * 2) * weights).sum().backward()
    value = writable({"x": [leaf, 3], "mask": None})
    assert value["mask"] is None and value["x"][1] == 3 and value["x"][0].data_ptr() == leaf.data_ptr()
    (value["x"][0].mul_(2).relu_() * weights).sum().backward()
    assert torch.equal(leaf.grad, other.grad), (leaf.grad, other.grad)
    assert leaf.grad.count_nonzero() == 6 and writable(buffer) is buffer


def test_autograd_sees_that_a_kept_leaf_is_overwritten():
    leaf = torch.ones(3, requires_grad=True)
    squares = leaf**2  # keeps the leaf
    writable(leaf).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_copies():
    x = torch.ones(2, requires_grad=True)
    first, (second, third), number = copied((x, [x, x.detach()], 4))
    assert first is second is not x and third is not first and number == 4
    first.mul_(3).sum().backward()
    assert x.tolist() == [1, 1] and x.grad.tolist() == [3, 3] and third.tolist() == [1, 1]
