"""engine.save_checkpoint and load_checkpoint: any arrangement of ranks loads what any other saved; exact resumption;
partial loads."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c import _C, errors
from deepspeed_c.checkpoint.native import state as state_files
from deepspeed_c.checkpoint.native.held import read_held
from deepspeed_c.checkpoint.native.manifest import read_manifest
from deepspeed_c.utils import RepeatingLoader, safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests import training
from tests.ranks import run_ranks

WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Has tied, frozen, unused, empty and scalar parameters, sizes that nothing divides, and a buffer that is not
    contiguous."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, width)
        self.up = nn.Linear(width, 29)
        self.down = nn.Linear(29, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("n_calls", torch.zeros(2, 3).t())
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.n_calls.add_(1)
        hidden = self.embedding(tokens)
        hidden = self.down(self.dropout(torch.relu(self.up(hidden)))) * self.scale
        return self.head(hidden + self.frozen(hidden)).float().pow(2).mean()


def make(
    stage: int, dtype: str = "fp32", seed: int = 0, model: nn.Module | None = None, data: Any = None, **config: Any
):
    torch.manual_seed(seed)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 14, "reduce_bucket_size": 500},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **config,
    }
    return deepspeed_c.initialize(model=model or Net(), config=settings, training_data=data)[0]


def train(engine, steps: range) -> list[float]:
    """Runs steps on batches that depend on step and rank alone; returns the losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        losses.append(training.step(engine, torch.randint(0, 37, (2, 3), generator=generator)))
    return losses


def whole_state(engine) -> dict[str, Any]:
    """All tensors and counts that a checkpoint has to restore. They are whole, and read without checkpoint code.
    Collective."""
    state: dict[str, Any] = {f"weight {name}": value for name, value in training.whole_weights(engine.module).items()}
    state.update(
        {f"buffer {name}": value.clone() for name, value in engine.module.named_buffers() if name == "n_calls"}
    )
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        state[f"master {name}"] = safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            try:
                state[f"{key} {name}"] = safe_get_full_optimizer_state(param, key)
            except errors.StateError:
                state[f"{key} {name}"] = None
    counts: dict[str, float] = {}
    for slot in engine._optimizer.reducer.slots:
        counts.update(
            {f"step {slot.name}": float(v) for k, v in engine._optimizer.pieces.named(slot)[1].items() if k == "step"}
        )
    for theirs in engine._comm.gather_objects(counts):
        state.update(theirs)
    state["lr"] = engine.get_lr()
    state["counters"] = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
    return state


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """The entries in which two whole states differ, with both values. Weights that were saved in another dtype are
    compared with the masters rounded to it."""
    found = []
    for key in sorted(expected.keys() | actual.keys()):
        a, b = expected.get(key), actual.get(key)
        if torch.is_tensor(a) and torch.is_tensor(b):
            if a.dtype != b.dtype:
                a = expected.get(key.replace("weight ", "master "), a).to(b.dtype)
            if a.shape != b.shape or not torch.equal(a, b):
                found.append(f"{key}: expected {a.flatten()[:4].tolist()}, got {b.flatten()[:4].tolist()}")
        elif (a is None) != (b is None) or (not torch.is_tensor(a) and not torch.is_tensor(b) and a != b):
            found.append(f"{key}: expected {a}, got {b}")
    return found


# -- every arrangement loads every other -------------------------------------------------------------------------------


def dtype_of(stage: int, world: int) -> str:
    return "bf16" if (stage // 2 + world) % 2 else "fp32"


def is_tried(saved_world: int, saved_stage: int, world: int, stage: int) -> bool:
    """Whether a pair of arrangements is tried: half of all pairs are, among them each arrangement with itself.

    All combinations of values of any three arguments occur, each with two values of the fourth. Precisions follow
    another rule. So any two stages, and any two worlds, occur both with equal and with different precisions.
    """
    return (saved_world + saved_stage + world + stage) % 2 == 0


def save_all(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    states = []
    for stage in STAGES:
        with make(stage, dtype_of(stage, world), seed=10 * world + stage) as engine:
            train(engine, range(3))
            engine.save_checkpoint(
                folder, tag=f"world{world}_stage{stage}", client_state={"world": world, "stage": stage}
            )
            states.append(whole_state(engine))
    return states


def load_all(rank: int, world: int, folder: str, expected: dict[tuple[int, int], dict[str, Any]]) -> list[str]:
    problems = []
    for stage in STAGES:
        with make(stage, dtype_of(stage, world), seed=99) as engine:
            for (saved_world, saved_stage), state in expected.items():
                if not is_tried(saved_world, saved_stage, world, stage):
                    continue
                # Train first: values from before the load must not remain after it.
                train(engine, range(1))
                path, client = engine.load_checkpoint(folder, tag=f"world{saved_world}_stage{saved_stage}")
                if client != {"world": saved_world, "stage": saved_stage}:
                    problems.append(f"client state {client} of {path}")
                got = whole_state(engine)
                # The count of samples comes from the run that saved.
                problems += [
                    f"world {saved_world} stage {saved_stage} -> world {world} stage {stage}: {text}"
                    for text in differences(state, got)
                ]
            losses = train(engine, range(3, 5))
            if not all(map(math.isfinite, losses)):
                problems.append(f"losses after loading: {losses}")
    return problems


@pytest.fixture(scope="module")
def saved_everywhere(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("matrix"))
    expected = {}
    for world in WORLDS:
        states = run_ranks(world, save_all, folder)[0]
        expected.update({(world, stage): state for stage, state in zip(STAGES, states)})
    return folder, expected


@pytest.mark.parametrize("world", WORLDS)
def test_stages_and_worlds_load_what_others_saved(saved_everywhere, world):
    folder, expected = saved_everywhere
    for problems in run_ranks(world, load_all, folder, expected):
        assert problems == []


def test_no_byte_is_saved_twice_and_ranks_save_alike(saved_everywhere):
    folder, _ = saved_everywhere
    for world, stage in itertools.product(WORLDS, STAGES):
        tag = f"{folder}/world{world}_stage{stage}"
        manifest = read_held(tag, lambda held, tag=tag: read_manifest(tag, held))
        for tensor in manifest.tensors:
            covered = sorted((p.begin, p.begin + p.n_elems) for p in tensor.pieces)
            numel = torch.Size(tensor.shape).numel()
            assert covered[0][0] == 0 and covered[-1][1] == numel, (world, stage, tensor)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(covered)), (world, stage, tensor)
        sizes = [file.n_bytes for file in manifest.files]
        if stage in (1, 2):
            assert len(sizes) == world and max(sizes) < 2.5 * min(sizes), (world, stage, sizes)


# -- exact resumption ---------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """Samples that hold their index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), i % 37)


def run_on_data(engine, loader, n_steps: int) -> list[Any]:
    """Trains from ``loader`` with accumulation. Also draws from every random number generator."""
    told = []
    gas = engine.gradient_accumulation_steps()
    for _ in range(n_steps * gas):
        batch = next(loader)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        told.append((batch[:, 0].tolist(), loss.item(), random.random(), torch.rand(1).item()))
    return told


def uninterrupted(rank: int, world: int, stage: int, dtype: str, folder: str) -> Any:
    with make(stage, dtype, data=Numbers(), gradient_accumulation_steps=2) as engine:
        random.seed(rank)
        torch.manual_seed(rank)
        loader = RepeatingLoader(engine.training_dataloader)
        run_on_data(engine, loader, 4)
        engine.save_checkpoint(folder)
        return run_on_data(engine, loader, 6), whole_state(engine)


def resumed(rank: int, world: int, stage: int, dtype: str, folder: str) -> Any:
    with make(stage, dtype, seed=5, data=Numbers(), gradient_accumulation_steps=2) as engine:
        path, client_state = engine.load_checkpoint(folder)
        assert path.endswith("global_step4") and client_state == {}, (path, client_state)
        return run_on_data(engine, RepeatingLoader(engine.training_dataloader), 6), whole_state(engine)


@pytest.mark.parametrize("world, stage, dtype", [(1, 0, "fp32"), (2, 1, "fp16"), (2, 2, "fp32"), (2, 3, "fp32"), (2, 3, "bf16"), (3, 0, "fp16")])  # fmt: skip
def test_ten_steps_equal_four_then_six_bit_for_bit(tmp_path, world, stage, dtype):
    expected = run_ranks(world, uninterrupted, stage, dtype, str(tmp_path))
    actual = run_ranks(world, resumed, stage, dtype, str(tmp_path))
    for (told, state), (told_again, state_again) in zip(expected, actual):
        assert told_again == told
        assert differences(state, state_again) == []


def continue_elsewhere(rank: int, world: int, folder: str, stage: int) -> Any:
    """Continues from a checkpoint of two ranks with 2 samples each. Any number of ranks sees the same four samples in a
    step."""
    micro = 4 // world
    with make(stage, model=Net(), data=Numbers(), train_micro_batch_size_per_gpu=micro) as engine:
        engine.module.dropout.p = 0.0
        loader = RepeatingLoader(engine.training_dataloader)
        if world == 2 and stage == 2:
            run_on_data(engine, loader, 3)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        told = run_on_data(engine, loader, 4)
        return [sorted(batch) for batch, *_ in told], [loss for _, loss, *_ in told], whole_state(engine)


@pytest.mark.parametrize("world, stage", [(1, 0), (1, 3), (4, 1), (4, 3)])
def test_another_world_goes_on_with_the_same_samples_and_the_same_losses(tmp_path, world, stage):
    expected = run_ranks(2, continue_elsewhere, str(tmp_path), 2)
    actual = run_ranks(world, continue_elsewhere, str(tmp_path), stage)
    for step in range(4):
        samples = sorted(itertools.chain.from_iterable(batches[step] for batches, *_ in expected))
        assert sorted(itertools.chain.from_iterable(batches[step] for batches, *_ in actual)) == samples
        loss = sum(losses[step] for _, losses, _ in expected) / 2
        # The ranks sum in fp32 in another order.
        assert sum(losses[step] for _, losses, _ in actual) / world == pytest.approx(loss, rel=2e-6)
    for key, value in expected[0][2].items():
        if torch.is_tensor(value):
            torch.testing.assert_close(actual[0][2][key], value, rtol=1e-4, atol=1e-6)


# -- partial loads ----------------------------------------------------------------------------------------------------


def partial_loads(rank: int, world: int, folder: str) -> list[str]:
    problems = []

    def check(is_right: bool, text: str) -> None:
        if not is_right:
            problems.append(text)

    with make(2, "bf16") as engine:
        train(engine, range(3))
        engine.save_checkpoint(folder, tag="all")
        engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True, save_latest=False)
        saved = whole_state(engine)
    with make(3, "bf16", seed=4) as engine:
        before = whole_state(engine)
        engine.load_checkpoint(folder, load_module_only=True)
        got = whole_state(engine)
        for key in saved:
            source = saved if key.startswith(("weight", "master", "buffer")) else before
            check(differences({key: source.get(key)}, {key: got.get(key)}) == [], f"module only: {key}")
    with make(1, "bf16", seed=4) as engine:
        engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
        got = whole_state(engine)
        check(got["exp_avg up.weight"] is None, "moments loaded though they were not asked for")
        check(got["counters"] == saved["counters"], f"counters {got['counters']}")
        check(differences({"w": saved["master up.weight"]}, {"w": got["master up.weight"]}) == [], "masters")
    with make(3, "bf16", seed=4) as engine:
        before = whole_state(engine)
        engine.load_checkpoint(folder, tag="trained")
        got = whole_state(engine)
        check(torch.equal(got["weight frozen.weight"], before["weight frozen.weight"]), "frozen weights were touched")
        check(torch.equal(got["weight up.weight"], saved["weight up.weight"]), "trained weights")

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict(src)

    with make(3, "bf16", seed=4) as engine:
        engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=load)
        got = whole_state(engine)
        check(torch.equal(got["weight up.weight"], saved["weight up.weight"]), "custom_load_fn")
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_parts_are_loaded_as_asked(tmp_path, world):
    for problems in run_ranks(world, partial_loads, str(tmp_path)):
        assert problems == []


def refusals(rank: int, world: int, folder: str) -> list[str]:
    told = []
    with make(2) as engine:
        train(engine, range(2))
        engine.save_checkpoint(folder)

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(3))
            del self.scale
            self.scale = 2.0

    def attempt(engine, **options: Any) -> None:
        before = whole_state(engine)
        try:
            engine.load_checkpoint(folder, **options)
            told.append("nothing was refused")
        except errors.StateError as error:
            told.append(str(error))
        if differences(before, whole_state(engine)):
            told.append(f"changed by a refused load: {differences(before, whole_state(engine))}")
        train(engine, range(1))

    with make(3, model=Other()) as engine:
        attempt(engine)
        engine.load_checkpoint(folder, load_module_strict=False)
    with make(1, model=Net(width=7)) as engine:
        attempt(engine, load_module_strict=False)
    with make(1, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}) as engine:
        attempt(engine)
    return told


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path):
    for told in run_ranks(2, refusals, str(tmp_path)):
        assert len(told) == 3, told
        assert "missing: extra" in told[0] and "unexpected: scale" in told[0], told[0]
        assert re.search(r"embedding.weight has shape \(37, 13\), the model's has \(37, 7\)", told[1]), told[1]
        assert "exp_avg" in told[2] and "momentum_buffer" in told[2], told[2]


def states_of_frozen(rank: int, world: int, stage: int, folder: str) -> Any:
    with make(stage) as engine:
        train(engine, range(2))
        engine.set_trainable(["down.*", "scale"])
        train(engine, range(2, 4))
        engine.save_checkpoint(folder)
        engine.set_trainable(["*"])
        return whole_state(engine), train(engine, range(4, 6))


def states_of_frozen_again(rank: int, world: int, stage: int, folder: str) -> Any:
    with make(stage, seed=3) as engine:
        engine.set_trainable(["down.*", "scale"])
        engine.load_checkpoint(folder)
        engine.set_trainable(["*"])
        return whole_state(engine), train(engine, range(4, 6))


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_parameters_frozen_in_mid_run_come_along(tmp_path, stage):
    expected = run_ranks(2, states_of_frozen, stage, str(tmp_path))
    actual = run_ranks(2, states_of_frozen_again, stage, str(tmp_path))
    for (state, losses), (state_again, losses_again) in zip(expected, actual):
        assert differences(state, state_again) == []
        assert losses_again == losses


OPTIMIZERS = {
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}},
    "momentum": {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}},
    "adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "torch": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}},
    "rmsprop": {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-2, "centered": True}}},
}


def other_optimizers(rank: int, world: int, stage: int, folder: str, is_resumed: bool) -> dict[str, Any]:
    told = {}
    for name, config in OPTIMIZERS.items():
        with make(stage, seed=int(is_resumed), **config) as engine:
            if is_resumed:
                engine.load_checkpoint(folder, tag=name)
            else:
                train(engine, range(2))
                engine.save_checkpoint(folder, tag=name)
            told[name] = train(engine, range(2, 4)), training.whole_weights(engine.module)
    return told


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_optimizer_resumes_exactly(tmp_path, stage):
    expected = run_ranks(2, other_optimizers, stage, str(tmp_path), False)
    actual = run_ranks(2, other_optimizers, stage, str(tmp_path), True)
    for told, again in zip(expected, actual):
        for name, (losses, params) in told.items():
            assert again[name][0] == losses, name
            for key, value in params.items():
                assert torch.equal(again[name][1][key], value), (name, key)


class Rows(torch.optim.Optimizer):
    """Keeps one number a row, as Adafactor does, so the shape of the state is not the parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    rows = p.grad.pow(2).reshape(p.shape[0] if p.dim() else 1, -1).sum(1)
                    state["rows"] = state.get("rows", torch.zeros_like(rows)) + rows
                    p.sub_(p.grad / (1 + state["rows"].reshape(-1, *[1] * (p.dim() - 1)).sum()), alpha=group["lr"])


def odd_states(rank: int, world: int, folder: str, is_resumed: bool) -> Any:
    torch.manual_seed(int(is_resumed))
    model = nn.Linear(5, 7)
    engine = training.engine_of(model, {"train_micro_batch_size_per_gpu": 1}, optimizer=Rows(model.parameters()))
    with engine:
        if is_resumed:
            engine.load_checkpoint(folder)
        else:
            run_linear(engine, 2)
            engine.save_checkpoint(folder)
        run_linear(engine, 2)
        return [p.detach().clone() for p in model.parameters()]


def run_linear(engine, n: int) -> None:
    for i in range(n):
        engine.backward(engine(torch.full((1, 5), float(i + 1))).pow(2).mean())
        engine.step()


def test_states_in_another_shape_are_saved_where_nothing_is_sharded(tmp_path):
    expected = run_ranks(2, odd_states, str(tmp_path), False)
    actual = run_ranks(2, odd_states, str(tmp_path), True)
    for a, b in zip(expected[0], actual[1]):
        assert torch.equal(a, b), (a, b)


# -- in DeepSpeed's layout ----------------------------------------------------------------------------------------------


def save_for_deepspeed(rank: int, world: int, stage: int, dtype: str, folder: str) -> Any:
    with make(stage, dtype, checkpoint={"format": "deepspeed"}) as engine:
        train(engine, range(3))
        engine.save_checkpoint(folder, client_state={"epoch": 3})
        return whole_state(engine), train(engine, range(3, 5))


def load_from_deepspeed(rank: int, world: int, stage: int, dtype: str, folder: str) -> Any:
    with make(stage, dtype, seed=8) as engine:
        _, client_state = engine.load_checkpoint(folder)
        return whole_state(engine), client_state.get("epoch")


@pytest.mark.parametrize("stage, dtype", [(1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_deepspeeds_layout_goes_out_and_comes_back(tmp_path, stage, dtype):
    expected = run_ranks(2, save_for_deepspeed, stage, dtype, str(tmp_path))
    files = sorted(path.name for path in (tmp_path / "global_step3").iterdir())
    prefix = "bf16_" if dtype == "bf16" else ""
    assert f"{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt" in files, files
    assert (tmp_path / "latest").read_text() == "global_step3"
    for target in (stage, (stage + 1) % 4):
        for (state, _), (got, epoch) in zip(expected, run_ranks(2, load_from_deepspeed, target, dtype, str(tmp_path))):
            assert epoch == 3
            # DeepSpeed keeps states in one flat tensor with one count of steps, also for parameters never updated.
            assert [text for text in differences(state, got) if " unused" not in text] == []


def sign(folder: str, name: str, **changed: Any) -> None:
    """Changes entries of a file of small state and updates its checksum."""
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        content = state_files.pack({**state_files.unpack(file.read(), path), **changed}, path)
    with open(path, "wb") as file:
        file.write(content)
    with open(os.path.join(folder, "manifest.json"), "rb") as file:
        manifest = json.loads(file.read())
    next(entry for entry in manifest["states"] if entry["name"] == name).update(
        n_bytes=len(content), crc32c=_C.crc32c(content)
    )
    raw = json.dumps(manifest).encode()
    with open(os.path.join(folder, "manifest.json"), "wb") as file:
        file.write(raw)
    with open(os.path.join(folder, "manifest.crc32c"), "w") as file:
        file.write(f"{_C.crc32c(raw):08x}\n")


ODD_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "random state cannot be put back": ("rank_00001.pt", {"random": 5}),
    "numpy's generator stands at": ("rank_00000.pt", {"random": {"numpy": ("MT19937", torch.zeros(624), 625, 0, 0.0)}}),
    "its place in the data is none": ("rank_00001.pt", {"loader": {"epoch": 0, "position": "x"}}),
    "its loss scale is none": ("state.pt", {"loss_scaler": {"scale": "x"}}),
    "client_state is a int": ("state.pt", {"client_state": 5}),
    "group 0 of the optimizer": ("state.pt", {"groups": [5]}),
}


def odd_states_of_ranks(rank: int, world: int, folder: str) -> list[str]:
    told = []
    with make(2, "fp16") as engine:
        train(engine, range(2))
        engine.save_checkpoint(folder, tag="good")
        for at, (name, changed) in enumerate(ODD_STATES.values()):
            engine.save_checkpoint(folder, tag=f"odd{at}", save_latest=False)
            if rank == 0:
                sign(os.path.join(folder, f"odd{at}"), name, **changed)
            torch.distributed.barrier()
        before, generator = whole_state(engine), torch.get_rng_state()
        for at in range(len(ODD_STATES)):
            try:
                engine.load_checkpoint(folder, tag=f"odd{at}")
                told.append("nothing was refused")
            except errors.CheckpointError as error:
                told.append(str(error))
            if differences(before, whole_state(engine)) or not torch.equal(generator, torch.get_rng_state()):
                told[-1] += " -- changed by a refused load"
        train(engine, range(1))  # nothing was overwritten, so the engine may go on
        # Only the schedule knows what its state may be, so only the schedule can refuse it.
        engine.save_checkpoint(folder, tag="schedule", save_latest=False)
        if rank == 0:
            sign(os.path.join(folder, "schedule"), "state.pt", lr_scheduler={"last_batch_iteration": "x"})
        torch.distributed.barrier()
        for attempt in (lambda: engine.load_checkpoint(folder, tag="schedule"), lambda: train(engine, range(1))):
            try:
                attempt()
                told.append("nothing was refused")
            except errors.DeepSpeedCError as error:
                told.append(f"{type(error).__name__} {error}")
        engine.load_checkpoint(folder, tag="schedule", load_lr_scheduler_states=False)
        train(engine, range(1))
    return told


def test_signed_state_of_other_types_is_refused_on_all_ranks_before_anything_changes(tmp_path):
    for rank, told in enumerate(run_ranks(2, odd_states_of_ranks, str(tmp_path))):
        for reason, text in zip([*ODD_STATES, "WarmupLR cannot take", "StateError"], told, strict=True):
            assert reason in text and "changed by" not in text, f"rank {rank}: expected {reason!r}, got {text!r}"
