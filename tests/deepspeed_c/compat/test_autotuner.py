"""compat/autotuner.py: searches and experiments that a program starts."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from deepspeed_c.compat.autotuner import Autotuner, ResourceManager
from deepspeed_c.compat.launcher_runner import parse_args
from deepspeed_c.errors import ConfigError, StateError
from tests.deepspeed_c.autotuning.test_tune import SCRIPT, TIMES, write_config

STEPS = {"train_micro_batch_size_per_gpu": " --micro "}


def args_of(folder, *words, n_ranks=1, **section):
    return parse_args(["--num_procs", str(n_ranks), str(SCRIPT), *write_config(folder, **section), *words])


def test_a_search_and_the_run_after_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    tuner = Autotuner(args_of(tmp_path, sizes=[2]), {"localhost": [0]})
    for early in (tuner.print_tuning_results, tuner.run_after_tuning, tuner.write_optimal_config):
        with pytest.raises(StateError, match="call tune"):
            early()
    tuner.tune()
    tuner.write_optimal_config()
    capfd.readouterr()
    tuner.print_tuning_results()
    assert "best: z0_gas1_tmbspg2; 1 of 1 ran" in capfd.readouterr().out
    tuner.run_after_tuning()
    assert "trained to the end" in capfd.readouterr().out
    optimal = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert optimal["train_micro_batch_size_per_gpu"] == 2


def test_experiments_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = {"enabled": True, **TIMES}
    paths = []
    for size in (1, 2):
        config = {"train_micro_batch_size_per_gpu": size, "optimizer": {"type": "SGD"}, "autotuning": section}
        paths.append(tmp_path / f"exp{size}.json")
        paths[-1].write_text(json.dumps({"name": f"exp{size}", "ds_config": config}))
    args = args_of(tmp_path, "--behaviour", "fails at 2")
    manager = ResourceManager(args, ["localhost"], 1, str(tmp_path / "results"), str(tmp_path), STEPS)
    manager.schedule_experiments([str(path) for path in paths])
    manager.schedule_experiments([str(paths[0])])  # known
    assert manager.parse_results("latency") == (None, None)
    manager.run()
    (first, problem), (_, failed) = manager.finished_experiments[0], manager.finished_experiments[1]
    assert problem is None and failed == "exit code 1"
    for metric in ("throughput", "latency"):
        best, value = manager.parse_results(metric)
        assert best is first and value == first["results"][metric] > 0
    assert "--micro 1" in (tmp_path / "results" / "exp1" / "cmd.txt").read_text()
    manager.schedule_experiments([])
    assert manager.experiment_queue == []


def test_the_smallest_time_and_the_largest_rate_are_best(tmp_path):
    manager = ResourceManager(args_of(tmp_path), [], 1, "results", "exps", None)
    for i, value in enumerate((3.0, 1.0, 2.0)):
        manager.finished_experiments[i] = {"results": {"latency": value, "throughput": value}}, None
    assert manager.parse_results("latency")[1] == 1.0 and manager.parse_results("throughput")[1] == 3.0


def test_what_a_section_says(tmp_path):
    (tmp_path / "x").mkdir()
    mappings = {"gradient_accumulation_steps": "--steps"}
    args = args_of(
        tmp_path, "--steps", "4", n_ranks=2, arg_mappings=mappings, max_train_batch_size=64, metric="latency"
    )
    path = tmp_path / "ds.json"
    config = json.loads(path.read_text()) | {"gradient_accumulation_steps": "auto", "fp16": {"enabled": True}}
    path.write_text(json.dumps(config))
    args.user_args[1] = str(path)
    tuner = Autotuner(args, {"localhost": [0, 1]})
    assert (tuner.metric(), tuner.fast_enabled(), tuner.fp16_enabled(), tuner.mp_size()) == ("latency", True, True, 1)
    assert tuner.get_gas_from_user_config() == 4 and tuner.get_val_from_user_args("train_batch_size") is None
    assert tuner.max_train_micro_batch_size_per_gpu() == 64 // (4 * 2)
    assert (tuner.min_train_micro_batch_size_per_gpu(), tuner.num_tuning_micro_batch_sizes()) == (1, 3)
    assert tuner.max_train_batch_size() == 64
    with pytest.raises(ConfigError, match="has 3 slots.* 2 ranks"):
        Autotuner(args, {"localhost": [0, 1, 2]})


def test_wrong_arguments_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="parse_args"):
        Autotuner(Namespace(user_script="a.py", user_args=[]), {})
    (tmp_path / "exp.json").write_text("{}")
    manager = ResourceManager(args_of(tmp_path), [], 1, "results", "exps", None)
    with pytest.raises(ConfigError, match="has no name"):
        manager.schedule_experiments([str(tmp_path / "exp.json")])
    with pytest.raises(ConfigError):
        manager.schedule_experiments([str(tmp_path / "none.json")])
