"""A compiled engine in many combinations with other features: its bits are those of the same engine without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.cells import full
from tests.deepspeed_c.compile.models import STEPS, WIDTH, Model, batch_of, close, make_block, make_engine, same, train
from tests.ranks import on_ranks, run_ranks
from tests.training import step, update


def weights_of(engine: Any) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def no_sync_train(engine: Any, rank: int) -> list[Any]:
    """The first micro-batch of each window is not reduced by itself."""
    found: list[Any] = []
    n = engine.gradient_accumulation_steps()
    for i in range(STEPS * n):
        if i % n == 0 and n > 1:
            with engine.no_sync():
                loss = engine(*batch_of(rank, i))
                engine.backward(loss)
        else:
            loss = engine(*batch_of(rank, i))
            engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm()]
    return found + weights_of(engine)


def two_losses_train(engine: Any, rank: int) -> list[Any]:
    """Two forwards, then a backward of each, the first one's first; then two backwards of one forward."""
    found: list[Any] = []
    for i in range(2 * STEPS):
        first, second = engine(*batch_of(rank, i)), engine(*batch_of(rank, i + 50))
        engine.backward(first)
        engine.backward(second)
        third = engine(*batch_of(rank, i + 70))
        engine.backward(third, retain_graph=True)
        update(engine, third)
        found += [first.item(), second.item(), third.item(), engine.get_global_grad_norm()]
    return found + weights_of(engine)


def lengths_train(engine: Any, rank: int) -> list[Any]:
    return train(engine, rank, lambda i: (5, 7, 2, 11, 3, 7)[i % 6])


def tokens_train(engine: Any, rank: int) -> list[Any]:
    """Between steps the model continues a text word by word, without gradients, and is evaluated."""
    found: list[Any] = []
    for i in range(2 * STEPS):
        step(engine, *batch_of(rank, i))
        engine.eval()
        text = batch_of(rank, i)[0][:, :1]
        with torch.no_grad():
            for _ in range(4):
                text = torch.cat((text, engine(text)[:, -1:].argmax(-1)), 1)
            found += [engine(*batch_of(rank, i)).item(), text]
        engine.train()
    return found + weights_of(engine)


class Adapted(nn.Linear):
    """A frozen layer and two small trained matrices beside it."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.requires_grad_(False)
        self.narrow, self.wide = nn.Parameter(torch.randn(2, n_in)), nn.Parameter(torch.zeros(n_out, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.narrow), self.wide)


class LowRank(Model):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)


class Tied(Model):
    """Both graphs read the tied weight, and each graph's backward has a part of its gradient."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.words(x))
        torch._dynamo.graph_break()
        scores = F.linear(self.blocks[2](self.blocks[1](h)), self.words.weight)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


class HalfTied(Model):
    """A graph reads the tied weight, and then a function that is not compiled."""

    @torch.compiler.disable
    def score(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.words.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.words(x)))
        return F.cross_entropy(self.score(h).flatten(0, 1), y.flatten())


class Odd(Model):
    """One block is called twice, and one only in some steps; one parameter is never used, and one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 5)
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.some = make_block()
        self.takes_some = True

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.empty.sum()
        h = self.blocks[1](self.blocks[0](self.blocks[1](h)))
        if self.takes_some:
            h = self.some(h)
        return F.cross_entropy(F.linear(h, self.words.weight).flatten(0, 1), y.flatten())


def odd_train(engine: Any, rank: int, parts: bool = False) -> list[Any]:
    """``parts``: rank 0 takes the branch always, and the others only in some steps."""
    found: list[Any] = []
    for i in range(3 * STEPS):
        engine.module.takes_some = i % 3 == 1 or (parts and rank == 0)
        loss = engine(*batch_of(rank, i))
        update(engine, loss)
        found += [loss.item(), engine.get_global_grad_norm()]
    return found + weights_of(engine)


class Case(NamedTuple):
    """A model, and what is done with its engine."""

    stages: tuple[int, ...] = (1, 2, 3)
    train: Callable[[Any, int], list[Any]] = train
    make: Callable[..., nn.Module] = Model
    """Makes the model of both engines."""
    plain: Callable[..., nn.Module] | None = None
    """Makes the model of the engine without a compiler, if it is another one."""
    zero: Mapping[str, Any] = MappingProxyType({})
    gas: int = 2
    precision: str = "fp32"
    compile_kwargs: Mapping[str, Any] = MappingProxyType({})
    world: int = 2


def again(block: nn.Module, h: torch.Tensor, **options: Any) -> Any:
    return checkpoint(block, h, **options)


def again_by_ours(block: nn.Module, h: torch.Tensor) -> Any:
    return deepspeed_c.checkpointing.checkpoint(block, h)


ODD = "tests.deepspeed_c.compile.test_combinations.Odd"
HOST = {"device": "cpu"}
NVME = {"device": "nvme"}
kept = partial(Model, again=partial(again, use_reentrant=False))
entered = partial(Model, again=partial(again, use_reentrant=True))
CASES = {
    "states on the host": Case((2,), zero={"offload_optimizer": HOST}),
    "weights on the host": Case((3,), zero={"offload_optimizer": HOST, "offload_param": HOST}),
    "states in files": Case((1,), zero={"offload_optimizer": NVME}),
    "weights in files": Case((3,), zero={"offload_optimizer": NVME, "offload_param": NVME}),
    "small weights kept": Case((3,), zero={"stage3_param_persistence_threshold": 50}),
    "groups of one rank": Case((3,), zero={"mics_shard_size": 1}),
    "frozen": Case((2, 3), make=partial(Model, frozen=True)),
    "adapters": Case((1, 3), make=LowRank),
    "adapters, bf16": Case((3,), make=LowRank, precision="bf16"),
    "twice, empty, unused and sometimes": Case((2, 3), train=odd_train, make=Odd, gas=3),
    # Ranks that take other branches need a leaf module at stage 3, without a compiler too.
    "sometimes on one rank": Case(
        train=partial(odd_train, parts=True), make=Odd, gas=3, zero={"leaf_module": {"classes": [ODD]}}
    ),
    "tied over graphs": Case(make=Tied, gas=3),
    "tied over graphs, bf16": Case((2, 3), make=Tied, precision="bf16"),
    "tied to what is not compiled": Case((2, 3), make=HalfTied, gas=3),
    "tied to what is not compiled, bf16": Case((3,), make=HalfTied, precision="bf16"),
    "tied over graphs, fp16": Case((3,), make=Tied, precision="fp16"),
    "recomputed": Case((2,), make=kept),
    # With one micro-batch. ``test_recomputed_over_micro_batches`` compares several.
    "recomputed, stage 3": Case((3,), make=kept, gas=1),
    # In the graph, torch's compiler makes every checkpoint one that is not reentrant.
    "recomputed within backward": Case((2,), make=entered, plain=kept),
    "recomputed within backward, stage 3": Case((3,), make=entered, plain=kept, gas=1),
    "recomputed by deepspeed_c": Case((3,), make=partial(Model, again=again_by_ours), gas=1),
    "one micro-batch": Case((1, 3), gas=1, train=no_sync_train),
    "three micro-batches, no_sync": Case(gas=3, train=no_sync_train),
    "two losses": Case(train=two_losses_train),
    "other lengths": Case((3,), train=lengths_train),
    "other lengths, dynamic": Case((2, 3), train=lengths_train, compile_kwargs={"dynamic": True}),
    "word by word": Case((3,), train=tokens_train),
    "one rank": Case((1, 2, 3), world=1),
    "three ranks": Case((3,), world=3),
}


def case_body(rank: int, world: int, name: str, stage: int, folder: str, backend: str) -> None:
    case = CASES[name]
    zero = {k: {**v, "nvme_path": folder} if v is NVME else v for k, v in case.zero.items()}
    torch._dynamo.reset()
    options = {"zero": zero, "gas": case.gas}
    with make_engine(stage, case.precision, compiled=False, make=case.plain or case.make, **options) as engine:
        want = case.train(engine, rank)
    with make_engine(stage, case.precision, make=case.make, **options) as engine:
        engine.compile(backend=backend, compile_kwargs=dict(case.compile_kwargs))
        got = case.train(engine, rank)
        assert engine._compiled.backend.n_frames > 0
    if backend == "eager":
        same(got, want)
    else:
        # Of 16 bits, a fused kernel rounds only its results; the operators of the other engine round each of theirs.
        close(got, want, 1e-5 if case.precision == "fp32" else 0.02)


# Without --full each case runs at its last stage.
STAGES = [
    pytest.param(name, stage, marks=() if stage == case.stages[-1] else full)
    for name, case in CASES.items()
    for stage in case.stages
]


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_the_bits_are_those_without_a_compiler(tmp_path, name: str, stage: int) -> None:
    run_ranks(CASES[name].world, case_body, name, stage, str(tmp_path), "eager", preload="torch._dynamo")


# Inductor compiles C++, for a minute a case. It changes only the code of an edited graph, so two kinds do.
INDUCTOR = {"tied over graphs, bf16", "other lengths, dynamic"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in INDUCTOR else full) for name in CASES])
def test_inductor(tmp_path, name: str) -> None:
    case = CASES[name]
    arguments = (name, case.stages[-1], str(tmp_path), "inductor")
    run_ranks(case.world, case_body, *arguments, preload="torch._dynamo", fresh=True)


def in_another_order_body(rank: int, world: int, stage: int, make: Callable[..., nn.Module], gas: int) -> None:
    torch._dynamo.reset()
    with make_engine(stage, compiled=False, make=make, gas=gas) as engine:
        want = train(engine, rank)
    with make_engine(stage, make=make, gas=gas) as engine:
        engine.compile(backend="eager")
        close(train(engine, rank), want, 1e-6)


def test_recomputed_over_micro_batches() -> None:
    """The bits differ in the order in which sums of two micro-batches are added. Probably the graph drops a layer's last
    operator, which the engine without a compiler runs again in the backward. So the last use of a unit, after which its
    bucket is sent, comes at another time.
    """
    run_ranks(2, in_another_order_body, 3, kept, 2, preload="torch._dynamo")


def test_tied_to_what_is_not_compiled_at_stage_1() -> None:
    """The graph adds its part of the gradient to the sum of micro-batches, and so does autograd the other part. Without
    a compiler autograd adds both parts first.
    """
    run_ranks(2, in_another_order_body, 1, HalfTied, 3, preload="torch._dynamo")


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Any) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.model.fails_backward:
            raise ValueError("a backward that fails")
        return grad, None


class FailsInBackward(Model):
    """Between its two graphs runs a function whose backward may raise."""

    fails_backward = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.words(x))
        torch._dynamo.graph_break()
        h = torch._dynamo.disable(Raising.apply)(h, self)
        # No weight is read by both graphs: each would reduce its part of the gradient, and the sums of several
        # micro-batches would be added in another order.
        return F.cross_entropy(self.blocks[2](self.blocks[1](h)).flatten(0, 1), y.flatten() % WIDTH)


def failing_train(engine: Any, rank: int) -> list[Any]:
    engine.module.fails_backward = True
    with pytest.raises(ValueError, match="a backward that fails"):
        engine.backward(engine(*batch_of(rank, 77)))
    engine.module.fails_backward = False
    return train(engine, rank)


@on_ranks(2, preload="torch._dynamo")
def test_an_exception_in_backward_is_followed_by_the_same_steps(rank: int, world: int) -> None:
    for stage in (2, 3):
        torch._dynamo.reset()
        with make_engine(stage, compiled=False, make=FailsInBackward) as engine:
            want = failing_train(engine, rank)
        with make_engine(stage, make=FailsInBackward) as engine:
            engine.compile(backend="eager")
            got = failing_train(engine, rank)
            assert engine._fetcher is None or engine._fetcher.stats.live_elems == 0
        same(got, want)


def turns_body(rank: int, world: int, folder: str) -> None:
    """Two compiled engines take turns. A third one goes on from a checkpoint of the first."""
    torch._dynamo.reset()
    wants = []
    for stage in (3, 2):
        with make_engine(stage, compiled=False) as engine:
            wants.append([train(engine, rank), train(engine, rank)])
    with make_engine(3) as first, make_engine(2) as second:
        first.compile(backend="eager")
        second.compile(backend="eager")
        for turn in range(2):
            same(train(first, rank), wants[0][turn])
            same(train(second, rank), wants[1][turn])
            if turn == 0:
                first.save_checkpoint(folder, "t")
    third = make_engine(3)
    third.compile(backend="eager")
    third.load_checkpoint(folder, "t")
    same(train(third, rank), wants[0][1])
    third.destroy()
    assert not third.is_deepcompile_active() and "forward" not in vars(third.module)


def test_engines_that_take_turns_and_one_from_a_checkpoint(tmp_path) -> None:
    run_ranks(2, turns_body, str(tmp_path), preload="torch._dynamo")
