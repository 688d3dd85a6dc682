"""zero/weights/hooks.py and zero/weights/fetch.py: stage 3 computes the same as plain torch in many uses of weights.

A scenario is a model and a micro-batch of work on it, written once. ``Plain`` runs it in one process over the data of
all ranks. ``Sharded`` runs it on each rank with the data of this rank. Losses, averaged gradients and the weights after
three steps must agree. Each scenario runs with several gather units that are gathered ahead and kept, and again with
limits that release each weight as soon as possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.errors import StateError
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_grad
from deepspeed_c.zero.weights.hooks import ModuleHooks
from deepspeed_c.zero.weights.param import state_of
from tests.cells import cells
from tests.ranks import on_ranks

WIDTH = 13  # prime, so that nothing divides evenly
STEPS = 3
LR = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # sums over ranks are taken in another order

LIMITS = {
    "eager": {"reduce_bucket_size": 60, "stage3_prefetch_bucket_size": 1000},
    "frugal": {
        "reduce_bucket_size": 250,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    },
}


def config_of(limits: str | dict = "frugal", gas: int = 1, optimizer: bool = True, compiled: bool = False) -> dict:
    zero = LIMITS[limits] if isinstance(limits, str) else limits
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "compile": {"deepcompile": compiled},
    }  # fmt: skip
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": LR}
    return config


def make_engine(model: nn.Module, limits: str | dict = "frugal", gas: int = 1, compiled: bool = False) -> Any:
    config = config_of(limits, gas, compiled=compiled)
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def data_of(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(3, WIDTH, generator=g), torch.randn(3, 5, generator=g)


class Net(nn.Module):
    """Three layers, of odd sizes; scenarios override ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, 5)
        self.prepare()

    def prepare(self) -> None:
        pass

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.body(x))


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


class Plain:
    """A micro-batch of one rank, in plain torch."""

    is_sharded = False

    def __init__(self, module: nn.Module, world: int) -> None:
        self.module, self.model, self.world = module, module, world
        self.losses: list[float] = []
        self.x = self.y = torch.empty(0)
        self.step = 0

    def on(self, step: int, rank: int) -> None:
        self.step = step
        self.x, self.y = data_of(step, rank)
        self.rank = rank

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        return (out - self.y).square().mean()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.losses.append(loss.item())
        (loss / self.world).backward(retain_graph=retain_graph)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        pass  # scenarios call it before this micro-batch has made gradients


class Sharded(Plain):
    """The same micro-batch on an engine."""

    is_sharded = True

    def __init__(self, engine: Any, world: int) -> None:
        super().__init__(engine.module, world)
        self.model = engine

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.losses.append(loss.item())
        self.model.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def zero_grad(self) -> None:
        self.model.zero_grad()


class AdamW:
    """AdamW by the paper's formulas. ``torch.optim`` would import the compiler, which takes seconds on each rank."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = list(params)
        self.state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.t = 0

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        b1, b2 = LR["betas"]
        for p, (m, v) in zip(self.params, self.state):
            if p.grad is not None:
                p.mul_(1 - LR["lr"] * LR["weight_decay"])
                m.lerp_(p.grad, 1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                root = (v / (1 - b2**self.t)).sqrt() + LR["eps"]
                p.addcdiv_(m / (1 - b1**self.t), root, value=-LR["lr"])


Micro = Callable[[Plain], None]


def once(run: Plain) -> None:
    run.backward(run.loss(run.model(run.x)))


# ---- models ----------------------------------------------------------------------------------------------------------


class UsedTwice(Net):
    def body(self, x):
        return super().body(super().body(x))


class Tied(Net):
    def prepare(self):
        self.b.weight = self.a.weight

    def body(self, x):
        return super().body(x) + F.linear(x, self.a.weight.t())


class ParentReads(Net):
    """Reads the weight of its child before the child runs, after it, and instead of running it."""

    def body(self, x):
        before = F.linear(x, self.b.weight)
        x = torch.tanh(self.a(before))
        return super().body(x) + x @ self.b.weight + self.a.bias * self.c.weight.sum()


class SeveralAtOnce(Net):
    """Single operations use weights of several gather units. Limits would release each unit for the next one."""

    def body(self, x):
        both = torch.cat([self.a.weight, self.b.weight, self.a.weight])
        mixed = self.a.bias * self.b.bias - torch.stack([self.b.bias, self.a.bias]).mean(0)
        return super().body(x) + F.linear(x, both).view(3, len(x), WIDTH).mean(0) + mixed


class Listed(Net):
    def prepare(self):
        self.held = [self.a.weight, self.b.bias]
        for p in self.held:
            deepspeed_c.zero.register_external_parameter(self, p)

    def body(self, x):
        return torch.tanh(F.linear(x, self.held[0], self.held[1])) + super().body(x)


class Functional(Net):
    """The parameters as a dict, handed to ``functional_call``."""

    def body(self, x):
        params = dict(self.b.named_parameters())
        return super().body(torch.func.functional_call(self.b, params, (x,)))


class FunctionalChanged(Net):
    """``functional_call`` with tensors that are made from the weights."""

    def body(self, x):
        params = {name: p * 0.5 for name, p in self.b.named_parameters()}
        return super().body(torch.func.functional_call(self.b, params, (x,)))


class Vmapped(Net):
    def body(self, x):
        return super().body(torch.func.vmap(lambda row: torch.tanh(self.b.weight @ row) + self.a(row))(x))


class _SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class _KeepsView(torch.autograd.Function):
    """Saves a view of the weight. The view is not a parameter."""

    @staticmethod
    def forward(ctx, x, w):
        view = w.t()[:, 1:]
        ctx.save_for_backward(x, view)
        return x @ view

    @staticmethod
    def backward(ctx, grad):
        x, view = ctx.saved_tensors
        gw = torch.zeros(view.shape[1] + 1, view.shape[0])
        gw[1:] = (x.t() @ grad).t()
        return grad @ view.t(), gw


class CustomFunction(Net):
    def body(self, x):
        return super().body(_SavesWeight.apply(x, self.b.weight)) + F.pad(_KeepsView.apply(x, self.a.weight), (1, 0))


class Detached(Net):
    """Uses a weight and the same weight detached in one graph."""

    def body(self, x):
        x = super().body(x)
        return x @ self.b.weight.detach() + F.linear(x, self.b.weight) * F.linear(x, self.a.weight.detach().abs())


class Views(Net):
    """Views of weights that outlive the module's forward."""

    def body(self, x):
        rows, column = self.b.weight[2:7], self.b.weight[:, 3]
        x = super().body(super().body(x))
        return x + F.pad(x @ rows.t(), (0, 8)) * column


class Checkpointed(Net):
    use_reentrant = False

    def body(self, x):
        if torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        return checkpoint(super().body, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class CheckpointedAll(Net):
    """Checkpoints the whole forward, with the last layer."""

    use_reentrant = False

    def forward(self, x):
        if torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class CheckpointedAllReentrant(CheckpointedAll):
    use_reentrant = True


class CheckpointedNested(Net):
    inner = outer = False

    def body(self, x):
        if torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        x = checkpoint(
            lambda t: torch.tanh(self.a(checkpoint(self.part, t, use_reentrant=self.inner))),
            x,
            use_reentrant=self.outer,
        )
        return super().body(x)

    def part(self, t):
        return torch.tanh(self.b(t))


class NestedReentrant(CheckpointedNested):
    inner = outer = True


class NestedInnerReentrant(CheckpointedNested):
    inner = True


class NestedOuterReentrant(CheckpointedNested):
    outer = True


class OnCpu(Net):
    def body(self, x):
        with torch.autograd.graph.save_on_cpu():
            x = super().body(x)
        return super().body(x)


class Packed(Net):
    """The user's own saved-tensor hooks are active in the middle of the forward."""

    def body(self, x):
        # The hook must keep a detached tensor: autograd hands over the parameter itself for a weight that it saves.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach(), 1), lambda p: p[0]):
            x = super().body(x) @ self.b.weight
        return super().body(x)


class CompiledBlock(Net):
    def prepare(self):
        self.block = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="aot_eager")

    def body(self, x):
        return super().body(self.block(x))


class PlainDict(Net):
    """Looks up a weight in a module's ``__dict__``, past ``__getattr__``."""

    def body(self, x):
        return super().body(F.linear(x, self.b.__dict__["_parameters"]["weight"]))


class Direct(nn.Module):
    """The root itself has parameters. One of them is 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, WIDTH))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.inner = Net()

    def forward(self, x):
        return F.linear(x, self.w) * self.gain + self.inner(x) * self.gain


# ---- micro-batches ------------------------------------------------------------------------------------------


def penalty(run: Plain) -> None:
    x = run.x.clone().requires_grad_()
    out = run.model(x)
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    run.backward(run.loss(out) + 0.1 * g.square().mean())


def retained(run: Plain) -> None:
    out = run.model(run.x)
    run.backward(run.loss(out), retain_graph=True)
    run.backward(out.square().mean())


def two_forwards(run: Plain) -> None:
    first, second = run.model(run.x), run.model(run.x * 0.5)
    run.backward(run.loss(first) + run.loss(second).square())


def first_after_second(run: Plain) -> None:
    one = run.loss(run.model(run.x))
    two = run.loss(run.model(run.x * 0.5))
    run.backward(one)
    run.backward(two)


def second_before_first(run: Plain) -> None:
    one = run.loss(run.model(run.x))
    two = run.loss(run.model(run.x * 0.5))
    run.backward(two)
    run.backward(one)


def without_sync(run: Plain) -> None:
    with run.no_sync():
        run.backward(run.loss(run.model(run.x)))
        run.backward(run.loss(run.model(run.x + 1)))
    run.backward(run.loss(run.model(run.x - 1)))


def with_eval(run: Plain) -> None:
    run.module.eval()
    with torch.no_grad():
        run.losses.append(run.loss(run.model(run.x)).item())
    run.module.train()
    once(run)


def eval_between(run: Plain) -> None:
    """Evaluates between forward and backward."""
    loss = run.loss(run.model(run.x))
    with torch.no_grad():
        run.losses.append(run.loss(run.model(run.x * 2)).item())
    run.backward(loss)


def with_inference(run: Plain) -> None:
    with torch.inference_mode():
        run.losses.append(float(run.loss(run.model(run.x))))
    once(run)
    with torch.inference_mode():
        run.losses.append(float(run.loss(run.model(run.x))))


def zero_grad_between(run: Plain) -> None:
    loss = run.loss(run.model(run.x))
    run.zero_grad()
    run.backward(loss)


def dropped_forward(run: Plain) -> None:
    """Drops the graph of a forward with gradients."""
    run.losses.append(run.loss(run.model(run.x)).item())
    once(run)


def direct_call(run: Plain) -> None:
    """Calls a submodule outside of the root's forward, with gradients and without."""
    run.losses.append(float(run.module.a(run.x).square().mean().detach()))
    with torch.no_grad():
        run.losses.append(float(run.module.b(run.x).mean()))
    once(run)


def direct_graph(run: Plain) -> None:
    """Calls a submodule outside of the root's forward, and uses the result in the loss."""
    run.backward(run.loss(run.model(torch.tanh(run.module.a(run.x)))))


def late_module(run: Plain) -> None:
    if run.step == 1 and not hasattr(run.module, "late"):
        late = nn.Linear(WIDTH, WIDTH, bias=False)
        late.weight = run.module.b.weight
        run.module.late = late
        body = run.module.body
        run.module.body = lambda x: late(body(x))
    once(run)


def late_head(run: Plain) -> None:
    """Adds a new container around an old submodule to the root in mid-run."""
    if run.step == 1 and "head" not in run.module._modules:
        run.module.head = nn.Sequential(run.module.c, nn.Tanh())
        run.module.forward = lambda x: run.module.head(run.module.body(x))
    once(run)


def late_in_late(run: Plain) -> None:
    """Adds a container in one step, and in the next a module within the container, which reads an old weight."""
    if run.step == 0 and "late" not in run.module._modules:
        run.module.late = nn.Sequential()
        body = run.module.body
        run.module.body = lambda x: body(run.module.late(x))
    if run.step == 1 and not len(run.module.late):
        late = nn.Linear(WIDTH, WIDTH, bias=False)
        late.weight = run.module.b.weight
        run.module.late.append(late)
    once(run)


def user_backward(run: Plain) -> None:
    loss = run.loss(run.model(run.x))
    run.losses.append(loss.item())
    (loss if run.is_sharded else loss / run.world).backward()


def partial_graph(run: Plain) -> None:
    """Runs a backward that ends in the middle of the model."""
    run.backward(run.module.c.weight.new_zeros(()) + run.model(run.x).mean() * 0 + run.loss(run.model(run.x)))


def gradients_of_inputs(run: Plain) -> None:
    """Calls ``autograd.grad`` to an input alone before the training step. The result is not part of the loss."""
    x = run.x.clone().requires_grad_()
    (g,) = torch.autograd.grad(run.model(x).sum(), x)
    run.losses.append(g.square().sum().item())
    once(run)


SCENARIOS: dict[str, tuple[type[nn.Module], Micro]] = {
    "plain": (Net, once), "direct_params": (Direct, once), "used_twice": (UsedTwice, once), "tied": (Tied, once),
    "parent_reads": (ParentReads, once), "several_at_once": (SeveralAtOnce, once), "listed": (Listed, once),
    "functional_call": (Functional, once), "functional_changed": (FunctionalChanged, once), "vmap": (Vmapped, once),
    "custom_function": (CustomFunction, once), "detached": (Detached, once), "views": (Views, once),
    "plain_dict": (PlainDict, once), "compiled_block": (CompiledBlock, once), "checkpoint": (Checkpointed, once),
    "checkpoint_reentrant": (CheckpointedReentrant, once), "checkpoint_all": (CheckpointedAll, once),
    "checkpoint_all_reentrant": (CheckpointedAllReentrant, once), "checkpoint_nested": (CheckpointedNested, once),
    "nested_reentrant": (NestedReentrant, once), "nested_inner_reentrant": (NestedInnerReentrant, once),
    "nested_outer_reentrant": (NestedOuterReentrant, once),
    "checkpoint_reentrant_user": (CheckpointedReentrant, user_backward), "save_on_cpu": (OnCpu, once),
    "packed": (Packed, once), "user_backward": (Net, user_backward), "penalty": (Net, penalty),
    "penalty_parent_reads": (ParentReads, penalty), "retained": (Net, retained),
    "retained_custom_function": (CustomFunction, retained), "two_forwards": (Net, two_forwards),
    "first_after_second": (ParentReads, first_after_second), "second_before_first": (ParentReads, second_before_first),
    "no_sync": (Net, without_sync), "no_sync_tied": (Tied, without_sync), "eval": (ParentReads, with_eval),
    "eval_between": (ParentReads, eval_between), "inference_mode": (ParentReads, with_inference),
    "zero_grad_between": (Net, zero_grad_between), "dropped_forward": (Net, dropped_forward),
    "direct_call": (Net, direct_call), "direct_graph": (Net, direct_graph), "late_module": (Net, late_module),
    "late_head": (Net, late_head), "late_in_late": (Net, late_in_late), "partial_graph": (Net, partial_graph),
    "gradients_of_inputs": (Net, gradients_of_inputs),
}  # fmt: skip


# ---- running and comparing --------------------------------------------------------------------------------------------


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def check(what: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    if want is None:  # plain torch has no gradient: the engine may have None or zeros
        assert got is None or not got.abs().max(), f"{what}: got {got}, want none"
        return
    assert got is not None, f"{what}: got none, want {want}"
    assert got.shape == want.shape, f"{what}: got {tuple(got.shape)}, want {tuple(want.shape)}"
    assert torch.allclose(got, want, **CLOSE), (
        f"{what}: off by {(got - want).abs().max():g}\n  got  {got}\n  want {want}"
    )


def check_rest(engine: Any) -> None:
    """Between steps no gathered weights are alive, and every parameter has the status of a released one."""
    fetcher = engine._fetcher
    assert fetcher.stats.live_elems == 0 and not len(fetcher.packer), (fetcher.stats.live_elems, len(fetcher.packer))
    for group in fetcher.groups:
        assert group.buffer is None and group.pins == 0, (group.label, group.pins)
    for name, p in engine.module.named_parameters():
        state = state_of(p)
        assert state.persists or p.ds_status.name == "NOT_AVAILABLE", (name, p.ds_status)
        assert p.untyped_storage().nbytes() == 0, (name, p.untyped_storage().nbytes())


def compare(
    rank: int, world: int, kind: type[nn.Module], micro: Micro, limits: str, note: str = "", backend: str = ""
) -> None:
    """Runs a scenario on the engine of this rank, and in plain torch over the data of all ranks. backend: the engine is
    compiled with it."""
    plain_module = make(kind)
    plain = Plain(plain_module, world)
    optimizer = AdamW(plain_module.parameters())
    with make_engine(make(kind), limits, compiled=bool(backend)) as engine:
        assert len(engine._fetcher.groups) > 1
        if backend:
            engine.compile(backend=backend)
        run = Sharded(engine, world)
        for step in range(STEPS):
            where = f"{note or kind.__name__} {micro.__name__} {limits} world {world} rank {rank} step {step}"
            run.on(step, rank)
            run.losses.clear()
            micro(run)
            optimizer.zero_grad()
            for r in range(world):
                plain.on(step, r)
                plain.losses.clear()
                micro(plain)
                if r == rank:
                    check(f"{where}: losses", torch.tensor(run.losses), torch.tensor(plain.losses))
            want = named(plain_module)
            for name, p in named(engine.module).items():
                check(f"{where}: gradient of {name}", safe_get_full_grad(p), want[name].grad)
            optimizer.step()
            engine.step()
            check_rest(engine)
        for name, p in named(engine.module).items():
            check(f"{where}: weight {name}", safe_get_full_fp32_param(p), want[name].detach())


def scenario_body(rank: int, world: int, name: str) -> None:
    kind, micro = SCENARIOS[name]
    for limits in LIMITS:
        compare(rank, world, kind, micro, limits, name)


@pytest.mark.parametrize(("name", "world"), cells(SCENARIOS, (2, 3), at_once=1))
def test_scenario(run_ranks, name: str, world: int) -> None:
    run_ranks(world, scenario_body, name)  # the first run imports the optimizer's modules


# ---- tests that do not fit a scenario --------------------------------------------------------------------------------


def train_and_compare(rank: int, world: int, engine: Any, plain: nn.Module, optimizer: AdamW, step: int) -> None:
    """Runs one ordinary step on the engine and in plain torch, and compares the weights."""
    x, y = data_of(step, rank)
    engine.backward((engine(x) - y).square().mean())
    engine.step()
    optimizer.zero_grad()
    for r in range(world):
        x, y = data_of(step, r)
        ((plain(x) - y).square().mean() / world).backward()
    optimizer.step()
    check_rest(engine)
    for (name, p), want in zip(engine.module.named_parameters(), plain.parameters()):
        check(f"rank {rank} step {step}: {name}", safe_get_full_fp32_param(p), want.detach())


def pair(kind: type[nn.Module], limits: str) -> tuple[Any, nn.Module, AdamW]:
    plain = make(kind)
    return make_engine(make(kind), limits), plain, AdamW(plain.parameters())


class Sliced(Net):
    """Runs through a slice of a list in the manner of transformers. A slice is a new list of the same modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def body(self, x):
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return self.b(self.a(x))


@on_ranks(2)
def test_hooks_look_for_new_modules_after_a_registration_within_the_model_alone(rank: int, world: int) -> None:
    engine, plain, optimizer = pair(Sliced, "frugal")
    with engine:
        train_and_compare(rank, world, engine, plain, optimizer, 0)
        with mock.patch.object(ModuleHooks, "_scan", autospec=True) as scan:
            for step in range(1, STEPS):
                train_and_compare(rank, world, engine, plain, optimizer, step)
        assert scan.call_count == 0
        engine.module.late = nn.Sequential()
        train_and_compare(rank, world, engine, plain, optimizer, STEPS)  # looks for new modules, and finds ``late``
        with mock.patch.object(ModuleHooks, "_scan", autospec=True) as scan:
            engine.module.late.append(nn.Tanh())
            train_and_compare(rank, world, engine, plain, optimizer, STEPS + 1)
        assert scan.called


class Raises(Net):
    where = ""

    def body(self, x):
        if self.where == "before":
            raise ValueError("boom")
        x = torch.tanh(self.a(x))
        if self.where == "after":
            raise ValueError("boom")
        if self.where == "within":
            x = self.b(x[:, :5])  # raises a shape error in the forward of the layer
        x = torch.tanh(self.b(x))
        if self.where == "backward":
            x.register_hook(_raise)
        return x


def _raise(_: torch.Tensor) -> None:
    raise ValueError("boom")


def exception_body(rank: int, world: int) -> None:
    for limits in LIMITS:
        engine, plain, optimizer = pair(Raises, limits)
        with engine:
            for step, where in enumerate(("before", "within", "after", "backward", "before", "backward")):
                engine.module.where = where
                x, y = data_of(99, rank)
                with pytest.raises((ValueError, RuntimeError)):
                    engine.backward((engine(x) - y).square().mean())
                engine.module.where = ""
                train_and_compare(rank, world, engine, plain, optimizer, step)


@pytest.mark.parametrize("world", [2, 3])
def test_an_exception_is_followed_by_a_correct_step(run_ranks, world: int) -> None:
    run_ranks(world, exception_body)


class Overwrites(Net):
    is_bad = False

    def body(self, x):
        x = torch.tanh(self.a(x))
        out = self.b(x)
        if self.is_bad:
            x.add_(1)
        return out


@on_ranks(2)
def test_a_saved_activation_that_is_overwritten_raises(rank: int, world: int) -> None:
    engine, plain, optimizer = pair(Overwrites, "frugal")
    with engine:
        train_and_compare(rank, world, engine, plain, optimizer, 0)
        engine.module.is_bad = True
        x, y = data_of(9, rank)
        loss = (engine(x) - y).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
        engine.module.is_bad = False
        train_and_compare(rank, world, engine, plain, optimizer, 1)


@on_ranks(2)
def test_torch_func_grad_is_refused_by_torch(rank: int, world: int) -> None:
    """torch refuses its gradient transforms while saved-tensor hooks are set. The engine works on after the error."""
    engine, plain, optimizer = pair(Net, "eager")
    with engine:
        body = engine.module.body
        train_and_compare(rank, world, engine, plain, optimizer, 0)
        engine.module.body = lambda x: body(x + torch.func.grad(lambda t: engine.module.a(t).sum())(x))
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            engine(data_of(0, rank)[0])
        engine.module.body = body
        train_and_compare(rank, world, engine, plain, optimizer, 1)


class Teacher(Net):
    """Calls another engine in its forward."""

    other: Any = None

    def body(self, x):
        with torch.no_grad():
            hint = self.other[0](x)
        return super().body(x) + F.pad(hint, (0, WIDTH - 5))


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_two_engines(rank: int, world: int) -> None:
    for limits in LIMITS:
        one, plain_one, optimizer_one = pair(Net, limits)
        two, plain_two, optimizer_two = pair(Teacher, limits)
        two.module.other, plain_two.other = [one], [plain_one]
        with one, two:
            for step in range(STEPS):
                train_and_compare(rank, world, one, plain_one, optimizer_one, step)
                train_and_compare(rank, world, two, plain_two, optimizer_two, step)
                check_rest(one)
            # Two micro-batches are interleaved: both forwards come first, then both backwards.
            x, y = data_of(50, rank)
            losses = [(engine(x) - y).square().mean() for engine in (one, two)]
            for engine, loss in zip((one, two), losses):
                engine.backward(loss)
            for plain, optimizer in ((plain_one, optimizer_one), (plain_two, optimizer_two)):
                optimizer.zero_grad()
            for r in range(world):
                x, y = data_of(50, r)
                for plain in (plain_one, plain_two):
                    ((plain(x) - y).square().mean() / world).backward()
            for engine, plain, optimizer in ((one, plain_one, optimizer_one), (two, plain_two, optimizer_two)):
                engine.step()
                optimizer.step()
                check_rest(engine)
                for (name, p), want in zip(engine.module.named_parameters(), plain.parameters()):
                    check(f"rank {rank}: {name}", safe_get_full_fp32_param(p), want.detach())


@on_ranks(2)
def test_an_engine_without_optimizer(rank: int, world: int) -> None:
    plain = make(ParentReads)
    engine = deepspeed_c.initialize(model=make(ParentReads), config=config_of("frugal", optimizer=False))[0]
    with engine:
        for step in range(STEPS):
            x, _ = data_of(step, rank)
            with torch.no_grad():
                check("output", engine(x), plain(x))
            got, want = x.clone().requires_grad_(), x.clone().requires_grad_()
            engine(got).square().sum().backward()
            plain(want).square().sum().backward()
            check("gradient of the input", got.grad, want.grad)
            # The engine does not learn when such a backward ends, so the last gathered unit stays until the next use.
            # No other unit stays.
            fetcher = engine._fetcher
            assert sum(group.buffer is not None for group in fetcher.groups) <= 1
            with torch.no_grad():
                engine(x)
            assert fetcher.stats.live_elems == 0, fetcher.stats.live_elems


@on_ranks(2)
def test_a_compiled_engine(rank: int, world: int) -> None:
    engine, plain, optimizer = pair(Net, "frugal")
    engine.compile(backend="aot_eager")
    with engine:
        for step in range(STEPS):
            train_and_compare(rank, world, engine, plain, optimizer, step)


@on_ranks(2)
def test_a_released_parameter_refuses(rank: int, world: int) -> None:
    """Outside of passes a released parameter raises an error that names GatheredParameters."""
    with make_engine(make(Net)) as engine:
        with pytest.raises(StateError, match="GatheredParameters"):
            _ = engine.module.a.weight.data
        with pytest.raises(StateError, match="GatheredParameters"):
            _ = engine.module.a.weight.clone()
