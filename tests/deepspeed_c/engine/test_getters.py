"""The engine's getters for its configuration: each returns a value, and computed values are right."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.engine.getters import GETTERS, ConfigGetters
from deepspeed_c.errors import FeatureError
from tests.deepspeed_c.zero.traits import Mlp, batch
from tests.ranks import on_ranks, run_ranks


def make(extra: dict, model: nn.Module | None = None):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **extra}
    return deepspeed_c.initialize(model=model or Mlp(), config=config)[0]


def answers_body(rank: int, world: int, extra: dict) -> dict:
    names = [name for name, value in inspect.getmembers(ConfigGetters, inspect.isfunction) if not name.startswith("_")]
    with make(extra) as engine:
        answers = {name: getattr(engine, name)() for name in names}
        # Every section needs a value, or a getter of a disabled feature would raise.
        return {
            name: value for name, value in answers.items() if isinstance(value, (bool, int, float, str, dict, tuple))
        } | {
            "communication_data_type": str(engine.communication_data_type),
            "get_data_types": [str(dtype) for dtype in engine.get_data_types()],
            "torch_autocast_dtype": str(engine.torch_autocast_dtype()),
        }


def test_defaults() -> None:
    (said,) = run_ranks(1, answers_body, {})
    assert said["communication_data_type"] == "torch.float32" and said["get_data_types"] == ["torch.float32"] * 2
    assert said["checkpoint_tag_validation_enabled"] and not said["checkpoint_tag_validation_fail"]
    assert said["torch_autocast_dtype"] == "torch.bfloat16"
    assert said["autotuning_metric_path"].endswith("/autotuning_metric.json")
    for name in (
        *("zero_use_cpu_optimizer", "zero_cpu_offload", "zero_nvme_offload_optimizer"),
        *("is_first_weights_partition_group", "optimizer_legacy_fusion", "compile_zero_optimization_stage"),
        *("uses_parallelization_pass_only", "is_deepcompile_active", "autotuning_profile_model_info"),
        *("checkpoint_writer_enabled", "zero_optimization"),
    ):
        assert said[name] is False, name


def test_what_is_configured() -> None:
    extra = {
        "fp16": {
            "enabled": True, "initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2,
        },
        "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "checkpoint": {"tag_validation": "fail"},
    }  # fmt: skip
    (said,) = run_ranks(1, answers_body, extra)
    assert said["dynamic_loss_scale_args"] == {
        "init_scale": 32, "scale_window": 7, "delayed_shift": 3, "consecutive_hysteresis": False, "min_scale": 2,
    }  # fmt: skip
    assert said["communication_data_type"] == "torch.float32"
    assert said["get_data_types"] == ["torch.float16", "torch.float32"]
    assert said["zero_use_cpu_optimizer"] and said["zero_cpu_offload"] and not said["zero_nvme_offload_optimizer"]
    assert said["is_first_weights_partition_group"] and said["checkpoint_tag_validation_fail"]
    assert said["loss_scale"] == 32
    # Passes are refused until the graph compiler is there.
    for name in (
        "compile_zero_optimization_stage",
        "compile_autotp",
        "compile_autosp",
        "uses_parallelization_pass_only",
    ):
        assert said[name] is False, name


def test_table_says_where_each_comes_from() -> None:
    for name, path in GETTERS.items():
        assert path in getattr(ConfigGetters, name).__doc__


# -- questions to the engine itself ------------------------------------------------------------------------------------


@on_ranks(2)
def test_engine_answers_for_itself(rank: int, world: int) -> None:
    torch.manual_seed(0)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    with make({"zero_optimization": zero, "wall_clock_breakdown": True}) as engine:
        assert engine.get_type() == [None]
        engine.backward(engine(*batch(0, 0, rank, 0)))
        assert engine.get_wall_clock_timers() == {}, "of the last step, and there is none"
        engine.step()
        assert engine.get_wall_clock_timers()["backward"] > 0, engine.get_wall_clock_timers()
        # A forward without a backward keeps its gathered weights for the next forward.
        with torch.no_grad():
            before = engine(*batch(1, 0, rank, 0))
        engine.empty_partition_cache()
        live = [group for group in engine._fetcher.groups if group.buffer is not None]
        assert not live and engine._fetcher.means.pool.n_free == 0
        with torch.no_grad():
            assert torch.equal(engine(*batch(1, 0, rank, 0)), before)
        state = engine.module_state_dict()
        doubled = {name: value * 2 for name, value in state.items()}
        engine.load_module_state_dict({"module": doubled, "global_steps": 3})
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, doubled[name]), name
        with pytest.raises(FeatureError, match="strict=False"):
            engine.load_module_state_dict(doubled, allowed_missing_keys={"gain"})
        with pytest.raises(FeatureError, match="compiled_autograd_enabled"):
            engine.compile(compiled_autograd_enabled=True)


def test_paths_follow_the_working_folder(tmp_path, monkeypatch) -> None:
    class Asked(ConfigGetters):
        class _config:
            class autotuning:
                metric_path = None
                model_info_path = "info.json"

    monkeypatch.chdir(tmp_path)
    assert Asked().autotuning_metric_path() == os.path.join(tmp_path, "autotuning_metric.json")
    assert Asked().autotuning_model_info_path() == "info.json"
