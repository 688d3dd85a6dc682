"""Pipelines whose masters and optimizer states lie in host memory or in files train as one plain process does. The
place of states does not change a bit.

On a machine without an accelerator everything lies in host memory. Where the tests patch ``is_apart``, states are
nevertheless moved between two memories.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import ConfigError, DeepSpeedCError
from deepspeed_c.offload import place
from deepspeed_c.offload.file import FileHome
from tests.cells import cells
from tests.deepspeed_c.pipe.models import Plain, loss_fn, micro_batches, module_of
from tests.ranks import run_ranks
from tests.training import descend_together

STEPS, N, CLIP = 3, 3, 0.5
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
NONE = {"device": "none"}
# Where states lie, and whether that memory is apart from the device's.
WHERE: dict[str, tuple[dict[str, Any], bool]] = {
    "none": (NONE, False),
    "cpu": ({"device": "cpu"}, True),
    "cpu, the same memory": ({"device": "cpu"}, False),
    "nvme": ({"device": "nvme", "pipeline_read": True, "pipeline_write": True}, True),
    "nvme, in turn": ({"device": "nvme", "buffer_count": 1}, False),
    "ratio": ({"device": "cpu", "ratio": 0.4}, True),
    "ratio of nvme": ({"device": "nvme", "ratio": 0.6}, True),
}
SCHEDULES = {"1f1b": {}, "zb_h1": {}, "zb_v": {}}


def config_of(where: str, folder: str, stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    section = WHERE[where][0] | ({"nvme_path": folder} if "nvme" in where else {})
    # Sums that move to host memory would be rounded to 16 bits once more.
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": N,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300, "offload_optimizer": section},
        "aio": {"checksum": True, "block_size": 4096},
        **({} if dtype == "fp32" else sums),
        **more,
    }


def engine_of(world: int, where: str, config: dict[str, Any], **options: Any) -> Any:
    with mock.patch.object(place, "is_apart", lambda device: WHERE[where][1]):
        net = module_of(2, **options)
        return deepspeed_c.initialize(
            model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config
        )[0]


def train(engine: Any, first: int = 0, last: int = STEPS) -> list[float]:
    mine = engine.grid.get_data_parallel_rank()
    return [float(engine.train_batch(iter(micro_batches(step, mine, N)))) for step in range(first, last)]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    named = engine.module.named_parameters()
    return {name.replace("tied_modules.embed", "0"): p.detach().clone() for name, p in named}


def plain_run(n_pipelines: int, last: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights by the names of layers) of plain torch in one process."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(last):
        batches = [batch for r in range(n_pipelines) for batch in micro_batches(step, r, N)]
        total = sum(loss_fn(model(x), y) for x, y in batches) / len(batches)
        descend_together(optimizer, [total], CLIP)
        losses.append(total.item())
    return losses, {name.removeprefix("built."): p.detach() for name, p in model.named_parameters()}


def places_of(engine: Any) -> set[tuple[str, bool]]:
    """(the label, whether it is apart) of the homes of this rank's states."""
    return {(unit.states.label, unit.states.is_apart) for unit in engine._layout.trained}


Run = tuple[list[float], float, dict[str, torch.Tensor], set[tuple[str, bool]]]


def train_cells(rank: int, world: int, schedule: str, dtype: str, folder: str) -> dict[str, Run]:
    found = {}
    for where in WHERE:
        for stage in (1, 2):
            with engine_of(world, where, config_of(where, folder, stage, dtype), schedule=schedule) as engine:
                losses = train(engine)
                places = places_of(engine)
                found[f"{where}, stage {stage}"] = losses, engine.get_global_grad_norm(), weights_of(engine), places
    return found


@pytest.mark.parametrize(("schedule", "dtype"), cells(SCHEDULES, ("fp32", "bf16"), at_once=1))
def test_states_elsewhere_do_not_change_a_bit(schedule: str, dtype: str, tmp_path: Path) -> None:
    outcome = run_ranks(4, train_cells, schedule, dtype, str(tmp_path))
    losses, weights = plain_run(2)
    tolerance = 5e-6 if dtype == "fp32" else 3e-2
    for rank, runs in enumerate(outcome):
        expected = runs["none, stage 1"]
        assert expected[0] == pytest.approx(losses, rel=tolerance), rank
        for name, value in expected[2].items():
            assert float((value.float() - weights[name]).abs().amax()) <= tolerance, (rank, name)
        for what, (got, norm, mine, places) in runs.items():
            where = what.split(", stage")[0]
            assert got == expected[0] and norm == pytest.approx(expected[1], rel=1e-6), (rank, what)
            for name, value in mine.items():
                assert torch.equal(value, expected[2][name]), (rank, what, name)
            assert ("file" in {label for label, _ in places}) == ("nvme" in where), (what, places)
            assert any(apart for _, apart in places) == WHERE[where][1], (what, places)
            assert len(places) == (2 if "ratio" in where else 1), (what, places)


def go_on(
    rank: int, world: int, where: str, loaded: str, saved: str, first: int, last: int, folder: str
) -> list[float]:
    stages = {"schedule": "zb_h1"} if world == 4 else {"schedule": "1f1b"}
    with engine_of(world, where, config_of(where, folder, 1 + first % 2), **stages) as engine:
        if loaded:
            engine.load_checkpoint(loaded)
            assert engine.global_steps == first
        losses = train(engine, first, last)
        if saved:
            engine.save_checkpoint(saved)
    return losses


@pytest.mark.parametrize("where", ["cpu", "nvme", "ratio of nvme"])
def test_checkpoints_go_from_any_place_to_any_other(where: str, tmp_path: Path) -> None:
    """Saved with offload and loaded without it, and the other way round."""
    expected, _ = plain_run(2, 4)
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    outcome = [
        run_ranks(4, go_on, where, "", one, 0, 1, str(tmp_path)),
        run_ranks(4, go_on, "none", one, two, 1, 2, str(tmp_path)),
        run_ranks(4, go_on, where, two, three, 2, 3, str(tmp_path)),
        run_ranks(4, go_on, where, three, "", 3, 4, str(tmp_path)),
    ]
    for step, by_rank in enumerate(outcome):
        for losses in by_rank:
            assert losses == pytest.approx(expected[step : step + 1], rel=2e-5), (step, losses)


def overflow(rank: int, world: int, where: str, folder: str) -> tuple[list[int], list[float], bool]:
    """A loss scale that is too large at first."""
    config = config_of(where, folder, 2, "fp16")
    config["fp16"] |= {"initial_scale_power": 40, "hysteresis": 1}
    skipped, scales = [], []
    with engine_of(world, where, config, schedule="zb_h1") as engine:
        before = weights_of(engine)
        for _ in range(3):
            train(engine, 0, 1)
            skipped.append(engine.skipped_steps)
            scales.append(engine.optimizer.cur_scale)
        same = all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
        while engine.skipped_steps == engine.global_steps:
            train(engine, 0, 1)
        moved = any(not torch.equal(value, before[name]) for name, value in weights_of(engine).items())
    return skipped, scales, same and moved


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_an_overflow_is_skipped_by_all_ranks(where: str, tmp_path: Path) -> None:
    outcome = run_ranks(4, overflow, where, str(tmp_path))
    assert all(found == outcome[0] for found in outcome), outcome
    assert outcome[0][0] == [1, 2, 3] and outcome[0][2], outcome


def fail_once(rank: int, world: int, where: str, folder: str) -> list[float]:
    """The losses of the steps around a batch in which the last stage raises an exception."""
    calls = 0

    def failing(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == N + 2:
            raise ValueError("no loss")
        return loss_fn(logits, labels)

    with engine_of(world, where, config_of(where, folder, 2)) as engine:
        engine.module.loss_fn = failing
        losses = train(engine, 0, 1)
        with pytest.raises(DeepSpeedCError, match="ValueError: no loss"):
            train(engine, 1, 2)
        return losses + train(engine, 1, 3)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_training_goes_on_after_an_exception_of_a_stage(where: str, tmp_path: Path) -> None:
    expected, _ = plain_run(2)
    for losses in run_ranks(4, fail_once, where, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=5e-6)


def freeze(rank: int, world: int, where: str, folder: str) -> tuple[list[float], int]:
    """The first stage is frozen, and has no states to move."""
    with mock.patch.object(place, "is_apart", lambda device: WHERE[where][1]):
        net = module_of(2, tied=False)
        if net.stage_id == 0:
            net.requires_grad_(requires_grad=False)
        engine, *_ = deepspeed_c.initialize(
            model=net,
            model_parameters=[p for p in net.parameters() if p.requires_grad],
            config=config_of(where, folder, 1),
        )
    with engine:
        return train(engine), sum(isinstance(unit.states, FileHome) for unit in engine._layout.trained)


def test_a_stage_may_have_nothing_to_move(tmp_path: Path) -> None:
    expected = [losses for losses, _ in run_ranks(2, freeze, "none", str(tmp_path))]
    for where in ("cpu", "nvme"):
        outcome = run_ranks(2, freeze, where, str(tmp_path))
        assert [losses for losses, _ in outcome] == expected, where
        assert [n > 0 for _, n in outcome] == [False, where == "nvme"], where


def refuse(rank: int, world: int, folder: str) -> dict[str, str]:
    """The errors of settings that do not fit, by what is wrong."""
    found = {}

    def said(what: str, config: dict[str, Any], where: str) -> None:
        try:
            engine_of(world, where, config).destroy()
        except DeepSpeedCError as error:
            found[what] = f"{type(error).__name__}: {error}"

    said("stage 0", config_of("cpu", folder, 0), "cpu")
    ahead = config_of("cpu", folder, 1)
    ahead["zero_optimization"]["offload_optimizer"]["super_offload"] = True
    said("updates ahead", ahead, "cpu")
    said("optimizer", config_of("nvme", folder, 1, optimizer={"type": "RMSprop"}), "nvme")
    # Only one rank of the last stage has no room for its file.
    no_room = ConfigError("no room", where="here", fix="make room")
    with mock.patch.object(place, "reserve", side_effect=no_room) if rank == 3 else nullcontext():
        said("no room", config_of("nvme", folder, 1), "nvme")
    return found


def test_what_cannot_be_is_refused_on_all_ranks(tmp_path: Path) -> None:
    said = {
        "stage 0": ("ConfigError", "shards no states"),
        "updates ahead": ("FeatureError", "super_offload", "at the end of a batch"),
        "optimizer": ("FeatureError", "RMSprop", "cannot lie on NVMe"),
        "no room": ("ConfigError", "no room"),
    }
    for found in run_ranks(4, refuse, str(tmp_path)):
        assert found.keys() == said.keys()
        for what, words in said.items():
            assert all(word in found[what] for word in words), (what, found)
