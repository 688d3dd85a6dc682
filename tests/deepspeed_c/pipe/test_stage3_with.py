"""Pipelines at ZeRO stage 3 together with other features: evaluation, frozen layers, recomputation, fp16, checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES
from tests.deepspeed_c.pipe.test_stage3 import TIGHT, TOLERANCE, check, plain, stage3, train
from tests.ranks import run_ranks
from tests.training import engine_of, whole_weights

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recomputed": ({"activation_checkpoint_interval": 2}, {}),
    "recomputed by torch": (
        {"activation_checkpoint_interval": 2, "activation_checkpoint_func": partial(checkpoint, use_reentrant=False)},
        {},
    ),
    "recomputed by section": ({}, {"activation_checkpointing": {"layers": "auto"}}),
    "a stage of one layer": ({"partition_method": [0, 1, 9]}, {}),
    "limit of activations": ({}, {"pipeline": {"schedule": "auto", "activation_bytes_limit": 10**9}}),
    "untied": ({"tied": False}, {}),
}


@pytest.mark.parametrize("limit", [{}, TIGHT], ids=["all", "one"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, limit):
    options, sections = VARIANTS[variant]
    outcome = run_ranks(4, train, 2, 4, stage3(4, limit, **sections), options)
    check(outcome, plain(2, 4, tied=options.get("tied", True)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages_of_one_rank(schedule):
    n = 8
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    check(run_ranks(4, train, 4, n, stage3(n), options), plain(1, n))


def train_frozen(rank: int, world: int, stages: int, limit: dict[str, Any]) -> Any:
    """All weights of the first half are frozen, except for norms, as adapters beside frozen weights are."""
    net = module_of(stages, tied=False)
    for name, param in net.named_parameters():
        param.requires_grad_(int(name.split(".")[0]) >= 4 or "norm" in name)
    trained = [p for p in net.parameters() if p.requires_grad]
    with engine_of(net, stage3(4 // (world // stages), limit), model_parameters=trained) as engine:
        data_rank = net.mpu().get_data_parallel_rank()
        losses, evals = [], []
        for step in range(5):
            batches = [b for r in range(2) for b in micro_batches(step, r, 2)]
            mine = batches if world == stages else batches[2 * data_rank : 2 * data_rank + 2]
            evals.append(
                float(
                    engine.eval_batch(
                        iter(mine[:1] if world > stages else batches[::2]), num_micro_batches=1 if world > stages else 2
                    )
                )
            )
            losses.append(float(engine.train_batch(iter(mine))))
        return losses, evals


@pytest.mark.parametrize("limit", [{}, TIGHT], ids=["all", "one"])
def test_frozen_weights_and_evaluation(limit):
    one = run_ranks(1, train_frozen, 1, {})[0]
    for got in run_ranks(4, train_frozen, 2, limit):
        assert got[0] == pytest.approx(one[0], rel=TOLERANCE), (got, one)
        assert got[1] == pytest.approx(one[1], rel=TOLERANCE), (got, one)


def overflow(rank: int, world: int) -> tuple[list[int], list[float]]:
    net = module_of(2)
    skipped, losses = [], []
    with engine_of(net, stage3(2, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})) as engine:
        before = whole_weights(net)
        for step in range(3):
            losses.append(float(engine.train_batch(iter(micro_batches(step, net.mpu().get_data_parallel_rank(), 2)))))
            skipped.append(engine.skipped_steps)
        after = whole_weights(net)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return skipped, losses


def test_all_stages_skip_together():
    outcome = run_ranks(4, overflow)
    assert [skipped for skipped, _ in outcome] == [[1, 2, 3]] * 4, outcome


def half(rank: int, world: int, stages: int, folder: str, begin: int, end: int, stage: int) -> Any:
    net = module_of(stages)
    n_pipelines = world // stages
    config = stage3(4 // n_pipelines, {"stage": stage})
    with engine_of(net, config) as engine:
        if begin:
            engine.load_checkpoint(folder)
        losses = []
        for step in range(begin, end):
            batches = [b for r in range(2) for b in micro_batches(step, r, 2)]
            at = net.mpu().get_data_parallel_rank() * 4 // n_pipelines
            losses.append(float(engine.train_batch(iter(batches[at : at + 4 // n_pipelines]))))
        if not begin:
            engine.save_checkpoint(folder)
        return losses


@pytest.mark.parametrize(
    "first, second",
    [
        ((4, 2, 3), (2, 1, 3)),
        ((4, 2, 3), (2, 2, 1)),
        ((2, 1, 3), (4, 2, 3)),
        ((4, 4, 3), (4, 2, 3)),
        ((1, 1, 0), (4, 2, 3)),
    ],
    ids=str,
)
def test_checkpoints_load_into_other_arrangements(first, second, tmp_path: Path):
    losses, _ = plain(2, 2)
    (world, stages, stage) = first
    for got in run_ranks(world, half, stages, str(tmp_path), 0, 2, stage):
        assert got == pytest.approx(losses[:2], rel=TOLERANCE)
    (world, stages, stage) = second
    for got in run_ranks(world, half, stages, str(tmp_path), 2, 5, stage):
        assert got == pytest.approx(losses[2:5], rel=TOLERANCE)


def weighed(rank: int, world: int, stage: int) -> list[tuple[int, int]]:
    net = module_of(2)
    with engine_of(net, stage3(4, {"stage": stage}, pipeline={"activation_bytes_limit": 10**9})) as engine:
        engine.train_batch(iter(micro_batches(0, net.mpu().get_data_parallel_rank(), 4)))
        return [(cost.kept_bytes, cost.weight_bytes) for cost in engine._costs]


def test_gathered_weights_are_no_activations():
    sharded, whole = (run_ranks(4, weighed, stage) for stage in (3, 2))
    assert sharded == whole, (sharded, whole)
