"""The engine's contract: boundaries, skipped steps, bad input, and leaks."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c import errors
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests import training
from tests.deepspeed_c.zero.traits import Mlp, Tied, batch
from tests.ranks import RanksFailed, on_ranks, run_ranks


def config(stage: int = 2, **extra) -> dict:
    return training.config(stage, "AdamW", zero={"stage3_param_persistence_threshold": 0}, lr=0.01) | extra


def make(stage: int = 2, model: nn.Module | None = None, **extra):
    torch.manual_seed(0)
    return deepspeed_c.initialize(model=model or Mlp(), config=config(stage, **extra))[0]


def train_step(engine, step: int = 0, rank: int = 0) -> float:
    x, y = batch(step, 0, rank, 0)
    return training.step(engine, x.to(next(engine.parameters()).dtype), y)


def state_of(engine) -> dict[str, torch.Tensor]:
    """Every bit that training changes."""
    state = training.whole_weights(engine.module)
    for slot in engine._optimizer.reducer.slots:
        state[slot.name + " master"] = safe_get_full_fp32_param(slot.param)
        for key in ("exp_avg", "exp_avg_sq"):
            state[slot.name + key] = safe_get_full_optimizer_state(slot.param, key)
    for i, entry in enumerate(engine._optimizer.pieces.entries):
        state[f"step {i}"] = torch.as_tensor(engine.optimizer.state[entry.param]["step"]).clone()
    return state


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, before in a.items():
        assert torch.equal(before, b[name]), f"{name} changed:\n  before {before}\n  after  {b[name]}"


# -- one process --------------------------------------------------------------------------------------------------------


def one_rank(fn):
    """Runs a test body in a process with a process group of one."""

    def test(*args):
        run_ranks(1, fn, *args)

    test.__name__, test.__doc__ = "test_" + fn.__name__, fn.__doc__
    return test


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_a_skipped_step_changes_no_bit_and_not_the_schedule(rank: int, world: int, stage: int, precision: str) -> dict:
    extra = {precision: {"enabled": True}} if precision != "fp32" else {}
    engine = make(
        stage, **extra, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}}
    )
    with engine:
        train_step(engine, 0, rank)
        before, lr = state_of(engine), engine.get_lr()
        scale = engine.loss_scale()
        x, y = batch(1, 0, rank, 0)
        loss = engine(x.to(next(engine.parameters()).dtype), y)
        bad = next(engine.parameters())
        handle = bad.register_hook(lambda g: g.fill_(float("inf"))) if rank == world - 1 else None
        loss = engine(x.to(bad.dtype), y)
        engine.backward(loss)
        engine.step()
        if handle is not None:
            handle.remove()
        assert not engine.was_step_applied() and engine.skipped_steps == 1
        assert engine.get_lr() == lr
        assert_same_bits(before, state_of(engine))
        if precision == "fp16":
            assert engine.loss_scale() <= scale
        train_step(engine, 2, rank)
        assert engine.was_step_applied() and engine.global_steps == 3
        assert engine.get_lr() != lr
    return {}


def nan_loss_body(rank: int, world: int, stage: int, precision: str) -> str:
    extra = {precision: {"enabled": True}} if precision != "fp32" else {}
    with make(stage, **extra) as engine:
        train_step(engine, 0, rank)
        before = state_of(engine)
        x, y = batch(1, 0, rank, 0)
        if rank == world - 1:
            y = y * float("nan")
        engine.backward(engine(x.to(next(engine.parameters()).dtype), y))
        with pytest.raises(errors.NonFiniteLossError) as caught:
            engine.step()
        assert_same_bits(before, state_of(engine))
        train_step(engine, 2, rank)
        assert engine.was_step_applied()
        return str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_nan_loss_is_an_error_on_every_rank_that_names_the_rank(stage, precision):
    for message in run_ranks(2, nan_loss_body, stage, precision):
        assert "rank 1" in message and "unchanged" in message, message


def loss_scale_floor_body(rank: int, world: int) -> list:
    seen = []
    with make(1, fp16={"enabled": True, "initial_scale_power": 2, "hysteresis": 1}) as engine:
        x, y = batch(0, 0, rank, 0)
        next(engine.parameters()).register_hook(lambda g: g.fill_(float("nan")))
        for _ in range(8):
            engine.backward(engine(x.half(), y))
            try:
                engine.step()
            except errors.LossScaleError as error:
                return seen + [str(error)]
            seen.append(engine.loss_scale())
    return seen


def test_the_loss_scale_halves_to_its_floor_and_then_raises():
    scales = run_ranks(1, loss_scale_floor_body)[0]
    assert scales[:-1] == [2.0, 1.0], scales
    assert "lowest loss scale" in str(scales[-1])


def boundary_body(rank: int, world: int) -> None:
    with make(2, gradient_accumulation_steps=3) as engine:
        applied = []
        for i in range(7):
            applied.append(engine.is_gradient_accumulation_boundary())
            train_step(engine, i)
        assert applied == [False, False, True, False, False, True, False], applied
        assert engine.global_steps == 2 and engine.micro_steps == 7 and engine.global_samples == 6
        engine.set_gradient_accumulation_boundary(True)
        train_step(engine)
        assert engine.global_steps == 3
        engine.set_gradient_accumulation_boundary(False)
        train_step(engine)
        train_step(engine)
        assert engine.global_steps == 3


test_boundaries = one_rank(boundary_body)


def batch_setters_body(rank: int, world: int) -> None:
    with make(0, gradient_accumulation_steps=2) as engine:
        assert engine.get_batch_info() == (2, 1, 2)
        engine.set_train_batch_size(6)
        assert engine.get_batch_info() == (6, 1, 6)
        engine.set_train_micro_batch_size(4)
        assert engine.get_batch_info() == (24, 4, 6)
        with pytest.raises(errors.BatchSizeError, match="multiple"):
            engine.set_train_batch_size(5)
        train_step(engine)
        with pytest.raises(errors.StateError, match="within"):
            engine.set_train_batch_size(4)


test_batch_setters = one_rank(batch_setters_body)


def unmanaged_body(rank: int, world: int) -> None:
    with make(1, gradient_accumulation_steps=4, managed_gradient_accumulation=False) as engine:
        x, y = batch(0, 0, 0, 0)
        for _ in range(3):
            engine.backward(engine(x, y))
        engine.step()
        assert engine.global_steps == 1 and engine.global_samples == 3


test_unmanaged_accumulation = one_rank(unmanaged_body)


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_an_exception_in_backward_drops_the_window_and_nothing_else(
    rank: int, world: int, stage: int, own_backward: bool
) -> None:
    """Backward raises, and another step follows. The result is the same as without the broken window."""

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("boom")

    class Model(Mlp):
        armed = False

        def body(self, x):
            x = torch.tanh(self.inp(x))
            if self.armed:
                x = Explode.apply(x)
            return self.out(torch.tanh(self.mid(x))) * self.gain

    torch.manual_seed(0)
    clean = make(stage, Model(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    dirty = make(stage, Model(), gradient_accumulation_steps=2)
    with clean, dirty:
        for engine in (clean, dirty):
            if engine is dirty:
                x, y = batch(5, 0, rank, 0)
                training.step(engine, x, y)
                engine.module.armed = True
                loss = engine(x, y)
                with pytest.raises(ValueError, match="boom"):
                    loss.backward() if own_backward else engine.backward(loss)
                engine.module.armed = False
            for step in range(4):
                train_step(engine, step, rank)
        assert clean.global_steps == dirty.global_steps == 2
        assert_same_bits(state_of(clean), state_of(dirty))


def bad_calls_body(rank: int, world: int) -> None:
    with make(2) as engine:
        x, y = batch(0, 0, 0, 0)
        with pytest.raises(errors.BackwardError, match="scalar"):
            engine.backward(engine.module.body(x))
        with pytest.raises(errors.BackwardError, match="requires no gradient"):
            engine.backward(torch.tensor(1.0))
        with pytest.raises(errors.BackwardError, match="not float"):
            engine.backward(1.0)
        with engine.no_sync():
            engine.backward(engine(x, y))
            with pytest.raises(errors.BackwardError, match="no_sync"):
                engine.step()
        engine.step()
        with pytest.raises(AttributeError, match="neither the engine nor its module"):
            _ = engine.no_such_thing
        assert engine.gain is engine.module.gain
    with pytest.raises(errors.StateError, match="closed"):
        engine(x, y)
    engine.close()


test_bad_calls = one_rank(bad_calls_body)


def bad_models_body(rank: int, world: int) -> None:
    with pytest.raises(errors.ModelError, match="must be a torch.nn.Module"):
        deepspeed_c.initialize(model=3, config=config())
    frozen = Mlp().requires_grad_(False)
    with pytest.raises(errors.ModelError, match="no parameter to train"):
        deepspeed_c.initialize(model=frozen, config=config())
    with pytest.raises(errors.OptimizerError, match="does not belong to the model"):
        deepspeed_c.initialize(model=Mlp(), optimizer=torch.optim.SGD(Mlp().parameters(), lr=0.1), config=config())
    with pytest.raises(errors.ConfigError, match="no configuration"):
        deepspeed_c.initialize(model=Mlp())
    with pytest.raises(errors.OptimizerError, match="neither"):
        deepspeed_c.initialize(model=Mlp(), optimizer=3, config=config())
    with pytest.raises(errors.ModelError, match="float64"):
        deepspeed_c.initialize(model=Mlp().double(), config=config())


test_bad_models = one_rank(bad_models_body)


def eval_only_body(rank: int, world: int) -> None:
    model = Mlp()
    x, y = batch(0, 0, 0, 0)
    want = model(x, y).item()
    engine, optimizer, loader, scheduler = deepspeed_c.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1}
    )
    assert optimizer is None and loader is None and scheduler is None
    assert engine(x, y).item() == want
    with pytest.raises(errors.StateError, match="only evaluates"):
        engine.backward(engine(x, y))


test_an_engine_without_optimizer_evaluates = one_rank(eval_only_body)


def loader_and_scheduler_body(rank: int, world: int) -> None:
    data = [batch(0, i, 0, 0) for i in range(8)]
    engine, _optimizer, loader, scheduler = deepspeed_c.initialize(
        model=Mlp(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        training_data=data,
        config={"train_batch_size": 2, "zero_optimization": {"stage": 1}},
    )
    with engine:
        n = 0
        for x, y in loader:
            training.step(engine, x[0], y[0])
            n += 1
        assert n == 4 // world * 1 if world > 1 else n == 4
        assert engine.get_lr() == [0.5 * 0.5**n] and scheduler.get_last_lr() == engine.get_lr()
        assert engine.get_mom() == [0.9]


test_loader_and_scheduler = one_rank(loader_and_scheduler_body)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_the_model_outlives_its_engine(rank: int, world: int) -> None:
    model = Tied()
    engine = make(2, model, bf16={"enabled": True})
    train_step(engine, 0, rank)
    weight, parameter = model.out.weight.detach().clone(), model.out.weight
    engine.close()
    assert model.out.weight is parameter and torch.equal(model.out.weight, weight)
    assert model.inp.weight is model.forth.weight
    x, y = batch(0, 0, 0, 0)
    model(x.bfloat16(), y).backward()
    assert parameter.grad is not None
    again = make(1, model)
    again.close()


def cycles_body(rank: int, world: int) -> list[tuple[int, int, int]]:
    seen = []
    for i in range(14):
        with make(2, nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))) as engine:
            training.update(engine, engine(torch.ones(2, 300)).sum())
        del engine
        gc.collect()
        with open("/proc/self/statm") as f:
            rss = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        tensors = sum(torch.is_tensor(o) for o in gc.get_objects())
        seen.append((rss, tensors, len(os.listdir("/proc/self/fd"))))
    return seen


def test_closed_engines_leave_nothing_behind():
    for seen in run_ranks(2, cycles_body):
        # A leak never goes down again. Memory that a thread of gloo holds for a moment does go down.
        (rss0, tensors0, fds0), (rss1, tensors1, fds1) = map(max, zip(*seen[4:7])), map(min, zip(*seen[11:]))
        assert tensors1 <= tensors0, f"live tensors by cycle: {[s[1] for s in seen]}"
        assert fds1 <= fds0, f"open files by cycle: {[s[2] for s in seen]}"
        assert rss1 - rss0 < 4 << 20, f"resident bytes by cycle: {[s[0] for s in seen]}"


def two_engines_body(rank: int, world: int) -> list[float]:
    """Two interleaved engines train as each does alone; a loss through both is divided once by each engine's
    accumulation steps."""
    alone = []
    for stage in (1, 2):
        with make(stage) as engine:
            alone.append([train_step(engine, s, rank) for s in range(3)])
    with make(1) as a, make(2) as b:
        both = [[], []]
        for s in range(3):
            both[0].append(train_step(a, s, rank))
            both[1].append(train_step(b, s, rank))
    assert both == alone, f"{both} != {alone}"

    torch.manual_seed(0)
    first, second = nn.Linear(5, 5), nn.Linear(5, 1)
    x = torch.randn(4, 5) + rank
    a = make(1, first, gradient_accumulation_steps=2, gradient_clipping=0)
    b = make(2, second, gradient_accumulation_steps=4, gradient_clipping=0)
    with a, b:
        a.set_gradient_accumulation_boundary(True)
        b.set_gradient_accumulation_boundary(True)
        b.backward(b(a(x)).sum())
        a.step()
        b.step()
        norms = [a.get_global_grad_norm(), b.get_global_grad_norm()]
    return norms


def test_two_engines_do_not_meet():
    torch.manual_seed(0)
    first, second = nn.Linear(5, 5), nn.Linear(5, 1)
    x = torch.randn(4, 5)
    got = run_ranks(1, two_engines_body)[0]
    second(first(x)).sum().backward()
    want = [
        torch.nn.utils.get_total_norm([p.grad for p in first.parameters()]).item() / 2,
        torch.nn.utils.get_total_norm([p.grad for p in second.parameters()]).item() / 4,
    ]
    assert got == pytest.approx(want, rel=1e-5), f"{got} != {want}"


def mismatch_body(rank: int, world: int, kind: str) -> str:
    model, cfg = Mlp(), config(1)
    if kind == "shape" and rank == 1:
        model.mid = nn.Linear(17, 11, bias=True)
    if kind == "frozen" and rank == 1:
        model.out.bias.requires_grad_(False)
    if kind == "missing" and rank == 1:
        del model.gain
    if kind == "config" and rank == 1:
        cfg["gradient_clipping"] = 0.25
    with pytest.raises(errors.RankMismatchError) as caught:
        deepspeed_c.initialize(model=model, config=cfg)
    return str(caught.value)


@pytest.mark.parametrize(
    "kind, names", [("shape", "mid.bias"), ("frozen", "out.bias"), ("missing", "gain"), ("config", "gradient_clipping")]
)
def test_ranks_with_different_models_are_told_which_parameter(kind, names):
    for message in run_ranks(2, mismatch_body, kind):
        assert names in message, message


def dead_rank_body(rank: int, world: int, stage: int) -> None:
    engine = make(stage)
    train_step(engine, 0, rank)
    if rank == 1:
        os._exit(7)
    with pytest.raises(errors.CommError, match="failed"):
        for step in range(3):
            train_step(engine, step, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dead_rank_is_an_error_on_the_others_and_no_hang(stage):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, dead_rank_body, stage)
    kinds = {o.rank: o.kind for o in caught.value.outcomes}
    assert kinds == {0: "returned", 1: "died"}, caught.value


def initial_weights_body(rank: int, world: int) -> dict:
    torch.manual_seed(rank)
    model = Mlp()
    with make(1, model):
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_all_ranks_start_from_rank_0():
    a, b = run_ranks(2, initial_weights_body)
    assert_same_bits(a, b)


def buffers_body(rank: int, world: int) -> None:
    class WithTable(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.tensor([1.0 / 3.0]))

    master = torch.nn.Parameter(torch.tensor([1.0 / 3.0]))
    model = WithTable()
    model.gain = master
    with make(1, model, bf16={"enabled": True}) as engine:
        assert model.table.dtype == torch.float32 and model.inp.weight.dtype == torch.bfloat16
        assert safe_get_full_fp32_param(model.gain).item() == torch.tensor(1.0 / 3.0).item()
        assert model.gain is master and model.gain.dtype == torch.bfloat16
        train_step(engine)
    model = WithTable()
    with make(1, model, bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"}):
        assert model.table.dtype == torch.bfloat16


test_buffers_stay_fp32_and_masters_come_from_the_given_weights = one_rank(buffers_body)
