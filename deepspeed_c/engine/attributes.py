"""Attributes of DeepSpeed's engine, apart from methods, that programs read. Each is a row of a table.

A row is used only if the engine itself has no attribute of that name. Rows come before the model's attributes, as in
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from deepspeed_c.compression.steps import AppliedSteps
from deepspeed_c.moe.gate import TopKGate
from deepspeed_c.moe.layer import MoE, MOELayer
from deepspeed_c.moe.utils import has_moe_layers
from deepspeed_c.observe.phases import TIMER_NAMES
from deepspeed_c.utils import groups

if TYPE_CHECKING:
    from deepspeed_c.compression.scheduler import compression_scheduler

__all__ = ["ATTRIBUTES", "OF_PIPELINES"]


def _names_of_sparse_tensors(engine: Any) -> set[str]:
    """Names of embedding weights whose gradients are sent as rows (``sparse_gradients``)."""
    if not engine.sparse_gradients_enabled():
        return set()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {f"{name}.weight" for name, module in engine.module.named_modules() if isinstance(module, kinds)}


def _modules(engine: Any, kind: type[torch.nn.Module]) -> list[Any]:
    return [module for module in engine.module.modules() if isinstance(module, kind)]


def _of_loader(attribute: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine.training_dataloader, attribute, None)


def _loaded_tensor_ranks(engine: Any) -> int | None:
    """Tensor-parallel ranks of the run that saved the checkpoint which was loaded last; None before the first load."""
    loaded = engine._checkpoints.loaded
    return None if loaded is None else loaded.tensor_parallel


def _loaded_data_ranks(engine: Any) -> int | None:
    """Data-parallel ranks of the run that saved the checkpoint which was loaded last, times its sequence-parallel
    ranks, as in DeepSpeed."""
    loaded = engine._checkpoints.loaded
    if loaded is None:
        return None
    # A folder of DeepSpeed does not record axes. For such a folder ``world_size`` is the number of ranks that share one
    # part of the model.
    return loaded.world_size // (loaded.axes.get("tp", 1) * loaded.axes.get("pp", 1))


def _compression_scheduler(engine: Any) -> compression_scheduler:
    # Imported on first use: most engines compress nothing.
    from deepspeed_c.compression.scheduler import compression_scheduler

    steps = AppliedSteps()
    steps.follow(engine._state.applied_steps)
    return compression_scheduler(engine.module, engine._config.resolved_dict()["compression_training"], steps=steps)


class TimerNames(NamedTuple):
    """Names of DeepSpeed's timers, which are keys of ``get_wall_clock_timers``. The lists are empty if a run has no
    timers."""

    forward_timers: list[str]
    backward_timers: list[str]
    backward_inner_timers: list[str]
    backward_reduce_timers: list[str]
    step_timers: list[str]
    micro_timers: list[str]
    global_timers: list[str]

    def active_timers(self) -> list[str]:
        """All of them."""
        return self.micro_timers + self.global_timers


def _engine_timers(engine: Any) -> TimerNames:
    names = list(TIMER_NAMES) if engine.phases.is_enabled else []
    micro = [f"{name}_microstep" for name in names]
    by_phase = [list(pair) for pair in zip(micro, names)] or [[] for _ in TIMER_NAMES]
    return TimerNames(*by_phase, micro, names)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda engine: value


# Attribute -> its value for an engine. Attributes of features that are not built have the value that means "off".
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "client_optimizer": lambda engine: None if engine.optimizer_name() else engine.basic_optimizer,
    "client_lr_scheduler": lambda engine: None if engine.scheduler_name() else engine.lr_scheduler,
    "training_data": _of_loader("dataset"),
    "collate_fn": _of_loader("collate_fn"),
    "param_names": lambda engine: {param: name for name, param in engine.module.named_parameters()},
    "sparse_tensor_module_names": _names_of_sparse_tensors,
    "inside_no_sync_ctxt": lambda engine: engine._passes.is_inside_no_sync,
    "gas_boundary_ctr": lambda engine: engine.global_steps,
    "loaded_checkpoint_mp_world_size": _loaded_tensor_ranks,
    "loaded_checkpoint_dp_world_size": _loaded_data_ranks,
    "checkpoint_mp_rank": lambda engine: engine.get_tensor_parallel_rank(),
    "losses": _always(None),
    "scale_wrt_gas": _always(None),
    "warn_unscaled_loss": _always(True),
    "torch_autocast_z0_gradscaler": _always(None),
    "first_dataloader_check": _always(None),
    "dist_backend": lambda engine: torch.distributed.get_backend(),
    "pipeline_parallelism": _always(False),
    "flatten": _always(_flatten_dense_tensors),
    "unflatten": _always(_unflatten_dense_tensors),
    "gradient_average": _always(True),
    "dont_change_device": _always(False),
    "use_ds_comm": _always(False),
    "has_moe_layers": lambda engine: has_moe_layers(engine.module)[0],
    "num_experts": lambda engine: [layer.num_experts for layer in _modules(engine, MoE)],
    "gate_modules": lambda engine: _modules(engine, TopKGate),
    "moe_layers": lambda engine: _modules(engine, MOELayer),
    "expert_parallel_group": lambda engine: groups._get_expert_parallel_group_dict(),
    "expert_data_parallel_group": lambda engine: groups._get_expert_data_parallel_group_dict(),
    "all_to_all_group": _always(None),
    "local_all_to_all_group": _always(None),
    "engine_timers": _engine_timers,
    "compression_scheduler": _compression_scheduler,
    "quantizer": _always(None),
    "progressive_layer_drop": lambda engine: engine._arguments.layer_drop,
    "curriculum_scheduler_legacy": lambda engine: engine._arguments.curriculum,
    "eigenvalue": _always(None),
    "block_eigenvalue": _always(None),
    "optimized_linear_base_weight_sharding": _always(False),
    "optimized_linear_lora_enabled": _always(False),
}

# Further attributes of the engine of a PipelineModule.
OF_PIPELINES: dict[str, Callable[[Any], Any]] = {
    "micro_batches": lambda engine: engine.gradient_accumulation_steps(),
    "micro_batch_size": lambda engine: engine.train_micro_batch_size_per_gpu(),
    "is_pipe_parallel": lambda engine: engine.num_stages > 1,
    "is_data_parallel": lambda engine: engine.dp_world_size > 1,
    "is_model_parallel": lambda engine: engine.mp_world_size > 1,
    "is_pipe_partitioned": _always(False),
    "is_grad_partitioned": _always(False),
    "prev_stage": lambda engine: engine.stage_id - 1,
    "next_stage": lambda engine: engine.stage_id + 1,
    "loss_model": lambda engine: engine.module.loss_fn,
    "using_bf16_optimizer": lambda engine: engine.bfloat16_enabled(),
    "pipeline_enable_backward_allreduce": _always(True),
    "eval_return_logits": _always(False),
}
