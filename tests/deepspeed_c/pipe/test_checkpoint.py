"""A checkpoint of a pipeline loads into any other arrangement, and training goes on as without the change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.checkpoint.open import open_checkpoint
from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.ranks import run_ranks
from tests.training import engine_of

N = 4
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def go_on(
    rank: int, world: int, stages: int, zero: int, options: dict[str, Any], folder: str, first: int, last: int, tag: str
) -> list[float]:
    """The losses of steps ``first`` to ``last``. Loads a checkpoint before them if there is one, and saves after
    them."""
    net = module_of(stages, **options)
    n = N // (world // stages)
    engine = engine_of(net, config_of(n, **ADAM, zero_optimization={"stage": zero}))
    with engine:
        if first:
            engine.load_checkpoint(folder)
            assert engine.global_steps == first
        losses = []
        for step in range(first, last):
            # All pipelines together see the same micro-batches, whatever their number.
            everything = micro_batches(step, 0, N)
            mine = everything[net.mpu().get_data_parallel_rank() * n :][:n]
            losses.append(float(engine.train_batch(iter(mine))))
        if tag:
            engine.save_checkpoint(folder, tag=tag)
    return losses


ARRANGEMENTS = {
    "2 stages": (2, 2, 1, {}),
    "1 rank": (1, 1, 0, {}),
    "2 x 2, stage 2": (4, 2, 2, {}),
    "4 stages": (4, 4, 0, {"schedule": "zb_h1"}),
    "V": (2, 2, 1, {"schedule": "zb_v"}),
    "two pipelines of one": (2, 1, 1, {}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict[str, str], list[float]]:
    folders = {}
    for name, (world, stages, zero, options) in ARRANGEMENTS.items():
        folders[name] = str(tmp_path_factory.mktemp("saved"))
        run_ranks(world, go_on, stages, zero, options, folders[name], 0, 2, "two")
    whole = run_ranks(1, go_on, 1, 0, {}, str(tmp_path_factory.mktemp("none")), 0, 4, "")[0]
    return folders, whole


@pytest.mark.parametrize("target", ARRANGEMENTS)
@pytest.mark.parametrize("source", ARRANGEMENTS)
def test_any_arrangement_loads_any_other(saved, source, target):
    folders, whole = saved
    world, stages, zero, options = ARRANGEMENTS[target]
    for losses in run_ranks(world, go_on, stages, zero, options, folders[source], 2, 4, ""):
        assert losses == pytest.approx(whole[2:], rel=2e-5), f"{losses} and {whole[2:]}"


def test_another_cut_loads(saved):
    """Files do not depend on the layers that ranks had, so a checkpoint outlives a change of the cut."""
    folders, whole = saved
    for cut in ([0, 1, 9], [0, 7, 9]):
        for losses in run_ranks(2, go_on, 2, 1, {"partition_method": cut}, folders["2 stages"], 2, 4, ""):
            assert losses == pytest.approx(whole[2:], rel=2e-5), f"{cut}: {losses} and {whole[2:]}"


def test_every_element_is_saved_once(saved):
    folders, _ = saved
    with open_checkpoint(folders["1 rank"], "two") as one:
        expected = {key: (tensor.shape, tensor.dtype) for key, tensor in one.tensors.items()}
        kinds = {name: info.group for name, info in one.params.items()}
    for name, folder in folders.items():
        with open_checkpoint(folder, "two") as source:
            assert {key: (tensor.shape, tensor.dtype) for key, tensor in source.tensors.items()} == expected, name
            assert {name: info.group for name, info in source.params.items()} == kinds


def plain_load(rank: int, world: int, folder: str) -> tuple[list[str], list[str]]:
    """Loads into a plain model, not a pipeline, whose layers have their numbers as names."""
    from tests.deepspeed_c.pipe.models import VOCABULARY, WIDTH, Block

    layers = torch.nn.Sequential(torch.nn.Identity(), *(Block(WIDTH) for _ in range(6)), torch.nn.LayerNorm(WIDTH))
    layers.tied_modules = torch.nn.ModuleDict({"embed": torch.nn.Embedding(VOCABULARY, WIDTH)})
    engine = engine_of(layers, config_of(1, **ADAM))
    with engine:
        engine.load_checkpoint(folder, tag="two")
        return float(layers[1].up.weight.double().sum()), float(layers.tied_modules["embed"].weight.double().sum())


def test_a_model_without_a_pipeline_loads_it(saved):
    folders, _ = saved
    assert run_ranks(1, plain_load, folders["4 stages"])[0] == pytest.approx(
        run_ranks(1, plain_load, folders["1 rank"])[0]
    )
