"""engine.fingerprint of models that are cut over ranks: the number of a checkpoint that is saved then, and of an engine
on one rank that has loaded it. A bit that is turned in a copy is named with its rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c import errors
from deepspeed_c.checkpoint.fingerprint import fingerprint_of_source
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.engine.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from tests.deepspeed_c.engine.test_fingerprint import make, train
from tests.deepspeed_c.inject import families, test_engine
from tests.deepspeed_c.moe import dense
from tests.deepspeed_c.moe import test_zero as moe
from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_checkpoint import ADAM
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.ranks import run_ranks
from tests.training import engine_of, update

PRELOAD = "tests.deepspeed_c.inject.preload"


def tensor_parallel(n_tp: int, stage: int, family: str = "llama") -> Any:
    return engine_of(families.make(family).train(), test_engine.make_config(n_tp, stage))


def pipeline(stages: int, stage: int, dtype: str = "fp32") -> Any:
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return engine_of(module_of(stages), config_of(2, **ADAM, zero_optimization={"stage": stage}, **precision))


def experts(size: int, stage: int) -> Any:
    return engine_of(dense.Model(moe.N_EXPERTS, (size, 1)), moe.config_of(stage, 1, "AdamW", {}))


MAKERS = {"tensor": tensor_parallel, "pipeline": pipeline, "experts": experts}


def train_axis(axis: str, engine: Any, rank: int) -> None:
    if axis == "tensor":
        test_engine.train(engine)
    elif axis == "pipeline":
        engine.train_batch(iter(micro_batches(0, engine.grid.get_data_parallel_rank(), 2)))
    else:
        moe.fill_engine(engine)
        update(engine, engine(*dense.batch(0, 0, rank)))


def saved(rank: int, world: int, axis: str, cells: list[tuple[int, int]], folder: str) -> list[int]:
    found = []
    for size, stage in cells:
        with MAKERS[axis](size, stage) as engine:
            before = engine.fingerprint()
            train_axis(axis, engine, rank)
            found.append(engine.fingerprint())
            assert before != found[-1]
            engine.save_checkpoint(folder, tag=f"{size}-{stage}")
            assert engine.fingerprint() == found[-1]
    return found


def loaded(rank: int, world: int, axis: str, cells: list[tuple[int, int]], folder: str) -> list[int]:
    found = []
    for size, stage in cells:
        with MAKERS[axis](1, 0) as engine:
            engine.load_checkpoint(folder, tag=f"{size}-{stage}")
            found.append(engine.fingerprint())
    return found


@pytest.mark.parametrize(
    ("axis", "world", "cells"),
    [
        ("tensor", 2, [(2, 0), (2, 3)]),
        ("tensor", 4, [(2, 1)]),
        ("pipeline", 2, [(2, 0), (2, 1)]),
        ("pipeline", 4, [(2, 1)]),
        ("experts", 2, [(2, 0), (2, 2), (2, 3)]),
        ("experts", 4, [(2, 1)]),
    ],
)
def test_a_cut_model_has_the_fingerprint_of_its_file_and_of_one_rank(tmp_path, axis, world, cells):
    every = run_ranks(world, saved, axis, cells, str(tmp_path), preload=PRELOAD)
    (alone,) = run_ranks(1, loaded, axis, cells, str(tmp_path), preload=PRELOAD)
    for i, (size, stage) in enumerate(cells):
        with open_checkpoint(str(tmp_path), f"{size}-{stage}") as source:
            expected = fingerprint_of_source(source).number
        found = [*(of_rank[i] for of_rank in every), alone[i]]
        assert found == [expected] * len(found), (size, stage, [f"{n:016x}" for n in found], f"{expected:016x}")


def turned(rank: int, world: int, axis: str, size: int, stage: int, name: str, odd: int, options: dict) -> str:
    """The error after a bit of ``name`` on rank ``odd``."""
    with MAKERS[axis](size, stage, **options) as engine:
        train_axis(axis, engine, rank)
        engine.fingerprint()
        if rank == odd:
            slots = [slot for unit in engine._optimizer.units for slot in unit.slots if slot.name.endswith(name)]
            data = (
                slots[0].unit.weight_piece(slots[0].unit.fragment_of[slots[0]]) if stage == 3 else slots[0].param.data
            )
            data.view(-1).view(torch.int16 if data.element_size() == 2 else torch.int32)[3] ^= 1
        with pytest.raises(errors.RankMismatchError) as raised:
            engine.fingerprint()
        return str(raised.value)


@pytest.mark.parametrize(
    ("axis", "world", "size", "stage", "name", "said", "options"),
    [
        ("tensor", 2, 2, 0, "model.norm.weight", "no copy has a majority: rank 0", {}),
        ("tensor", 4, 2, 0, "q_proj.weight", "no copy has a majority: rank 1 ", {}),
        ("experts", 4, 1, 1, "first.router.weight", "rank 1 differs from 3 ranks", {}),
        ("pipeline", 2, 2, 0, "embed.weight", "stage 0 (rank 0)", {"dtype": "bf16"}),
    ],
)
def test_a_turned_bit_of_a_cut_model_is_named(axis, world, size, stage, name, said, options):
    for error in run_ranks(world, turned, axis, size, stage, name, 1, options, preload=PRELOAD):
        assert name in error and said in error, error


def other_places(rank: int, world: int, folder: str) -> dict[str, list[int]]:
    """Place of states -> fingerprint of the engine, and of the file that it saves then."""
    cells = {
        "nvme": {"zero": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/nvme"}}},
        "nvme weights": {
            "zero": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/nvme"},
                "offload_param": {"device": "nvme", "nvme_path": f"{folder}/nvme"},
            }
        },
        "8 bits": {"params": {"state_dtype": "int8"}},
    }
    found = {}
    for place, more in cells.items():
        with make(3 if "zero" in more else 1, "bf16", **more) as engine:
            train(engine)
            number = engine.fingerprint()
            engine.save_checkpoint(folder, tag=place)
            with open_checkpoint(folder, place) as source:
                found[place] = [number, engine.fingerprint(), fingerprint_of_source(source).number]
    return found


def test_states_in_files_and_of_8_bits(tmp_path):
    for found in run_ranks(2, other_places, str(tmp_path)):
        for place, numbers in found.items():
            assert len(set(numbers)) == 1, (place, [f"{n:016x}" for n in numbers])


def offloaded(rank: int, world: int) -> None:
    with make(3, "bf16") as engine:
        train(engine)
        expected = engine.fingerprint()
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
        with pytest.raises(errors.StateError, match="fingerprint"):
            engine.fingerprint()
        engine.reload_states()
        assert engine.fingerprint() == expected


def test_states_that_are_away_are_refused():
    run_ranks(2, offloaded)
