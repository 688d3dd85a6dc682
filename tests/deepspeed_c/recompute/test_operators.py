"""recompute/operators.py: an output that was overwritten is not kept, whichever alias was used to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import RecomputeError
from deepspeed_c.inject import exchange
from deepspeed_c.inject.exchange import sum_
from deepspeed_c.ops import nn as own_nn
from deepspeed_c.recompute.operators import KeptOutputs, Measurement
from deepspeed_c.recompute.recomputer import Recomputer
from tests.ranks import run_ranks
from tests.training import engine_of

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda y: y.relu_(),
    "by a view": lambda y: y[0].zero_(),
    "by an alias without a graph": lambda y: y.detach().mul_(2),
    "by data": lambda y: torch.relu_(y.view(-1, y.shape[-1])),
    "out=": lambda y: torch.add(y.detach(), 1, out=y.detach()),
}


class Layer(nn.Module):
    """Without a bias, outputs of three dimensions come from ``_unsafe_view``."""

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


class RunAgain(TorchDispatchMode):
    """Counts the matrix products of a layer that runs within a backward, without the products of the backward
    itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func._schema.name in ("aten::mm", "aten::addmm")
        self.n_products += is_product and torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tail", "n_run"), [(nn.Identity(), 1), (nn.Tanh(), 2), (nn.Linear(4, 4), 2)])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_an_operator_that_is_not_run_again_takes_no_time(
    tail: nn.Module, n_run: int, bias: bool, is_reentrant: bool
) -> None:
    layer, x = nn.Sequential(Layer(bias, ""), tail), torch.randn(2, 3, 4, requires_grad=True)
    n_products = 3 if isinstance(tail, nn.Linear) else 2
    measurement = Measurement("layer", layer, [x], set(), ends_early=not is_reentrant)
    with saved_tensors_hooks(lambda t: (measurement.note_saved(t), t)[1], lambda t: t), measurement:
        layer(x)
    measured = measurement.done()
    recomputer = Recomputer(ActivationCheckpointing())
    recomputer.run(layer, (x,), {}, is_reentrant=is_reentrant).sum().backward()  # the first run compares outputs
    loss = recomputer.run(layer, (x,), {}, is_reentrant=is_reentrant).sum()
    with (counter := RunAgain()):
        loss.backward()
    times = [operator.ns for operator in measured.operators]
    n_run = n_products if is_reentrant else n_run
    assert (len(times), counter.n_products) == (n_products, n_run)
    assert [ns > 0 for ns in times] == [i < n_run for i in range(n_products)], times
    assert measured.ns >= sum(times), (measured.ns, times)


def summed_body(rank: int, world: int) -> list[bool]:
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with engine_of(model, config) as engine:
        layer, x = nn.Linear(4, 6, bias=False), torch.randn(2, 3, 4)
        with (measurement := Measurement("layer", layer, [x], set())), torch.no_grad():
            sum_(layer(x), engine._comm, "test")
        return [operator.may_keep for operator in measurement.done().operators]


def test_a_sum_over_ranks_in_place_overwrites() -> None:
    assert run_ranks(2, summed_body) == [[False, True]] * 2


def own_operators_body(rank: int, world: int) -> list[tuple[list[str], int, bool]]:
    """For our attention and tensor-parallel collectives: (known operators, number of collectives in the second run,
    whether the values of both runs are equal)."""
    comm = Collectives(torch.distributed.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    x, w = torch.randn(1, 2, 5, 8, generator=generator), torch.randn(8, 8, generator=generator)

    def summed(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        exchange.sum_(y, comm, "test")
        return torch.tanh(y)

    def summed_later(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        exchange.sum_(y, comm, "test", waits=False)
        return torch.tanh(exchange.wait(y))

    found = []
    for layer in (
        summed,
        summed_later,
        lambda x: torch.tanh(exchange.wait(exchange.sum_start(x @ w, comm, "test"))),
        lambda x: exchange.gathered(
            exchange.wait(exchange.gather_start(x, [8] * world, 3, comm, "test")), [8] * world, 3
        ),
        lambda x: torch.tanh(own_nn.attention(x, x, x, causal=True)),
    ):
        measurement = Measurement("layer", None, [x], set())
        with measurement:
            want = layer(x)
        measured = measurement.done()
        operators = measured.operators
        assert measured.ns > sum(op.ns for op in operators), measured
        last = len(operators) - 1
        assert operators[last].may_keep and operators[last].n_bytes, operators
        kept = KeptOutputs("layer", [last])
        with kept.recording():
            layer(x)
        for _ in range(2):
            before = sum(total.count for total in comm.ledger.totals.values())
            with kept.replaying():
                again = layer(x)
            n_calls = sum(total.count for total in comm.ledger.totals.values()) - before
        found.append(([op.name for op in operators], n_calls, torch.equal(again, want)))
    return found


def test_own_attention_and_sums_are_kept() -> None:
    for found in run_ranks(2, own_operators_body):
        assert found == [
            (["mm", "tp_sum_"], 0, True),
            (["mm", "tp_sum_start_"], 0, True),
            (["mm", "tp_sum_start"], 0, True),
            (["tp_gather_start"], 0, True),
            (["nn_attention"], 0, True),
        ], found


def halves_body(rank: int, world: int) -> list[tuple[list[tuple[str, bool, int]], list[int], float]]:
    """A layer runs two halves of a batch. Each half has a sum in place that overlaps with the other half. The wait for
    the second sum is within the layer, or after it. For each of these two cases: (the operators, the number of
    collectives in the second run for each choice of sums to keep, the largest difference from one process)."""
    comm = Collectives(torch.distributed.group.WORLD)
    xs = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(99))
    want = sum(x @ w for x in xs)

    def layer(leaves: bool) -> list[torch.Tensor]:
        halves = [x @ w for x in xs[rank]]
        for half in halves:
            exchange.sum_(half, comm, "test", waits=False)
        for half in halves[: 1 if leaves else 2]:
            exchange.wait(half)
        return halves

    def finished(halves: list[torch.Tensor]) -> torch.Tensor:
        exchange.settle()
        return torch.stack(halves)

    found = []
    for leaves in (False, True):
        with (measurement := Measurement("layer", None, [xs[rank]], set())):
            halves = layer(leaves)
        finished(halves)
        operators = [(op.name, op.may_keep, op.n_bytes) for op in measurement.done().operators]
        n_calls, errors = [], []
        for chosen in ((2,), (3,), (2, 3)):
            kept = KeptOutputs("layer", chosen)
            with kept.recording():
                halves = layer(leaves)
            errors.append((finished(halves) - want).abs().max().item())
            before = sum(total.count for total in comm.ledger.totals.values())
            with kept.replaying():
                halves = layer(leaves)
            errors.append((finished(halves) - want).abs().max().item())
            n_calls.append(sum(total.count for total in comm.ledger.totals.values()) - before)
        found.append((operators, n_calls, max(errors)))
    return found


def test_a_sum_that_travels_is_kept_when_it_has_been_waited_for() -> None:
    products, half_bytes = [("mm", False, 96)] * 2, 96
    for within, after in run_ranks(2, halves_body):
        assert within[:2] == ([*products, *[("tp_sum_start_", True, half_bytes)] * 2], [1, 1, 0]), within
        # The second sum is still under way when the layer ends. It cannot be kept, and is made again.
        operators = [*products, ("tp_sum_start_", True, half_bytes), ("tp_sum_start_", True, 0)]
        assert after[:2] == (operators, [1, 2, 1]), after
        assert within[2] < 1e-5 and after[2] < 1e-5, (within[2], after[2])
