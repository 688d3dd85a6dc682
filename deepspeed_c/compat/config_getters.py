"""The functions ``get_*`` of ``deepspeed.runtime.config`` and ``deepspeed.autotuning.config``, and those for the
sections ``aio`` and ``checkpoint``: single values of a configuration that is a dictionary, or their defaults.

Programs call them before there is an engine. They check nothing else and change nothing in the dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_c.compat import runtime_constants as c
from deepspeed_c.compat import swap_constants as aio
from deepspeed_c.compat.config_sections import HybridEngineConfig
from deepspeed_c.compat.ds_config import DtypeEnum
from deepspeed_c.errors import ConfigError

__all__ = [
    "Getter",
    "get_aio_config",
    "get_amp_enabled",
    "get_amp_params",
    "get_checkpoint_config",
    "get_checkpoint_parallel_write_pipeline",
    "get_checkpoint_params",
    "get_checkpoint_tag_validation_mode",
    "get_checkpoint_writer_config",
    "get_communication_data_type",
    "get_data_types_params",
    "get_dataloader_drop_last",
    "get_default_model_info_config",
    "get_disable_allgather",
    "get_dump_state",
    "get_eigenvalue_config",
    "get_eigenvalue_enabled",
    "get_eigenvalue_gas_boundary_resolution",
    "get_eigenvalue_layer_name",
    "get_eigenvalue_layer_num",
    "get_eigenvalue_max_iter",
    "get_eigenvalue_stability",
    "get_eigenvalue_tol",
    "get_eigenvalue_verbose",
    "get_expert_data_topo_config",
    "get_gradient_accumulation_steps",
    "get_gradient_allreduce_op",
    "get_gradient_clipping",
    "get_gradient_predivide_factor",
    "get_graph_harvesting",
    "get_hybrid_engine_config",
    "get_log_level",
    "get_lower_precision_safe_modules",
    "get_managed_gradient_accumulation",
    "get_memory_breakdown",
    "get_model_info_config",
    "get_optimizer_gradient_clipping",
    "get_optimizer_legacy_fusion",
    "get_optimizer_name",
    "get_optimizer_params",
    "get_pipeline_config",
    "get_pld_enabled",
    "get_pld_params",
    "get_prescale_gradients",
    "get_scheduler_name",
    "get_scheduler_params",
    "get_sparse_attention",
    "get_sparse_attention_mode",
    "get_sparse_attention_type",
    "get_sparse_bigbird_config",
    "get_sparse_bslongformer_config",
    "get_sparse_dense_config",
    "get_sparse_fixed_config",
    "get_sparse_gradients_enabled",
    "get_sparse_variable_config",
    "get_steps_per_print",
    "get_torch_autocast_dtype",
    "get_torch_autocast_enabled",
    "get_train_batch_size",
    "get_train_micro_batch_size_per_gpu",
    "get_wall_clock_breakdown",
    "get_zero_allow_untested_optimizer",
    "get_zero_force_ds_cpu_optimizer",
    "one_of",
    "others",
    "value",
]

Getter = Callable[[Mapping[str, Any]], Any]

_COMM_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def value(key: str, default: Any, section: str | None = None) -> Getter:
    """A function that returns the value of ``key`` in a configuration, or in one of its sections."""

    def getter(param_dict: Mapping[str, Any]) -> Any:
        return (param_dict if section is None else param_dict.get(section, {})).get(key, default)

    return getter


def others(section: str, missing: Any) -> Getter:
    """A function that returns a copy of a section without its key ``enabled``; ``missing`` without the section."""

    def getter(param_dict: Mapping[str, Any]) -> Any:
        if section not in param_dict:
            return missing if missing is False else dict(missing)
        return {key: value for key, value in param_dict[section].items() if key != "enabled"}

    return getter


def one_of(key: str, given: Any, allowed: Any) -> Any:
    """``given``, if it is allowed. Raises ConfigError."""
    if given not in allowed:
        raise ConfigError(f"is {given!r}", where=key, fix=f"write one of {', '.join(map(repr, allowed))}")
    return given


get_train_batch_size = value(c.TRAIN_BATCH_SIZE, c.TRAIN_BATCH_SIZE_DEFAULT)
get_train_micro_batch_size_per_gpu = value(c.TRAIN_MICRO_BATCH_SIZE_PER_GPU, c.TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT)
get_gradient_accumulation_steps = value(c.GRADIENT_ACCUMULATION_STEPS, c.GRADIENT_ACCUMULATION_STEPS_DEFAULT)
get_managed_gradient_accumulation = value(c.MANAGED_GRADIENT_ACCUMULATION, c.MANAGED_GRADIENT_ACCUMULATION_DEFAULT)
get_gradient_clipping = value(c.GRADIENT_CLIPPING, c.GRADIENT_CLIPPING_DEFAULT)
get_gradient_predivide_factor = value(c.GRADIENT_PREDIVIDE_FACTOR, c.GRADIENT_PREDIVIDE_FACTOR_DEFAULT)
get_prescale_gradients = value(c.PRESCALE_GRADIENTS, c.PRESCALE_GRADIENTS_DEFAULT)
get_sparse_gradients_enabled = value(c.SPARSE_GRADIENTS, c.SPARSE_GRADIENTS_DEFAULT)
get_steps_per_print = value(c.STEPS_PER_PRINT, c.STEPS_PER_PRINT_DEFAULT)
get_disable_allgather = value(c.DISABLE_ALLGATHER, c.DISABLE_ALLGATHER_DEFAULT)
get_dump_state = value(c.DUMP_STATE, c.DUMP_STATE_DEFAULT)
get_graph_harvesting = value(c.GRAPH_HARVESTING, c.GRAPH_HARVESTING_DEFAULT)
get_wall_clock_breakdown = value(c.WALL_CLOCK_BREAKDOWN, c.WALL_CLOCK_BREAKDOWN_DEFAULT)
get_memory_breakdown = value(c.MEMORY_BREAKDOWN, c.MEMORY_BREAKDOWN_DEFAULT)
get_dataloader_drop_last = value(c.DATALOADER_DROP_LAST, c.DATALOADER_DROP_LAST_DEFAULT)
get_log_level = value(c.LOG_LEVEL, c.LOG_LEVEL_DEFAULT)
get_zero_allow_untested_optimizer = value(c.ZERO_ALLOW_UNTESTED_OPTIMIZER, c.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT)
get_zero_force_ds_cpu_optimizer = value(c.ZERO_FORCE_DS_CPU_OPTIMIZER, c.ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT)
get_expert_data_topo_config = value(c.USE_DATA_BEFORE_EXPERT_PARALLEL, c.USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT)

get_amp_enabled = value(c.AMP_ENABLED, c.AMP_ENABLED_DEFAULT, c.AMP)
get_amp_params = others(c.AMP, False)
get_pld_enabled = value(c.PLD_ENABLED, c.PLD_ENABLED_DEFAULT, c.PROGRESSIVE_LAYER_DROP)
get_pld_params = others(c.PROGRESSIVE_LAYER_DROP, False)
get_torch_autocast_enabled = value(c.TORCH_AUTOCAST_ENABLED, c.TORCH_AUTOCAST_ENABLED_DEFAULT, c.TORCH_AUTOCAST)

get_eigenvalue_enabled = value(c.EIGENVALUE_ENABLED, c.EIGENVALUE_ENABLED_DEFAULT, c.EIGENVALUE)
get_eigenvalue_verbose = value(c.EIGENVALUE_VERBOSE, c.EIGENVALUE_VERBOSE_DEFAULT, c.EIGENVALUE)
get_eigenvalue_max_iter = value(c.EIGENVALUE_MAX_ITER, c.EIGENVALUE_MAX_ITER_DEFAULT, c.EIGENVALUE)
get_eigenvalue_tol = value(c.EIGENVALUE_TOL, c.EIGENVALUE_TOL_DEFAULT, c.EIGENVALUE)
get_eigenvalue_stability = value(c.EIGENVALUE_STABILITY, c.EIGENVALUE_STABILITY_DEFAULT, c.EIGENVALUE)
get_eigenvalue_gas_boundary_resolution = value(
    c.EIGENVALUE_GAS_BOUNDARY_RESOLUTION, c.EIGENVALUE_GAS_BOUNDARY_RESOLUTION_DEFAULT, c.EIGENVALUE
)
get_eigenvalue_layer_name = value(c.EIGENVALUE_LAYER_NAME, c.EIGENVALUE_LAYER_NAME_DEFAULT, c.EIGENVALUE)
get_eigenvalue_layer_num = value(c.EIGENVALUE_LAYER_NUM, c.EIGENVALUE_LAYER_NUM_DEFAULT, c.EIGENVALUE)

get_optimizer_name = value(c.TYPE, c.OPTIMIZER_TYPE_DEFAULT, c.OPTIMIZER)
get_optimizer_legacy_fusion = value(c.LEGACY_FUSION, c.LEGACY_FUSION_DEFAULT, c.OPTIMIZER)
get_scheduler_name = value(c.TYPE, c.SCHEDULER_TYPE_DEFAULT, c.SCHEDULER)


def get_optimizer_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The optimizer's arguments; None without a type."""
    section = param_dict.get(c.OPTIMIZER, {})
    return section.get(c.OPTIMIZER_PARAMS) if section.get(c.TYPE) is not None else None


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> float | None:
    """The limit of the norm among the optimizer's arguments."""
    return (get_optimizer_params(param_dict) or {}).get(c.MAX_GRAD_NORM)


def get_scheduler_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scheduler's arguments; None without a type."""
    section = param_dict.get(c.SCHEDULER, {})
    return section.get(c.SCHEDULER_PARAMS) if section.get(c.TYPE) is not None else None


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of autocast; None without the key. Raises ValueError for another text."""
    name = param_dict.get(c.TORCH_AUTOCAST, {}).get(c.TORCH_AUTOCAST_DTYPE)
    return None if name is None else DtypeEnum(name).value


def get_lower_precision_safe_modules(param_dict: Mapping[str, Any]) -> list[str] | None:
    """The classes of modules that autocast may round; None without the key."""
    key = c.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES
    names = param_dict.get(c.TORCH_AUTOCAST, {}).get(key)
    if names is not None and not all(isinstance(name, str) for name in names):
        raise ConfigError(f"is {names!r}", where=f"{c.TORCH_AUTOCAST}.{key}", fix="write a list of dotted class names")
    return names


def get_communication_data_type(
    param_dict: Mapping[str, Any],
    comm_type: str = c.COMMUNICATION_DATA_TYPE,
    comm_data_type_default: str | None = c.COMMUNICATION_DATA_TYPE_DEFAULT,
) -> torch.dtype | None:
    """The dtype under the key ``comm_type``; None: the engine chooses."""
    name = param_dict.get(comm_type, comm_data_type_default)
    return None if name is None else _COMM_DTYPES[one_of(comm_type, name.lower(), _COMM_DTYPES)]


def get_gradient_allreduce_op(param_dict: Mapping[str, Any]) -> str:
    """How gradients of ranks are combined: "mean" or "sum"."""
    name = param_dict.get(c.GRADIENT_ALLREDUCE_OP, c.GRADIENT_ALLREDUCE_OP_DEFAULT)
    name = name.lower() if isinstance(name, str) else name
    return one_of(c.GRADIENT_ALLREDUCE_OP, name, c.GRADIENT_ALLREDUCE_OP_SUPPORTED)


def get_hybrid_engine_config(param_dict: Mapping[str, Any]) -> HybridEngineConfig:
    """The section ``hybrid_engine``."""
    return HybridEngineConfig(**param_dict.get("hybrid_engine", {}))


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``pipeline`` over the defaults."""
    return {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
        **param_dict.get("pipeline", {}),
    }


def get_eigenvalue_config(param_dict: Mapping[str, Any]) -> tuple[Any, ...]:
    """(enabled, verbose, max_iter, tol, stability, gas_boundary_resolution, layer_name, layer_num).

    As in DeepSpeed, they come from ``quantize_training``, and count only where weights are quantized. Raises
    ConfigError if they are enabled there.
    """
    shared = param_dict.get("compression_training", {}).get("shared_parameters", {})
    source = param_dict.get("quantize_training") if shared.get("enabled", False) else None
    found = tuple(getter(source or {}) for getter in _EIGENVALUES)
    if found[0]:
        raise ConfigError(
            "eigenvalues do not set bits", where="quantize_training.eigenvalue", fix="write enabled: false"
        )
    return found


_EIGENVALUES = (
    *(get_eigenvalue_enabled, get_eigenvalue_verbose, get_eigenvalue_max_iter, get_eigenvalue_tol),
    *(get_eigenvalue_stability, get_eigenvalue_gas_boundary_resolution, get_eigenvalue_layer_name),
    get_eigenvalue_layer_num,
)

get_checkpoint_params = value(c.CHECKPOINT, {})
get_data_types_params = value(c.DATA_TYPES, {})


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """The reaction to different tags, in capitals. The argument is the section ``checkpoint``."""
    mode = checkpoint_params.get(c.CHECKPOINT_TAG_VALIDATION, c.CHECKPOINT_TAG_VALIDATION_DEFAULT).upper()
    return one_of(f"checkpoint.{c.CHECKPOINT_TAG_VALIDATION}", mode, c.CHECKPOINT_TAG_VALIDATION_MODES)


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    """Whether all ranks of a pipeline's stage write. The argument is the section ``checkpoint``."""
    section, key = c.CHECKPOINT_PARALLEL_WRITE, c.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE
    given = checkpoint_params.get(section, {}).get(key, c.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT)
    return one_of(f"checkpoint.{section}.{key}", given, (True, False))


def get_checkpoint_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``tag_validation``, ``checkpoint_serialization`` and ``writer`` of the section ``checkpoint``."""
    section = param_dict.get(c.CHECKPOINT) or {}
    return {
        c.CHECKPOINT_TAG_VALIDATION: get_checkpoint_tag_validation_mode(section),
        "checkpoint_serialization": section.get("checkpoint_serialization", True),
        "writer": get_checkpoint_writer_config(section),
    }


_WRITER = {
    "type": "FAST",
    "io_buffer_size": 64 << 20,
    "io_buffer_double": True,
    "show_statistics": False,
    "data_parallel": None,
    "decoupled": False,
    "io_multiplier": 1,
}
_WRITER_CHOICES = {"type": ("MOCK", "PYTHON", "FAST"), "data_parallel": ("REPLICA", "SOCKET", "MACHINE")}


def get_checkpoint_writer_config(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section ``writer`` over the defaults; None without it. The argument is the section ``checkpoint``."""
    section = param_dict.get("writer")
    if section is None:
        return None
    found = {key: section.get(key, default) for key, default in _WRITER.items()}
    for key, choices in _WRITER_CHOICES.items():
        if found[key] is not None:
            found[key] = one_of(f"checkpoint.writer.{key}", found[key].upper(), choices)
    return found


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``aio`` over the defaults."""
    section = param_dict.get(aio.AIO) or {}
    defaults = {
        aio.AIO_BLOCK_SIZE: aio.AIO_BLOCK_SIZE_DEFAULT,
        aio.AIO_QUEUE_DEPTH: aio.AIO_QUEUE_DEPTH_DEFAULT,
        aio.AIO_INTRA_OP_PARALLELISM: aio.AIO_INTRA_OP_PARALLELISM_DEFAULT,
        aio.AIO_SINGLE_SUBMIT: aio.AIO_SINGLE_SUBMIT_DEFAULT,
        aio.AIO_OVERLAP_EVENTS: aio.AIO_OVERLAP_EVENTS_DEFAULT,
        aio.AIO_USE_GDS: aio.AIO_USE_GDS_DEFAULT,
    }
    return {key: section.get(key, default) for key, default in defaults.items()}


def get_default_model_info_config() -> dict[str, Any]:
    """The keys of ``autotuning.model_info`` and their defaults."""
    return {"profile": False, "num_params": None, "hidden_size": None, "num_layers": None}


def get_model_info_config(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """``model_info`` of the section ``autotuning``, which is the argument, over the defaults; None without it."""
    section = param_dict.get("model_info")
    if section is None:
        return None
    return {key: section.get(key, default) for key, default in get_default_model_info_config().items()}


_LAYOUT = (c.SPARSE_DIFFERENT_LAYOUT_PER_HEAD, c.SPARSE_DIFFERENT_LAYOUT_PER_HEAD_DEFAULT)
_N_LOCAL = (c.SPARSE_NUM_LOCAL_BLOCKS, c.SPARSE_NUM_LOCAL_BLOCKS_DEFAULT)
_N_GLOBAL = (c.SPARSE_NUM_GLOBAL_BLOCKS, c.SPARSE_NUM_GLOBAL_BLOCKS_DEFAULT)
_N_RANDOM = (c.SPARSE_NUM_RANDOM_BLOCKS, c.SPARSE_NUM_RANDOM_BLOCKS_DEFAULT)
_N_SLIDING = (c.SPARSE_NUM_SLIDING_WINDOW_BLOCKS, c.SPARSE_NUM_SLIDING_WINDOW_BLOCKS_DEFAULT)
_PATTERNS = (c.SPARSE_NUM_DIFFERENT_GLOBAL_PATTERNS, c.SPARSE_NUM_DIFFERENT_GLOBAL_PATTERNS_DEFAULT)
_DIRECTION = (c.SPARSE_ATTENTION_TYPE, c.SPARSE_ATTENTION_TYPE_DEFAULT)
_HORIZONTAL = (c.SPARSE_HORIZONTAL_GLOBAL_ATTENTION, c.SPARSE_HORIZONTAL_GLOBAL_ATTENTION_DEFAULT)
_LOCAL = (c.SPARSE_LOCAL_WINDOW_BLOCKS, c.SPARSE_LOCAL_WINDOW_BLOCKS_DEFAULT)
_BEGINS = (c.SPARSE_GLOBAL_BLOCK_INDICES, c.SPARSE_GLOBAL_BLOCK_INDICES_DEFAULT)
_ENDS = (c.SPARSE_GLOBAL_BLOCK_END_INDICES, c.SPARSE_GLOBAL_BLOCK_END_INDICES_DEFAULT)


def _pattern(mode: str, *keys: tuple[str, Any]) -> Getter:
    """A function that returns the keys of one pattern of sparse attention, from the section ``sparse_attention``."""

    def getter(sparsity: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: sparsity.get(key, default) for key, default in ((c.SPARSE_BLOCK, c.SPARSE_BLOCK_DEFAULT), *keys)}
        return {c.SPARSE_MODE: mode, **found}

    return getter


get_sparse_dense_config = _pattern(c.SPARSE_DENSE_MODE)
get_sparse_fixed_config = _pattern(
    c.SPARSE_FIXED_MODE, *(_LAYOUT, _N_LOCAL, _N_GLOBAL, _DIRECTION, _HORIZONTAL, _PATTERNS)
)
get_sparse_variable_config = _pattern(
    c.SPARSE_VARIABLE_MODE, *(_LAYOUT, _N_RANDOM, _LOCAL, _BEGINS, _ENDS, _DIRECTION, _HORIZONTAL)
)
get_sparse_bigbird_config = _pattern(c.SPARSE_BIGBIRD_MODE, *(_LAYOUT, _N_RANDOM, _N_SLIDING, _N_GLOBAL))
get_sparse_bslongformer_config = _pattern(c.SPARSE_BSLONGFORMER_MODE, *(_LAYOUT, _N_SLIDING, _BEGINS, _ENDS))

# Their argument is the section ``sparse_attention``.
get_sparse_attention_mode = value(c.SPARSE_MODE, c.SPARSE_MODE_DEFAULT)
get_sparse_attention_type = value(c.SPARSE_ATTENTION_TYPE, c.SPARSE_ATTENTION_TYPE_DEFAULT)

_PATTERN_OF = {
    c.SPARSE_DENSE_MODE: get_sparse_dense_config,
    c.SPARSE_FIXED_MODE: get_sparse_fixed_config,
    c.SPARSE_VARIABLE_MODE: get_sparse_variable_config,
    c.SPARSE_BIGBIRD_MODE: get_sparse_bigbird_config,
    c.SPARSE_BSLONGFORMER_MODE: get_sparse_bslongformer_config,
}


def get_sparse_attention(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of the pattern of sparse attention; None without the section."""
    if c.SPARSE_ATTENTION not in param_dict:
        return None
    section = param_dict[c.SPARSE_ATTENTION]
    mode = one_of(f"{c.SPARSE_ATTENTION}.{c.SPARSE_MODE}", get_sparse_attention_mode(section), _PATTERN_OF)
    return _PATTERN_OF[mode](section)
