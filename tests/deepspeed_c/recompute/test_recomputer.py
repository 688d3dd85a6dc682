"""recompute/recomputer.py and active.py: the settings that apply to a call, the names of layers in errors, and the
source of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.config.checkpoint import ActivationCheckpointing, ActivationOffload
from deepspeed_c.errors import ConfigError
from deepspeed_c.recompute import recomputer
from deepspeed_c.recompute.active import current
from deepspeed_c.recompute.budget import KEEP, RECOMPUTE, Budget
from deepspeed_c.recompute.configured import configured
from deepspeed_c.recompute.recomputer import Recomputer, check_section, label_of, tensor_parallel_ranks


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    configured.clear()
    yield
    configured.clear()


def test_labels() -> None:
    layer = nn.Linear(1, 1)
    for function in (
        layer,
        layer.forward,
        functools.partial(layer, 1),
        functools.partial(nn.Linear.forward, layer),  # as transformers calls its layers
        functools.partial(functools.partial(layer.forward)),
    ):
        assert label_of(function) == "Linear"
    assert label_of(functools.partial(test_labels)) == "test_labels" and label_of(len) == "len"
    assert label_of(SimpleNamespace()) == "SimpleNamespace"


def test_an_mpu_without_such_ranks() -> None:
    assert tensor_parallel_ranks(None) is None and tensor_parallel_ranks(SimpleNamespace()) is None
    assert tensor_parallel_ranks(SimpleNamespace(get_model_parallel_group=lambda: None)) is None


def test_what_one_arena_needs() -> None:
    section = ActivationCheckpointing(contiguous_memory_optimization=True)
    with pytest.raises(ConfigError, match="here: .*partition_activations.*number_checkpoints"):
        check_section(section, None, "here")
    section = ActivationCheckpointing(contiguous_memory_optimization=True, partition_activations=True)
    with pytest.raises(ConfigError, match="number_checkpoints"):
        check_section(section, None, "here")
    check_section(section, 12, "here")
    check_section(ActivationCheckpointing(), None, "here")


def test_calls_follow_who_is_active_and_so_do_those_that_are_run_again() -> None:
    mine, seen = Recomputer(ActivationCheckpointing(python_random=True)), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(current())
        return x.exp().exp()

    x = torch.randn(2, requires_grad=True)
    with mine.active():
        with Recomputer(ActivationCheckpointing()).active():
            pass
        out = checkpointing.checkpoint(layer, x)
    assert current() is None
    out.sum().backward()
    checkpointing.checkpoint(layer, x).sum().backward()
    assert seen == [mine, mine, None, None] and current() is None


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_device_is_waited_for_at_each_boundary(monkeypatch: pytest.MonkeyPatch, is_reentrant: bool) -> None:
    done: list[str] = []
    monkeypatch.setattr(recomputer, "get_accelerator", lambda: SimpleNamespace(synchronize=lambda: done.append("wait")))
    section = ActivationCheckpointing(synchronize_checkpoint_boundary=True, use_reentrant=is_reentrant)
    Recomputer(section).run(lambda t: done.append("layer") or t * 2, (torch.randn(2, requires_grad=True),), {})
    assert done == ["wait", "layer", "wait"]


def test_the_flavour_that_is_asked_for_wins() -> None:
    checkpointing.configure(None, {"activation_checkpointing": {"use_reentrant": True}})
    x = torch.randn(2, requires_grad=True)
    assert "Reentrant" in type(checkpointing.checkpoint(torch.exp, x).grad_fn).__name__
    assert "Exp" in type(checkpointing.non_reentrant_checkpoint(torch.exp, x).grad_fn).__name__


class Routed(nn.Module):
    """A layer that sends some rows to an expert. In some calls it sends no rows, and then other tensors are saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 3), nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.n_used = [0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                self.n_used[i] += 1
                y = y.index_add(0, rows, expert(x[rows]).tanh() * weight[rows, None])
        return x + y


def routed_losses(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> tuple[list[list[torch.Tensor]], int]:
    """Returns (gradients of each step, number of calls of experts)."""
    torch.manual_seed(3)
    layers = [Routed(8) for _ in range(5)]
    found = []
    for n_rows in (1, 2, 7, 1, 3):
        x = torch.randn(n_rows, 8, requires_grad=True)
        y = x
        for layer in (*layers, layers[1]):
            y = run(layer, y)
        params = [param for layer in layers for param in layer.parameters()]
        found.append(torch.autograd.grad(y.square().sum(), [x, *params], allow_unused=True, materialize_grads=True))
    return found, sum(sum(layer.n_used) for layer in layers)


def files(folder: Path) -> ActivationOffload:
    return ActivationOffload(device="nvme", nvme_path=str(folder))


@pytest.mark.parametrize("has_files", [False, True], ids=["plain", "files"])
def test_unequal_routing(tmp_path: Path, has_files: bool) -> None:
    section = ActivationCheckpointing(offload=files(tmp_path)) if has_files else ActivationCheckpointing()
    mine = Recomputer(section)
    wanted, n_calls = routed_losses(lambda layer, x: layer(x))
    # Some calls have left an expert out, and others have not.
    assert 0 < n_calls < 5 * 6 * 2
    got, n_again = routed_losses(lambda layer, x: mine.run(layer, (x,), {}))
    mine.close()
    assert n_again == 2 * n_calls
    for step, pair in enumerate(zip(got, wanted)):
        for a, b in zip(*pair):
            assert torch.equal(a, b), step


def test_backwards_in_several_threads_over_one_file(tmp_path: Path) -> None:
    mine = Recomputer(ActivationCheckpointing(offload=files(tmp_path)))
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(6)]

    def losses(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(5)
        for n_rows in (3, 1, 200, 17):
            x = torch.randn(n_rows, 16, requires_grad=True)
            y = x
            for layer in layers:
                y = run(layer, y)
            yield y.square().sum(), x

    wanted = [torch.autograd.grad(loss, x)[0] for loss, x in losses(lambda layer, x: layer(x))]
    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            todo = list(losses(lambda layer, x: mine.run(layer, (x,), {})))
            got = list(threads.map(lambda pair: torch.autograd.grad(*pair)[0], todo))
        for a, b in zip(got, wanted):
            assert torch.equal(a, b)
    mine.close()


def test_layers_within_layers_under_a_budget() -> None:
    torch.manual_seed(6)
    inner = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    params = [param for layer in inner for param in layer.parameters()]

    def gradients(run: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def outer(i: int, x: torch.Tensor) -> torch.Tensor:
            return x + run(inner[i], x).sin() + run(inner[i], x * 2)

        y = x
        for i in range(4):
            y = run(functools.partial(outer, i), y)
        return torch.autograd.grad(y.square().sum(), params)

    batches = [torch.randn(32, 16, requires_grad=True) for _ in range(3)]
    wanted = [gradients(lambda f, x: f(x), x) for x in batches]
    # The second budget is half way between recomputing and keeping everything. The forward contains a backward, as a
    # penalty does.
    plans = {}
    for budget in ("1GiB", None):
        budget = budget or (plans["1GiB"].smallest_bytes + plans["1GiB"].peak_bytes) // 2
        section = ActivationCheckpointing(budget=budget)
        mine = Recomputer(section, budget=Budget(section, None))
        for step, x in enumerate(batches):
            with mine.active():
                got = gradients(lambda f, t, mine=mine: mine.run(f, (t,), {}), x)
            for a, b in zip(got, wanted[step]):
                assert torch.equal(a, b), (budget, step)
        plans[budget] = mine.budget.plan
    # Nested layers are a part of the outer layers, and are not planned by themselves.
    assert all(len(plan.treatments) == 4 for plan in plans.values()), plans
    assert {treatment.choice for treatment in plans["1GiB"].treatments} == {KEEP}
    assert RECOMPUTE in {treatment.choice for treatment in plans[budget].treatments}, plans
