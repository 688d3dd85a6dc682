"""DeepSpeed's module paths and names, and what answers to each here: the one table to edit when something is added.

A module of DeepSpeed's either is one of our modules (``MODULES``), or is gathered from several of them, name by name (``NAMES``). ``NAMES`` also holds
what a module of ours is asked for under DeepSpeed's name for it, and has elsewhere or under another name. ``ABSENT`` says what to do without the rest.
"""

from __future__ import annotations

__all__ = ["ABSENT", "MODULES", "NAMES"]

# DeepSpeed's module -> our module, which is the same object under both names. Modules with the same path need no line to be imported; with
# one they are also there as attributes, without an import of their own, as they are in DeepSpeed.
MODULES: dict[str, str] = {
    "deepspeed.accelerator": "deepspeed_c.accelerator",
    "deepspeed.accelerator.abstract_accelerator": "deepspeed_c.accelerator",
    "deepspeed.accelerator.real_accelerator": "deepspeed_c.accelerator",
    "deepspeed.checkpoint": "deepspeed_c.checkpoint",
    "deepspeed.checkpointing": "deepspeed_c.utils.checkpointing",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepspeed_c.utils.checkpointing",
    "deepspeed.checkpoint.ds_to_universal": "deepspeed_c.checkpoint.ds_to_universal",
    "deepspeed.checkpoint.utils": "deepspeed_c.checkpoint.utils",
    "deepspeed.comm": "deepspeed_c.comm",
    "deepspeed.comm.comm": "deepspeed_c.comm.comm",
    "deepspeed.ops": "deepspeed_c.ops",
    "deepspeed.ops.adagrad": "deepspeed_c.ops.adagrad",
    "deepspeed.ops.adagrad.cpu_adagrad": "deepspeed_c.ops.adagrad",
    "deepspeed.ops.adam": "deepspeed_c.ops.adam",
    "deepspeed.ops.adam.cpu_adam": "deepspeed_c.ops.adam",
    "deepspeed.ops.adam.fused_adam": "deepspeed_c.ops.adam",
    "deepspeed.ops.aio": "deepspeed_c.ops.aio",
    "deepspeed.ops.lamb": "deepspeed_c.ops.lamb",
    "deepspeed.ops.lamb.fused_lamb": "deepspeed_c.ops.lamb",
    "deepspeed.ops.lion": "deepspeed_c.ops.lion",
    "deepspeed.ops.lion.cpu_lion": "deepspeed_c.ops.lion",
    "deepspeed.ops.lion.fused_lion": "deepspeed_c.ops.lion",
    "deepspeed.runtime.dataloader": "deepspeed_c.data.loader",
    "deepspeed.runtime.engine": "deepspeed_c.engine.engine",
    "deepspeed.runtime.lr_schedules": "deepspeed_c.lr_schedules",
    "deepspeed.runtime.utils": "deepspeed_c.utils.runtime",
    "deepspeed.runtime.zero": "deepspeed_c.zero",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed_c.zero.partition_parameters",
    "deepspeed.utils": "deepspeed_c.utils",
    "deepspeed.utils.comms_logging": "deepspeed_c.comm.log",
    "deepspeed.utils.groups": "deepspeed_c.utils.groups",
    "deepspeed.utils.init_on_device": "deepspeed_c.utils.init_on_device",
    "deepspeed.utils.logging": "deepspeed_c.logging",
    "deepspeed.utils.nvtx": "deepspeed_c.utils.nvtx",
    "deepspeed.utils.tensor_fragment": "deepspeed_c.zero.access",
    "deepspeed.utils.timer": "deepspeed_c.profile.timers",
    "deepspeed.utils.z3_leaf_module": "deepspeed_c.zero.leaf",
    "deepspeed.utils.zero_to_fp32": "deepspeed_c.utils.zero_to_fp32",
    "deepspeed.zero": "deepspeed_c.zero",
}

_CONSTANTS = "deepspeed_c.alias.constants"
_VERSIONS = {
    "__version_major__": f"{_CONSTANTS}:VERSION_MAJOR",
    "__version_minor__": f"{_CONSTANTS}:VERSION_MINOR",
    "__version_patch__": f"{_CONSTANTS}:VERSION_PATCH",
    "__git_hash__": f"{_CONSTANTS}:GIT_HASH",
    "__git_branch__": f"{_CONSTANTS}:GIT_BRANCH",
}
_OPTIMIZER_NAMES = {
    name: f"{_CONSTANTS}:{name}"
    for name in (
        "ADAGRAD_OPTIMIZER",
        "ADAMW_OPTIMIZER",
        "ADAM_OPTIMIZER",
        "LAMB_OPTIMIZER",
        "LION_OPTIMIZER",
        "MUON_OPTIMIZER",
    )
}
_LOGGING = {name: f"deepspeed_c.logging:{name}" for name in ("log_dist", "logger")}
_ESTIMATES = "deepspeed_c.zero.estimate"
_CHECKPOINT_NAMES = {
    name: f"deepspeed_c.checkpoint.utils:{name}"
    for name in ("get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank")
}
_GROUP_NAMES = {
    name: f"deepspeed_c.comm.groups:{name}"
    for name in (
        *("destroy_process_group", "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank"),
        *("get_world_group", "get_world_size", "init_distributed", "initialize_mesh_device", "is_available"),
        *("is_initialized", "mpi_discovery", "new_group"),
    )
}

# DeepSpeed's module -> name -> "module:name" of ours; "module:" is a module itself.
NAMES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "DeepSpeedConfigError": "deepspeed_c.errors:ConfigError",
        "DeepSpeedDataLoader": "deepspeed_c.data.loader:DeepSpeedDataLoader",
        "OnDevice": "deepspeed_c.utils.init_on_device:OnDevice",
        "add_tuning_arguments": "deepspeed_c.lr_schedules:add_tuning_arguments",
        "dist": "deepspeed_c.comm:",
        **_LOGGING,
        **{name: _OPTIMIZER_NAMES[name] for name in ("ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER")},
        **_VERSIONS,
        "git_branch": _VERSIONS["__git_branch__"],
        "git_hash": _VERSIONS["__git_hash__"],
        "version": "deepspeed_c.alias.version:API_VERSION",
    },
    "deepspeed.checkpoint": _CHECKPOINT_NAMES,
    "deepspeed.comm.comm": _GROUP_NAMES,
    "deepspeed.constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "deepspeed_c.comm.discover:DEFAULT_PORT",
        "default_pg_timeout": "deepspeed_c.comm.groups:DEFAULT_TIMEOUT",
    },
    "deepspeed.env_report": {
        "cli_main": "deepspeed_c.launcher.report:main",
        "main": "deepspeed_c.launcher.report:main",
    },
    "deepspeed.git_version_info": {
        "compatible_ops": "deepspeed_c.ops:__compatible_ops__",
        "git_branch": _VERSIONS["__git_branch__"],
        "git_hash": _VERSIONS["__git_hash__"],
        "installed_ops": "deepspeed_c.ops:__compatible_ops__",
        "version": "deepspeed_c.alias.version:API_VERSION",
    },
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": f"{_CONSTANTS}:DEEPSPEED_ENVIRONMENT_NAME",
        "main": "deepspeed_c.launcher.main:main",
    },
    "deepspeed.ops.op_builder": {"AsyncIOBuilder": "deepspeed_c.ops.aio:AsyncIOBuilder"},
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": "deepspeed_c.zero.optimizer:DeepSpeedOptimizer",
        "ZeROOptimizer": "deepspeed_c.zero.optimizer:ZeroOptimizer",
    },
    "deepspeed.runtime.config": {"DeepSpeedConfigError": "deepspeed_c.errors:ConfigError", **_OPTIMIZER_NAMES},
    "deepspeed.runtime.engine": {
        "DeepSpeedDataLoader": "deepspeed_c.data.loader:DeepSpeedDataLoader",
        "dist": "deepspeed_c.comm:",
        **_OPTIMIZER_NAMES,
    },
    # What pickles of checkpoints in DeepSpeed's layout hold, for those who read such files by themselves.
    "deepspeed.runtime.fp16.loss_scaler": {
        name: f"deepspeed_c.checkpoint.deepspeed.unpickle:{name}"
        for name in ("DynamicLossScaler", "LossScaleConfig", "LossScaleProfile", "LossScaler")
    },
    "deepspeed.utils.tensor_fragment": {
        "fragment_address": "deepspeed_c.checkpoint.deepspeed.unpickle:fragment_address"
    },
    "deepspeed.runtime.zero.config": {
        "OffloadDeviceEnum": "deepspeed_c.engine.offload:OffloadDeviceEnum",
        "ZeroStageEnum": "deepspeed_c.zero.stages:ZeroStageEnum",
    },
    "deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": "deepspeed_c.engine.offload:OffloadDeviceEnum",
        "OffloadStateTypeEnum": "deepspeed_c.engine.offload:OffloadStateTypeEnum",
    },
    "deepspeed.runtime.zero.stage3": {
        "estimate_zero3_model_states_mem_needs": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs",
        "estimate_zero3_model_states_mem_needs_all_cold": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs_all_cold",
        "estimate_zero3_model_states_mem_needs_all_live": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs_all_live",
        "model_to_params": f"{_ESTIMATES}:model_to_params",
        "unwrap_model_for_generation": "deepspeed_c.zero.gathered:unwrap_model_for_generation",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "estimate_zero2_model_states_mem_needs": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs",
        "estimate_zero2_model_states_mem_needs_all_cold": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs_all_cold",
        "estimate_zero2_model_states_mem_needs_all_live": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs_all_live",
        "model_to_params": f"{_ESTIMATES}:model_to_params",
    },
    "deepspeed.utils.timer": {"trim_mean": "deepspeed_c.comm.log:trim_mean"},
}

_PIPELINE = "pipeline parallelism comes with a later version; ZeRO stages 1 to 3 train the same model without stages"
_EXPERTS = "expert parallelism comes with a later version; mixtures of experts train with ZeRO stages 0 to 3, their blocks are found and made leaf modules"
_SEQUENCE = (
    "sequence parallelism comes with a later version; gradient checkpointing of the model, and stage 3, save memory"
)
_TENSOR = "tensor parallelism comes with a later version; stage 3 shards the weights"
_INFERENCE = "the inference engine comes with a later version; `deepspeed_c.initialize` at stage 3 without an optimizer runs forward on sharded weights"
_CHECKPOINTING = "activation checkpointing of DeepSpeed's own comes with a later version; use torch.utils.checkpoint.checkpoint, or the model's gradient_checkpointing_enable()"
_COMPRESSION = "compression comes with a later version"
_ONE_BIT = "1-bit optimizers come with a later version; use Adam, AdamW or Lamb of deepspeed_c.ops"
_DATA = "data efficiency (curriculum, random layer token drop) comes with a later version; use deepspeed_c.data.DeepSpeedDataLoader"
_ONE_OPTIMIZER = "one class serves all stages: deepspeed_c.zero.optimizer.ZeroOptimizer; the stage is engine.zero_optimization_stage()"
_KEYS = "write the key itself as text, as it stands in the JSON file; docs/config.md has all of them"
_CONVERTER = "`deepspeed_c checkpoint convert` turns a checkpoint into any layout; checkpoints load on any number of ranks as they are"
_OPEN = "deepspeed_c.checkpoint.open.open_checkpoint reads checkpoints of both layouts; `deepspeed_c checkpoint info` shows one"
_LOAD_CONFIG = "deepspeed_c.config.load_config(FILE_OR_DICT, world_size=...) reads and checks a configuration"
_TILED = "tiled layers come with a later version; stage 3 cuts large weights into buckets by itself"
_MICS = "zero.Init(zero_param_parallel_group=...) shards over a group of ranks"
_MUON = "use deepspeed_c.ops.muon.Muon, or the optimizer Muon in the configuration"
_LAYERS = "use the model's own layers, or torch.nn.TransformerEncoderLayer"
_KEYS_OF_FILES = "the names of entries in DeepSpeed's files; deepspeed_c.checkpoint.open.open_checkpoint reads what stands under them"
_HELPERS = "a helper of DeepSpeed's engine; the engine has get_global_grad_norm(), offload_states() and reload_states(), torch has clip_grad_norm_"
_FRAGMENTS = "use safe_get_full_* and safe_set_full_* of deepspeed_c.utils"
_BUILDERS = (
    "operators are built when the package is installed; import the optimizers of deepspeed_c.ops, no builder is needed"
)

# What is not here, by the longest prefix of the path that was asked for -> what to use instead. Names stand behind their modules' dots.
ABSENT: dict[str, str] = {
    "deepspeed.DeepSpeedConfig": _LOAD_CONFIG,
    "deepspeed.DeepSpeedHybridEngine": _INFERENCE,
    "deepspeed.DeepSpeedInferenceConfig": _INFERENCE,
    "deepspeed.DeepSpeedTransformerConfig": _LAYERS,
    "deepspeed.DeepSpeedTransformerLayer": _LAYERS,
    "deepspeed.InferenceEngine": _INFERENCE,
    "deepspeed.PipelineEngine": _PIPELINE,
    "deepspeed.PipelineModule": _PIPELINE,
    "deepspeed.is_compile_supported": "every torch that this package takes can compile",
    "deepspeed.load_ds_config": _LOAD_CONFIG,
    "deepspeed.merge_tp_model_init_into_config": _TENSOR,
    "deepspeed.record_tp_model_init_args": _TENSOR,
    "deepspeed.replace_transformer_layer": _INFERENCE,
    "deepspeed.revert_transformer_layer": _INFERENCE,
    "deepspeed.set_autotp_mode": _TENSOR,
    "deepspeed.autotuning": "`deepspeed_c plan` says which stage and offload fit, without running anything",
    "deepspeed.checkpoint": _CONVERTER,
    "deepspeed.checkpoint.DeepSpeedCheckpoint": _OPEN,
    "deepspeed.checkpoint.deepspeed_checkpoint": _OPEN,
    "deepspeed.checkpoint.constants": _KEYS_OF_FILES,
    "deepspeed.checkpoint.ds_to_universal": _CONVERTER,
    "deepspeed.checkpoint.reshape_3d_utils": _CONVERTER,
    "deepspeed.checkpoint.reshape_meg_2d": _CONVERTER,
    "deepspeed.checkpoint.reshape_utils": _CONVERTER,
    "deepspeed.checkpoint.universal_checkpoint": _CONVERTER,
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.compile": "torch.compile by way of engine.compile()",
    "deepspeed.compression": _COMPRESSION,
    "deepspeed.default_inference_config": _INFERENCE,
    "deepspeed.elasticity": "checkpoints load on any number of ranks; choose the batch by hand",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.init_inference": _INFERENCE,
    "deepspeed.io": "deepspeed_c.ops.aio.aio_handle writes and reads files; checkpoints use it by themselves",
    "deepspeed.launcher": "start processes with the command deepspeed_c, or python -m deepspeed_c",
    "deepspeed.linear": "use peft for LoRA; its frozen base may have another dtype",
    "deepspeed.model_implementations": _INFERENCE,
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.moe": _EXPERTS,
    "deepspeed.monitor": "monitors come with a later version; log from the training loop, engine.get_lr() and get_global_grad_norm() have the numbers",
    "deepspeed.nvme": "`deepspeed_c io bench|tune` measures a device and finds the settings that suit it",
    "deepspeed.ops.adam.ZenFlowCPUAdam": "use DeepSpeedCPUAdam",
    "deepspeed.ops.adam.ZenFlowSelectiveAdamW": "use FusedAdam",
    "deepspeed.ops.adam.ZenFlowSelectiveAdamW_stage3": "use FusedAdam",
    "deepspeed.ops.op_builder": _BUILDERS,
    "deepspeed.ops.sparse_attention": "use torch.nn.attention.flex_attention",
    "deepspeed.ops.transformer": _LAYERS,
    "deepspeed.pipe": _PIPELINE,
    "deepspeed.profiling": "the flops profiler comes with a later version; use torch.utils.flop_counter.FlopCounterMode",
    "deepspeed.runtime.activation_checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.bf16_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.compression": _ONE_BIT,
    "deepspeed.runtime.config.DeepSpeedConfig": _LOAD_CONFIG,
    "deepspeed.runtime.config_utils": _KEYS,
    "deepspeed.runtime.constants": _KEYS,
    "deepspeed.runtime.data_pipeline": _DATA,
    "deepspeed.runtime.engine.DeepSpeedOptimizerCallable": "any callable that takes the parameters and returns an optimizer will do",
    "deepspeed.runtime.engine.DeepSpeedSchedulerCallable": "any callable that takes the optimizer and returns a scheduler will do",
    "deepspeed.runtime.engine.MoE": _EXPERTS,
    "deepspeed.runtime.engine.PipelineModule": _PIPELINE,
    "deepspeed.runtime.fp16": f"{_ONE_OPTIMIZER}; {_ONE_BIT}",
    "deepspeed.runtime.fp16.fused_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.fp16.onebit": _ONE_BIT,
    "deepspeed.runtime.fp16.unfused_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.hybrid_engine": _INFERENCE,
    "deepspeed.runtime.pipe": _PIPELINE,
    "deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "deepspeed.runtime.swap_tensor": "offload is set in the configuration, zero_optimization.offload_optimizer; docs/concepts/offload.md",
    "deepspeed.runtime.tensor_parallel": _TENSOR,
    "deepspeed.runtime.utils": _HELPERS,
    "deepspeed.runtime.utils.get_norm_with_moe_layers": _EXPERTS,
    "deepspeed.runtime.utils.get_norm_with_moe_layers_fast": _EXPERTS,
    "deepspeed.runtime.utils.partition_balanced": _PIPELINE,
    "deepspeed.runtime.zero.DeepSpeedZeRoOffload": "engine.optimizer.parameter_offload, at stage 3",
    "deepspeed.runtime.zero.MiCS_Init": _MICS,
    "deepspeed.runtime.zero.TiledLinear": _TILED,
    "deepspeed.runtime.zero.TiledLinearReturnBias": _TILED,
    "deepspeed.runtime.zero.config": "zero_optimization is a section of the configuration; deepspeed_c.config.load_config reads and checks it",
    "deepspeed.runtime.zero.mics": _MICS,
    "deepspeed.runtime.zero.muon": _MUON,
    "deepspeed.runtime.zero.stage3": _ONE_OPTIMIZER,
    "deepspeed.runtime.zero.stage_1_and_2": _ONE_OPTIMIZER,
    "deepspeed.runtime.zero.tiling": _TILED,
    "deepspeed.sequence": _SEQUENCE,
    "deepspeed.set_optimizer_flags": _MUON,
    "deepspeed.tp_model_init": _TENSOR,
    **{
        f"deepspeed.utils.{name}": _FRAGMENTS
        for name in (
            *(
                "fragment_address",
                "get_full_hp_grad",
                "get_full_hp_param",
                "get_hp_fragment_mapping",
                "tensor_fragment",
            ),
            *("lazy_init_hp_params_optimizer_state", "link_hp_params", "map_to_flat_opt_states"),
            *("set_full_hp_grad", "set_full_hp_param"),
        )
    },
    "deepspeed.utils.get_numactl_cmd": "`deepspeed_c --bind_cores_to_rank` gives each process cores of its own",
    "deepspeed.utils.groups": _EXPERTS,
    "deepspeed.utils.timer": "torch.cuda.Event measures time on a device",
    "deepspeed.utils.zero_to_fp32": "use get_fp32_state_dict_from_zero_checkpoint, or `deepspeed_c checkpoint export`",
}
