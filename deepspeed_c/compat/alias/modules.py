"""DeepSpeed's module paths and names, and the modules and objects of this package for them. A new name is added here
only; those of MII are in mii_modules.py.

A module of DeepSpeed is either one module of this package (``MODULES``), or its names come from several modules
(``NAMES``). ``NAMES`` also holds names of modules in ``MODULES`` whose objects lie in another module here or have
another name. ``ABSENT`` names replacements for missing paths.
"""

from __future__ import annotations

from deepspeed_c.compat.alias import mii_modules

__all__ = ["ABSENT", "MODULES", "NAMES"]

# DeepSpeed's module -> this package's module, one object under both names. A module with the same path in both packages
# can be imported without an entry here. An entry also makes it an attribute of its parent without an import, as in
# DeepSpeed.
MODULES: dict[str, str] = {
    "deepspeed.accelerator": "deepspeed_c.accelerator",
    "deepspeed.accelerator.abstract_accelerator": "deepspeed_c.accelerator",
    "deepspeed.accelerator.real_accelerator": "deepspeed_c.accelerator",
    "deepspeed.checkpoint": "deepspeed_c.checkpoint",
    "deepspeed.checkpointing": "deepspeed_c.compat.checkpointing",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepspeed_c.compat.checkpointing",
    "deepspeed.checkpoint.ds_to_universal": "deepspeed_c.checkpoint.tools.ds_to_universal",
    "deepspeed.checkpoint.utils": "deepspeed_c.compat.checkpoint_utils",
    "deepspeed.checkpoint.constants": "deepspeed_c.compat.checkpoint_constants",
    "deepspeed.comm": "deepspeed_c.comm",
    "deepspeed.comm.constants": "deepspeed_c.compat.comm_constants",
    "deepspeed.comm.comm": "deepspeed_c.comm.comm",
    "deepspeed.elasticity.config": "deepspeed_c.config.elasticity",
    "deepspeed.elasticity.constants": "deepspeed_c.compat.elasticity_constants",
    "deepspeed.elasticity.elasticity": "deepspeed_c.config.elasticity",
    "deepspeed.launcher.constants": "deepspeed_c.compat.launcher_constants",
    "deepspeed.launcher.multinode_runner": "deepspeed_c.compat.multinode_runner",
    "deepspeed.monitor": "deepspeed_c.monitor",
    "deepspeed.monitor.comet": "deepspeed_c.monitor.comet",
    "deepspeed.monitor.csv_monitor": "deepspeed_c.monitor.csv_monitor",
    "deepspeed.monitor.monitor": "deepspeed_c.monitor.monitor",
    "deepspeed.monitor.tensorboard": "deepspeed_c.monitor.tensorboard",
    "deepspeed.monitor.utils": "deepspeed_c.monitor.utils",
    "deepspeed.monitor.wandb": "deepspeed_c.monitor.wandb",
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
    "deepspeed.ops.op_builder": "deepspeed_c.ops.op_builder",
    "deepspeed.ops.quantizer": "deepspeed_c.ops.quantizer",
    "deepspeed.ops.quantizer.quantizer": "deepspeed_c.ops.quantizer",
    "deepspeed.ops.lion.fused_lion": "deepspeed_c.ops.lion",
    "deepspeed.module_inject.autotp_config": "deepspeed_c.inject.autotp_config",
    "deepspeed.module_inject.replace_module": "deepspeed_c.inject.replace",
    "deepspeed.compression": "deepspeed_c.compression",
    "deepspeed.compression.basic_layer": "deepspeed_c.compression.basic_layer",
    "deepspeed.compression.compress": "deepspeed_c.compression.compress",
    "deepspeed.compression.config": "deepspeed_c.compat.compression_getters",
    "deepspeed.compression.helper": "deepspeed_c.compat.dotted",
    "deepspeed.compression.scheduler": "deepspeed_c.compression.scheduler",
    "deepspeed.moe": "deepspeed_c.moe",
    "deepspeed.moe.experts": "deepspeed_c.moe.experts",
    "deepspeed.moe.layer": "deepspeed_c.moe.layer",
    "deepspeed.moe.mappings": "deepspeed_c.moe.mappings",
    "deepspeed.moe.utils": "deepspeed_c.moe.utils",
    "deepspeed.ops.transformer": "deepspeed_c.ops.transformer",
    "deepspeed.ops.transformer.transformer": "deepspeed_c.ops.transformer",
    "deepspeed.profiling.flops_profiler": "deepspeed_c.profile.flops",
    "deepspeed.profiling.flops_profiler.profiler": "deepspeed_c.profile.flops",
    "deepspeed.runtime.compiler": "deepspeed_c.compat.compiler",
    "deepspeed.runtime.config": "deepspeed_c.compat.ds_config",
    "deepspeed.runtime.config_utils": "deepspeed_c.compat.config_utils",
    "deepspeed.runtime.constants": "deepspeed_c.compat.runtime_constants",
    "deepspeed.runtime.dataloader": "deepspeed_c.data.loader",
    "deepspeed.runtime.data_pipeline.config": "deepspeed_c.compat.data_getters",
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": "deepspeed_c.data.curriculum",
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": "deepspeed_c.data.analyzer",
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": "deepspeed_c.data.sampler",
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": "deepspeed_c.data.indexed",
    "deepspeed.runtime.progressive_layer_drop": "deepspeed_c.engine.forward_arguments",
    "deepspeed.runtime.engine": "deepspeed_c.engine.engine",
    "deepspeed.runtime.hybrid_engine": "deepspeed_c.engine.hybrid",
    "deepspeed.runtime.lr_schedules": "deepspeed_c.lr_schedules",
    "deepspeed.runtime.rollout": "deepspeed_c.rollout",
    "deepspeed.runtime.rollout.base": "deepspeed_c.rollout.base",
    "deepspeed.runtime.rollout.hybrid_engine_rollout": "deepspeed_c.rollout.hybrid",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "deepspeed_c.sequence.parallel_state",
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "deepspeed_c.sequence.huggingface",
    "deepspeed.runtime.state_dict_factory": "deepspeed_c.checkpoint.formats.megatron",
    "deepspeed.pipe": "deepspeed_c.pipe",
    "deepspeed.runtime.pipe": "deepspeed_c.pipe",
    "deepspeed.runtime.pipe.engine": "deepspeed_c.engine.pipeline",
    "deepspeed.runtime.pipe.module": "deepspeed_c.pipe.module",
    "deepspeed.runtime.pipe.schedule": "deepspeed_c.pipe.instructions",
    "deepspeed.runtime.pipe.topology": "deepspeed_c.pipe.topology",
    "deepspeed.runtime.swap_tensor.constants": "deepspeed_c.compat.swap_constants",
    "deepspeed.runtime.torch_autocast": "deepspeed_c.zero.layout.autocast",
    "deepspeed.runtime.utils": "deepspeed_c.utils.runtime",
    "deepspeed.runtime.zero": "deepspeed_c.zero",
    "deepspeed.runtime.zero.linear": "deepspeed_c.compat.zero_linear",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed_c.zero.weights.init",
    "deepspeed.sequence.cross_entropy": "deepspeed_c.sequence.loss",
    "deepspeed.sequence.layer": "deepspeed_c.sequence.layer",
    "deepspeed.sequence.fpdt_layer": "deepspeed_c.sequence.fpdt",
    "deepspeed.utils": "deepspeed_c.utils",
    "deepspeed.utils.comms_logging": "deepspeed_c.comm.log",
    "deepspeed.utils.groups": "deepspeed_c.utils.groups",
    "deepspeed.utils.init_on_device": "deepspeed_c.utils.init_on_device",
    "deepspeed.utils.logging": "deepspeed_c.logging",
    "deepspeed.utils.nvtx": "deepspeed_c.utils.nvtx",
    "deepspeed.utils.tensor_fragment": "deepspeed_c.zero.states.access",
    "deepspeed.utils.timer": "deepspeed_c.profile.timers",
    "deepspeed.utils.torch": "deepspeed_c.compat.torch_version",
    "deepspeed.utils.z3_leaf_module": "deepspeed_c.zero.layout.leaf",
    "deepspeed.utils.zero_to_fp32": "deepspeed_c.utils.zero_to_fp32",
    "deepspeed.zero": "deepspeed_c.zero",
}

_CONSTANTS = "deepspeed_c.compat.alias.constants"
_VERSIONS = {
    "__version_major__": f"{_CONSTANTS}:VERSION_MAJOR",
    "__version_minor__": f"{_CONSTANTS}:VERSION_MINOR",
    "__version_patch__": f"{_CONSTANTS}:VERSION_PATCH",
    "__git_hash__": f"{_CONSTANTS}:GIT_HASH",
    "__git_branch__": f"{_CONSTANTS}:GIT_BRANCH",
}
_CONFIG, _SECTIONS, _TIMING = (
    "deepspeed_c.compat.ds_config",
    "deepspeed_c.compat.config_sections",
    "deepspeed_c.compat.timing",
)
_RUNNERS = ("PDSHRunner", "OpenMPIRunner", "MPICHRunner", "IMPIRunner", "SlurmRunner", "MVAPICHRunner")
_INFERENCE_CONFIG = "deepspeed_c.config.inference"
_RAGGED = "deepspeed_c.inference.v2"
_RAGGED_CONFIG = "deepspeed_c.config.ragged"
_RAGGED_BUILDERS = ("build_engine_from_ds_checkpoint", "build_hf_engine")
_RAGGED_ENGINE = {
    "DeepSpeedTPConfig": f"{_INFERENCE_CONFIG}:DeepSpeedTPConfig",
    "InferenceEngineV2": f"{_RAGGED}.engine:InferenceEngineV2",
    "RaggedInferenceEngineConfig": f"{_RAGGED_CONFIG}:RaggedInferenceEngineConfig",
    **{name: f"{_RAGGED}.factory:{name}" for name in _RAGGED_BUILDERS},
}
_RAGGED_LIMITS = {
    name: f"{_RAGGED_CONFIG}:{name}"
    for name in ("AllocationMode", "DSStateManagerConfig", "KVCacheConfig", "MemoryConfig")
}
_RAGGED_BATCH = {"RaggedBatchWrapper": f"{_RAGGED}.batch:RaggedBatchWrapper"}
_RAGGED_ALLOCATOR = {"BlockedAllocator": f"{_RAGGED}.blocks:BlockedAllocator"}
_SPLIT_KV = {"split_kv": f"{_RAGGED}.blocks:split_kv"}
_RAGGED_STATE = {
    name: f"{_RAGGED}.state:{name}"
    for name in ("DSSequenceDescriptor", "DSStateManager", "PlaceholderSequenceDescriptor")
}
_BUILDERS = "deepspeed_c.ops.op_builder"
_GETTERS = "deepspeed_c.compat.config_getters"
_RUNTIME_GETTERS = {
    name: f"{_GETTERS}:{name}"
    for name in (
        *("get_amp_enabled", "get_amp_params", "get_checkpoint_parallel_write_pipeline", "get_checkpoint_params"),
        *("get_checkpoint_tag_validation_mode", "get_communication_data_type", "get_data_types_params"),
        *("get_dataloader_drop_last", "get_disable_allgather", "get_dump_state", "get_eigenvalue_config"),
        *("get_eigenvalue_enabled", "get_eigenvalue_gas_boundary_resolution", "get_eigenvalue_layer_name"),
        *("get_eigenvalue_layer_num", "get_eigenvalue_max_iter", "get_eigenvalue_stability", "get_eigenvalue_tol"),
        *("get_eigenvalue_verbose", "get_expert_data_topo_config", "get_gradient_accumulation_steps"),
        *("get_gradient_allreduce_op", "get_gradient_clipping", "get_gradient_predivide_factor"),
        *("get_graph_harvesting", "get_hybrid_engine_config", "get_log_level", "get_lower_precision_safe_modules"),
        *("get_managed_gradient_accumulation", "get_memory_breakdown", "get_optimizer_gradient_clipping"),
        *("get_optimizer_legacy_fusion", "get_optimizer_name", "get_optimizer_params", "get_pipeline_config"),
        *("get_pld_enabled", "get_pld_params", "get_prescale_gradients", "get_scheduler_name"),
        *("get_scheduler_params", "get_sparse_attention", "get_sparse_attention_mode", "get_sparse_attention_type"),
        *("get_sparse_bigbird_config", "get_sparse_bslongformer_config", "get_sparse_dense_config"),
        *("get_sparse_fixed_config", "get_sparse_gradients_enabled", "get_sparse_variable_config"),
        *("get_steps_per_print", "get_torch_autocast_dtype", "get_torch_autocast_enabled", "get_train_batch_size"),
        *("get_train_micro_batch_size_per_gpu", "get_wall_clock_breakdown", "get_zero_allow_untested_optimizer"),
        "get_zero_force_ds_cpu_optimizer",
    )
}
_OPTIMIZER_NAMES = {
    name: f"{_CONFIG}:{name}"
    for name in (
        *("ADAGRAD_OPTIMIZER", "ADAMW_OPTIMIZER", "ADAM_OPTIMIZER", "DEEPSPEED_OPTIMIZERS", "LAMB_OPTIMIZER"),
        *("LION_OPTIMIZER", "MUADAMW_OPTIMIZER", "MUADAM_OPTIMIZER", "MUON_OPTIMIZER", "MUSGD_OPTIMIZER"),
        *("ONEBIT_ADAM_OPTIMIZER", "ONEBIT_LAMB_OPTIMIZER", "ZERO_ONE_ADAM_OPTIMIZER"),
    )
}
_TENSOR_PARALLEL = {
    name: f"{_SECTIONS}:{name}" for name in ("TPConfig", "TPTrainingConfig", "get_tensor_parallel_config")
}
_ZERO_CONFIG = {
    "OffloadDeviceEnum": "deepspeed_c.engine.offload:OffloadDeviceEnum",
    "OffloadStateTypeEnum": "deepspeed_c.engine.offload:OffloadStateTypeEnum",
    "DeepSpeedZeroOffloadParamConfig": f"{_SECTIONS}:DeepSpeedZeroOffloadParamConfig",
    "DeepSpeedZeroOffloadOptimizerConfig": f"{_SECTIONS}:DeepSpeedZeroOffloadOptimizerConfig",
}
_LR_NAMES = {
    name: f"deepspeed_c.compat.lr_constants:{name}"
    for name in (
        *("LR_RANGE_TEST_MIN_LR", "LR_RANGE_TEST_STEP_RATE", "LR_RANGE_TEST_STEP_SIZE", "LR_RANGE_TEST_STAIRCASE"),
        *("EDGE_VALUE", "MID_VALUE", "CYCLE_FIRST_STEP_SIZE", "CYCLE_FIRST_STAIR_COUNT", "CYCLE_SECOND_STEP_SIZE"),
        *("CYCLE_SECOND_STAIR_COUNT", "CYCLE_MIN_LR", "CYCLE_MAX_LR", "CYCLE_MIN_MOM", "CYCLE_MAX_MOM"),
        *("DECAY_STEP_SIZE", "DECAY_LR_RATE", "DECAY_MOM_RATE", "WARMUP_MIN_LR", "WARMUP_MAX_LR", "WARMUP_NUM_STEPS"),
        *("WARMUP_TYPE", "WARMUP_MIN_RATIO", "COS_MIN_RATIO", "TOTAL_NUM_STEPS"),
    )
}
_TIMER_NAMES = {
    name: f"{_TIMING}:{name}"
    for name in (
        *("BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER"),
        *("BACKWARD_MICRO_TIMER", "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "CudaEventTimer"),
        *("FORWARD_GLOBAL_TIMER", "FORWARD_MICRO_TIMER", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "TIME_EPSILON"),
    )
}
_LOGGING = {name: f"deepspeed_c.logging:{name}" for name in ("log_dist", "logger")}
_ESTIMATES = "deepspeed_c.compat.zero_estimate"
_CHECKPOINT_NAMES = {
    name: f"deepspeed_c.compat.checkpoint_utils:{name}"
    for name in ("get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank")
}
_FOLDER, _DS_CHECKPOINT = "deepspeed_c.compat.checkpoint_folder", "deepspeed_c.compat.deepspeed_checkpoint"
_FOLDER_NAMES = (
    *("SubparamShape", "ZeROCheckpoint", "get_model_3d_descriptor", "merge_state", "model_3d_desc"),
    "reshape_meg_2d_parallel",
)
_HP_ACCESS = {
    name: f"deepspeed_c.compat.hp_access:{name}"
    for name in ("fragment_address", "get_full_hp_grad", "get_full_hp_param", "set_full_hp_grad", "set_full_hp_param")
}
_FRAGMENT_NAMES = {
    name: f"deepspeed_c.compat.fragments:{name}"
    for name in (
        *("get_hp_fragment_mapping", "lazy_init_hp_params_optimizer_state", "link_hp_params"),
        "map_to_flat_opt_states",
    )
}
_ENGINES = "deepspeed_c.checkpoint.checkpoint_engine"
_OFFLOAD_HOOKS = "deepspeed_c.zero.weights.hooks:ModuleHooks"
_GROUP_NAMES = {
    name: f"deepspeed_c.comm.groups:{name}"
    for name in (
        *("destroy_process_group", "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank"),
        *("get_world_group", "get_world_size", "init_distributed", "initialize_mesh_device", "is_available"),
        *("is_initialized", "mpi_discovery", "new_group"),
    )
}

_LAYER_NAMES = {
    **{
        name: f"deepspeed_c.inject.layers:{name}"
        for name in ("LinearAllreduce", "LinearLayer", "SubParamLinearAllreduce", "SubParamLinearLayer")
    },
    "EmbeddingLayer": "deepspeed_c.inject.by_hand:EmbeddingLayer",
    "GatherReplacedLayerParams": "deepspeed_c.inject.by_hand:GatherReplacedLayerParams",
    "set_autotp_mode": "deepspeed_c.inject.by_hand:set_autotp_mode",
}
_INJECTED_NAMES = {
    name: f"deepspeed_c.inject.{file}:{name}"
    for file, names in {
        "autotp_config": ("AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "merge_autotp_configs"),
        "layer_policies": ("HFBertLayerPolicy",),
        "replace": ("generic_injection", "replace_transformer_layer", "revert_transformer_layer"),
    }.items()
    for name in names
}
_LAYER_POLICIES = {
    name: f"deepspeed_c.inject.layer_policies:{name}" for name in ("HFBertLayerPolicy", "HFDistilBertLayerPolicy")
}

_EXPERT_NAMES = {
    "MOELayer": "deepspeed_c.moe.layer:MOELayer",
    "MoE": "deepspeed_c.moe.layer:MoE",
    **{name: f"deepspeed_c.moe.gate:{name}" for name in ("TopKGate", "top1gating", "top2gating", "topkgating")},
}

_PROBES = "deepspeed_c.compat.probes"
# Questions about torch, the machine, tensors and nodes of graphs.
_QUESTIONS = {
    "deepspeed.autotuning.utils": ("was_interrupted",),
    "deepspeed.checkpoint.autoep_zero3_metadata": ("is_autoep_zero3_partitioned_entry",),
    "deepspeed.comm.torch": ("has_all_reduce_coalesced", "has_coalescing_manager"),
    "deepspeed.comm.utils": (
        *("get_local_rank_from_launcher", "get_world_rank_from_launcher", "get_world_size_from_launcher"),
    ),
    "deepspeed.compile.fx": ("should_release_reduce_buckets",),
    "deepspeed.compile.profilers.graph_profile": ("is_profile_incomplete",),
    "deepspeed.compile.util": ("is_backend_inductor", "is_cast_op", "is_comm_op", "is_release_node"),
    "deepspeed.compile.z3_eager_fallback": ("is_dynamo_guard_evaluation",),
    "deepspeed.compression.helper": ("is_module_compressible",),
    "deepspeed.elasticity.utils": ("is_torch_elastic_compatible",),
    "deepspeed.env_report": ("get_shm_size", "installed_cann_path", "installed_cann_version"),
    "deepspeed.inference.v2.inference_utils": ("is_gated",),
    "deepspeed.module_inject.auto_ep_folding": ("is_autoep_folding_gradient_corrected",),
    "deepspeed.ops.op_builder.builder": ("get_default_compute_capabilities", "installed_cuda_version"),
    "deepspeed.ops.transformer.inference.triton.matmul_ext": ("is_nfs_path",),
    "deepspeed.ops.triton_ops._triton": ("is_triton_available",),
    "deepspeed.runtime.pipe.engine": ("is_even",),
    "deepspeed.runtime.pipe.p2p": ("can_send_recv",),
    "deepspeed.runtime.zero.mics": ("has_hierarchical_all_gather_groups",),
    "deepspeed.runtime.zero.utils": (
        *("get_norm_dtype", "is_builtin_type", "is_zero_param", "is_zero_supported_optimizer"),
    ),
}
# Questions about the state of a feature that is not here: False, whatever the arguments. A question about data must
# not stand in this table.
_NO = {
    "deepspeed.comm.mori": ("is_enabled", "supports"),
    "deepspeed.compile.custom_ops.sp_dp_registry": ("is_setup",),
    "deepspeed.compile.util": ("is_deepcompile_supported",),
    "deepspeed.runtime.zenflow.engine": ("is_zenflow_update_boundary",),
    "deepspeed.runtime.zenflow.engine_stage3": ("is_zenflow_select_boundary",),
}
# The current objects and numbers of features that are not here: None.
_NOTHING = {
    "deepspeed.compile.z3_eager_fallback": ("get_active_z3_eager_fallback",),
    "deepspeed.module_inject.tp_shard": ("get_n_embd", "get_num_attention_heads", "get_num_kv_heads"),
    "deepspeed.utils.pin_memory": ("get_active_native_pinned_memory",),
}


def _with_questions(names: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The table with the entries of ``_QUESTIONS``, ``_NO`` and ``_NOTHING``."""
    found = {module: dict(entries) for module, entries in names.items()}
    for table, answer in ((_QUESTIONS, None), (_NO, "no"), (_NOTHING, "nothing")):
        for module, asked in table.items():
            found.setdefault(module, {}).update({name: f"{_PROBES}:{answer or name}" for name in asked})
    return found


# DeepSpeed's module -> name -> "module:name" in this package; "module:" is a module itself.
_NAMES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "DeepSpeedConfig": f"{_CONFIG}:DeepSpeedConfig",
        "DeepSpeedConfigError": "deepspeed_c.errors:ConfigError",
        "DeepSpeedDataLoader": "deepspeed_c.data.loader:DeepSpeedDataLoader",
        "DeepSpeedHybridEngine": "deepspeed_c.engine.hybrid:DeepSpeedHybridEngine",
        "PipelineEngine": "deepspeed_c.engine.pipeline:PipelineEngine",
        "PipelineModule": "deepspeed_c.pipe.module:PipelineModule",
        "OnDevice": "deepspeed_c.utils.init_on_device:OnDevice",
        "add_tuning_arguments": "deepspeed_c.lr_schedules:add_tuning_arguments",
        "dist": "deepspeed_c.comm:",
        "replace_transformer_layer": _INJECTED_NAMES["replace_transformer_layer"],
        "revert_transformer_layer": _INJECTED_NAMES["revert_transformer_layer"],
        "set_autotp_mode": _LAYER_NAMES["set_autotp_mode"],
        "is_compile_supported": "deepspeed_c.compat.torch_version:is_compile_supported",
        "load_ds_config": f"{_CONFIG}:load_ds_config",
        "set_optimizer_flags": f"{_CONFIG}:set_optimizer_flags",
        **_LOGGING,
        **{name: _OPTIMIZER_NAMES[name] for name in ("ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER")},
        **_VERSIONS,
        "git_branch": _VERSIONS["__git_branch__"],
        "git_hash": _VERSIONS["__git_hash__"],
        "version": "deepspeed_c.compat.alias.version:API_VERSION",
    },
    "deepspeed.checkpoint": {
        **_CHECKPOINT_NAMES,
        **{name: f"{_FOLDER}:{name}" for name in _FOLDER_NAMES},
        "DeepSpeedCheckpoint": f"{_DS_CHECKPOINT}:DeepSpeedCheckpoint",
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": {"DeepSpeedCheckpoint": f"{_DS_CHECKPOINT}:DeepSpeedCheckpoint"},
    "deepspeed.checkpoint.ds_to_universal": {
        name: f"{_DS_CHECKPOINT}:{name}" for name in ("dp_index_to_str", "dump_param_fragment", "extract_zero_shards")
    },
    "deepspeed.checkpoint.reshape_3d_utils": {
        name: f"{_FOLDER}:{name}" for name in ("get_model_3d_descriptor", "model_3d_desc")
    },
    "deepspeed.checkpoint.reshape_meg_2d": {
        name: f"{_FOLDER}:{name}" for name in ("meg_2d_parallel_map", "reshape_meg_2d_parallel")
    },
    "deepspeed.checkpoint.reshape_utils": {
        name: f"{_FOLDER}:{name}"
        for name in (
            *("basic_folder_validation", "get_files", "get_files_with_prefix", "get_zero_files", "merge_state"),
            "partition_data",
        )
    },
    "deepspeed.checkpoint.universal_checkpoint": {"SubparamShape": f"{_FOLDER}:SubparamShape"},
    "deepspeed.checkpoint.zero_checkpoint": {"ZeROCheckpoint": f"{_FOLDER}:ZeROCheckpoint"},
    "deepspeed.comm.comm": _GROUP_NAMES,
    "deepspeed.compression": {"convert_conv1d_to_linear": "deepspeed_c.compression.conv1d:convert_conv1d_to_linear"},
    "deepspeed.compression.helper": {
        "convert_conv1d_to_linear": "deepspeed_c.compression.conv1d:convert_conv1d_to_linear"
    },
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
        "torch_info": "deepspeed_c.compat.torch_version:torch_info",
        "version": "deepspeed_c.compat.alias.version:API_VERSION",
    },
    # A gathering module, because our own module of that path is another one
    "deepspeed.launcher.launch": {"main": "deepspeed_c.compat.launcher_launch:main"},
    "deepspeed.launcher.runner": {
        **{name: f"deepspeed_c.compat.multinode_runner:{name}" for name in _RUNNERS},
        "DEEPSPEED_ENVIRONMENT_NAME": f"{_CONSTANTS}:DEEPSPEED_ENVIRONMENT_NAME",
        **{
            name: f"deepspeed_c.compat.launcher_runner:{name}"
            for name in (
                *("DEEPSPEED_ENVIRONMENT_PATHS", "DLTS_HOSTFILE", "EXCLUDE_ENVS", "EXPORT_ENVS", "_parse_hostfile"),
                *("encode_world_info", "fetch_hostfile", "main", "parse_args", "parse_inclusion_exclusion"),
                *("parse_node_config_list", "parse_resource_filter"),
            )
        },
    },
    "deepspeed.module_inject": {**_LAYER_NAMES, **_INJECTED_NAMES},
    "deepspeed.module_inject.containers": _LAYER_POLICIES,
    "deepspeed.module_inject.layers": {
        **_LAYER_NAMES,
        "LmHeadLinearAllreduce": "deepspeed_c.inject.layers:LmHeadLinearAllreduce",
        "fused_LinearLayer": "deepspeed_c.inject.by_hand:fused_LinearLayer",
        "is_autotp_training_mode": "deepspeed_c.inject.by_hand:is_autotp_training_mode",
    },
    "deepspeed.module_inject.replace_policy": _LAYER_POLICIES,
    # DeepSpeed has one file for each builder.
    **{
        f"deepspeed.ops.op_builder.{file}": {name: f"{_BUILDERS}:{name}" for name in names}
        for file, names in {
            "all_ops": ("ALL_OPS",),
            "async_io": ("AsyncIOBuilder",),
            "builder": ("CUDAOpBuilder", "OpBuilder", "TorchCPUOpBuilder", "probe_is_compatible"),
            "cpu": ("AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "NotImplementedBuilder"),
            "cpu_adagrad": ("CPUAdagradBuilder",),
            "cpu_adam": ("CPUAdamBuilder",),
            "cpu_lion": ("CPULionBuilder",),
            "fused_adam": ("FusedAdamBuilder",),
            "fused_lamb": ("FusedLambBuilder",),
            "fused_lion": ("FusedLionBuilder",),
            "utils": ("UtilsBuilder",),
        }.items()
    },
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": "deepspeed_c.zero.states.optimizer:DeepSpeedOptimizer",
        "ZeROOptimizer": "deepspeed_c.zero.states.kinds:ZeROOptimizer",
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "deepspeed_c.zero.states.kinds:BF16_Optimizer"},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": "deepspeed_c.zero.states.kinds:FP16_Optimizer"},
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "FP16_UnfusedOptimizer": "deepspeed_c.zero.states.kinds:FP16_UnfusedOptimizer"
    },
    "deepspeed.runtime.config": {
        "DeepSpeedConfigError": "deepspeed_c.errors:ConfigError",
        "DeepSpeedConfigModel": "deepspeed_c.config.config_model:DeepSpeedConfigModel",
        "WeightQuantConfig": f"{_INFERENCE_CONFIG}:WeightQuantConfig",
        **_RUNTIME_GETTERS,
        **{
            name: f"{_SECTIONS}:{name}"
            for name in (
                *("DeepSpeedAutotuningConfig", "DeepSpeedDataStatesConfig", "HybridEngineConfig"),
                *("get_expert_parallel_config", "get_tensor_parallel_config"),
            )
        },
    },
    "deepspeed.autotuning": {"Autotuner": "deepspeed_c.compat.autotuner:Autotuner"},
    "deepspeed.autotuning.autotuner": {"Autotuner": "deepspeed_c.compat.autotuner:Autotuner"},
    "deepspeed.autotuning.scheduler": {"ResourceManager": "deepspeed_c.compat.autotuner:ResourceManager"},
    "deepspeed.autotuning.config": {
        "DeepSpeedAutotuningConfig": f"{_SECTIONS}:DeepSpeedAutotuningConfig",
        **{name: f"{_GETTERS}:{name}" for name in ("get_default_model_info_config", "get_model_info_config")},
    },
    "deepspeed.runtime.model_checkpointing.config": {
        name: f"{_GETTERS}:{name}" for name in ("get_checkpoint_config", "get_checkpoint_writer_config")
    },
    "deepspeed.runtime.swap_tensor.aio_config": {"get_aio_config": f"{_GETTERS}:get_aio_config"},
    "deepspeed.datastates.config": {"DeepSpeedDataStatesConfig": f"{_SECTIONS}:DeepSpeedDataStatesConfig"},
    "deepspeed.inference.engine": {"InferenceEngine": "deepspeed_c.inference.engine:InferenceEngine"},
    **dict.fromkeys(("deepspeed.inference", "deepspeed.inference.v2"), _RAGGED_ENGINE),
    "deepspeed.inference.v2.config_v2": {
        "DeepSpeedTPConfig": f"{_INFERENCE_CONFIG}:DeepSpeedTPConfig",
        "QuantizationConfig": f"{_RAGGED_CONFIG}:RaggedQuantizationConfig",
        **{name: f"{_RAGGED_CONFIG}:{name}" for name in ("DSStateManagerConfig", "RaggedInferenceEngineConfig")},
    },
    "deepspeed.inference.v2.engine_factory": {
        name: _RAGGED_ENGINE[name] for name in ("InferenceEngineV2", "RaggedInferenceEngineConfig", *_RAGGED_BUILDERS)
    },
    "deepspeed.inference.v2.engine_v2": {
        **{name: _RAGGED_ENGINE[name] for name in ("InferenceEngineV2", "RaggedInferenceEngineConfig")},
        **{name: f"{_RAGGED}.scheduling:{name}" for name in ("SchedulingError", "SchedulingResult")},
        **{name: f"{_RAGGED}.state:{name}" for name in ("DSStateManager", "PlaceholderSequenceDescriptor")},
        **_RAGGED_BATCH,
    },
    "deepspeed.inference.v2.scheduling_utils": {
        name: f"{_RAGGED}.scheduling:{name}" for name in ("SchedulingError", "SchedulingResult")
    },
    "deepspeed.inference.v2.ragged": {**_RAGGED_LIMITS, **_RAGGED_STATE, **_RAGGED_BATCH, **_SPLIT_KV},
    "deepspeed.inference.v2.ragged.blocked_allocator": _RAGGED_ALLOCATOR,
    "deepspeed.inference.v2.ragged.kv_cache": {
        **{name: _RAGGED_LIMITS[name] for name in ("AllocationMode", "KVCacheConfig", "MemoryConfig")},
        **_RAGGED_ALLOCATOR,
        **_SPLIT_KV,
    },
    "deepspeed.inference.v2.ragged.manager_configs": {
        **_RAGGED_LIMITS,
        "DtypeEnum": "deepspeed_c.compat.dtype_enum:DtypeEnum",
        "KVCacheType": f"{_RAGGED_CONFIG}:KVCacheType",
    },
    "deepspeed.inference.v2.ragged.ragged_manager": {
        **{name: _RAGGED_STATE[name] for name in ("DSSequenceDescriptor", "DSStateManager")},
        **{name: _RAGGED_LIMITS[name] for name in ("DSStateManagerConfig", "KVCacheConfig")},
        **_RAGGED_ALLOCATOR,
    },
    "deepspeed.inference.v2.ragged.ragged_wrapper": {
        **{name: _RAGGED_LIMITS[name] for name in ("DSStateManagerConfig",)},
        **{name: _RAGGED_STATE[name] for name in ("DSSequenceDescriptor",)},
        **_RAGGED_BATCH,
        "to_padded": f"{_RAGGED}.batch:to_padded",
    },
    "deepspeed.inference.v2.ragged.sequence_descriptor": {
        **{name: _RAGGED_STATE[name] for name in ("DSSequenceDescriptor", "PlaceholderSequenceDescriptor")},
        "BaseSequenceDescriptor": f"{_RAGGED}.state:BaseSequenceDescriptor",
    },
    "deepspeed.inference.config": {
        "DtypeEnum": "deepspeed_c.compat.dtype_enum:DtypeEnum",
        **{
            name: f"{_INFERENCE_CONFIG}:{name}"
            for name in (
                *("ActivationQuantConfig", "BaseQuantConfig", "DeepSpeedInferenceConfig", "DeepSpeedMoEConfig"),
                *("DeepSpeedTPConfig", "InferenceCheckpointConfig", "MoETypeEnum", "QKVQuantConfig", "QuantTypeEnum"),
                *("QuantizationConfig", "WeightQuantConfig"),
            )
        },
    },
    "deepspeed.runtime.tensor_parallel": _TENSOR_PARALLEL,
    "deepspeed.runtime.tensor_parallel.config": _TENSOR_PARALLEL,
    "deepspeed.runtime.precision_config": {
        name: f"{_SECTIONS}:{name}"
        for name in ("DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config")
    },
    "deepspeed.runtime.activation_checkpointing.config": {
        "DeepSpeedActivationCheckpointingConfig": f"{_SECTIONS}:DeepSpeedActivationCheckpointingConfig"
    },
    "deepspeed.comm.config": {name: f"{_SECTIONS}:{name}" for name in ("CommsLoggerConfig", "DeepSpeedCommsConfig")},
    "deepspeed.compile.config": {"CompileConfig": f"{_SECTIONS}:CompileConfig"},
    "deepspeed.monitor.comet": {
        "Name": "deepspeed_c.monitor.base:Name",
        "GlobalSamples": "deepspeed_c.monitor.base:GlobalSamples",
        "Value": "deepspeed_c.monitor.base:Value",
        "check_comet_availability": "deepspeed_c.monitor.utils:check_comet_availability",
    },
    "deepspeed.monitor.tensorboard": {"check_tb_availability": "deepspeed_c.monitor.utils:check_tb_availability"},
    "deepspeed.monitor.wandb": {"check_wandb_availability": "deepspeed_c.monitor.utils:check_wandb_availability"},
    "deepspeed.monitor.config": {
        name: f"{_SECTIONS}:{name}"
        for name in (
            *("CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig"),
            "get_monitor_config",
        )
    },
    "deepspeed.profiling.config": {"DeepSpeedFlopsProfilerConfig": f"{_SECTIONS}:DeepSpeedFlopsProfilerConfig"},
    "deepspeed.runtime.zenflow.zenflow_config": {"ZenFlowConfig": f"{_SECTIONS}:ZenFlowConfig"},
    "deepspeed.runtime.zero.leaf_module_config": {
        "DeepSpeedZeroLeafModuleConfig": f"{_SECTIONS}:DeepSpeedZeroLeafModuleConfig"
    },
    "deepspeed.runtime.lr_schedules": _LR_NAMES,
    "deepspeed.utils.config": {
        name: f"{_SECTIONS}:{name}" for name in ("DeepSpeedThroughputTimerConfig", "get_timers_config")
    },
    "deepspeed.moe.sharded_moe": {
        **_EXPERT_NAMES,
        "dist": "deepspeed_c.comm:",
        "drop_tokens": "deepspeed_c.moe.mappings:drop_tokens",
        "gather_tokens": "deepspeed_c.moe.mappings:gather_tokens",
        "groups": "deepspeed_c.utils.groups:",
        "gumbel_rsample": "deepspeed_c.moe.gate:gumbel_rsample",
        "logger": _LOGGING["logger"],
    },
    "deepspeed.profiling.flops_profiler.profiler": {"MoE": _EXPERT_NAMES["MoE"]},
    "deepspeed.runtime.engine": {
        **{name: _EXPERT_NAMES[name] for name in ("MOELayer", "MoE", "TopKGate")},
        "PipelineModule": "deepspeed_c.pipe.module:PipelineModule",
        "DeepSpeedDataLoader": "deepspeed_c.data.loader:DeepSpeedDataLoader",
        "dist": "deepspeed_c.comm:",
        **_OPTIMIZER_NAMES,
    },
    # Classes in the pickles of checkpoints in DeepSpeed's layout, for programs that unpickle such files themselves.
    "deepspeed.runtime.fp16.loss_scaler": {
        name: f"deepspeed_c.checkpoint.formats.deepspeed.stand_ins:{name}"
        for name in ("DynamicLossScaler", "LossScaleConfig", "LossScaleProfile", "LossScaler")
    },
    "deepspeed.runtime.checkpoint_engine": {
        name: f"{_ENGINES}:{name}" for name in ("CheckpointCommitInfo", "TorchCheckpointEngine")
    },
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine": {
        name: f"{_ENGINES}:{name}" for name in ("CheckpointCommitInfo", "CheckpointEngine")
    },
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": {
        name: f"{_ENGINES}:{name}" for name in ("CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine")
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "UlyssesSPDataLoaderAdapter": "deepspeed_c.sequence.loader:UlyssesSPDataLoaderAdapter",
        **{
            name: f"deepspeed_c.sequence.tiles:{name}"
            for name in ("SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute")
        },
    },
    "deepspeed.runtime.zero": {"DeepSpeedZeRoOffload": _OFFLOAD_HOOKS},
    "deepspeed.runtime.zero.parameter_offload": {"DeepSpeedZeRoOffload": _OFFLOAD_HOOKS},
    "deepspeed.utils": {**_HP_ACCESS, **_FRAGMENT_NAMES, "get_numactl_cmd": "deepspeed_c.utils.numa:get_numactl_cmd"},
    "deepspeed.utils.mixed_precision_linkage": {
        name: _FRAGMENT_NAMES[name] for name in ("lazy_init_hp_params_optimizer_state", "link_hp_params")
    },
    "deepspeed.utils.tensor_fragment": {
        **_HP_ACCESS,
        **_FRAGMENT_NAMES,
        "tensor_fragment": "deepspeed_c.compat.fragments:tensor_fragment",
    },
    "deepspeed.runtime.zero.config": {
        **_ZERO_CONFIG,
        "DeepSpeedZeroConfig": f"{_SECTIONS}:DeepSpeedZeroConfig",
        "DeepSpeedZeroLeafModuleConfig": f"{_SECTIONS}:DeepSpeedZeroLeafModuleConfig",
        "ZERO_OPTIMIZATION": f"{_CONSTANTS}:ZERO_OPTIMIZATION",
        "ZenFlowConfig": f"{_SECTIONS}:ZenFlowConfig",
        "ZeroStageEnum": "deepspeed_c.config.stages:ZeroStageEnum",
        "get_zero_config": f"{_SECTIONS}:get_zero_config",
    },
    "deepspeed.runtime.zero.offload_config": _ZERO_CONFIG,
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "deepspeed_c.zero.states.kinds:DeepSpeedZeroOptimizer_Stage3",
        "estimate_zero3_model_states_mem_needs": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs",
        "estimate_zero3_model_states_mem_needs_all_cold": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs_all_cold",
        "estimate_zero3_model_states_mem_needs_all_live": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs_all_live",
        "model_to_params": f"{_ESTIMATES}:model_to_params",
        "unwrap_model_for_generation": "deepspeed_c.zero.weights.gathered:unwrap_model_for_generation",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": "deepspeed_c.zero.states.kinds:DeepSpeedZeroOptimizer",
        "estimate_zero2_model_states_mem_needs": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs",
        "estimate_zero2_model_states_mem_needs_all_cold": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs_all_cold",
        "estimate_zero2_model_states_mem_needs_all_live": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs_all_live",
        "get_alignment_padding": "deepspeed_c.utils.gradients:get_alignment_padding",
        "model_to_params": f"{_ESTIMATES}:model_to_params",
    },
    "deepspeed.utils.zero_to_fp32": {
        name: f"deepspeed_c.compat.zero_files:{name}"
        for name in ("parse_model_states", "parse_optim_states", "zero3_partitioned_param_info", "zero_model_state")
    },
    "deepspeed.utils.timer": {"trim_mean": "deepspeed_c.comm.log:trim_mean", **_TIMER_NAMES},
}
NAMES = _with_questions(_NAMES)

_EXPERTS = "deepspeed_c.moe.layer.MoE is the layer of experts (docs/concepts/moe.md); mixtures of other libraries train with ZeRO stages 0 to 3, their blocks are found and made leaf modules"
_SEQUENCE = "UlyssesSPAttentionHF.register_with_transformers cuts sequences of models of transformers over ranks; deepspeed_c.sequence has the attention, tiles and losses for other models (docs/concepts/sequence.md)"
_TENSOR = "tensor parallelism is set in the configuration, tensor_parallel.autotp_size, or by tp_model_init; docs/concepts/tensor-parallel.md"
_INFERENCE = "deepspeed_c.inference.v2 has the ragged engine (build_hf_engine, put, query, flush), `deepspeed_c.init_inference` runs any module, with `generate`; kernels and policies of single families are not needed"
_BLOCKED_CACHE = "deepspeed_c.kv.ragged.RaggedCache holds keys and values in blocks, and is a cache of transformers too"
_CHECKPOINTING = "what is kept for a backward is packed and given back by deepspeed_c.checkpointing.checkpoint itself"
_COMPRESSION = "convolutions come with a later version; deepspeed_c.compression.compress.init_compression quantizes linear layers and embeddings, and prunes linear layers (docs/concepts/compression.md)"
_ONE_BIT = "1-bit optimizers come with a later version; use Adam, AdamW or Lamb of deepspeed_c.ops"
_DATA = "random layer token drop and batches by tokens come with a later version; deepspeed_c.data has loader, sampler, curricula and indexed data sets"
_ONE_OPTIMIZER = "one class does the work at all stages: deepspeed_c.zero.states.optimizer.ZeroOptimizer; the stage is engine.zero_optimization_stage()"
_KEYS = "write the key itself as text, as it stands in the JSON file; docs/config.md has all of them"
_CONVERTER = "`deepspeed_c checkpoint convert` turns a checkpoint into any layout; checkpoints load on any number of ranks as they are"
_OPEN = "deepspeed_c.checkpoint.open.open_checkpoint reads checkpoints of both layouts; `deepspeed_c checkpoint info` shows one"
_LOAD_CONFIG = "deepspeed_c.config.load_config(FILE_OR_DICT, world_size=...) reads and checks a configuration"
_TILED = "tiled layers come with a later version; stage 3 cuts large weights into buckets by itself"
_MICS = "zero.Init(zero_param_parallel_group=...) shards over a group of ranks"
_MUON = "use deepspeed_c.ops.muon.Muon, or the optimizer Muon in the configuration"
_LAYERS = "layers for inference come with a later version; training has DeepSpeedTransformerLayer"
_KEYS_OF_FILES = "the names of entries in DeepSpeed's files; deepspeed_c.checkpoint.open.open_checkpoint reads what stands under them"
_HELPERS = "a helper of DeepSpeed's engine; the engine has get_global_grad_norm(), offload_states() and reload_states(), torch has clip_grad_norm_"
_FRAGMENTS = "use safe_get_full_* and safe_set_full_* of deepspeed_c.utils"

_ACCELERATOR = "deepspeed_c.accelerator.get_accelerator() is one class for all kinds of devices"
_COLLECTIVES = "deepspeed_c.comm has the collectives; a process group of torch is a group here"
_WRITERS = "all ranks write their parts of a checkpoint at once; docs/concepts/checkpoint.md"
_ZENFLOW = "zenflow and superoffload come with a later version; zero_optimization.offload_optimizer offloads the states (docs/concepts/offload.md)"
_STAGE_3 = "stage 3 gathers and prefetches by itself; zero.Init, zero.GatheredParameters and the section zero_optimization steer it"
_ROUNDING = (
    "deepspeed_c.compression.compress.init_compression quantizes layers, and init_inference stores weights in few bits"
)
_GENERATION = "the hybrid engine generates with the weights in training: hybrid_engine.enabled, and engine.generate"
_ENGINE = "a part of DeepSpeed's own engine; the engine that initialize returns has the public methods"
_STATIC_CACHE = (
    "generate of deepspeed_c.init_inference makes its cache itself; transformers.StaticCache is a cache of fixed size"
)
_ACTIVATIONS = "torch.nn.functional has the activations and norms"
_GROUPS = "deepspeed_c.utils.groups has the sizes and ranks of groups"
_OPTIMIZER_FACTORY = "any callable that takes the parameters and returns an optimizer will do"
_SCHEDULE_FACTORY = "any callable that takes the optimizer and returns a scheduler will do"
_CPU_ADAM = "use DeepSpeedCPUAdam"
_FUSED_ADAM = "use FusedAdam"
_PINNED = "use torch.Tensor.pin_memory"
_ALL_IN_ONE_CALL = "use FusedAdam or FusedLion, which update all tensors in one call"
_PLAIN_TORCH = "a helper of DeepSpeed's own code; use torch's functions"

# Prefix of a path that is missing here -> the replacement; the longest prefix counts. The path of a name is
# module.name.
ABSENT: dict[str, str] = {
    "deepspeed.DeepSpeedOptimizerCallable": _OPTIMIZER_FACTORY,
    "deepspeed.DeepSpeedSchedulerCallable": _SCHEDULE_FACTORY,
    "deepspeed.merge_tp_model_init_into_config": _TENSOR,
    "deepspeed.record_tp_model_init_args": _TENSOR,
    "deepspeed.git_version_info": "deepspeed_c.__version__ is the version; the command `deepspeed_c report` prints what is installed",
    "deepspeed.ops.adam.ZenFlowCPUAdam": _CPU_ADAM,
    "deepspeed.ops.adam.ZenFlowSelectiveAdamW": _FUSED_ADAM,
    "deepspeed.ops.adam.ZenFlowSelectiveAdamW_stage3": _FUSED_ADAM,
    "deepspeed.ops.adam.fused_adam": _ALL_IN_ONE_CALL,
    "deepspeed.ops.lion.fused_lion": _ALL_IN_ONE_CALL,
    "deepspeed.ops.pin_memory": _PINNED,
    "deepspeed.runtime.base_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.compiler": "use torch.compiler.is_compiling and torch.compiler.disable",
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.hybrid_engine": _GENERATION,
    "deepspeed.runtime.pipe.engine": "stages of a PipelineModule send tensors whole",
    "deepspeed.runtime.state_dict_factory": "deepspeed_c.checkpoint.formats.megatron has SDLoaderFactory and MegatronSDLoader",
    "deepspeed.runtime.state_dict_factory.WeightQuantization": _ROUNDING,
    "deepspeed.runtime.zero.test": "a test of DeepSpeed's own allocator",
    "deepspeed.utils.bwc_pipeline_parallel_world_size": _GROUPS,
    "deepspeed.utils.bwc_tensor_model_parallel_world_size": _GROUPS,
    "deepspeed.utils.get_caller_func": "use sys._getframe(1).f_code.co_name",
    "deepspeed.utils.logging": "use deepspeed_c.utils.logger, and logging of Python for the rest",
    "deepspeed.utils.pin_memory_tracker": _PINNED,
    "deepspeed.utils.static_cache": _STATIC_CACHE,
    "deepspeed.utils.types": _ACTIVATIONS,
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.comm": _COLLECTIVES,
    "deepspeed.compat": _PLAIN_TORCH,
    "deepspeed.env_report": "the command `deepspeed_c report` prints what is installed",
    "deepspeed.nebula": _WRITERS,
    "deepspeed.ops.deepspeed4science": "use torch.nn.functional.scaled_dot_product_attention with a bias",
    "deepspeed.ops.fp_quantizer": _ROUNDING,
    "deepspeed.ops.random_ltd": _DATA,
    "deepspeed.ops.adam.multi_tensor_apply": _ALL_IN_ONE_CALL,
    "deepspeed.ops.lion.multi_tensor_apply": _ALL_IN_ONE_CALL,
    "deepspeed.ops.triton_ops": _PLAIN_TORCH,
    "deepspeed.runtime.checkpoint_engine": _WRITERS,
    "deepspeed.runtime.model_checkpointing": _WRITERS,
    "deepspeed.runtime.comm": _COLLECTIVES,
    "deepspeed.runtime.domino": _TENSOR,
    "deepspeed.runtime.eigenvalue": _COMPRESSION,
    "deepspeed.runtime.hybrid_engine_graph": _GENERATION,
    "deepspeed.runtime.pipe.p2p": "deepspeed_c.comm.send and deepspeed_c.comm.recv; stages of a PipelineModule send by themselves",
    "deepspeed.runtime.quantize": _ROUNDING,
    "deepspeed.runtime.weight_quantizer": _ROUNDING,
    "deepspeed.runtime.sparse_tensor": "gradients of embeddings are sent sparse with sparse_gradients: true",
    "deepspeed.runtime.superoffload": _ZENFLOW,
    "deepspeed.runtime.zenflow": _ZENFLOW,
    "deepspeed.runtime.torch_autocast": "the section torch_autocast of the configuration sets it",
    "deepspeed.runtime.zero.contiguous_memory_allocator": _STAGE_3,
    "deepspeed.runtime.zero.linear": _STAGE_3,
    "deepspeed.runtime.zero.mics_utils": _MICS,
    "deepspeed.runtime.zero.offload_states": "engine.offload_states() and engine.reload_states()",
    "deepspeed.runtime.zero.parameter_offload": _STAGE_3,
    "deepspeed.runtime.zero.partition_parameters": _STAGE_3,
    "deepspeed.runtime.zero.partitioned_param_coordinator": _STAGE_3,
    "deepspeed.runtime.zero.partitioned_param_profiler": _STAGE_3,
    "deepspeed.runtime.zero.utils": _STAGE_3,
    "deepspeed.utils.bwc": _GROUPS,
    "deepspeed.utils.debug": "param.ds_summary() describes a sharded parameter; use logging of Python for the rest",
    "deepspeed.utils.pin_memory": _PINNED,
    "deepspeed.utils.comms_logging": "the section comms_logger, and deepspeed_c.comm.log_summary()",
    "deepspeed.autotuning": "`deepspeed_c --autotuning tune` searches, and `deepspeed_c plan` says what fits",
    "deepspeed.checkpoint": _CONVERTER,
    "deepspeed.checkpoint.deepspeed_checkpoint": _OPEN,
    "deepspeed.checkpoint.ds_to_universal": _CONVERTER,
    "deepspeed.checkpoint.reshape_3d_utils": _CONVERTER,
    "deepspeed.checkpoint.reshape_meg_2d": _CONVERTER,
    "deepspeed.checkpoint.reshape_utils": _CONVERTER,
    "deepspeed.checkpoint.universal_checkpoint": _CONVERTER,
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.compile": "torch.compile by way of engine.compile()",
    "deepspeed.compression": _COMPRESSION,
    "deepspeed.elasticity": "start the script with `deepspeed_c --elastic_training`: the launcher is the agent",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.inference.v2.ragged.kv_cache.BlockedKVCache": _BLOCKED_CACHE,
    "deepspeed.io": "deepspeed_c.ops.aio.aio_handle writes and reads files; checkpoints use it by themselves",
    "deepspeed.launcher": "start processes with the command deepspeed_c, or python -m deepspeed_c",
    "deepspeed.linear": "use peft for LoRA; its frozen base may have another dtype",
    "deepspeed.model_implementations": _INFERENCE,
    "deepspeed.module_inject": _TENSOR,
    "deepspeed.moe": _EXPERTS,
    "deepspeed.nvme": "`deepspeed_c io bench|tune` measures a device and finds the settings that suit it",
    "deepspeed.ops.adam.zenflow_cpu_adam": _CPU_ADAM,
    "deepspeed.ops.adam.zenflow_torch_adam": _FUSED_ADAM,
    "deepspeed.ops.op_builder": "deepspeed_c.ops.op_builder has the builders; NAME, is_compatible and load are what they offer",
    "deepspeed.ops.sparse_attention": "use torch.nn.attention.flex_attention",
    "deepspeed.ops.transformer": _LAYERS,
    "deepspeed.profiling": "deepspeed_c.profiling.flops_profiler has FlopsProfiler and get_model_profile; they count torch's operators and replace none of its functions; write keys of the configuration as text",
    "deepspeed.runtime.activation_checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.bf16_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.compression": _ONE_BIT,
    "deepspeed.runtime.config": "the values are attributes of deepspeed.runtime.config.DeepSpeedConfig",
    "deepspeed.runtime.data_pipeline": _DATA,
    "deepspeed.runtime.engine.DeepSpeedOptimizerCallable": _OPTIMIZER_FACTORY,
    "deepspeed.runtime.engine.DeepSpeedSchedulerCallable": _SCHEDULE_FACTORY,
    "deepspeed.runtime.fp16": f"{_ONE_OPTIMIZER}; {_ONE_BIT}",
    "deepspeed.runtime.fp16.fused_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.fp16.onebit": _ONE_BIT,
    "deepspeed.runtime.fp16.unfused_optimizer": _ONE_OPTIMIZER,
    "deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "deepspeed.runtime.swap_tensor": "offload is set in the configuration, zero_optimization.offload_optimizer; docs/concepts/offload.md",
    "deepspeed.runtime.tensor_parallel": _TENSOR,
    "deepspeed.runtime.utils": _HELPERS,
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
    **{f"deepspeed.utils.{name}": _FRAGMENTS for name in (*("tensor_fragment",),)},
    "deepspeed.utils.groups": _EXPERTS,
    "deepspeed.utils.zero_to_fp32": "use get_fp32_state_dict_from_zero_checkpoint, or `deepspeed_c checkpoint export`",
}

MODULES |= mii_modules.MODULES
NAMES |= mii_modules.NAMES
ABSENT |= mii_modules.ABSENT
