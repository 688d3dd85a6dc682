"""Attributes of DeepSpeed's ZeRO optimizers that programs read, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["ATTRIBUTES", "LossScale"]


class LossScale(NamedTuple):
    """What programs read of DeepSpeed's loss scaler."""

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
    """The model's parameters that are trained, a list for each group of the optimizer."""
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
