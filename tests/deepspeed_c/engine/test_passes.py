"""engine/passes.py: a backward pass that gives no parameter a gradient computes the same as in plain torch and is no
part of the window. This holds at every stage and in every precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c import errors
from deepspeed_c.utils import safe_get_full_grad, set_z3_leaf_modules
from deepspeed_c.zero import GatheredParameters
from tests.log_lines import LogLines
from tests.ranks import on_ranks, run_ranks
from tests.toys import Chain
from tests.training import engine_of, whole_weights

WIDTH, GAS, SCALE = 13, 2, 2.0**10
OPTIMIZER = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
FP16 = {"enabled": True, "initial_scale_power": 10}
PRECISIONS = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": FP16},
    "autocast_bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast_fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}, "fp16": {"initial_scale_power": 10}},
}  # fmt: skip
CELLS = [
    (stage, precision)
    for stage in range(4)
    for precision in PRECISIONS
    if stage in (1, 3) or "autocast" not in precision
]
# Limits of the norm of the difference over the norm. The bugs to find are a wrong factor (loss scale, accumulation
# steps) and a missing term.
TOLERANCE = {"fp32": 2e-5, "bf16": 4e-2, "fp16": 1e-2, "autocast_bf16": 4e-2, "autocast_fp16": 1e-2}


class Net(nn.Module):
    """A network that is twice differentiable. ``kind``: how its middle is run."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.inp, self.mid, self.out = nn.Linear(WIDTH, 17), nn.Linear(17, 17), nn.Linear(17, 5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.mid(torch.tanh(self.inp(x)))))

    def forward(self, x: torch.Tensor):
        if self.kind in ("reentrant", "non_reentrant"):
            return checkpoint(self.body, x, use_reentrant=self.kind == "reentrant")
        y = self.body(x)
        return {"loss": y.float().square().mean(), "logits": y} if self.kind == "outputs" else y


def make_net(kind: str = "plain", seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def make_config(stage: int, precision: str, gas: int = GAS) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100},
        **copy.deepcopy(PRECISIONS[precision]),
    }


def make(stage: int, precision: str, kind: str = "plain", gas: int = GAS, seed: int = 1):
    model = make_net(kind, seed)
    if kind == "leaf":
        set_z3_leaf_modules(model, [nn.Linear])
    return deepspeed_c.initialize(model=model, config=make_config(stage, precision, gas))[0]


def make_input(engine, rank: int, step: int) -> torch.Tensor:
    """A leaf of numbers that bf16 holds exactly, so that all precisions see the same input."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
    dtype = torch.float32 if engine is None else next(engine.module.parameters()).dtype
    return x.to(dtype).requires_grad_()


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


# -- passes that end in no parameter ------------------------------------------------------------------------------------


def of_output(run, x):
    return torch.autograd.grad(run(x).float().sum(), x)[0]


def of_map(run, x):
    """Goes back through one graph twice; the second pass begins at a saliency map."""
    g = torch.autograd.grad(run(x).float().square().sum(), x, create_graph=True)[0]
    return torch.autograd.grad(g.float().abs().sum(), x)[0]


def by_backward(run, x):
    run(x).float().sum().backward(inputs=[x])
    return x.grad


def of_the_output_itself(run, x):
    out = run(x)
    return torch.autograd.grad(out.float().square().sum(), out)[0]


def by_hooks(run, x):
    """The gradients that hooks on the model's input see."""
    seen = []
    y = x * 1
    y.register_hook(seen.append)
    torch.autograd.grad(run(y).float().sum(), x)
    return seen[0]


def of_many_at_once(run, x):
    """A Jacobian: one pass carries a batch of gradients of the outputs."""
    out = run(x).float().sum(0)
    return torch.autograd.grad(out, x, torch.eye(5), is_grads_batched=True)[0]


def by_transform(run, x):
    return torch.func.grad(lambda t: run(t).float().sum())(x.detach())


PASSES = [of_output, of_map, by_backward, of_the_output_itself, by_hooks, of_many_at_once, by_transform]


def window_of(engine) -> tuple:
    """The state that a pass of the window would change."""
    reducer = engine._optimizer.reducer
    buckets = [(b.is_launched, b.has_result, b.is_pending) for b in reducer.buckets]
    return (
        engine._passes.n_backwards, reducer.scaling.window_factor, reducer.is_in_backward, reducer.is_complete,
        reducer._path.seen(), buckets,
    )  # fmt: skip


def assert_at_rest(engine) -> None:
    fetcher = engine._fetcher
    if fetcher is not None:
        assert not fetcher.phase.is_in_backward and not fetcher.phase.is_active and fetcher.stats.live_elems == 0
        assert all(group.pins == 0 for group in fetcher.groups)


def train(engine, rank: int, between, n_steps: int = 2) -> dict[str, torch.Tensor]:
    for step in range(n_steps):
        for micro in range(GAS):
            between(step)
            out = engine(make_input(engine, rank, 2 * step + micro).detach())
            between(step)
            engine.backward(loss_of(out))
            between(step)
            engine.step()
    return whole_weights(engine.module)


def passes_body(rank: int, world: int, stage: int, precision: str) -> None:
    with make(stage, precision) as engine:
        plain = make_net()
        before, n_gathers = window_of(engine), 0

        # torch refuses torch.func where saved-tensor hooks keep gathered weights out of graphs.
        passes = [run for run in PASSES if stage < 3 or world == 1 or run is not by_transform]

        def run_all(step: int) -> None:
            for run in passes:
                window = window_of(engine)
                run(engine, make_input(engine, rank, step + 7))
                assert window_of(engine) == window, run.__name__

        for run in passes:
            got, want = run(engine, make_input(engine, rank, 3)), run(plain, make_input(None, rank, 3))
            # Second derivatives lose more digits.
            tolerance = TOLERANCE[precision] * (4 if run is of_map else 1)
            assert off_by(got, want) < tolerance, f"{run.__name__}: {off_by(got, want):g}"
            assert window_of(engine) == before, run.__name__
            if stage == 3 and world > 1 and run is not of_the_output_itself:  # that pass reads no weight
                assert_at_rest(engine)
                assert engine._fetcher.stats.n_gathers > n_gathers
                n_gathers = engine._fetcher.stats.n_gathers
        disturbed = train(engine, rank, run_all)
        assert all(p.grad is None for p in engine.module.parameters())
        if stage < 3:
            assert not engine._optimizer.reducer.late.waiting
    with make(stage, precision) as engine:
        undisturbed = train(engine, rank, lambda step: None)
    for name, value in undisturbed.items():
        assert torch.equal(disturbed[name], value), name
    if precision == "fp32":
        optimizer = torch.optim.AdamW(plain.parameters(), **OPTIMIZER)
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(GAS):
                for r in range(world):
                    (loss_of(plain(make_input(None, r, 2 * step + micro).detach())) / (GAS * world)).backward()
            optimizer.step()
        for name, p in plain.named_parameters():
            assert off_by(disturbed[name], p) < 2e-5, name


@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_a_pass_that_ends_in_no_parameter_is_neither_scaled_nor_counted(stage, precision):
    run_ranks(2, passes_body, stage, precision)


def test_on_one_rank():
    for stage in range(4):
        run_ranks(1, passes_body, stage, "fp16")


# -- gradient penalties -------------------------------------------------------------------------------------------------


def penalized(run, x: torch.Tensor) -> torch.Tensor:
    out = run(x)
    g = torch.autograd.grad(out.float().sum(), x, create_graph=True)[0]
    return loss_of(out) + 0.3 * g.float().square().sum()


def penalty_body(rank: int, world: int, stage: int, precision: str, backward: str) -> None:
    with make(stage, precision) as engine:
        for window in range(2):  # the second window follows the plans that the first has learnt
            engine.zero_grad()
            plain = make_net()
            for micro in range(GAS):
                for r in range(world):
                    (penalized(plain, make_input(None, r, micro)) / (GAS * world)).backward()
                loss = penalized(engine, make_input(engine, rank, micro))
                if backward == "engine.backward":
                    engine.backward(loss)
                elif backward == "scale":
                    engine.scale(loss).backward()
                else:
                    loss.backward()
                if micro < GAS - 1:
                    engine.step()
            assert engine._passes.n_backwards == GAS
            for (name, p), q in zip(plain.named_parameters(), engine.module.parameters()):
                worst = off_by(safe_get_full_grad(q), p.grad)
                assert worst < 4 * TOLERANCE[precision], f"window {window}: {name} is off by {worst:g}"
        engine.step()
        if stage < 3:
            assert not engine._optimizer.reducer.late.waiting


@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_a_gradient_penalty_is_that_of_plain_torch(stage, precision):
    run_ranks(2, penalty_body, stage, precision, "engine.backward")
    run_ranks(2, penalty_body, stage, precision, "scale")
    if "fp16" not in precision:
        run_ranks(2, penalty_body, stage, precision, "backward")


@on_ranks(1)
def test_a_penalty_that_fp16_cannot_scale_at_the_outputs_is_refused(rank: int, world: int) -> None:
    with make(1, "fp16", gas=1) as engine:
        with pytest.raises(errors.BackwardError, match=r"engine\.scale"):
            penalized(engine, make_input(engine, rank, 0)).backward()
        loss = loss_of(engine(make_input(engine, rank, 0)))
        engine.zero_grad()
        loss.backward()
        engine.step()
        assert engine.was_step_applied()


# -- parts of the module -----------------------------------------------------------------------------------------------


def kind_body(rank: int, world: int, stage: int, precision: str, kind: str, backward: str) -> None:
    """Passes to the input alternate with trained passes. By ``kind``, the parameters lie in a graph of their own or in
    a single node, or outputs depend on one another."""
    with make(stage, precision, "plain" if kind == "compiled" else kind, gas=1) as engine:
        if kind == "compiled":
            engine.compile(backend="aot_eager")
        first = (lambda out: out["logits"] + out["loss"]) if kind == "outputs" else (lambda out: out)
        for step in range(2):
            plain = make_net("plain" if kind == "compiled" else kind)
            x, plain_x = make_input(engine, rank, step), make_input(None, rank, step)
            if kind == "reentrant":
                with pytest.raises(RuntimeError, match="use_reentrant"):
                    torch.autograd.grad(first(engine(x)).float().sum(), x)
            else:
                got = torch.autograd.grad(first(engine(x)).float().sum(), x)[0]
                want = torch.autograd.grad(first(plain(plain_x)).sum(), plain_x)[0]
                assert off_by(got, want) < TOLERANCE[precision], off_by(got, want)
            assert engine._passes.n_backwards == 0 and not engine._optimizer.reducer.is_in_backward
            loss = loss_of(first(engine(make_input(engine, rank, step))))
            engine.backward(loss) if backward == "engine" else loss.backward()
            for r in range(world):
                (loss_of(first(plain(make_input(None, r, step)))) / world).backward()
            for (name, p), q in zip(plain.named_parameters(), engine.module.parameters()):
                worst = off_by(safe_get_full_grad(q), p.grad)
                assert worst < 2 * TOLERANCE[precision], f"step {step}: {name} is off by {worst:g}"
            assert engine._passes.n_backwards == 1
            engine.zero_grad()


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant", "outputs", "leaf", "compiled"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_passes_through_every_kind_of_module(stage, kind):
    for precision, backward in (("bf16", "user"), ("fp16", "engine"), ("fp16", "user")):
        run_ranks(2, kind_body, stage, precision, kind, backward)


class Own(torch.autograd.Function):
    """A user's autograd node, opaque to the engine."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class WithOwn(Net):
    def body(self, x):
        return super().body(Own.apply(x))


def frozen_body(rank: int, world: int, stage: int, precision: str, has_own_node: bool) -> None:
    """All parameters are frozen for a while, like those of a discriminator while the generator is trained."""
    torch.manual_seed(1)
    model = WithOwn() if has_own_node else Net()
    with deepspeed_c.initialize(model=model, config=make_config(stage, precision))[0] as engine:
        plain = make_net()
        window = window_of(engine)
        for p in model.parameters():
            p.requires_grad_(False)
        x, plain_x = make_input(engine, rank, 0), make_input(None, rank, 0)
        if has_own_node:
            got = torch.autograd.grad(engine(x).float().sum(), x)[0]
            plain(plain_x * 2).sum().backward()
        else:
            engine(x).float().sum().backward()
            plain(plain_x).sum().backward()
            got = x.grad
        assert off_by(got, plain_x.grad) < TOLERANCE[precision], off_by(got, plain_x.grad)
        assert window_of(engine) == window


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_frozen_module_lets_gradients_through(precision):
    for stage in (1, 3):
        for has_own_node in (False, True):
            run_ranks(2, frozen_body, stage, precision, has_own_node)


def parameters_body(rank: int, world: int, stage: int, precision: str) -> None:
    """autograd.grad to parameters gives this rank's gradient: whole, unscaled, and not reduced over ranks."""
    with make(stage, precision) as engine:
        plain = make_net()
        window = window_of(engine)
        params = list(engine.module.parameters())
        want = torch.autograd.grad(loss_of(plain(make_input(None, rank, 0))), list(plain.parameters()))
        loss = loss_of(engine(make_input(engine, rank, 0)))
        got = torch.autograd.grad(loss, params, retain_graph=True)
        with GatheredParameters(params):
            again = torch.autograd.grad(loss, params, retain_graph=True)
        for (name, _), g, h, w in zip(plain.named_parameters(), got, again, want):
            assert off_by(g, w) < TOLERANCE[precision], f"{name} is off by {off_by(g, w):g}"
            assert torch.equal(g, h), name
        assert window_of(engine) == window
        # backward(inputs=...) to some parameters is a pass of the window. Only these parameters get gradients.
        loss.backward(inputs=params[:2])
        engine.step()
        (loss_of(engine(make_input(engine, rank, 0))) * 0).backward(inputs=params[:2])
        assert engine._passes.n_backwards == 2
        unused = [slot.name for slot in engine._optimizer.complete_gradients().unused]
        assert sorted(unused) == sorted(name for name, _ in list(plain.named_parameters())[2:])
        (half, *_) = torch.autograd.grad(loss_of(plain(make_input(None, 0, 0))), list(plain.parameters()))
        for r in range(1, world):
            half = half + torch.autograd.grad(loss_of(plain(make_input(None, r, 0))), list(plain.parameters()))[0]
        assert off_by(safe_get_full_grad(params[0]), half / world / GAS) < TOLERANCE[precision]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_parameters_that_are_asked_for(stage):
    for precision in ("fp32", "fp16"):
        run_ranks(2, parameters_body, stage, precision)


# -- passes to an input and to parameters ------------------------------------------------------------------------------


def both_body(rank: int, world: int, precision: str, backward: str) -> list[str]:
    with LogLines() as log, make(2, precision) as engine:
        want = make_input(None, rank, 0)
        loss_of(make_net()(want)).backward()
        for micro in range(GAS):
            x = make_input(engine, rank, 0)
            loss = loss_of(engine(x))
            engine.backward(loss) if backward == "engine" else loss.backward()
            # Only fp16 scales the caller's own loss, at the outputs.
            factor = (1.0 if precision == "bf16" and backward == "user" else 1.0 / GAS) * (
                SCALE if precision == "fp16" else 1.0
            )
            assert off_by(x.grad / factor, want.grad) < TOLERANCE[precision], off_by(x.grad / factor, want.grad)
            engine.step()
    return [text for text in log.lines if "beyond the inputs" in text]


@pytest.mark.parametrize("backward", ["engine", "user"])
def test_fp16_says_once_that_gradients_of_inputs_are_scaled(backward):
    (said,) = run_ranks(1, both_body, "fp16", backward)[0]
    assert "512" in said and "torch.autograd.grad" in said
    assert run_ranks(1, both_body, "bf16", backward)[0] == []


# -- several engines ----------------------------------------------------------------------------------------------------


def make_tail() -> nn.Module:
    torch.manual_seed(2)
    return Chain(end=torch.tanh, layer=nn.Linear(5, 3))


def chain_body(rank: int, world: int, stage: int, first: str, second: str, how: str) -> None:
    """The outputs of one engine are the inputs of another. ``how``: which engine, or the caller, runs backward."""
    precision = first if first != "fp32" else second
    with make(stage, first) as head, engine_of(make_tail(), make_config(stage, second)) as tail:
        if second == "fp16":
            tail.optimizer.scaler.load_state_dict({**tail.optimizer.scaler.state_dict(), "scale": 64.0})
        plain, plain_tail = make_net(), make_tail()
        to = next(tail.module.parameters()).dtype
        for micro in range(GAS):
            for r in range(world):
                out = plain(make_input(None, r, micro).detach())
                (loss_of(plain_tail(out)) + loss_of(out)).div(GAS * world).backward()
            out = head(make_input(head, rank, micro).detach())
            loss = loss_of(tail(out.to(to))) + loss_of(out)
            if how == "tail":
                tail.backward(loss)
            elif how == "head":
                head.backward(loss)
            elif how == "scale":
                tail.scale(loss).backward()
            else:
                loss.backward()
            assert head._passes.n_backwards == tail._passes.n_backwards == micro + 1
            if micro < GAS - 1:
                head.step()
                tail.step()
        for (name, p), q in zip(
            [*plain.named_parameters(), *plain_tail.named_parameters()],
            [*head.module.parameters(), *tail.module.parameters()],
        ):
            worst = off_by(safe_get_full_grad(q), p.grad)
            assert worst < 3 * TOLERANCE[precision], f"{name} is off by {worst:g}"
        head.step()
        tail.step()
        assert head.was_step_applied() and tail.was_step_applied()


CHAINS = [
    ("fp32", "fp32", "tail"), ("fp32", "fp32", "head"), ("fp32", "fp32", "user"), ("bf16", "fp16", "tail"),
    ("fp16", "fp16", "tail"), ("fp16", "fp16", "head"), ("fp16", "fp16", "scale"), ("fp16", "fp32", "head"),
    ("fp16", "fp32", "user"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "how"), CHAINS)
def test_an_output_of_one_engine_feeds_another(first, second, how):
    for stage in (1, 3):
        run_ranks(2, chain_body, stage, first, second, how)


def refused_chain_body(rank: int, world: int, how: str) -> None:
    with make(1, "fp16") as head, deepspeed_c.initialize(model=make_tail(), config=make_config(1, "fp16"))[0] as tail:
        loss = loss_of(tail(head(make_input(head, rank, 0))))
        with pytest.raises(errors.BackwardError, match="another engine"):
            loss.backward()
        head.zero_grad()
        tail.zero_grad()
        loss = loss_of(tail(head(make_input(head, rank, 0))))
        tail.backward(loss)


def test_a_chain_that_fp16_cannot_scale_is_refused():
    run_ranks(1, refused_chain_body, "user")


@on_ranks(1)
def test_two_engines_side_by_side(rank: int, world: int) -> None:
    """One loss depends on two engines in fp16, side by side."""
    with make(1, "fp16", gas=1) as one, make(1, "fp16", gas=1, seed=5) as two:
        for how in ("user", "scales", "one"):
            loss_1, loss_2 = (loss_of(e(make_input(e, 0, 0).detach())) for e in (one, two))
            if how == "user":
                (loss_1 + loss_2).backward()
            elif how == "scales":
                (one.scale(loss_1) + two.scale(loss_2)).backward()
            else:
                one.backward(loss_1 + loss_2)
            for engine, seed in ((one, 1), (two, 5)):
                plain = make_net(seed=seed)
                loss_of(plain(make_input(None, 0, 0))).backward()
                for p, q in zip(plain.parameters(), engine.module.parameters()):
                    assert off_by(safe_get_full_grad(q), p.grad) < TOLERANCE["fp16"], how
                engine.zero_grad()


# -- passes that raise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_pass_that_raises_leaves_the_window_alone(rank: int, world: int, stage: int) -> None:
    """A pass that raises changes neither the window nor later passes."""

    def refuse(grad):
        raise ValueError("no")

    def between(step: int) -> None:
        x = make_input(engine, rank, step)
        y = x * 1
        y.register_hook(refuse)
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                torch.autograd.grad(engine(y).sum(), x)

    with make(stage, "fp32") as engine:
        disturbed = train(engine, rank, between)
    with make(stage, "fp32") as engine:
        undisturbed = train(engine, rank, lambda step: None)
    for name, value in undisturbed.items():
        assert torch.equal(disturbed[name], value), name
