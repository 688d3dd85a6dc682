"""Updates that begin while backward runs (super_offload), against the same engine without super_offload. Masters,
states, counts and weights are equal bit for bit after every step. Steps may be clipped, skipped, edited or dropped, or
differ from the step that the update had assumed.

The tests patch ``is_apart``, so that states lie in another memory than the device's. ``submit`` is patched to wait for
its updates, so that they surely come before the step. One run of each kind does not wait.
"""

from __future__ import annotations

import copy
import math
import tempfile
import threading
from collections.abc import Callable
from concurrent import futures
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import deepspeed_c
from deepspeed_c.errors import CheckpointError, ConfigError, FeatureError, NonFiniteLossError, StateError
from deepspeed_c.offload import place
from deepspeed_c.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed_c.zero.states.ahead import StepAhead
from tests import training
from tests.ranks import on_ranks, run_ranks

STEPS = 5
Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.middle = torch.nn.ModuleList([torch.nn.Linear(13, 13) for _ in range(9)])
        self.unused = torch.nn.Linear(3, 5)
        self.last = torch.nn.Linear(13, 1)

    def forward(self, x: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = torch.tanh(layer(x))
        x = self.last(x)
        return (x + self.unused(x.new_ones(3)).sum() if uses_all else x).square().mean()


Engine = deepspeed_c.DeepSpeedEngine
Act = Callable[[Engine, int], Tensors | None]


def nothing(engine: Engine, step: int) -> None:
    pass


def edit_gradient(engine: Engine, step: int) -> None:
    if step == 2:
        safe_set_full_grad(engine.module.last.weight, torch.full((1, 13), 0.5))


def edit_weight(engine: Engine, step: int) -> None:
    """Write between backward and step: the step goes on from the written values."""
    if step == 2:
        weight = engine.module.last.weight
        with deepspeed_c.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight[0, ::2] = 0.5


def other_lr(engine: Engine, step: int) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.01 * (step + 2)


def drop(engine: Engine, step: int) -> None:
    if step == 2:
        engine.zero_grad()


def second_backward(engine: Engine, step: int) -> None:
    if step in (1, 3):
        engine.backward(engine(inputs(engine, step, 1), step == 1))


def read_master(engine: Engine, step: int) -> None:
    """Read between backward and step: reads return the values of the last step."""
    if step == 2:
        weight = engine.module.last.weight
        with deepspeed_c.zero.GatheredParameters(weight):
            forward = weight.detach().clone()
        master = safe_get_full_fp32_param(weight)
        assert torch.equal(master.to(forward.dtype), forward), f"{master} beside {forward}"


def save_and_load(engine: Engine, step: int) -> None:
    """Save and load between backward and step: the checkpoint holds the values of the last step."""
    if step == 2:
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            torch.distributed.broadcast_object_list(shared)
            engine.save_checkpoint(shared[0], tag="between")
            torch.distributed.barrier()
            engine.load_checkpoint(shared[0], tag="between")
            torch.distributed.barrier()


# Actions between the last backward of a window and its step, with their settings.
SCENES: dict[str, tuple[Act, dict]] = {
    "plain": (nothing, {}), "accumulated": (nothing, {"gradient_accumulation_steps": 2}),
    # Some steps are clipped, others are not.
    "clipped": (nothing, {"gradient_clipping": 6.0}),
    "overflow": (nothing, {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}),
    "edited": (edit_gradient, {"gradient_clipping": 50.0}), "edited_weight": (edit_weight, {}),
    "other_lr": (other_lr, {}), "dropped": (drop, {}), "second_backward": (second_backward, {}),
    "saved": (save_and_load, {}), "read": (read_master, {}),
    "int8": (nothing, {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "state_dtype": "int8"}}}),
    "lion": (nothing, {"optimizer": {"type": "Lion", "params": {"lr": 0.001}}}), "sometimes_unused": (nothing, {}),
}  # fmt: skip
# These scenes also run without waiting, so that updates may or may not have begun when backward ends.
IN_A_RACE = {"plain", "clipped", "second_backward", "sometimes_unused"}
BF16 = {"saved", "edited", "read"}  # other SCENES are fp32, unless they name a precision


def inputs(engine: Engine, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + engine.global_rank)
    return (torch.randn(6, 7, generator=generator) * (1 + step % 2)).to(next(engine.module.parameters()).dtype)


def make_engine(stage: int, offload: dict, settings: dict, seed: int = 0) -> Engine:
    torch.manual_seed(seed)
    zero = {"stage": stage, "reduce_bucket_size": 60, "stage3_param_persistence_threshold": 0}
    zero["offload_optimizer"] = {"device": "cpu", **offload}
    config = training.config(optimizer="AdamW", zero=zero, lr=0.01, params={"weight_decay": 0.1}, gradient_clipping=0.0)
    config |= settings
    return deepspeed_c.initialize(model=Model(), config=config)[0]


def bits(engine: Engine) -> Tensors:
    """Copies of all tensors of this rank that a step changes."""
    found: Tensors = {}
    for i, unit in enumerate(engine._optimizer.units):
        for bucket in range(unit.n_buckets):
            found[f"masters of {i}.{bucket}"] = unit.master[bucket].clone()
            found[f"weights of {i}.{bucket}"] = unit.param_slice(bucket).clone()
        if unit.flat_param is not None:
            found[f"weights of {i}"] = unit.flat_param.clone()
    states = engine.optimizer.state
    for i, entry in enumerate(engine._optimizer.pieces.entries):
        found |= {f"{key} of {i}": value.clone() for key, value in states.get(entry.param, {}).items()}
    return found


def waiting(submit: Callable[..., None]) -> Callable[..., None]:
    def submit_and_wait(self: StepAhead, *args) -> None:
        submit(self, *args)
        futures.wait(self._jobs.values())

    return submit_and_wait


def train(stage: int, scene: str, is_ahead: bool, waits: bool) -> tuple[list[Tensors], list[int]]:
    """For each step: (the tensors after it and the values read before it, the number of buckets whose update ahead was
    kept)."""
    act, settings = SCENES[scene] if scene in SCENES else (ACTS[scene], {})
    if scene.endswith("8 bits"):
        settings = SCENES["int8"][1]
    if scene in BF16 or scene in ACTS:
        settings = {**settings, "bf16": {"enabled": True}}
    kept: list[int] = []
    keep, submit = StepAhead.keep, StepAhead.submit

    def counting_keep(self: StepAhead, grad_scale: float) -> set:
        done = keep(self, grad_scale)
        kept.append(len(done))
        return done

    found = []
    with (
        mock.patch.object(place, "is_apart", lambda device: True),
        mock.patch.object(StepAhead, "keep", counting_keep),
        mock.patch.object(StepAhead, "submit", waiting(submit) if waits else submit),
        make_engine(stage, {"super_offload": is_ahead}, settings) as engine,
    ):
        for step in range(STEPS):
            read = None
            for part in range(engine.gradient_accumulation_steps()):
                uses_all = scene != "sometimes_unused" or step in (0, 3)
                engine.backward(engine(inputs(engine, step, part), uses_all))
                if engine.is_gradient_accumulation_boundary():
                    read = act(engine, step)
                if scene == "dropped" and step == 2:
                    break
                engine.step()
            found.append(bits(engine) | (read or {}))
    return found, kept


def compare(rank: int, world: int, stage: int, scenes: list[str]) -> dict[str, list[int]]:
    """Raises where a bit differs. Returns, for each scene, the number of buckets whose update ahead each step kept."""
    result = {}
    for scene in scenes:
        want, none = train(stage, scene, is_ahead=False, waits=False)
        assert none == []
        for waits in (True, False) if scene in IN_A_RACE else (True,):
            got, kept = train(stage, scene, is_ahead=True, waits=waits)
            for step, (a, b) in enumerate(zip(got, want)):
                for name in a | b:
                    # Before the first update that is kept, states are missing or zero.
                    x, y = (found.get(name, torch.zeros(1)) for found in (a, b))
                    where = f"{scene}, waits {waits}, step {step}, rank {rank}: {name}"
                    assert torch.equal(x, y) or not (x.any() or y.any()), f"{where}\n  got  {x}\n  want {y}"
            if waits:
                result[scene] = kept
    return result


# Scene -> the steps that keep their update ahead.
STANDS = {
    "plain": [0, 1, 2, 3, 4], "accumulated": [0, 1, 2, 3, 4], "edited": [0, 1, 3, 4], "int8": [0, 1, 2, 3, 4],
    "lion": [0, 1, 2, 3, 4], "other_lr": [],
    "saved": [0, 1, 4],  # the step after the load has no gradients
}  # fmt: skip


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_every_bit_is_that_of_a_step_without(world: int, stage: int) -> None:
    found = run_ranks(world, compare, stage, list(SCENES))
    # Only the rank that owns the accessed element takes updates back.
    for scene in ("edited_weight", "read"):
        assert any(kept[scene][2] == 0 for kept in found), (scene, found)
    for kept in found:
        print(kept)
        for scene, stands in STANDS.items():
            assert [step for step, n in enumerate(kept[scene]) if n > 0] == stands, (scene, kept[scene])
        for scene in ("clipped", "sometimes_unused"):
            assert any(kept[scene]) and not all(kept[scene]), (scene, kept[scene])


# -- every reader and writer of masters and states ---------------------------------------------------------------------


def shared_folder(engine: Engine) -> str:
    """A folder, the same on all ranks, that lasts as long as the engine."""
    if not hasattr(engine, "folder"):
        made = tempfile.TemporaryDirectory()
        shared = [made.name]
        torch.distributed.broadcast_object_list(shared)
        engine.folder, engine.keeps_folder = shared[0], made
    return engine.folder


def rolls_back(**how) -> Act:
    """Save in step 1. In step 3, after backward, load that checkpoint, so that the updates since then are undone."""

    def act(engine: Engine, step: int) -> None:
        if step == 1:
            engine.save_checkpoint(shared_folder(engine), tag="good")
        if step == 3:
            engine.load_checkpoint(engine.folder, tag="good", **how)
            torch.distributed.barrier()

    return act


def load_by_hand(src: dict, dst: torch.nn.Module) -> None:
    dst.load_state_dict(src)


def load_nothing(engine: Engine, step: int) -> None:
    """Ask for a load that is refused: the step is made as without it."""
    if step == 2:
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(shared_folder(engine), tag="of another run")


def load_module(engine: Engine, step: int) -> None:
    if step == 2:
        engine.load_module_state_dict({name: value * 0.5 for name, value in engine.module_state_dict().items()})


def load_plainly(engine: Engine, step: int) -> None:
    """Load by torch's ``load_state_dict``, which does not tell the engine."""
    if step == 2 and engine.zero_optimization_stage() < 3:
        engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})


def refresh(engine: Engine, step: int) -> None:
    if step == 2:
        engine.optimizer.refresh_fp32_params()


def load_optimizer(engine: Engine, step: int) -> Tensors | None:
    if step == 1:
        engine.kept = copy.deepcopy(engine.optimizer.state_dict())
        return {f"saved {i}": master for i, master in enumerate(engine.kept["masters"])}
    if step == 3:
        engine.optimizer.load_state_dict(engine.kept)


def load_base(engine: Engine, step: int) -> Tensors | None:
    if step == 1:
        engine.kept = copy.deepcopy(engine._optimizer.optimizer.state_dict())
        return {f"saved {i}": state["exp_avg"] for i, state in engine.kept["state"].items()}
    if step == 3:
        engine._optimizer.optimizer.load_state_dict(engine.kept)


def write_states(engine: Engine, step: int) -> None:
    if step == 2:
        for state in engine.optimizer.state.values():
            state["exp_avg"].mul_(0.5)


def write_flat_masters(engine: Engine, step: int) -> None:
    if step == 2:
        for group in engine.optimizer.single_partition_of_fp32_groups:
            group.mul_(0.5)


def write_group_params(engine: Engine, step: int) -> None:
    if step == 2:
        with torch.no_grad():
            for p in engine.optimizer.param_groups[0]["params"]:
                p.mul_(0.5)


def write_betas(engine: Engine, step: int) -> None:
    """Write into the list of betas in place: the values that an update ahead has assumed must not change with it."""
    if step == 0:
        engine.optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    if step == 2:
        engine._optimizer.optimizer.param_groups[0]["betas"][0] = 0.5


def set_masters(engine: Engine, step: int) -> None:
    if step == 2:
        safe_set_full_fp32_param(engine.module.last.weight, torch.full((1, 13), 0.3))
        weight = engine.module.first.weight
        safe_set_local_fp32_param(weight, safe_get_local_fp32_param(weight) * 0.5)


def set_states(engine: Engine, step: int) -> None:
    if step == 2:
        safe_set_full_optimizer_state(engine.module.last.weight, torch.full((1, 13), 0.3), "exp_avg")
        weight = engine.module.first.weight
        piece = safe_get_local_optimizer_state(weight, "exp_avg_sq")
        safe_set_local_optimizer_state(weight, piece * 0.5, "exp_avg_sq")


def set_gradients(engine: Engine, step: int) -> None:
    if step == 2:
        safe_update_full_grad_vectorized(list(engine.module.middle.parameters()), lambda grad, param: grad * 0.5)
        weight = engine.module.first.weight
        safe_set_local_grad(weight, safe_get_local_grad(weight) * 0.5)


def write_weights(engine: Engine, step: int) -> None:
    """Write weights in place, at any moment of the step."""
    if step in (1, 2) and engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            engine.module.first.weight.mul_(0.5)
        if step == 1:
            engine.optimizer.keep_edits()


def partition_anew(engine: Engine, step: int) -> None:
    weight = engine.module.first.weight
    if step == 2 and hasattr(weight, "ds_status"):
        weight.all_gather()
        with torch.no_grad():
            weight.mul_(0.5)
        weight.partition(has_been_updated=True)


def saves(is_async: bool) -> Act:
    """Save between backward and step: the checkpoint holds the values of the last step. It is loaded at the end as a
    check."""

    def act(engine: Engine, step: int) -> None:
        if step == 2:
            engine.save_checkpoint(shared_folder(engine), tag="between", is_async=is_async)
        if step == STEPS - 1:
            engine.load_checkpoint(engine.folder, tag="between")

    return act


def save_model(engine: Engine, step: int) -> Tensors | None:
    if step == 2:
        engine.save_model(shared_folder(engine), dtype=torch.float32)
        torch.distributed.barrier()
        return {f"file {name}": t for name, t in load_file(f"{engine.folder}/model.safetensors").items()}


def refuse(engine: Engine, step: int) -> None:
    """Make calls that are allowed only between windows: they are refused while gradients wait for their step, and the
    step is unaffected."""
    if step == 2:
        for attempt in (
            lambda: engine.set_trainable(["first.*"]),
            lambda: engine.set_train_batch_size(4 * engine.world_size),
            lambda: engine.set_train_micro_batch_size(2),
            lambda: engine.offload_states(),
        ):
            with pytest.raises(StateError, match="within an accumulation window"):
                attempt()


def freeze(engine: Engine, step: int) -> None:
    """Drop the gradients of this window, and freeze or unfreeze parameters between two windows."""
    if step in (1, 3):
        engine.zero_grad()
        engine.set_trainable(["first.*", "last.*"] if step == 1 else ["*"])
        assert sum("step ahead" in thread.name for thread in threading.enumerate()) == 0


def move_out(engine: Engine, step: int) -> None:
    if step == 2:
        engine.zero_grad()
        engine.offload_states()
        engine.reload_states()


def drop_gradients(engine: Engine, step: int) -> None:
    if step == 2:
        engine.optimizer.zero_grad()


ACTS: dict[str, Act] = {
    "rolled back": rolls_back(),
    "rolled back but states": rolls_back(load_optimizer_states=False),
    "rolled back weights": rolls_back(load_module_only=True),
    "rolled back in 8 bits": rolls_back(),
    "rolled back by hand": rolls_back(load_module_only=True, custom_load_fn=load_by_hand),
    **{
        act.__name__: act
        for act in (
            *(load_nothing, load_module, load_plainly, refresh, load_optimizer, load_base, write_states),
            *(write_flat_masters, write_group_params, write_betas, set_masters, set_states, set_gradients),
            *(write_weights, partition_anew, save_model, refuse, freeze, move_out, drop_gradients),
        )
    },
    "saved": saves(is_async=False),
    "saved in the background": saves(is_async=True),
}
# The actions that take no update back, then the actions that do and the step in which they do it.
LEAVES_AHEAD = {"load_nothing", "refuse"}
TAKES_BACK = {
    "write_states": 2, "write_flat_masters": 2, "write_group_params": 2, "write_betas": 2, "load_base": 3,
    "save_model": 2, "set_states": 2,
}  # fmt: skip


# The actions that run other code where weights are whole.
WHOLE = ["rolled back", "rolled back by hand", "load_module", "load_plainly", "write_weights", "save_model"]


@pytest.mark.parametrize(("world", "stage", "acts"), [(1, 2, WHOLE), (2, 3, list(ACTS))])
def test_who_reads_or_writes_states_finds_those_of_the_last_step(world: int, stage: int, acts: list[str]) -> None:
    for kept in run_ranks(world, compare, stage, acts, timeout=300):
        print(kept)
        for act, steps in kept.items():
            assert steps[0] > 0 or act == "write_betas", (act, steps)
            assert act not in LEAVES_AHEAD or steps[2] > 0, (act, steps)
            assert act not in TAKES_BACK or steps[TAKES_BACK[act]] == 0, (act, steps)


@on_ranks(2)
def test_closing_between_backward_and_step(rank: int, world: int) -> None:
    """An engine is closed between backward and step. No thread is left, and the weights are those after the last
    step."""
    with (
        mock.patch.object(place, "is_apart", lambda device: True),
        mock.patch.object(StepAhead, "submit", waiting(StepAhead.submit)),
    ):
        engine = make_engine(2, {"super_offload": True}, {"bf16": {"enabled": True}})
        training.step(engine, inputs(engine, 0, 0))
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.backward(engine(inputs(engine, 1, 0)))
        module = engine.module
        assert any("step ahead" in thread.name for thread in threading.enumerate())
        engine.close()
    assert not any("step ahead" in thread.name for thread in threading.enumerate())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


@on_ranks(2)
def test_a_bad_loss_leaves_all_as_it_was(rank: int, world: int) -> None:
    with (
        mock.patch.object(place, "is_apart", lambda device: True),
        make_engine(2, {"super_offload": True}, {}) as engine,
    ):
        training.step(engine, inputs(engine, 0, 0))
        before = bits(engine)
        engine.backward(engine(inputs(engine, 1, 0)) * (math.nan if rank == 1 else 1.0))
        with pytest.raises(NonFiniteLossError):
            engine.step()
        after = bits(engine)
        assert all(torch.equal(before[name], after[name]) for name in before), (
            "a step that was refused has changed states"
        )


def check_failing(rank: int, world: int) -> int:
    """An update ahead that fails half way is taken back, and the step makes the update. Returns the number of failed
    updates."""
    states, n_failed = [], 0
    for fails in (False, True):
        with (
            mock.patch.object(place, "is_apart", lambda device: True),
            mock.patch.object(StepAhead, "submit", waiting(StepAhead.submit)),
            make_engine(2, {"super_offload": True}, {}) as engine,
        ):
            update = engine._optimizer._ahead._update

            def fail(unit, bucket, scale, update=update):
                nonlocal n_failed
                update(unit, bucket, scale)
                n_failed += 1
                raise MemoryError("no memory in the test")

            for step in range(3):
                engine._optimizer._ahead._update = fail if fails and step == 1 else update
                training.step(engine, inputs(engine, step, 0))
            states.append(bits(engine))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return n_failed


def test_an_update_that_fails_is_taken_back() -> None:
    assert run_ranks(1, check_failing)[0] > 0


def refused(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="super_offload.*device nvme"):
        make_engine(2, {"device": "nvme", "nvme_path": "/nowhere", "super_offload": True}, {})
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}
    with pytest.raises(FeatureError, match="FusedLamb cannot update a bucket before"):
        make_engine(2, {"super_offload": True}, lamb)


def test_refusals(run_ranks) -> None:
    run_ranks(1, refused)
