"""A load of any kind, anywhere in an accumulation window, begins a new window. Training goes on as plain torch does
from the loaded weights and states, with gradients only of micro-batches after the load. A refused load leaves the
window as it was."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.errors import CheckpointError, StateError
from tests import training
from tests.ranks import on_ranks

GAS, WORLD = 3, 2
Engine = deepspeed_c.DeepSpeedEngine
Weights = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(window: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * window + 10 * micro + rank))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.float().square().mean()


class Plain:
    """The same training in plain torch, in one process with the data of all ranks."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, window: int, micro: int) -> None:
        for rank in range(WORLD):
            (loss_of(self.model(batch(window, micro, rank))) / (GAS * WORLD)).backward()

    def run(self, window: int) -> None:
        for micro in range(GAS):
            self.backward(window, micro)
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def copies(self) -> tuple[dict, dict]:
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        momenta = {p: self.optimizer.state[p]["momentum_buffer"].clone() for p in self.model.parameters()}
        return weights, momenta

    def put(self, weights: dict | None, momenta: dict | None) -> None:
        if weights is not None:
            self.model.load_state_dict(weights)
        for p, value in (momenta or {}).items():
            self.optimizer.state[p]["momentum_buffer"].copy_(value)


def make_engine(stage: int, steering: str = "managed", **config) -> Engine:
    settings = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": GAS, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 30},
        "managed_gradient_accumulation": steering != "unmanaged", **config,
    }  # fmt: skip
    return deepspeed_c.initialize(model=make_model(), config=settings)[0]


# -- the engine or the caller ends windows -----------------------------------------------------------------------------


def micro_batches(engine: Engine, steering: str, window: int) -> Iterator[int]:
    """Runs a window. Yields after each backward and after each call of step()."""
    for micro in range(GAS):
        is_last = micro == GAS - 1
        if steering in ("boundary", "boundary_only"):
            engine.set_gradient_accumulation_boundary(is_last)
        with engine.no_sync() if steering == "no_sync" and not is_last else nullcontext():
            engine.backward(loss_of(engine(batch(window, micro, engine.global_rank))))
            yield micro
        if is_last or steering in ("managed", "boundary", "no_sync"):
            engine.step()
            yield micro


def run(engine: Engine, steering: str, window: int) -> None:
    """Runs a whole window. Only its last step may update weights."""
    before = engine.global_samples
    for micro in micro_batches(engine, steering, window):
        is_boundary = engine.is_gradient_accumulation_boundary()
        assert steering == "unmanaged" or engine.was_step_applied() or micro < GAS - 1 or is_boundary, micro
    assert engine.was_step_applied() and not engine._state.is_within_window
    assert engine.global_samples - before == GAS * 4 * WORLD, engine.global_samples - before


STEERINGS = ["managed", "boundary", "boundary_only", "unmanaged", "no_sync"]
# The number of yields of `micro_batches` before a load: within no_sync() of the first backward, in the middle, before
# the last step.
MOMENTS = {
    "managed": (1, 2, 3, 5), "boundary": (1, 4, 5), "boundary_only": (1, 3), "unmanaged": (2, 3), "no_sync": (1, 2, 5),
}  # fmt: skip


def by_hand(src: Weights, dst: nn.Module) -> None:
    dst.load_state_dict(src)


# Kind of load -> (the call, whether it restores weights, whether it restores momenta).
LOADS: dict[str, tuple[Callable[[Engine, str], object], bool, bool]] = {
    "all": (lambda engine, folder: engine.load_checkpoint(folder), True, True),
    "but states": (lambda engine, folder: engine.load_checkpoint(folder, load_optimizer_states=False), True, False),
    "module only": (lambda engine, folder: engine.load_checkpoint(folder, load_module_only=True), True, False),
    "by hand": (lambda engine, folder: engine.load_checkpoint(folder, custom_load_fn=by_hand), True, False),
    "module state dict": (lambda engine, folder: engine.load_module_state_dict(engine.kept[0]), True, False),
    "optimizer state dict": (
        lambda engine, folder: engine.optimizer.load_state_dict(copied(engine.kept[1])),
        False,
        True,
    ),
}
KEEPS_COUNTS = {"module only", "module state dict", "optimizer state dict"}


def copied(state: object) -> object:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(copied, state))
    return state.clone() if torch.is_tensor(state) else state


def check_weights(engine: Engine, plain: Plain, where: str) -> None:
    for name, want in plain.model.named_parameters():
        got = training.whole_weights(engine.module)[name]
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), f"{where}: {name} is\n{got}\nand not\n{want}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(WORLD)
def test_a_load_begins_a_window(rank: int, world: int, stage: int, folder: str) -> None:
    for steering in STEERINGS:
        plain = Plain()
        with make_engine(stage, steering) as engine:
            run(engine, steering, 0)
            plain.run(0)
            engine.save_checkpoint(folder, tag=steering)
            engine.kept = copied(engine.module_state_dict()), copied(engine.optimizer.state_dict())
            weights, momenta = plain.copies()
            kinds = LOADS if steering == "managed" else ["all", "module only"]
            for kind, moment in itertools.product(kinds, MOMENTS[steering]):
                where = f"stage {stage}, {steering}, {kind}, moment {moment}"
                load, takes_weights, takes_states = LOADS[kind]
                run(engine, steering, 1)
                plain.run(1)
                steps = engine.global_steps
                abandoned = micro_batches(engine, steering, 2)
                for _ in range(moment):
                    next(abandoned)
                load(engine, folder)
                abandoned.close()
                assert not engine._state.is_within_window and engine._passes.n_backwards == 0, where
                assert engine.global_steps == (steps if kind in KEEPS_COUNTS else 1), (where, engine.global_steps)
                if steering in ("managed", "no_sync"):
                    assert engine.micro_steps == engine.global_steps * GAS, (where, engine.micro_steps)
                plain.put(weights if takes_weights else None, momenta if takes_states else None)
                run(engine, steering, 3)
                plain.run(3)
                check_weights(engine, plain, where)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(WORLD)
def test_gradients_of_another_loss_scale_are_dropped(rank: int, world: int, stage: int) -> None:
    """Loads an optimizer's dict, with masters and a loss scale, while gradients accumulated at the old scale wait."""
    found = []
    for abandons in (False, True):
        with make_engine(stage, fp16={"enabled": True, "initial_scale_power": 8}) as engine:

            def half(window: int, micro: int, engine: Engine = engine) -> None:
                training.update(engine, loss_of(engine(batch(window, micro, rank).half())))

            for micro in range(GAS):
                half(0, micro)
            kept = copied(engine.optimizer.state_dict())
            kept["loss_scaler"]["scale"] = 32.0
            if abandons:
                half(1, 0)
                engine.backward(engine.scale(loss_of(engine(batch(1, 1, rank).half()))) / engine.loss_scale())
            engine.optimizer.load_state_dict(kept)
            assert engine.loss_scale() == 32.0
            for micro in range(GAS):
                half(2, micro)
            found.append(training.whole_weights(engine.module))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), f"{name}: {found[1][name]} and not {found[0][name]}"


# -- loads that are refused, and loads that break -----------------------------------------------------------------------


def damage(folder: str) -> None:
    """Flips the last byte of the first rank's file, which keeps its length."""
    path = os.path.join(folder, "rank_00000.safetensors")
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0xFF]))


REFUSED: dict[str, tuple[type[Exception] | None, Callable[[Engine, str], object]]] = {
    "no such tag": (CheckpointError, lambda engine, folder: engine.load_checkpoint(folder, tag="none")),
    "nothing there": (None, lambda engine, folder: engine.load_checkpoint(os.path.join(folder, "nowhere"))),
    "of another model": (StateError, lambda engine, folder: engine.load_checkpoint(folder, tag="wider")),
    "damaged, by hand": (
        CheckpointError,
        lambda engine, folder: engine.load_checkpoint(folder, tag="damaged", custom_load_fn=by_hand),
    ),
    "of other ranks": (
        StateError,
        lambda engine, folder: engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "world_size": 7}),
    ),
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(WORLD)
def test_a_load_that_is_refused_leaves_the_window_as_it_was(rank: int, world: int, stage: int, folder: str) -> None:
    with make_engine(stage) as engine:
        run(engine, "managed", 0)
        for tag in ("first", "damaged"):
            engine.save_checkpoint(folder, tag=tag)
    wide = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    with deepspeed_c.initialize(model=wide, config={"train_micro_batch_size_per_gpu": 4})[0] as engine:
        engine.save_checkpoint(folder, tag="wider")
    if rank == 0:
        damage(os.path.join(folder, "damaged"))
    torch.distributed.barrier()
    for kind, (error, load) in REFUSED.items():
        plain = Plain()
        with make_engine(stage) as engine:
            for at, _ in enumerate(micro_batches(engine, "managed", 0)):
                if at in (1, 2, 4):  # after the first step(), between a backward and its step(), before the last one
                    before = engine.micro_steps, engine._passes.n_backwards
                    with pytest.raises(error) if error else nullcontext():
                        load(engine, folder)
                    assert (engine.micro_steps, engine._passes.n_backwards) == before, kind
            plain.run(0)
            check_weights(engine, plain, f"stage {stage}, {kind}")


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(WORLD)
def test_a_load_that_breaks_begins_a_window_with_the_next_one(rank: int, world: int, stage: int, folder: str) -> None:
    """One rank finds a file unreadable after weights were overwritten. The window is lost, the engine refuses to train,
    and the next load begins a window."""
    plain = Plain()
    with make_engine(stage) as engine:
        run(engine, "managed", 0)
        plain.run(0)
        engine.save_checkpoint(folder, tag="first")
        weights, momenta = plain.copies()
        run(engine, "managed", 1)
        abandoned = micro_batches(engine, "managed", 2)
        next(abandoned), next(abandoned)
        read = NativeSource.read

        def fail(self: NativeSource, reads) -> None:
            read(self, reads)
            if rank == 1:
                raise CheckpointError("damaged in the test", where="test")

        with mock.patch.object(NativeSource, "read", fail), pytest.raises(CheckpointError, match="damaged in the test"):
            engine.load_checkpoint(folder, tag="first")
        assert engine._checkpoints.is_half_loaded and not engine._state.is_within_window
        with pytest.raises(StateError, match="could not be read to its end"):
            engine(batch(2, 1, rank))
        engine.load_checkpoint(folder, tag="first")
        plain.put(weights, momenta)
        run(engine, "managed", 3)
        plain.run(3)
        check_weights(engine, plain, f"stage {stage}")


# -- calls between two windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steering", STEERINGS)
@on_ranks(WORLD)
def test_a_window_is_open_from_its_first_backward_to_its_step(rank: int, world: int, steering: str) -> None:
    """A window is open from its first backward to the step that updates, both where the engine counts micro-batches and
    where the caller does."""
    with make_engine(2, steering) as engine:
        for window in range(2):
            engine.set_train_batch_size(engine.train_batch_size())
            for at, _ in enumerate(micro_batches(engine, steering, window)):
                if engine.was_step_applied() and at > 0:
                    break
                with pytest.raises(StateError, match="within an accumulation window"):
                    engine.set_train_batch_size(engine.train_batch_size())
            engine.set_train_batch_size(engine.train_batch_size())
            engine._step_applied = False


# -- the place in the data at which a window began ---------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """Samples that hold their index."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((5,), float(i))


@on_ranks(WORLD)
def test_what_is_saved_within_a_window_goes_on_with_its_first_batch(rank: int, world: int, folder: str) -> None:
    """Training from a checkpoint that was saved within a window goes on with the first batch of that window, however
    the window began."""
    settings = training.config(2, None, rows=2, accumulate=GAS)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 1e-6}}
    model = make_model()
    engine, _, loader, _ = deepspeed_c.initialize(model=model, config=settings, training_data=Numbers())
    with engine:
        batches = iter(loader)
        firsts = {}

        def run_some(n: int, *, steps_last: bool = True) -> torch.Tensor:
            """The first of ``n`` micro-batches."""
            given = []
            for i in range(n):
                given.append(next(batches)[:, 0].tolist())
                engine.backward(loss_of(engine(torch.tensor(given[-1]).view(-1, 1).expand(-1, 5))))
                if i < n - 1 or steps_last:
                    engine.step()
            return given[0]

        firsts["in the first window"] = run_some(1)
        engine.save_checkpoint(folder, tag="in the first window")
        run_some(GAS - 1)
        firsts["before step()"] = run_some(1, steps_last=False)
        engine.save_checkpoint(folder, tag="before step()")
        engine.zero_grad()
        firsts["after zero_grad()"] = run_some(2)
        engine.save_checkpoint(folder, tag="after zero_grad()")
        run_some(GAS - 2)
        run_some(2 * GAS + 1)
        engine.load_checkpoint(folder, tag="after zero_grad()")
        batches = iter(loader)
        firsts["after a load"] = run_some(1)
        engine.save_checkpoint(folder, tag="after a load")
        assert firsts["after a load"] == firsts["after zero_grad()"]
        engine.load_checkpoint(folder, tag="in the first window", load_module_only=True)
        firsts["after a load of weights"] = run_some(2)
        engine.save_checkpoint(folder, tag="after a load of weights")
        for tag, first in firsts.items():
            engine.load_checkpoint(folder, tag=tag)
            batches = iter(loader)
            assert next(batches)[:, 0].tolist() == first, tag
