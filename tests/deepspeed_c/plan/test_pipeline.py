"""Plans of pipelines are compared with engines that run: bytes of weights, and the gathers of a batch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.buffers import GRANULE_BYTES
from deepspeed_c.launcher.main import main
from deepspeed_c.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_c.plan.memory import GATHERED, WEIGHTS
from deepspeed_c.plan.pipeline import as_json, plan_pipeline
from deepspeed_c.plan.script import find_model
from tests.deepspeed_c.pipe.models import VOCABULARY, Block, Embed, as_logits, loss_fn, micro_batches
from tests.ranks import run_ranks
from tests.training import config, engine_of

WIDTH, N, TOLERANCE = 64, 4, 0.05
LARGEST = 3 * WIDTH * WIDTH
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2}
# All units of a rank, less than a stage, and one unit.
LIMITS = {"all": 10**9, "between": 60_000, "one": LARGEST}

SCRIPT = """
import json, sys
import deepspeed_c
from tests.deepspeed_c.plan.test_pipeline import module_of
net = module_of(sys.argv[1], int(sys.argv[2]))
deepspeed_c.initialize(model=net, model_parameters=net.parameters(), config=json.loads(sys.argv[3]))
"""


def module_of(schedule: str, virtual: int) -> PipelineModule:
    layers = [
        TiedLayerSpec("embed", Embed, WIDTH),
        *(LayerSpec(Block, WIDTH) for _ in range(5)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embed, WIDTH, forward_fn=as_logits),
    ]
    return PipelineModule(
        layers, num_stages=2, loss_fn=loss_fn, seed_layers=True, schedule=schedule, virtual_stages=virtual
    )


def config_of(stage: int, limit: int) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "reduce_bucket_size": LARGEST,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": limit,
    }
    return config(rows=2, accumulate=N, optimizer="SGD", zero_optimization=zero, comm={"local": "off"})


def measured(rank: int, world: int, schedule: str, virtual: int, config: dict[str, Any]) -> dict[str, int]:
    """The bytes of weights of a rank, and the gathers of its third batch."""
    net = module_of(schedule, virtual)
    with engine_of(net, config) as engine:
        data_rank, fetcher = net.mpu().get_data_parallel_rank(), engine._fetcher
        for step in range(3):
            if fetcher is not None:
                before = fetcher.stats.n_gathers, fetcher.stats.n_received_bytes
            engine.train_batch(iter(micro_batches(step, data_rank, N)))
        if fetcher is None:
            return {"weights": sum(p.numel() * p.element_size() for p in net.parameters())}
        return {
            "weights": sum(unit.weight_bytes for unit in {group.unit for group in fetcher.groups}),
            "gathered": fetcher.means.pool.n_bytes,
            "max_live_elems": fetcher.stats.max_live_elems,
            "elems": sum(group.numel for group in fetcher.groups),
            "n_gathers": fetcher.stats.n_gathers - before[0],
            "received_bytes": fetcher.stats.n_received_bytes - before[1],
        }


def _plan(folder: Path, schedule: str, config: dict[str, Any], **options: Any) -> dict[str, Any]:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    find = partial(find_model, str(path), [schedule, str(SCHEDULES[schedule]), json.dumps(config)], 4)
    first = find(rank=0)
    found = plan_pipeline(lambda rank: find(rank=rank), first, first.read_source(), 4, **options)
    return json.loads(json.dumps(as_json(found)))


@pytest.fixture
def plan(tmp_path: Path):
    """Returns a function that plans a run of 2 x 2 ranks under its own configuration, as JSON."""
    return partial(_plan, tmp_path, every_stage=False)


def chosen(rank: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in rank["rows"] if row["is_chosen"])


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_3_pipeline_has_the_planned_weights_and_gathers(schedule, limit, plan):
    config = config_of(3, LIMITS[limit])
    found = plan(schedule, config)
    assert found["pipelines"] == 2 and [rank["rank"] for rank in found["ranks"]] == [0, 2]
    outcome = run_ranks(4, measured, schedule, SCHEDULES[schedule], config)
    for rank in found["ranks"]:
        real, batch, kinds = outcome[rank["rank"]], rank["batch"], chosen(rank)["phases"]["batch"]["kinds"]
        for name, planned in (("weights", kinds[WEIGHTS]), ("gathered", kinds[GATHERED])):
            assert planned == pytest.approx(real[name], rel=TOLERANCE), (rank["rank"], name)
        for name in ("elems", "n_gathers", "received_bytes"):
            assert batch[name] == pytest.approx(real[name], rel=TOLERANCE), (rank["rank"], name)
        planned = chosen(rank)["gathered_elems"]
        assert planned == pytest.approx(real["max_live_elems"], rel=TOLERANCE), rank["rank"]
        # In the first batch orders are guesses, and a use that they lack is gathered beside the others.
        assert real["max_live_elems"] <= min(LIMITS[limit], real["elems"]) + (limit != "all") * LARGEST
        if limit == "all":
            # Half of the stage, and all of it. The buffer of each unit is rounded up.
            both = kinds[WEIGHTS] + kinds[GATHERED], real["weights"] + 4 * real["elems"]
            assert both[1] <= both[0] <= both[1] + GRANULE_BYTES * batch["n_units"], both
        assert batch["peak_elems"] == max(moment["elems"] for moment in batch["live"])
        if limit == "all":
            assert batch["n_gathers"] == real["n_gathers"] == batch["n_units"] and batch["more_gathers"] == 0
            assert batch["received_bytes"] == real["received_bytes"] == 2 * batch["elems"]
            assert batch["peak_elems"] == batch["elems"]
        else:
            assert batch["more_gathers"] == batch["n_gathers"] - batch["n_units"]
            assert batch["more_bytes"] == batch["received_bytes"] - 2 * batch["elems"]
            assert (batch["more_gathers"] > 0) == (batch["elems"] > LIMITS[limit]), batch


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_hold_their_weights_whole(stage, plan):
    config = config_of(stage, 10**9)
    found = plan("1f1b", config)
    outcome = run_ranks(4, measured, "1f1b", 1, config)
    for rank in found["ranks"]:
        row = chosen(rank)
        assert row["stage"] == stage and rank["batch"] is None
        assert row["phases"]["batch"]["kinds"][WEIGHTS] == pytest.approx(outcome[rank["rank"]]["weights"], rel=0.05)
    assert sum(rank["params"] for rank in found["ranks"]) == sum(p.numel() for p in _whole().parameters()) + (
        VOCABULARY * WIDTH
    )


def _whole() -> nn.Module:
    return nn.Sequential(Embed(WIDTH), *(Block(WIDTH) for _ in range(5)), nn.LayerNorm(WIDTH))


def test_the_text_says_layers_gathers_and_the_cost_of_the_limit(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    words = ["plan", "--ranks", "4", "--device", "cpu", str(path), "1f1b", "1", json.dumps(config_of(3, LARGEST))]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "2 parallel pipelines of 2 ranks, built for 1f1b, 4 micro-batches" in out
    assert "rank 0 (stage 0: layers 0 to " in out and "rank 2 (stage 1: layers " in out
    stages = {line[4] for line in out.splitlines() if line[5:11] == " " * 6 and line[4:5].isdigit()}
    assert stages == set("0123"), out
    assert "summed whole over the micro-batches" in out and "the limit costs " in out and "0F0:" in out


@pytest.mark.parametrize("words", [["--batch", "2"], ["--generate", "1x2x3"], ["--device-memory", "1GiB"]])
def test_what_plans_whole_models_is_refused(words, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    arguments = ["1f1b", "1", json.dumps(config_of(3, LARGEST))]
    assert main(["plan", "--ranks", "4", *words, str(path), *arguments]) == 2
    said = capsys.readouterr().err
    assert words[0] in said and "PipelineModule" in said


def test_a_limit_below_a_unit_is_a_refused_row(plan):
    rank = plan("1f1b", config_of(3, LARGEST - 1))["ranks"][0]
    assert "stage3_max_live_parameters" in chosen(rank)["refused"], chosen(rank)
    assert torch.empty(1).device.type == "cpu"
