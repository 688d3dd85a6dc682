"""engine.fingerprint: one number for every stage and number of ranks, and the rank whose copy differs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c import _C, errors
from deepspeed_c.checkpoint.fingerprint import fingerprint_of_source
from deepspeed_c.checkpoint.native.save import OwnedPiece
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import Box
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.engine.fingerprint import RankPrints
from deepspeed_c.logging import logger
from tests import training
from tests.ranks import on_ranks, run_ranks

STAGES = (0, 1, 2, 3)
PLACES: dict[str, dict[str, Any]] = {
    "stay": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "params": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


class Net(nn.Module):
    """Sizes that nothing divides, so that buckets are padded; an empty, a one-element, a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 13)
        self.up = nn.Linear(13, 29)
        self.down = nn.Linear(29, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        hidden = self.embedding(tokens)
        hidden = self.down(torch.relu(self.up(hidden))) * self.scale
        return self.head(hidden + self.frozen(hidden)).float().pow(2).mean()


def make(stage: int, dtype: str, seed: int = 0, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    torch.manual_seed(seed)
    zero = {"stage3_param_persistence_threshold": 14, "reduce_bucket_size": 500, "stage": stage, **(zero or {})}
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return training.engine_of(Net(), training.config(None, "AdamW", rows=2, lr=0.01, zero=zero, **precision, **more))


def train(engine: Any, n_steps: int = 1) -> None:
    for step in range(n_steps):
        generator = torch.Generator().manual_seed(100 * step + engine.global_rank)
        training.step(engine, torch.randint(0, 37, (2, 3), generator=generator))


def saved(rank: int, world: int, folder: str) -> dict[str, int]:
    """dtype -> the fingerprint of the engine that saved."""
    found = {}
    for dtype in ("fp32", "bf16"):
        with make(2, dtype) as engine:
            train(engine, 2)
            found[dtype] = engine.fingerprint()
            engine.save_checkpoint(folder, tag=dtype)
            assert engine.fingerprint() == found[dtype]
            train(engine)
            assert engine.fingerprint() != found[dtype]
    return found


def loaded(rank: int, world: int, folder: str) -> dict[tuple[str, int, str], int]:
    """(dtype, stage, place of states) -> the fingerprint of an engine that has loaded the checkpoint of the dtype."""
    found = {}
    for dtype in ("fp32", "bf16"):
        for stage in STAGES:
            for place, zero in PLACES.items():
                if zero and stage not in (2, 3):
                    continue
                with make(stage, dtype, seed=9, zero=zero) as engine:
                    engine.load_checkpoint(folder, tag=dtype)
                    found[dtype, stage, place] = engine.fingerprint()
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("fingerprints"))
    return folder, run_ranks(2, saved, folder)[0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_and_world_has_the_fingerprint_of_the_file(checkpoints, world):
    folder, expected = checkpoints
    for found in run_ranks(world, loaded, folder):
        assert {key: f"{number:016x}" for key, number in found.items()} == {
            key: f"{expected[key[0]]:016x}" for key in found
        }


def test_the_file_has_the_fingerprint_of_the_engine(checkpoints):
    folder, expected = checkpoints
    for dtype, number in expected.items():
        with open_checkpoint(folder, dtype) as source:
            found = fingerprint_of_source(source)
        assert found.number == number
        assert ("param", "empty") in found.tensors and ("exp_avg", "scale") in found.tensors
        assert ("buffer", "calls") not in found.tensors


def with_a_bit_turned(rank: int, world: int, stage: int, dtype: str, what: str, odd: int) -> tuple[str, list[str]]:
    """The error, and the lines of the log before it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    zero = {"mics_shard_size": 1} if stage == 3 else None  # each rank has a copy of the only shard
    try:
        with make(stage, dtype, zero=zero, fingerprint_every=2) as engine:
            train(engine, 2)
            if rank == odd:
                slot = next(s for u in engine._optimizer.units for s in u.slots if s.name == "up.weight")
                if what == "weight":
                    fragment = slot.unit.fragment_of[slot]
                    data = slot.unit.weight_piece(fragment) if stage == 3 else slot.param.data.view(-1)
                else:
                    data = engine._optimizer.pieces.local(slot, what)
                bits = data.view(torch.int16 if data.element_size() == 2 else torch.int32)
                bits[5] ^= 1
            with pytest.raises(errors.RankMismatchError) as raised:
                engine.fingerprint()
            return str(raised.value), lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("stage", "dtype", "what"),
    [
        (0, "fp32", "weight"),
        (0, "bf16", "exp_avg"),
        (1, "bf16", "weight"),
        (2, "fp32", "weight"),
        (3, "bf16", "weight"),
    ],
)
def test_a_turned_bit_is_named_with_its_rank(stage, dtype, what):
    results = run_ranks(3, with_a_bit_turned, stage, dtype, what, 1)
    kind = "param" if what == "weight" else what
    for error, _ in results:
        assert f"fingerprint: {kind} of up.weight, " in error
        assert "rank 1 differs from 2 ranks" in error
    logged = [[line for line in lines if ": fingerprint" in line] for _, lines in results]
    assert len(logged[0]) == 1 and logged[0][0].startswith("step 2: fingerprint ")
    assert logged[1:] == [[], []]


def step_after_a_turned_bit(rank: int, world: int) -> str:
    with make(0, "bf16", fingerprint_every=2) as engine:
        train(engine, 1)
        slot = next(s for u in engine._optimizer.units for s in u.slots)
        if rank == 1:
            engine._optimizer.pieces.local(slot, "exp_avg_sq").view(torch.int32)[0] ^= 1 << 20
        with pytest.raises(errors.RankMismatchError) as raised:
            train(engine, 1)
        return str(raised.value)


def test_training_ends_on_all_ranks_when_a_copy_differs():
    for error in run_ranks(2, step_after_a_turned_bit):
        assert "no copy has a majority: rank 0 " in error and "rank 1 " in error


def before_the_first_update(rank: int, world: int, folder: str) -> dict[tuple[str, str], dict[tuple[str, int], int]]:
    """(dtype, moment) -> (place of the states, stage) -> fingerprint."""
    places = {
        "memory": {},
        "cpu": {"offload_optimizer": {"device": "cpu"}},
        "nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/states"}},
    }
    # A scale at which the gradients of fp16 overflow, and no step but the first.
    sections = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 60, "hysteresis": 1}}}
    found: dict[tuple[str, str], dict[tuple[str, int], int]] = {}
    for dtype, section in sections.items():
        for place, zero in places.items():
            for stage in STAGES:
                if stage == 0 and zero:  # stage 0 shards nothing that could be offloaded
                    continue
                with make(stage, "fp32", zero=zero, **section) as engine:
                    number = engine.fingerprint()
                    found.setdefault((dtype, "new"), {})[place, stage] = number
                    assert {kind for kind, _ in engine.tensor_fingerprints()} == {"param"}
                    engine.save_checkpoint(folder, tag=f"{dtype}{place}{stage}")
                    with open_checkpoint(folder, f"{dtype}{place}{stage}") as source:
                        assert fingerprint_of_source(source).number == number, (dtype, place, stage)
                    train(engine)
                    assert engine.skipped_steps == (1 if dtype == "fp16" else 0)
                    found.setdefault((dtype, "stepped"), {})[place, stage] = engine.fingerprint()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_states_count_from_the_first_update_on(world, tmp_path):
    for found in run_ranks(world, before_the_first_update, str(tmp_path)):
        for moment, numbers in found.items():
            assert len({f"{number:016x}" for number in numbers.values()}) == 1, (moment, numbers)
        one = {moment: numbers["memory", 0] for moment, numbers in found.items()}
        assert one["fp16", "stepped"] == one["fp16", "new"], one
        assert one["fp32", "stepped"] != one["fp32", "new"], one


def piece_of(whole: torch.Tensor, box: Box | None, begin: int, end: int) -> OwnedPiece:
    part = whole if box is None else whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
    return OwnedPiece("param", "w", tuple(whole.shape), begin, part.reshape(-1)[begin:end], box)


@on_ranks(1)
def test_pieces_of_boxes_make_up_the_tensor(rank, world):
    whole = torch.randn(5, 7, 3)
    alone = Collectives(is_alone=True)
    expected = RankPrints(alone).of([piece_of(whole, None, 0, 105)], ["w"])
    left, right = Box((0, 0, 0), (5, 2, 3)), Box((0, 2, 0), (5, 5, 3))
    cuts = [(left, 0, 11), (left, 11, 30), (right, 0, 75)]
    found = RankPrints(alone).of([piece_of(whole, *cut) for cut in cuts], ["w"])
    assert found.tensors == expected.tensors
    assert found.tensors["param", "w"].crc == _C.crc32c(whole.numpy())
    with pytest.raises(errors.StateError, match="94 elements, and the tensor has 105"):
        RankPrints(alone).of([piece_of(whole, *cut) for cut in cuts[1:]], ["w"])


@on_ranks(1)
def test_tensors_are_listed_by_kind_and_name(rank, world):
    with make(0, "fp32") as engine:
        train(engine)
        found = engine.tensor_fingerprints()
        assert found["param", "scale"].shape == (1,) and found["exp_avg", "up.weight"].shape == (29, 13)
        before = engine.fingerprint()
        train(engine)
        after = engine.tensor_fingerprints()
        assert engine.fingerprint() != before
        assert after["param", "frozen.weight"] == found["param", "frozen.weight"]
        assert after["param", "up.weight"].crc != found["param", "up.weight"].crc
