"""The hundred or so methods of DeepSpeed's engine that return a value of the configuration, as rows of a table."""

from __future__ import annotations

import os
from functools import reduce
from typing import Any

import torch

from deepspeed_c.comm.axes import DATA
from deepspeed_c.engine.precision import DTYPES

__all__ = ["ABSENT_METHODS", "GETTERS", "ConfigGetters"]

# Method of the engine -> path in the configuration.
GETTERS: dict[str, str] = {
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "steps_per_print": "steps_per_print",
    "log_level": "log_level",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "sparse_gradients_enabled": "sparse_gradients",
    "graph_harvesting": "graph_harvesting",
    "dataloader_drop_last": "dataloader_drop_last",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "dynamic_loss_scale": "fp16.is_dynamic",
    "initial_dynamic_scale": "fp16.initial_scale",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "amp_enabled": "amp.enabled",
    "amp_params": "amp",
    "zero_optimization_stage": "zero.stage",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_reduce_scatter": "zero.reduce_scatter",
    "zero_overlap_comm": "zero.overlap_comm",
    "zero_offload_optimizer": "zero.offload_optimizer",
    "zero_offload_param": "zero.offload_param",
    "zero_sub_group_size": "zero.sub_group_size",
    "zero_reduce_bucket_size": "zero.reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": "zero.use_multi_rank_bucket_allreduce",
    "zero_allgather_bucket_size": "zero.allgather_bucket_size",
    "zero_allgather_partitions": "zero.allgather_partitions",
    "zero_contiguous_gradients": "zero.contiguous_gradients",
    "zero_load_from_fp32_weights": "zero.load_from_fp32_weights",
    "zero_elastic_checkpoint": "zero.elastic_checkpoint",
    "zero_max_live_parameters": "zero.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero.stage3_max_reuse_distance",
    "zero_prefetch_bucket_size": "zero.stage3_prefetch_bucket_size",
    "zero_module_granularity_threshold": "zero.stage3_module_granularity_threshold",
    "zero_param_persistence_threshold": "zero.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": "zero.stage3_model_persistence_threshold",
    "zero_gather_16bit_weights_on_model_save": "zero.stage3_gather_16bit_weights_on_model_save",
    "zero_grad_hooks": "zero.grad_hooks",
    "zero_legacy_stage1": "zero.legacy_stage1",
    "zero_ignore_unused_parameters": "zero.ignore_unused_parameters",
    "zero_save_muon_momentum_buffer_in_memory": "zero.save_muon_momentum_buffer_in_memory",
    "zero_round_robin_gradients": "zero.round_robin_gradients",
    "zero_hpz_partition_size": "zero.zero_hpz_partition_size",
    "zero_quantized_weights": "zero.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero.zero_quantized_gradients",
    "zeropp_loco_param": "zero.zeropp_loco_param",
    "zero_log_trace_cache_warnings": "zero.log_trace_cache_warnings",
    "zero_allgather_sequential": "zero.stage3_allgather_sequential",
    "is_sanity_checks_enabled": "zero.enable_sanity_checks",
    "mics_shard_size": "zero.mics_shard_size",
    "zenflow_config": "zero.zenflow",
    "super_offload": "zero.offload_optimizer.super_offload",
    "cpuadam_cores_perc": "zero.offload_optimizer.cpuadam_cores_perc",
    "zero_partial_offload": "zero.offload_optimizer.ratio",
    "tensor_parallel_config": "tensor_parallel",
    "autotp_size": "tensor_parallel.autotp_size",
    "aio_config": "aio",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "elasticity_enabled": "elasticity.enabled",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_params": "progressive_layer_drop",
    "pld_theta": "progressive_layer_drop.theta",
    "pld_gamma": "progressive_layer_drop.gamma",
    "eigenvalue_enabled": "eigenvalue.enabled",
    "eigenvalue_verbose": "eigenvalue.verbose",
    "eigenvalue_max_iter": "eigenvalue.max_iter",
    "eigenvalue_tol": "eigenvalue.tol",
    "eigenvalue_stability": "eigenvalue.stability",
    "eigenvalue_gas_boundary_resolution": "eigenvalue.gas_boundary_resolution",
    "eigenvalue_layer_name": "eigenvalue.layer_name",
    "eigenvalue_layer_num": "eigenvalue.layer_num",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": "curriculum_learning",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_metric": "autotuning.metric",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "is_deepcompile_enabled": "compile.deepcompile",
}


_BY_ITSELF = "nothing: gradients are reduced within backward, and clipped within step"
_GRAPH_PASSES = "engine.compile(backend=..., compile_kwargs=...) compiles with torch.compile"
_COMM = "deepspeed_c.comm has the collectives"

# Methods of DeepSpeed's engine that this one does not have -> what to do instead.
ABSENT_METHODS: dict[str, str] = {
    "random_ltd_initialize": "random layer token drop comes with a later version",
    "quantize_training": "quantization in the optimizer's step (MoQ) comes with a later version",
    "print_forward_breakdown": "wall_clock_breakdown times the phases; engine.expert_load() counts tokens by expert",
    "swap_tensor_config": "engine.zero_offload_optimizer() and engine.aio_config() say where states lie",
    "clip_fp32_gradients": _BY_ITSELF,
    "sparse_allreduce_no_retain": _COMM,
    "sparse_allreduce_bucket": _COMM,
    "sparse_allreduce": _COMM,
    "sparse_all_gather": _COMM,
    "get_autosp_backend": _GRAPH_PASSES,
    "get_autotp_backend": _GRAPH_PASSES,
}


def _getter(name: str, path: str):
    parts = path.split(".")

    def get(self) -> Any:
        return reduce(getattr, parts, self._config)

    get.__name__ = name
    get.__doc__ = f"The configuration's ``{path}``."
    return get


class ConfigGetters:
    """The rows of ``GETTERS`` as methods, and a few methods that compute their value."""

    def optimizer_name(self) -> str | None:
        return None if self._config.optimizer is None else self._config.optimizer.type.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        return None if self._config.optimizer is None else dict(self._config.optimizer.params)

    def optimizer_legacy_fusion(self) -> bool:
        return self._config.optimizer is not None and self._config.optimizer.legacy_fusion

    def scheduler_name(self) -> str | None:
        return None if self._config.scheduler is None else self._config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        return None if self._config.scheduler is None else dict(self._config.scheduler.params)

    def zero_optimization(self) -> bool:
        return self._config.zero.sharding.optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.zero.sharding.gradients

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.zero.sharding.parameters

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the host does the update: the optimizer's states live in host memory or on NVMe."""
        return self._config.zero.offload_optimizer.device != "none"

    def zero_cpu_offload(self) -> bool:
        return self._config.zero.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._config.zero.offload_optimizer.device == "nvme"

    def is_first_weights_partition_group(self) -> bool:
        """Whether this rank's group writes the weights' shards. There is only one group, so this is True at stage 3."""
        return self._config.zero.sharding.parameters

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.checkpoint.tag_validation != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.checkpoint.tag_validation == "FAIL"

    def checkpoint_writer_enabled(self) -> bool:
        return self._config.checkpoint.writer is not None

    def is_elastic_model_parallel_supported(self) -> bool:
        """Whether the section elasticity acts and its hosts hold whole copies of the model."""
        section = self._config.elasticity
        return section.enabled and section.num_gpus_per_node % section.model_parallel_size == 0

    def is_map_style_dataset(self, dataset: Any = None) -> bool:
        """Whether samples of ``dataset`` are found by their number. Torch's iterable datasets have the methods, too."""
        return (
            not self.is_iterable_style_dataset(dataset)
            and hasattr(dataset, "__getitem__")
            and hasattr(dataset, "__len__")
        )

    def is_iterable_style_dataset(self, dataset: Any = None) -> bool:
        return isinstance(dataset, torch.utils.data.IterableDataset)

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def loss_scale(self) -> float:
        """The present loss scale; 1.0 if none is used."""
        return self._optimizer.loss_scale

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The dynamic loss scale's parameters, under the names that DeepSpeed's scaler takes."""
        fp16 = self._config.fp16
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def torch_autocast_dtype(self) -> torch.dtype:
        return DTYPES[self._config.torch_autocast.dtype]

    def _trained_dtype(self) -> torch.dtype:
        return self._precision.dtype or torch.float32

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of reductions of gradients."""
        asked = self._config.communication_data_type
        return self._trained_dtype() if asked is None else DTYPES[asked]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the weights, dtype of the sums of gradients)"""
        accumulated = self._config.data_types.grad_accum_dtype
        return self._trained_dtype(), self._trained_dtype() if accumulated is None else DTYPES[accumulated]

    def _compiler_passes(self) -> tuple[str, ...]:
        return self._config.compile.passes or ()

    def compile_zero_optimization_stage(self) -> bool:
        return "z1" in self._compiler_passes() or "z3" in self._compiler_passes()

    def compile_autosp(self) -> bool:
        return "autosp" in self._compiler_passes()

    def compile_autotp(self) -> bool:
        return "autotp" in self._compiler_passes()

    def uses_parallelization_pass_only(self) -> bool:
        return self.compile_autosp() or self.compile_autotp()

    def is_deepcompile_active(self) -> bool:
        """Whether the module runs as graphs that gather weights and reduce gradients by themselves."""
        return self._compiled is not None

    def autotuning_profile_model_info(self) -> bool:
        autotuning = self._config.autotuning
        return autotuning.enabled and autotuning.model_info is not None and autotuning.model_info.profile

    def autotuning_metric_path(self) -> str:
        return self._config.autotuning.metric_path or os.path.join(os.getcwd(), "autotuning_metric.json")

    def autotuning_model_info_path(self) -> str:
        return self._config.autotuning.model_info_path or os.path.join(os.getcwd(), "autotuning_model_info.json")

    def get_pld_theta(self) -> float | None:
        """The keep probability of progressive layer drop in the next step; None without it."""
        return self._arguments.theta(self.global_steps)

    def get_data_parallel_rank(self) -> int:
        return self._mesh.index(*DATA)

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank


for _name, _path in GETTERS.items():
    setattr(ConfigGetters, _name, _getter(_name, _path))
