"""An engine with ``autotuning.enabled`` times its steps, writes the metric file, and ends the run."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.config import load_config
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.errors import ConfigError
from tests import training
from tests.ranks import run_ranks

WIDTH = 7
SLEEP_SECONDS = 0.05


class Slow(nn.Module):
    """A layer whose forward sleeps, so that its least time is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_SECONDS)
        return self.layer(x).square().mean()


def trained(rank: int, world: int, path: str, section: dict, most: int = 20) -> tuple[object, int, str]:
    """(exit code or None, steps that were taken, the text of a ConfigError)."""
    config = training.config(rows=3, accumulate=2, lr=0.01, autotuning={"metric_path": path, **section})
    torch.manual_seed(0)
    engine = deepspeed_c.initialize(model=Slow(), config=config)[0]
    steps = 0
    try:
        for _ in range(most):
            for _ in range(2):
                training.step(engine, torch.ones(3, WIDTH))
            steps += 1
    except SystemExit as stop:
        return stop.code, steps + 1, ""
    except ConfigError as error:
        engine.close()
        return None, steps + 1, str(error)
    engine.close()
    return None, steps, ""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("window", [(0, 0), (1, 3)])
def test_times_and_samples(tmp_path, world, window):
    path = tmp_path / "deep" / "metrics.json"
    start, end = window
    if has_folder := world == 2:  # otherwise the number of steps so far has no place to be written to
        path.parent.mkdir()
    section = {"enabled": True, "start_profile_step": start, "end_profile_step": end, "metric": "flops"}
    assert run_ranks(world, trained, str(path), section) == [(0, end + 1, "")] * world
    found = json.loads(path.read_text())
    # Two forwards a step, and each of them sleeps.
    assert found["latency"] >= 2 * SLEEP_SECONDS and found["latency"] < 100 * SLEEP_SECONDS
    assert found["throughput"] == pytest.approx(6 * world / found["latency"])
    assert 2 * SLEEP_SECONDS <= found["forward"] <= found["latency"]
    assert 0 < found["step"] < found["latency"] and 0 < found["backward"] < found["latency"]
    # A product of 3 x WIDTH with WIDTH x WIDTH, a bias, and what the mean of squares adds.
    n_flops = round(found["flops"] * found["latency"] / 6)
    assert 2 * 3 * WIDTH * WIDTH <= n_flops <= 2 * 3 * WIDTH * WIDTH + 5 * 3 * WIDTH
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (6 * world, 3)
    assert found["inputs"] == [{"shape": [3, WIDTH], "is_floating_point": True}] and found["n_ranks"] == world
    assert found["peak_host_bytes"] > 1 << 20
    names = ["metrics.json", "steps.txt"] if has_folder else ["metrics.json"]
    assert sorted(file.name for file in path.parent.iterdir()) == names
    if has_folder:
        assert (path.parent / "steps.txt").read_text() == str(end + 1)


def test_section_that_is_off_changes_nothing(tmp_path):
    path = tmp_path / "metrics.json"
    assert run_ranks(1, trained, str(path), {"end_profile_step": 3}, 6) == [(None, 6, "")]
    assert not path.exists()


def test_file_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    section = {"enabled": True, "start_profile_step": 0, "end_profile_step": 1}
    for code, steps, text in run_ranks(2, trained, str(tmp_path / "file" / "metrics.json"), section):
        assert (code, steps) == (None, 2) and "autotuning.metric_path" in text and "Fix:" in text


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"start_profile_step": 4, "end_profile_step": 3}, "autotuning.end_profile_step"),
        (
            {"min_train_micro_batch_size_per_gpu": 4, "max_train_micro_batch_size_per_gpu": 3},
            "autotuning.max_train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_ranges_that_are_empty(section, where):
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "autotuning": section}, world_size=1)
    assert caught.value.where == where and caught.value.fix


def test_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
