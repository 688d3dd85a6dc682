"""initialize refuses wrong ``mpu`` objects. An engine over a part of the ranks has the right state and results."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c import _C
from deepspeed_c.errors import CommError, ConfigError, FeatureError, OptimizerError
from tests.log_lines import LogLines
from tests.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
}


class Mpu:
    """The methods of Megatron's and DeepSpeed's topologies."""

    def __init__(self, group=None, **sizes: int) -> None:
        self._group, self._sizes = group, sizes

    def __getattr__(self, name: str):
        axis = name.removeprefix("get_").removesuffix("_world_size")
        if axis == name or axis.startswith("_"):
            raise AttributeError(name)
        return lambda: self._sizes.get(axis, 1)

    def get_data_parallel_group(self):
        return self._group


AXES = {
    "pipeline_model_parallel": "pp",
    "pipe_parallel": "pp",
}


# Axes of an mpu that mean tensor parallelism. The tests give them more ranks than the job has.
TENSOR = ("model_parallel", "tensor_model_parallel", "slice_parallel")


def axes_body(rank: int, world: int) -> None:
    for name in TENSOR:
        with pytest.raises(CommError, match="1 data-parallel times 2 tensor-parallel ranks, the job 1"):
            deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=CONFIG, mpu=Mpu(**{name: 2}))
    for name in ("sequence_parallel", "context_parallel"):
        with pytest.raises(CommError, match="times 2 sequence-parallel times 1 tensor-parallel ranks, the job 1"):
            deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=CONFIG, mpu=Mpu(**{name: 2}))
    for name, axis in AXES.items():
        with pytest.raises(FeatureError, match=f"axis '{axis}' has 2 ranks"):
            deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=CONFIG, mpu=Mpu(**{name: 2}))


def test_mpu_with_another_axis_is_refused_by_its_name():
    run_ranks(1, axes_body)


def subgroup_body(rank: int, world: int) -> tuple[int, int, int]:
    group = [dist.new_group([0]), dist.new_group([1, 2])][rank > 0]
    with deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=CONFIG, mpu=Mpu(group))[0] as engine:
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
        return engine.global_rank, engine._comm.rank, engine.dp_world_size


def test_global_rank_is_that_of_the_job_and_not_of_the_group():
    assert run_ranks(3, subgroup_body) == [(0, 0, 1), (1, 0, 2), (2, 1, 2)]


def threads_body(rank: int, world: int) -> tuple[int, int, int]:
    offload = {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.0}
    zero = {"stage": 2, "offload_optimizer": offload}
    config = {**CONFIG, "bf16": {"enabled": True}, "zero_optimization": zero}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSC_NUM_THREADS", "3")
        _C.pool_resize(0)
        before = _C.pool_n_threads()
        refused = {**config, "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
        with pytest.raises(FeatureError, match="ahead of the step"):
            deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=refused)
        assert _C.pool_n_threads() == before, "a refused engine has left some"
        with deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=config)[0] as engine:
            engine.set_trainable(["weight"])
            during = _C.pool_n_threads()
        after = _C.pool_n_threads()
    _C.pool_resize(0)
    return before, during, after


def test_super_offload_gives_back_the_threads_that_it_takes():
    assert run_ranks(1, threads_body) == [(3, 1, 3)]


def layouts_body(rank: int, world: int) -> None:
    engines = [deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2})[0] for _ in range(2)]
    try:
        assert engines[0]._layout is not engines[1]._layout
        assert engines[0]._layout.trained is not engines[1]._layout.trained
    finally:
        for engine in engines:
            engine.close()


def test_engines_without_a_layout_share_none():
    """Each engine that only evaluates at stage 0 has an empty layout of its own."""
    run_ranks(1, layouts_body)


def passed_body(rank: int, world: int, is_passed: bool) -> None:
    model = torch.nn.Linear(8, 8)
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
    }
    passed: dict[str, Any] = {}
    if is_passed:
        passed["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
        passed["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2}, **sections}
    with LogLines() as records:
        engine, optimizer, _, _ = deepspeed_c.initialize(model=model, config=config, **passed)
    with engine:
        lr = optimizer.param_groups[0]["lr"]
    (line,) = (text for text in records.lines if text.startswith("configuration from"))
    assert ("optimizer.params.lr" in line, "scheduler.type" in line) == (not is_passed,) * 2, line
    assert ('"optimizer" has no effect: initialize(optimizer=...) acts' in line) == is_passed, line
    assert ('"scheduler" has no effect: initialize(lr_scheduler=...) acts' in line) == is_passed, line
    assert (lr == 1e-3) == is_passed, lr


@pytest.mark.parametrize("is_passed", [False, True])
def test_the_first_line_says_which_optimizer_and_which_schedule_act(is_passed: bool) -> None:
    run_ranks(1, passed_body, is_passed)


def idle_body(rank: int, world: int) -> None:
    model = torch.nn.Linear(3, 1)
    config = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR"}, "pipeline": {"schedule": "gpipe"}}
    with LogLines() as records:
        engine, _, _, schedule = deepspeed_c.initialize(model=model, config=config)
    with engine:
        (line,) = (text for text in records.lines if text.startswith("configuration from"))
    assert schedule is None
    assert '"scheduler" has no effect: there is no optimizer' in line, line
    assert '"pipeline" has no effect: the model is no PipelineModule' in line, line
    assert "WarmupLR" not in line and "gpipe" not in line, line
    with pytest.raises(OptimizerError, match="there is no optimizer whose learning rate"):
        deepspeed_c.initialize(model=model, config=config, lr_scheduler=lambda base: base)


def test_sections_without_an_optimizer_or_stages_have_no_effect_and_the_first_line_says_so() -> None:
    run_ranks(1, idle_body)


def groups_body(rank: int, world: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    groups = [{"params": model[0].parameters(), "lr": 7.0}, {"params": model[1].parameters(), "weight_decay": 0.5}]
    config = {"train_batch_size": 1}

    def factory(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0, momentum=0.25)

    with (
        LogLines() as records,
        deepspeed_c.initialize(model=model, model_parameters=groups, optimizer=factory, config=config)[0] as engine,
    ):
        found = [(g["lr"], g["weight_decay"], g["momentum"]) for g in engine.optimizer.param_groups]
    assert found == [(7.0, 0, 0.25), (1.0, 0.5, 0.25)], found
    assert not any("model_parameters" in line for line in records.lines), records.lines

    own = torch.optim.SGD(model[0].parameters(), lr=1.0)
    for given, expected in (
        (model.parameters(), ["2 parameters of initialize(model_parameters=...) are not in the optimizer"]),
        (
            [{"params": [*model[0].parameters()], "lr": 7.0}],
            ["group 0 of initialize(model_parameters=...) has lr = 7.0, but 1.0"],
        ),
        (model[0].parameters(), []),
    ):
        with LogLines() as records:
            deepspeed_c.initialize(model=model, model_parameters=given, optimizer=own, config=config)[0].close()
        lines = [line for line in records.lines if "model_parameters" in line]
        assert len(lines) == len(expected) and all(map(str.startswith, lines, expected)), (lines, expected)


def test_groups_reach_a_factory_and_differ_from_an_optimizers_with_a_warning() -> None:
    run_ranks(1, groups_body)


def two_configurations_body(rank: int, world: int, folder: str) -> None:
    path = os.path.join(folder, "ds.json")
    with open(path, "w") as file:
        file.write('{"train_batch_size": 2}')
    model = torch.nn.Linear(3, 1)
    args = types.SimpleNamespace(deepspeed_config=path)
    same: dict[str, Any] = {"args": args, "config": {"train_batch_size": 2}, "config_params": path}
    deepspeed_c.initialize(model=model, **same)[0].close()
    for other in (
        {"args": args, "config": {"train_batch_size": 1}},
        {"config": path, "config_params": {"train_batch_size": 2, "gradient_clipping": 0.5}},
    ):
        names = [{"args": "args.deepspeed_config"}.get(name, name) for name in sorted(other, reverse=True)]
        key = "gradient_clipping" if "config_params" in other else "train_batch_size"
        with pytest.raises(ConfigError) as caught:
            deepspeed_c.initialize(model=model, **other)
        assert all(name in str(caught.value) for name in (*names, key)), (str(caught.value), names)
    with pytest.raises(ConfigError, match="config_dict_or_path and param_dict give different"):
        deepspeed_c.zero.Init(config_dict_or_path=path, param_dict={"bf16": {"enabled": True}})


def test_two_configurations_that_differ_are_an_error(tmp_path: Path) -> None:
    run_ranks(1, two_configurations_body, str(tmp_path))
