"""zero/weights/fetch.py: the times at which weights are gathered, how many are live, the bytes sent, and ranks that
skip layers which other ranks use."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import deepspeed_c
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero.weights import gather_unit
from deepspeed_c.zero.weights.drivers.join import JoinMode
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from tests import training
from tests.ranks import on_ranks

WIDTH, LAYERS, STEPS = 16, 6, 8
LAYER_ELEMS = WIDTH * WIDTH


class Stack(nn.Module):
    """Layers without bias; each fills a bucket, so there are as many gather units as layers."""

    def __init__(self, n_layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers))
        self.order = list(range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


def make_engine(model: nn.Module, bf16: bool = False, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": LAYER_ELEMS,
            "stage3_max_reuse_distance": 0, **zero,
        },
        "bf16": {"enabled": bf16},
    }  # fmt: skip
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> None:
    # The input requires a gradient. Otherwise backward would not need the weight of the first layer, and the plan would
    # learn to leave it out.
    x = batch(step, rank).to(dtype).requires_grad_()
    training.update(engine, engine(x).float().square().mean())
    fetcher = engine._fetcher
    assert fetcher.stats.live_elems == 0 and not len(fetcher.packer)
    assert all(group.buffer is None for group in fetcher.groups)


def since(engine: Any, before: dict[str, int]) -> dict[str, int]:
    return {key: n - before[key] for key, n in engine._fetcher.stats.as_dict().items()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("ahead", [0, LAYER_ELEMS, 100 * LAYER_ELEMS])
@on_ranks()
def test_once_learnt_each_unit_is_gathered_once_a_pass(rank: int, world: int, ahead: int) -> None:
    with make_engine(Stack(), stage3_prefetch_bucket_size=ahead) as engine:
        fetcher = engine._fetcher
        assert len(fetcher.groups) == LAYERS
        for step in range(4):
            train(engine, step, rank)
        before = fetcher.stats.as_dict()
        for step in range(4, 4 + STEPS):
            train(engine, step, rank)
        got = since(engine, before)
        # Each unit is gathered once in a forward and once in a backward.
        assert got["n_gathers"] == 2 * LAYERS * STEPS, got
        assert got["n_passes"] == 2 * STEPS, got
        assert got["n_replans"] == got["n_unexpected"] == 0, got


@contextlib.contextmanager
def written_to(path: str) -> Iterator[None]:
    """Within the context all output of this process goes to a file. pytest does not capture the output of ranks for the
    current test: they were started with an earlier stdout."""
    kept = [os.dup(fd) for fd in (1, 2)]
    with open(path, "wb") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, was in zip((1, 2), kept):
            os.dup2(was, fd)
            os.close(was)


def changed_order_body(rank: int, world: int, folder: str) -> None:
    model = Stack()
    with written_to(os.path.join(folder, str(rank))), make_engine(model) as engine:
        for step in range(4):
            train(engine, step, rank)
        before = engine._fetcher.stats.as_dict()
        model.order = [3, 0, 5, 1, 2, 4]
        train(engine, 4, rank)
        changed = since(engine, before)
        assert changed["n_unexpected"] > 0 and changed["n_replans"] > 0, changed
        for step in range(5, 9):  # the ranks compare the order at passes 1, 2, 4, 8
            train(engine, step, rank)
        before = engine._fetcher.stats.as_dict()
        for step in range(9, 13):
            train(engine, step, rank)
        settled = since(engine, before)
        assert settled["n_unexpected"] == settled["n_replans"] == 0, settled
        assert settled["n_gathers"] == 2 * LAYERS * 4, settled


@pytest.mark.parametrize("world", [2, 3])
def test_a_changed_order_is_counted_replanned_and_not_printed(run_ranks, tmp_path, world: int) -> None:
    run_ranks(world, changed_order_body, str(tmp_path))
    said = [line for rank in range(world) for line in (tmp_path / str(rank)).read_text().splitlines()]
    assert not [line for line in said if "[INFO]" not in line], said


@on_ranks(2)
def test_an_order_that_is_made_invalid_is_recorded_anew(rank: int, world: int) -> None:
    """After a change of order a plan also holds the old places, until the ranks compare the order. An invalidated order
    makes them compare at once."""
    gathers = {}
    for is_told in (False, True):
        model = Stack()
        with make_engine(model) as engine:
            coordinator = engine.optimizer.parameter_offload.param_coordinator
            assert coordinator.is_invalid_trace()
            for step in range(4):
                train(engine, step, rank)
                assert not coordinator.is_invalid_trace()
            model.order = [3, 0, 5, 1, 2, 4]
            train(engine, 4, rank)
            if is_told:
                coordinator._invalidate_trace()
                assert coordinator.is_invalid_trace()
            train(engine, 5, rank)
            assert not coordinator.is_invalid_trace()
            before = engine._fetcher.stats.as_dict()
            train(engine, 6, rank)
            gathers[is_told] = since(engine, before)["n_gathers"]
    assert gathers[True] == 2 * LAYERS < gathers[False], gathers


class Modal(Stack):
    def forward(self, x):
        order = self.order if torch.is_grad_enabled() else self.order[::2] if self.training else self.order[::-1]
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x

    def generate(self, x):
        with torch.no_grad():
            return self(self(x))


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_each_mode_has_its_plan(rank: int, world: int) -> None:
    model = Modal()
    # One element less than the model has: generation is gathered for each forward.
    with make_engine(model, stage3_max_live_parameters=LAYERS * LAYER_ELEMS - 1) as engine:

        def a_round(step: int) -> None:
            train(engine, step, rank)
            model.eval()
            with torch.no_grad():
                engine(batch(step, rank))
            model.train()
            with torch.no_grad():
                engine.generate(batch(step, rank))

        for step in range(9):
            a_round(step)
        modes = engine._fetcher.drivers.of(RecordedPlan)._modes
        assert modes["train"].steps == list(range(LAYERS)), modes["train"].steps
        assert modes["eval"].steps == list(range(LAYERS))[::-1], modes["eval"].steps
        assert set(modes) == {"train", "eval", *(key for key in modes if key[0] == "backward")}, list(modes)
        assert engine._fetcher.drivers.of(JoinMode).rounds.steps == [0, 2, 4]  # what a forward of a generation has used
        before = engine._fetcher.stats.as_dict()
        for step in range(9, 12):
            a_round(step)
        got = since(engine, before)
        assert got["n_unexpected"] == got["n_replans"] == 0, got


@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_no_more_is_live_than_the_plan_states(rank: int, world: int) -> None:
    for max_live in (0, LAYER_ELEMS, 2 * LAYER_ELEMS, 3 * LAYER_ELEMS + 1):
        with make_engine(
            Stack(),
            stage3_max_live_parameters=max_live,
            stage3_max_reuse_distance=10**6,
            stage3_prefetch_bucket_size=10**6,
        ) as engine:
            for step in range(5):
                train(engine, step, rank)
            fetcher = engine._fetcher
            planned = max(mode.plan.peak_elems for mode in fetcher.drivers.of(RecordedPlan)._modes.values())
            assert fetcher.stats.max_live_elems <= planned, (max_live, fetcher.stats.max_live_elems, planned)
            assert planned <= max(max_live, LAYER_ELEMS), (max_live, planned)


def wire_body(rank: int, world: int) -> tuple[int, int]:
    with make_engine(Stack(), bf16=True) as engine:
        ledger = engine._comm.ledger
        for step in range(4):
            train(engine, step, rank, torch.bfloat16)
        ledger.reset_totals()
        before = engine._fetcher.stats.n_received_bytes
        for step in range(4, 4 + STEPS):
            train(engine, step, rank, torch.bfloat16)
        totals = ledger.totals
        received = engine._fetcher.stats.n_received_bytes - before
        assert received == totals["all-gather"].wire_bytes, (received, totals["all-gather"])
        wire = totals["all-gather"].wire_bytes + totals["reduce-scatter"].wire_bytes
        units = {group.unit for group in engine._fetcher.groups}
        return wire, sum(unit.flat_elems for unit in units)


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_on_the_wire(run_ranks, world: int) -> None:
    """A gather in forward, a gather in backward and a reduce-scatter move each bf16 parameter: 3 x 2 bytes x parameters
    x (N-1)/N a step.

    Padding is sent too, and counted: a rank's slice of a bucket is a multiple of 32 elements (a 64-byte line of bf16).
    On two ranks there is no padding here; on three it is 32 of 288 elements a layer.
    """
    for wire, padded in run_ranks(world, wire_body):
        n = LAYERS * LAYER_ELEMS
        assert padded == LAYERS * -(-LAYER_ELEMS // (32 * world)) * 32 * world and padded >= n, padded
        assert wire == STEPS * 3 * 2 * padded * (world - 1) // world, (wire, padded)


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


@on_ranks(2)
def test_nothing_is_left_over(rank: int, world: int) -> None:
    with make_engine(Stack()) as engine:
        sizes = []
        for step in range(60):
            train(engine, step, rank)
            sizes.append((tensors_alive(), engine._fetcher.means.pool.n_free))
        tensors, buffers = zip(*sizes)
        # A leak never goes down again. The number of buffers that gloo's threads hold does go down.
        assert min(tensors[-20:]) <= max(tensors[20:40]), tensors
        assert max(buffers) <= LAYERS, buffers
        assert min(buffers[-20:]) <= max(buffers[20:40]), buffers
    del engine
    counts = []
    for _ in range(11):
        with make_engine(Stack()) as engine:
            train(engine, 0, rank)
        del engine
        counts.append(tensors_alive())
    assert min(counts[-3:]) <= max(counts[:3]), counts


# ---- ranks that do not do the same ------------------------------------------------------------------------------------


class Skips(Stack):
    """One rank leaves a layer out, or lets no gradient through it."""

    skipped: tuple[str, int] | None = None

    def forward(self, x):
        for i in self.order:
            if self.skipped == ("forward", i):
                continue
            y = torch.tanh(self.layers[i](x))
            x = x + y.detach() if self.skipped == ("backward", i) else y
        return x


PLAN = [
    None, None, ("forward", 2), ("backward", 3), None, ("forward", 4), ("forward", 0), ("backward", 0), ("forward", 5),
    None,
]  # fmt: skip


def skip_body(rank: int, world: int, zero: dict) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = Skips()
    with make_engine(model, **zero) as engine:
        for step, skipped in enumerate(PLAN):
            model.skipped = skipped if rank == step % world else None
            train(engine, step, rank)
        return [safe_get_full_fp32_param(p) for p in model.parameters()]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "zero",
    [{}, {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}, {"stage3_max_reuse_distance": 10**6}],
    ids=["default", "frugal", "reuse"],
)
def test_a_rank_that_skips_along_the_plan(run_ranks, world: int, zero: dict) -> None:
    results = run_ranks(world, skip_body, zero)
    torch.manual_seed(7)
    model = Skips()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for step, skipped in enumerate(PLAN):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(world):
            model.skipped = skipped if rank == step % world else None
            (model(batch(step, rank)).square().mean() / world).backward()
        optimizer.step()
    for rank, weights in enumerate(results):
        for i, (got, want) in enumerate(zip(weights, model.parameters())):
            assert torch.allclose(got, want, rtol=2e-5, atol=2e-6), (
                f"rank {rank} layer {i}: {(got - want).abs().max():g}"
            )


# ---- what it costs ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_modules_of_a_unit_that_is_there_cost_no_work_of_the_runner(rank: int, world: int) -> None:
    n_layers, done = 20, Counter()

    def counted(name: str, function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            done[name] += 1
            return function(*args)

        return call

    class Runner:
        def __init__(self, run: Any) -> None:
            self.run, self.use = run, counted("use", run.use)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.run, name)

    names = ("point_at", "point_at_nothing", "adopt_shape")
    zero = {"reduce_bucket_size": 10**6, "stage3_max_reuse_distance": 10**6}
    before = {name: getattr(gather_unit, name) for name in names}
    with make_engine(Stack(n_layers), **zero) as engine:
        assert len(engine._fetcher.groups) == 1
        for step in range(4):
            train(engine, step, rank)
        run = engine._fetcher.drivers.of(RecordedPlan)._run
        run._run = Runner(run._run)
        for name, function in before.items():
            setattr(gather_unit, name, counted(name, function))
        try:
            for step in range(4, 7):
                done.clear()
                train(engine, step, rank)
                # The runner is called once a unit and pass, not once a module. Each parameter is made to point at its
                # weights once, and released once.
                assert done == {"use": 2, "point_at": n_layers, "point_at_nothing": n_layers}, done
        finally:
            for name, function in before.items():
                setattr(gather_unit, name, function)


# ---- forwards that no backward follows --------------------------------------------------------------------------------


class Checkpointed(Stack):
    """A stack under an activation checkpoint. Its output is in a container that the engine does not know."""

    class Output:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    def forward(self, x):
        return self.Output(torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False))


@pytest.mark.parametrize("keeps", ["none", "rank 0", "all"])
@on_ranks(2)
def test_forwards_without_backward_are_forgotten_with_their_graphs(rank: int, world: int, keeps: str) -> None:
    """Runs forwards without a backward. ``keeps``: which ranks keep the outputs of these forwards."""
    with make_engine(Stack()) as engine:
        fetcher = engine._fetcher
        for step in range(4):
            train(engine, step, rank)
        kept, most = [], 0
        for step in range(100):
            output = engine(batch(step, rank).requires_grad_())
            if keeps == "all" or (keeps == "rank 0" and rank == 0):
                kept.append(output)
            most = max(most, len(fetcher.drivers.of(RecordedPlan)._in_flight))
        del output
        n_modes, before = len(fetcher.drivers.of(RecordedPlan)._modes), fetcher.stats.as_dict()
        if keeps == "none":
            assert most <= 16, most
            train(engine, 4, rank)
            got = since(engine, before)
            assert got["n_gathers"] == 2 * LAYERS and got["n_unexpected"] == got["n_replans"] == 0, got
            assert len(fetcher.drivers.of(RecordedPlan)._modes) == n_modes, fetcher.drivers.of(
                RecordedPlan
            )._modes.keys()
        else:
            assert most == len(fetcher.drivers.of(RecordedPlan)._in_flight) == 100
            train(engine, 4, rank)
            # A backward may still follow on the rank that keeps the outputs. Another step does not touch them.
            assert len(fetcher.drivers.of(RecordedPlan)._in_flight) == 100
            assert since(engine, before)["n_gathers"] == 2 * LAYERS
        kept.clear()
        for _ in range(3):
            engine(batch(5, rank).requires_grad_())
        before = fetcher.stats.as_dict()
        train(engine, 5, rank)
        assert since(engine, before)["n_gathers"] == 2 * LAYERS
        assert len(fetcher.drivers.of(RecordedPlan)._in_flight) == 0


@on_ranks(2)
def test_an_engine_without_optimizer_keeps_no_forwards(rank: int, world: int) -> None:
    config = training.config(3, None, zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": LAYER_ELEMS})
    with deepspeed_c.initialize(model=Stack(), config=config)[0] as engine:
        for step in range(20):
            x = batch(step, rank).requires_grad_()
            engine(x).sum().backward()
            assert x.grad.abs().sum() > 0
        assert len(engine._fetcher.drivers.of(RecordedPlan)._in_flight) == 0


def several_body(rank: int, world: int, how: str) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = Checkpointed() if how == "checkpointed" else Stack()
    with make_engine(model) as engine:

        def forward(i: int) -> torch.Tensor:
            output = engine(batch(i, rank).requires_grad_())
            return (output.value if how == "checkpointed" else output).square().mean()

        def a_step(step: int) -> dict[str, int]:
            before = engine._fetcher.stats.as_dict()
            first = forward(step)
            forward(50 + step)
            training.update(engine, first + forward(100 + step))
            return since(engine, before)

        for step in range(STEPS):
            got = a_step(step)
        if how == "plain":
            # Three forwards and two backwards gather.
            assert got["n_unexpected"] == got["n_replans"] == 0 and got["n_gathers"] == 5 * LAYERS, got
        return [safe_get_full_fp32_param(p) for p in model.parameters()]


@pytest.mark.parametrize("how", ["plain", "checkpointed"])
def test_a_backward_through_several_forwards_is_planned_from_those_that_live(run_ranks, how: str) -> None:
    results = run_ranks(2, several_body, how)
    torch.manual_seed(7)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            losses = [model(batch(i, rank)).square().mean() for i in (step, 100 + step)]
            (sum(losses) / 2).backward()
        optimizer.step()
    for weights in results:
        for got, want in zip(weights, model.parameters()):
            assert torch.allclose(got, want, rtol=2e-5, atol=2e-6), f"{(got - want).abs().max():g}"
