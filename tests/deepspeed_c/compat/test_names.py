"""Behaviour of names of ``compat`` that has no counterpart in DeepSpeed: errors of our own types, hosts and devices,
and lighter implementations."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed_c.checkpoint.checkpoint_engine import TorchCheckpointEngine
from deepspeed_c.compat import ds_config, torch_version
from deepspeed_c.compat.checkpoint_folder import merge_state, partition_data
from deepspeed_c.compat.config_sections import DeepSpeedFP16Config, DeepSpeedZeroConfig
from deepspeed_c.compat.timing import CudaEventTimer
from deepspeed_c.config.config_model import DeepSpeedConfigModel, Field
from deepspeed_c.errors import (
    CheckpointError,
    ConfigError,
    ElasticityConfigError,
    FeatureError,
    ModelError,
    StateError,
)
from deepspeed_c.moe import utils as experts
from deepspeed_c.utils import gradients
from deepspeed_c.utils.numa import parse_range
from tests.waits import ran


@pytest.mark.parametrize(
    "call, kind, text",
    [
        (lambda: DeepSpeedZeroConfig(stge=1), ConfigError, "did you mean stage"),
        (
            lambda: DeepSpeedZeroConfig(reduce_bucket_size=0),
            ConfigError,
            "DeepSpeedZeroConfig.reduce_bucket_size: is 0",
        ),
        (lambda: DeepSpeedZeroConfig(stage3_max_live_parameters="x"), ConfigError, "stage3_max_live_parameters"),
        (lambda: setattr(DeepSpeedZeroConfig(), "stage", 7), ConfigError, "one of 0, 1, 2, 3"),
        (lambda: setattr(DeepSpeedZeroConfig(), "nothing", 7), ConfigError, "has no key nothing"),
        (lambda: DeepSpeedFP16Config(enabled=True, min_loss_scale=0), ConfigError, "min_loss_scale"),
        (
            lambda: ds_config.DeepSpeedConfig({"train_batch_size": 1, "gradient_cliping": 1}),
            ConfigError,
            "gradient_clipping",
        ),
        (lambda: ds_config.DeepSpeedConfig("/no/such/file.json"), ConfigError, "no such file"),
        (lambda: ds_config.load_ds_config("/no/such/file.json"), ConfigError, "no such file"),
        (
            lambda: ds_config.DeepSpeedConfig({"elasticity": {"enabled": True}, "train_batch_size": 1}),
            ElasticityConfigError,
            "elasticity",
        ),
        (lambda: experts.configure_moe_param_groups([]), ModelError, "model_parameters"),
        (lambda: experts.split_params_into_different_moe_groups_for_optimizer(1), ModelError, "param_groups"),
        (lambda: partition_data([1, 2, 3], 2), CheckpointError, "3 entries"),
        (lambda: merge_state({"a": {"b": 1}}, {"a": {"b": "x"}}), CheckpointError, "a.b"),
        (lambda: parse_range("5-3"), ConfigError, "5-3"),
        (lambda: gradients.reload_adam_states(adam(), "cpu"), StateError, "not been offloaded"),
        (lambda: gradients.graph_process(True, adam), StateError, "no CUDAGraph"),
        (lambda: gradients.count_used_parameters_in_backward([]), StateError, "no backward"),
    ],
)
def test_errors_are_typed_and_name_the_place(call, kind, text, monkeypatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(kind, match=text):
        call()


def adam() -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_features_that_come_later_can_be_read() -> None:
    config = {"train_batch_size": 2, "pipeline": {"stages": 2}, "tensorboard": {"enabled": True}}
    read = ds_config.DeepSpeedConfig(config)
    assert read.pipeline["stages"] == 2 and read.monitor_config.enabled
    assert config == {"train_batch_size": 2, "pipeline": {"stages": 2}, "tensorboard": {"enabled": True}}


def test_sections_of_later_features_are_objects() -> None:
    curriculum = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64}
    config = {
        "train_batch_size": 1,
        "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 3, "tp_grain_size": 64}, "kernel_inject": True},
        "expert_parallel": {"autoep_size": 4},
        "curriculum_learning": {"enabled": False, **curriculum},
        "weight_quantization": {"num_bits": 4},
        "autotuning": {"enabled": False, "fast": False},
        "datastates_ckpt": {"host_cache_size": 3},
    }
    read, bare = ds_config.DeepSpeedConfig(config), ds_config.DeepSpeedConfig({"train_batch_size": 1})
    tp = read.tensor_parallel_config
    assert (tp.autotp_size, tp.tensor_parallel.tp_size, tp.tensor_parallel.tp_grain_size) == (1, 3, 64)
    assert tp.replace_with_kernel_inject and tp.dtype is torch.float16 and not hasattr(tp, "tp")
    assert bare.tensor_parallel_config.tensor_parallel.mpu is None
    assert (read.expert_parallel_config.autoep_size, bare.expert_parallel_config.autoep_size) == (4, 1)
    assert (read.curriculum_params_legacy, bare.curriculum_params_legacy) == (curriculum, False)
    assert read.weight_quantization_config.num_bits == 4 and bare.weight_quantization_config is None
    assert (read.autotuning_config.fast, bare.autotuning_config.fast) == (False, True)
    assert (read.datastates_config.enabled, read.datastates_config.config) == (True, {"host_cache_size": 3})
    assert (bare.datastates_config.enabled, bare.datastates_config.config) == (False, None)


def test_configurations_from_files_and_text(tmp_path) -> None:
    import base64

    config = {"train_batch_size": 2, "fp16": {"enabled": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for source in (config, str(path), path, text):
        assert ds_config.load_ds_config(source) == config
        assert ds_config.DeepSpeedConfig(source).float16_config.enabled
    assert ds_config.load_ds_config(config) is config


def test_an_old_key_says_so_once(caplog) -> None:
    with caplog.at_level("WARNING", logger="deepspeed_c"):
        config = DeepSpeedZeroConfig(cpu_offload=True)
    assert config.offload_optimizer.device == "cpu" and not hasattr(config, "cpu_offload")


def test_fields_of_pydantic_are_read_by_their_attributes() -> None:
    # Looks like pydantic.Field(3, ge=1, alias="w"). pydantic itself is not required.
    class FieldInfo:
        default, default_factory, alias, json_schema_extra, exclude = 3, None, "w", None, None
        metadata = (SimpleNamespace(ge=1),)

        def is_required(self) -> bool:
            return False

    class PydanticDescriptorProxy:
        pass

    class Model(DeepSpeedConfigModel):
        width: int = FieldInfo()
        names: list[str] = Field(default_factory=lambda: ["a"])

    assert Model(w=5).width == 5 and Model().width == 3
    with pytest.raises(ConfigError, match="Model.w"):
        Model(width=0)
    one, other = Model(), Model()
    one.names.append("b")
    assert other.names == ["a"], "a default is shared"
    with pytest.raises(FeatureError, match="validator"):

        class Checked(DeepSpeedConfigModel):
            check = PydanticDescriptorProxy()


def test_muon_is_for_matrices_that_are_no_tables() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "lm_head": nn.Linear(2, 3)})
    muon = {"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    ds_config.set_optimizer_flags(ds_config.DeepSpeedConfig({"train_batch_size": 1}), model)
    assert not any(hasattr(param, "use_muon") for param in model.parameters())
    ds_config.set_optimizer_flags(ds_config.DeepSpeedConfig(muon), model)
    assert [name for name, param in model.named_parameters() if param.use_muon] == ["body.weight"]


def test_torch_engine_reads_plain_data_only(tmp_path) -> None:
    engine = TorchCheckpointEngine()
    engine.save({"x": SimpleNamespace(a=1)}, str(tmp_path / "file.pt"))
    with pytest.raises(CheckpointError, match="file.pt"):
        engine.load(str(tmp_path / "file.pt"))


def test_timer_waits_for_its_end() -> None:
    said = []
    start = SimpleNamespace(elapsed_time=lambda end: said.append("elapsed") or 2.5)
    end = SimpleNamespace(synchronize=lambda: said.append("wait"))
    assert CudaEventTimer(start, end).get_elapsed_msec() == 2.5 and said == ["wait", "elapsed"]


def test_torch_info_is_of_this_torch() -> None:
    info = torch_version.torch_info
    assert info["version"] == ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert (info["cuda_version"] == "0.0") == (torch.version.cuda is None)
    assert set(info) == {"version", "bf16_support", "cuda_version", "nccl_version", "hip_version"}


def test_a_hook_is_called_with_the_gradient_in_place() -> None:
    param, seen = nn.Parameter(torch.ones(2)), []
    handle = torch_version.register_grad_hook(param, lambda p: seen.append(p.grad.tolist()))
    (param * 3).sum().backward()
    handle.remove()
    param.sum().backward()
    assert seen == [[3, 3]]


@pytest.mark.parametrize(
    "module", ["runtime_constants", "checkpoint_constants", "swap_constants", "comm_constants", "lr_constants"]
)
def test_constants_need_no_torch(module: str) -> None:
    code = f"import sys, deepspeed_c.compat.{module}; assert 'torch' not in sys.modules"
    done = ran([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
