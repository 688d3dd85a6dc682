"""Attributes of DeepSpeed's ZeRO optimizers that programs read, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["ATTRIBUTES", "OF_STAGES_1_AND_2", "OF_STAGES_1_TO_3", "OF_STAGE_3", "LossScale"]


class LossScale(NamedTuple):
    """The attributes of DeepSpeed's loss scaler that programs read."""

    cur_scale: float
    dynamic: bool

    @property
    def loss_scale(self) -> float:
        return self.cur_scale


def _loss_scaler(optimizer: Any) -> LossScale:
    return LossScale(optimizer.loss_scale, _is_dynamic(optimizer))


def _is_dynamic(optimizer: Any) -> bool:
    return optimizer.scaler is not None and optimizer.scaler.is_dynamic


def _params_by_group(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """The model's trained parameters, one list for each group of the optimizer."""
    groups: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for unit in optimizer.units:
        groups[unit.group] += [slot.param for slot in unit.slots]
    return groups


# Attribute -> its value for an optimizer.
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "device": lambda optimizer: optimizer.units[0].device,
    "dtype": lambda optimizer: optimizer.units[0].dtype,
    "dp_process_group": lambda optimizer: optimizer.comm.group,
    "partition_count": lambda optimizer: [optimizer.comm.world_size for _ in optimizer.param_groups],
    "clip_grad": lambda optimizer: optimizer.clip,
    "cpu_offload": lambda optimizer: any(unit.states.is_apart for unit in optimizer.units),
    "loss_scaler": _loss_scaler,
    "dynamic_loss_scale": _is_dynamic,
    "custom_loss_scaler": lambda optimizer: False,
    "external_loss_scale": lambda optimizer: None,
    "has_moe_layers": lambda optimizer: False,
    "bit16_groups": _params_by_group,
    "fp16_groups": _params_by_group,
    "param_names": lambda optimizer: {slot.param: slot.name for slot in optimizer.slots},
}


def _key(name: str) -> Callable[[Any], Any]:
    """The key of that name in ``zero_optimization``."""
    return lambda optimizer: getattr(optimizer.section, name)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda optimizer: value


def _is_offloaded(key: str) -> Callable[[Any], bool]:
    return lambda optimizer: getattr(optimizer.section, key).device != "none"


def _is_on_nvme(key: str) -> Callable[[Any], bool]:
    return lambda optimizer: getattr(optimizer.section, key).device == "nvme"


def _is_pinned(key: str) -> Callable[[Any], bool]:
    """False where nothing is offloaded, as in DeepSpeed."""
    return lambda optimizer: _is_offloaded(key)(optimizer) and getattr(optimizer.section, key).pin_memory


# Further attributes of the optimizers that shard. Attributes that stand for configuration keys have the configured
# values.
OF_STAGES_1_TO_3: dict[str, Callable[[Any], Any]] = {
    "offloaded_states": lambda optimizer: optimizer.kinds_away,
    "reduce_bucket_size": _key("reduce_bucket_size"),
    "reduce_scatter": _key("reduce_scatter"),
    "contiguous_gradients": _key("contiguous_gradients"),
    "elastic_checkpoint": _key("elastic_checkpoint"),
    "communication_data_type": lambda optimizer: optimizer.units[0].comm_dtype,
    "gradient_accumulation_dtype": lambda optimizer: optimizer.reducer.sums.summing.dtype_of(optimizer.units[0]),
    "master_weights_and_grads_dtype": lambda optimizer: optimizer.units[0].master_dtype,
    "gradient_predivide_factor": lambda optimizer: optimizer.reducer.sums.summing.settings.gradient_predivide_factor,
    "postscale_gradients": lambda optimizer: not optimizer.reducer.sums.summing.settings.prescale_gradients,
    "torch_autocast_gradscaler": _always(None),
    "flatten": _always(_flatten_dense_tensors),
    "unflatten": _always(_unflatten_dense_tensors),
}

OF_STAGES_1_AND_2: dict[str, Callable[[Any], Any]] = {
    "partition_gradients": lambda optimizer: optimizer.section.sharding.gradients,
    "zero_stage_string": lambda optimizer: f"ZeRO-{optimizer.section.stage}",
    "overlap_comm": _key("overlap_comm"),
    "allgather_bucket_size": _key("allgather_bucket_size"),
    "round_robin_gradients": _key("round_robin_gradients"),
    "ignore_unused_parameters": _key("ignore_unused_parameters"),
    "use_multi_rank_bucket_allreduce": _key("use_multi_rank_bucket_allreduce"),
    "real_dp_process_group": lambda optimizer: [optimizer.comm.group for _ in optimizer.param_groups],
    "cpu_offload_pin_memory": _is_pinned("offload_optimizer"),
    "check_grad_overflow": lambda optimizer: optimizer.checks_overflow,
    "gradient_average": _always(True),
    "zenflow": _always(False),
}

OF_STAGE_3: dict[str, Callable[[Any], Any]] = {
    "offload_optimizer": _is_offloaded("offload_optimizer"),
    "offload_optimizer_pin_memory": _is_pinned("offload_optimizer"),
    "swap_optimizer": _is_on_nvme("offload_optimizer"),
    "partial_offload": lambda optimizer: optimizer.section.offload_optimizer.ratio,
    "offload_param": _is_offloaded("offload_param"),
    "offload_param_pin_memory": _is_pinned("offload_param"),
    "params_in_nvme_and_cpu": _is_on_nvme("offload_param"),
    "max_params_in_cpu": lambda optimizer: (
        optimizer.section.offload_param.max_in_cpu if _is_offloaded("offload_param")(optimizer) else 0
    ),
    "prefetch_elements": _key("stage3_prefetch_bucket_size"),
    "sub_group_size": _key("sub_group_size"),
    "zero_hpz_partition_size": _key("zero_hpz_partition_size"),
    "zero_quantized_nontrainable_weights": _key("zero_quantized_nontrainable_weights"),
    "zeropp_loco_param": _key("zeropp_loco_param"),
    "enable_sanity_checks": _key("enable_sanity_checks"),
}
