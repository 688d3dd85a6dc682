"""``DeepSpeedConfig`` of ``deepspeed.runtime.config``: a whole configuration as an object with an attribute for each
key that programs read.

The engine uses ``deepspeed_c.config`` instead, which also checks the values for this class.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_c import comm
from deepspeed_c.comm import groups
from deepspeed_c.compat.config_sections import (
    CompileConfig,
    DeepSpeedActivationCheckpointingConfig,
    DeepSpeedAutotuningConfig,
    DeepSpeedCommsConfig,
    DeepSpeedDataStatesConfig,
    DeepSpeedFlopsProfilerConfig,
    DeepSpeedNebulaConfig,
    HybridEngineConfig,
    get_bfloat16_config,
    get_expert_parallel_config,
    get_float16_config,
    get_monitor_config,
    get_tensor_parallel_config,
    get_timers_config,
    get_zero_config,
)
from deepspeed_c.compat.config_utils import ScientificNotationEncoder
from deepspeed_c.compat.runtime_constants import *
from deepspeed_c.compat.runtime_constants import ValidationMode
from deepspeed_c.compat.swap_constants import AIO
from deepspeed_c.config import read_config
from deepspeed_c.config.batch import resolve_batch
from deepspeed_c.config.elasticity import batch_of_world
from deepspeed_c.config.findings import BATCH_KEYS
from deepspeed_c.config.inference import WeightQuantConfig
from deepspeed_c.config.keys import DTYPE_NAMES
from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError, UnsupportedConfigError
from deepspeed_c.logging import logger

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUADAMW_OPTIMIZER",
    "MUADAM_OPTIMIZER",
    "MUON_OPTIMIZER",
    "MUSGD_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "DeepSpeedConfig",
    "DtypeEnum",
    "load_ds_config",
    "set_optimizer_flags",
]

# Values of `type` in the section optimizer, in lower case.
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER),
    *(ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER),
    *(LION_OPTIMIZER, MUON_OPTIMIZER),
]

TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True
TENSOR_CORE_ALIGN_SIZE = 8

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class DtypeEnum(enum.Enum):
    """Floating-point formats. The value of a member is torch's dtype; any usual spelling gives the member:
    ``DtypeEnum("half")``."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        names = {**DTYPE_NAMES, "int8": "int8", "torch.int8": "int8"}
        return cls[names[value]] if isinstance(value, str) and value in names else None


def load_ds_config(config: str | os.PathLike[str] | dict[str, Any]) -> dict[str, Any]:
    """The configuration as a dictionary: ``config`` itself if it is a dictionary, else the content of a JSON or
    Hjson file, or of base64 text.

    Raises:
        ConfigError: ``config`` has none of these forms, or the text is neither JSON nor Hjson.
    """
    return config if isinstance(config, dict) else read_source(config).keys


def set_optimizer_flags(config_class: DeepSpeedConfig, model: torch.nn.Module) -> None:
    """If the configured optimizer is Muon, set ``use_muon`` on each parameter. It is True for matrices that are neither
    an embedding nor the output layer.
    """
    if config_class.optimizer_name != MUON_OPTIMIZER:
        return
    for name, param in model.named_parameters():
        is_table = "embed" in name.lower() or "lm_head" in name.lower()
        param.use_muon = param.ndim >= 2 and not is_table


class DeepSpeedConfig:
    """A configuration with resolved batch sizes and sections as objects. Attributes have DeepSpeed's names.

    A configuration may request features that this version lacks: ``initialize`` refuses them, this class does not.

    Args:
        config: a dictionary, which is not changed, the path of a JSON or Hjson file, or base64 text.
        mpu: an object with ``get_data_parallel_world_size()`` or ``get_sequence_parallel_world_size()``, needed if not
            all ranks of the process group are data-parallel. Without a process group there is one rank.
        mesh_device: a device mesh whose dimension "data_parallel" contains the data-parallel ranks.

    Raises:
        ConfigError: unknown or malformed keys, all in one message.
        BatchSizeError: the batch sizes contradict each other, or are missing.
        ElasticityError: the section elasticity gives no batch to this number of ranks.
    """

    def __init__(self, config: str | dict[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        source = read_source(config)
        self._param_dict, self._origin = source
        self.global_rank = groups.get_rank() if comm.is_initialized() else 0
        self.world_size = self._data_parallel_ranks(mpu, mesh_device)
        known, problems = read_config(source).resolve_with_problems(world_size=self.world_size, batch="skip")
        wrong = [each for each in problems if not isinstance(each, UnsupportedConfigError)]
        if wrong:
            raise wrong[0] if len(wrong) == 1 else ConfigError("\n".join(map(str, wrong)), where=self._origin)
        self.elasticity_enabled = known.elasticity.enabled
        if self.elasticity_enabled:
            given = batch_of_world(known.resolved_dict()["elasticity"], self.world_size)
            self.elastic_model_parallel_size = known.elasticity.model_parallel_size
            self.num_gpus_per_node = known.elasticity.num_gpus_per_node
        else:
            given = tuple(getattr(known, name) for name in BATCH_KEYS)
        sizes, _ = resolve_batch(*given, self.world_size)
        self.train_batch_size = sizes.train_batch_size
        self.train_micro_batch_size_per_gpu = sizes.micro_batch_size
        self.gradient_accumulation_steps = sizes.accumulation_steps
        self._read_plain_keys(known)
        self._read_optimizer(self._param_dict)
        self._read_sections(self._param_dict, known)
        self._read_checkpoint(known)

    def _data_parallel_ranks(self, mpu: Any, mesh_device: Any) -> int:
        if not comm.is_initialized():
            return 1
        if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
            return mpu.get_data_parallel_world_size()
        if mpu is not None:
            return groups.get_world_size() // mpu.get_sequence_parallel_world_size()
        if mesh_device is not None:
            return groups.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
        return groups.get_world_size() // self._param_dict.get("sequence_parallel_size", 1)

    def _read_plain_keys(self, known: Any) -> None:
        for name in (
            *("managed_gradient_accumulation", "steps_per_print", "dump_state", "disable_allgather"),
            *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "gradient_clipping"),
            *("graph_harvesting", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "memory_breakdown"),
            *("dataloader_drop_last", "log_level"),
        ):
            setattr(self, name, getattr(known, name))
        self.sparse_gradients_enabled = known.sparse_gradients
        self.communication_data_type = _DTYPES.get(known.communication_data_type)
        self.seq_parallel_communication_data_type = _DTYPES.get(known.seq_parallel_communication_data_type)
        self.use_data_before_expert_parallel_ = known.use_data_before_expert_parallelism
        self.grad_accum_dtype = known.data_types.grad_accum_dtype
        self.param_dtype = known.data_types.param_dtype
        self.buffer_dtype = known.data_types.buffer_dtype

    def _read_optimizer(self, given: Mapping[str, Any]) -> None:
        optimizer, scheduler = given.get(OPTIMIZER) or {}, given.get(SCHEDULER) or {}
        name = optimizer.get(TYPE)
        self.optimizer_name = name.lower() if name and name.lower() in DEEPSPEED_OPTIMIZERS else name
        self.optimizer_params = optimizer.get(OPTIMIZER_PARAMS) if name else None
        self.optimizer_legacy_fusion = optimizer.get(LEGACY_FUSION, LEGACY_FUSION_DEFAULT)
        self.scheduler_name = scheduler.get(TYPE)
        self.scheduler_params = scheduler.get(SCHEDULER_PARAMS) if self.scheduler_name else None

    def _read_sections(self, given: Mapping[str, Any], known: Any) -> None:
        self.zero_config = get_zero_config(given)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.mics_shard_size = self.zero_config.mics_shard_size
        self.mics_hierarchial_params_gather = self.zero_config.mics_hierarchical_params_gather
        self.float16_config, self.bfloat16_config = get_float16_config(given), get_bfloat16_config(given)
        if self.float16_config.enabled and self.bfloat16_config.enabled:
            raise ConfigError("fp16 and bf16 are both enabled", where="fp16.enabled, bf16.enabled", fix="enable one")
        self.activation_checkpointing_config = DeepSpeedActivationCheckpointingConfig(given)
        self.comms_config = DeepSpeedCommsConfig(given)
        self.monitor_config = get_monitor_config(given)
        self.flops_profiler_config = DeepSpeedFlopsProfilerConfig(given)
        self.wall_clock_breakdown = known.wall_clock_breakdown or self.flops_profiler_config.enabled
        self.nebula_config = DeepSpeedNebulaConfig(given)
        self.hybrid_engine = HybridEngineConfig(**given.get("hybrid_engine", {}))
        self.compile_config = CompileConfig(**given.get("compile", {}))
        self.timers_config = get_timers_config(given)
        resolved = known.resolved_dict()
        aio_keys = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
        self.aio_config = {key: resolved[AIO][key] for key in aio_keys}
        # Keys that DeepSpeed does not have.
        own = ("activation_bytes_limit", "schedule", "use_reentrant", "virtual_stages")
        self.pipeline = {key: value for key, value in resolved["pipeline"].items() if key not in own}
        self.pipeline |= given.get("pipeline", {})
        self.sparse_attention = resolved[SPARSE_ATTENTION]
        self.compression_config = resolved["compression_training"]
        self.amp_enabled, self.amp_params = _switched(given, AMP)
        self.pld_enabled, self.pld_params = _switched(given, PROGRESSIVE_LAYER_DROP)
        self.torch_autocast_enabled = known.torch_autocast.enabled
        autocast = given.get(TORCH_AUTOCAST, {})
        self.torch_autocast_dtype = _DTYPES[known.torch_autocast.dtype] if TORCH_AUTOCAST_DTYPE in autocast else None
        self.torch_autocast_lower_precision_safe_modules = autocast.get(TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES)
        for name, value in resolved[EIGENVALUE].items():
            setattr(self, f"eigenvalue_{name}", value)
        self.autotuning_config = DeepSpeedAutotuningConfig(given)
        self.datastates_config = DeepSpeedDataStatesConfig(given)
        self.tensor_parallel_config = get_tensor_parallel_config(given)
        self.expert_parallel_config = get_expert_parallel_config(given)
        quantization = given.get("weight_quantization")
        self.weight_quantization_config = None if quantization is None else WeightQuantConfig(**quantization)
        self.curriculum_enabled_legacy, self.curriculum_params_legacy = _switched(given, "curriculum_learning")
        self.data_efficiency_enabled = known.data_efficiency.enabled
        self.data_efficiency_config = resolved["data_efficiency"]

    def _read_checkpoint(self, known: Any) -> None:
        rule = known.checkpoint.tag_validation
        section = known.resolved_dict()[CHECKPOINT]
        self.checkpoint_config = {
            key: section[key] for key in (CHECKPOINT_TAG_VALIDATION, "checkpoint_serialization", "writer")
        }
        self.checkpoint_tag_validation_enabled = rule != ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail = rule == ValidationMode.FAIL
        self.load_universal_checkpoint = known.checkpoint.load_universal
        self.use_node_local_storage = known.checkpoint.use_node_local_storage
        self.checkpoint_parallel_write_pipeline = known.checkpoint.parallel_write.pipeline_stage

    def print_user_config(self) -> None:
        """Log the user's configuration, as JSON."""
        text = json.dumps(self._param_dict, sort_keys=True, indent=4, cls=ScientificNotationEncoder)
        logger.info("  json = %s", text)

    def print(self, name: str) -> None:
        """Log all attributes, one a line, under the heading ``name``."""
        logger.info("%s:", name)
        for attribute, value in sorted(vars(self).items()):
            if not attribute.startswith("_"):
                logger.info("  %s %s", attribute.ljust(29, "."), value)
        self.print_user_config()


def _switched(given: Mapping[str, Any], key: str) -> tuple[bool, dict[str, Any] | bool]:
    """(whether a section is enabled, its other keys). The second value is False if the section is missing."""
    if key not in given:
        return False, False
    section = dict(given[key])
    return section.pop("enabled", False), section
