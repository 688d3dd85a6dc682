"""DeepSpeed's classes for the sections of a configuration. Keys, types, defaults and bounds come from the sections in
``deepspeed_c.config``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.config.aliases import stage_from_switch
from deepspeed_c.config.checkpoint import ActivationCheckpointing, Nebula
from deepspeed_c.config.compiler import Compile
from deepspeed_c.config.config_model import DeepSpeedConfigModel, Field
from deepspeed_c.config.monitor import (
    Comet,
    CommsLoggerSection,
    CsvMonitor,
    FlopsProfilerSection,
    TensorBoard,
    Throughput,
    Wandb,
)
from deepspeed_c.config.offload import OffloadOptimizer, OffloadParam, ZenFlow
from deepspeed_c.config.parallel import ExpertParallel, HybridEngine, TensorParallel, TpGroup
from deepspeed_c.config.precision import Bf16, Fp16
from deepspeed_c.config.stages import ZeroStageEnum
from deepspeed_c.config.tuning import Autotuning
from deepspeed_c.config.zero import LeafModule, Zero
from deepspeed_c.errors import ConfigError

__all__ = [
    "AutoEPConfig",
    "CSVConfig",
    "CometConfig",
    "CommsLoggerConfig",
    "CompileConfig",
    "DeepSpeedActivationCheckpointingConfig",
    "DeepSpeedAutotuningConfig",
    "DeepSpeedBF16Config",
    "DeepSpeedCommsConfig",
    "DeepSpeedDataStatesConfig",
    "DeepSpeedFP16Config",
    "DeepSpeedFlopsProfilerConfig",
    "DeepSpeedMonitorConfig",
    "DeepSpeedNebulaConfig",
    "DeepSpeedThroughputTimerConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "HybridEngineConfig",
    "TPConfig",
    "TPTrainingConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "ZenFlowConfig",
    "get_bfloat16_config",
    "get_expert_parallel_config",
    "get_float16_config",
    "get_monitor_config",
    "get_tensor_parallel_config",
    "get_timers_config",
    "get_zero_config",
]


class DeepSpeedFP16Config(DeepSpeedConfigModel, section=Fp16):
    """The section ``fp16``."""

    def _check(self) -> None:
        for name in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and self.loss_scale == 0 and getattr(self, name) <= 0:
                raise ConfigError(
                    f"is {getattr(self, name)}, and the loss scale is dynamic",
                    where=f"fp16.{name}",
                    fix="write a number > 0, or a loss_scale",
                )

    def initial_dynamic_scale(self) -> int:
        """The first loss scale if the scale is dynamic."""
        return 2**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Arguments of DeepSpeed's ``DynamicLossScaler``, by name."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel, section=Bf16):
    """The section ``bf16``."""


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section ``fp16`` of a whole configuration."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a whole configuration, or the section ``bfloat16`` if there is no ``bf16``."""
    section = param_dict.get("bf16")
    return DeepSpeedBF16Config(**(param_dict.get("bfloat16", {}) if section is None else section))


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel, section=OffloadParam):
    """The section ``zero_optimization.offload_param``."""

    nvme_path: Path | None = None


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel, section=OffloadOptimizer):
    """The section ``zero_optimization.offload_optimizer``."""

    nvme_path: Path | None = None

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap updates."""
        return self.pipeline_read or self.pipeline_write


class ZenFlowConfig(DeepSpeedConfigModel, section=ZenFlow):
    """The section ``zero_optimization.zenflow``. Dumps leave out ``steps_per_epoch``, which the engine sets."""

    steps_per_epoch: int | None = Field(None, exclude=True)


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel, section=LeafModule):
    """The section ``zero_optimization.leaf_module``. A single name counts as a list of one name. Repeated names count
    once.
    """

    def __init__(self, strict: bool = False, **data: Any) -> None:
        lists = {key: [value] if isinstance(value, str) else value for key, value in data.items()}
        super().__init__(strict, **lists)

    def _check(self) -> None:
        for name in self.model_fields:
            self.__dict__[name] = list(dict.fromkeys(getattr(self, name)))


class DeepSpeedZeroConfig(DeepSpeedConfigModel, section=Zero, prefix="stage3_"):
    """The section ``zero_optimization``.

    The attributes of keys that begin with ``stage3_`` lack this prefix. Keys are read with and without the prefix.
    """

    stage: ZeroStageEnum = 0
    grad_hooks: bool = Field(True, exclude=True)  # a key of older releases that DeepSpeed 0.19.6 does not have
    compute_grad_norm: bool = Field(True, exclude=True)  # this key and the next are new in DeepSpeed 0.19.8
    parameter_alignment: bool = Field(False, exclude=True)
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: ZenFlowConfig | None = None
    zeropp_loco_param: dict[str, Any] | None = None
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    # Old keys.
    cpu_offload_param: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_param",
            "new_param_fn": lambda is_on: DeepSpeedZeroOffloadParamConfig(device="cpu") if is_on else None,
        },
    )
    cpu_offload_use_pin_memory: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_param or offload_optimizer",
            "set_new_param": False,
        },
    )
    cpu_offload: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_optimizer",
            "new_param_fn": lambda is_on: DeepSpeedZeroOffloadOptimizerConfig(device="cpu") if is_on else None,
        },
    )
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        False, json_schema_extra={"deprecated": True, "new_param": "gather_16bit_weights_on_model_save"}
    )

    def _check(self) -> None:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == 3
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1 and self.stage != 3:
            raise ConfigError(
                f"is {self.offload_optimizer.ratio} at stage {self.stage}",
                where="zero_optimization.offload_optimizer.ratio",
                fix="a part of the state can be offloaded at stage 3 only: write 1.0",
            )


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section ``zero_optimization`` of a whole configuration; ``true`` in its place is stage 1."""
    section = stage_from_switch(param_dict.get("zero_optimization", {}))
    if section == {"stage": 1} and param_dict["zero_optimization"] is True:
        section["allgather_bucket_size"] = param_dict.get("allgather_size", 500_000_000)
    return DeepSpeedZeroConfig(**section)


class HybridEngineConfig(DeepSpeedConfigModel, section=HybridEngine):
    """The section ``hybrid_engine``."""


class CompileConfig(DeepSpeedConfigModel, section=Compile):
    """The section ``compile``."""


class TensorBoardConfig(DeepSpeedConfigModel, section=TensorBoard):
    """The section ``tensorboard``."""


class WandbConfig(DeepSpeedConfigModel, section=Wandb):
    """The section ``wandb``."""


class CSVConfig(DeepSpeedConfigModel, section=CsvMonitor):
    """The section ``csv_monitor``."""


class CometConfig(DeepSpeedConfigModel, section=Comet):
    """The section ``comet``."""


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The sections of all monitors."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    @property
    def enabled(self) -> bool:
        """Whether any monitor is enabled."""
        return any(monitor.enabled for _, monitor in self)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' sections of a whole configuration."""
    return DeepSpeedMonitorConfig(
        **{key: param_dict[key] for key in DeepSpeedMonitorConfig.model_fields if key in param_dict}
    )


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel, section=Throughput):
    """The section ``timers.throughput``."""


def get_timers_config(param_dict: Mapping[str, Any] | None) -> DeepSpeedThroughputTimerConfig:
    """The section ``timers.throughput`` of a whole configuration."""
    return DeepSpeedThroughputTimerConfig(**(param_dict or {}).get("timers", {}).get("throughput", {}))


class CommsLoggerConfig(DeepSpeedConfigModel, section=CommsLoggerSection):
    """The section ``comms_logger``."""


class DeepSpeedCommsConfig:
    """``comms_logger_enabled``: whether a whole configuration has the section ``comms_logger``; ``comms_logger``: the
    section."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config["comms_logger"])


class _FromWhole(DeepSpeedConfigModel):
    """A class whose objects are made from a whole configuration, as in DeepSpeed. The keys of its section are the
    attributes.
    """

    _key = ""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        super().__init__(**param_dict.get(self._key, {}))


class DeepSpeedFlopsProfilerConfig(_FromWhole, section=FlopsProfilerSection):
    """The section ``flops_profiler``."""

    _key = "flops_profiler"


class DeepSpeedActivationCheckpointingConfig(_FromWhole, section=ActivationCheckpointing):
    """The section ``activation_checkpointing``."""

    _key = "activation_checkpointing"


class DeepSpeedNebulaConfig(_FromWhole, section=Nebula, prefix="nebula_"):
    """The section ``nebula``; its ``nebula_load_path`` is the attribute ``load_path``."""

    _key = "nebula"


class DeepSpeedAutotuningConfig(_FromWhole, section=Autotuning):
    """The section ``autotuning``."""

    _key = "autotuning"


class DeepSpeedDataStatesConfig:
    """``enabled``: whether a whole configuration has the section ``datastates_ckpt``; ``config``: a copy of it."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = param_dict.get("datastates_ckpt", False)
        self.enabled = section is not False
        self.config = copy.deepcopy(section) if self.enabled else None


class TPConfig(DeepSpeedConfigModel, section=TpGroup):
    """The section ``tensor_parallel.tp``, and groups of ranks that a program passes."""

    mpu: object = None
    tp_group: object = None


class TPTrainingConfig(DeepSpeedConfigModel, section=TensorParallel, without=("tp",)):
    """The section ``tensor_parallel``; its ``tp`` is the attribute ``tensor_parallel``."""

    dtype: torch.dtype = torch.float16
    tensor_parallel: TPConfig = Field(default_factory=TPConfig, alias="tp")
    injection_policy_tuple: tuple | None = None
    partition_config: dict[str, Any] | None = None
    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TPTrainingConfig:
    """The section ``tensor_parallel`` of a whole configuration."""
    return TPTrainingConfig(**ds_config.get("tensor_parallel", {}))


class AutoEPConfig(DeepSpeedConfigModel, section=ExpertParallel):
    """The section ``expert_parallel``."""


def get_expert_parallel_config(param_dict: Mapping[str, Any]) -> AutoEPConfig:
    """The section ``expert_parallel`` of a whole configuration."""
    return AutoEPConfig(**param_dict.get("expert_parallel", {}))
