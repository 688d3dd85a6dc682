"""Attributes that mark parameters of experts, and optimizer groups that separate experts from other parameters.

The attributes are DeepSpeed's: ``allreduce`` is False on a parameter of an expert, and ``group_name`` names the group
of ranks that share the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed_c.errors import ModelError
from deepspeed_c.moe.layer import MoE

__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

# Largest number of elements of one optimizer group of experts, by default; DeepSpeed has the same default.
_GROUP_ELEMS = 178956971


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the model has a layer ``MoE``, and the number of experts of the first one. Blocks of other libraries do
    not count.
    """
    found = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return (False, 0) if found is None else (True, found.num_experts)


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether the parameter is marked as an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> Any:
    """The entry ``moe`` of the optimizer group; False if there is none."""
    return param_group.get("moe", False)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters into shared ones, which all ranks have, and experts' parameters."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for param in params:
        parts[is_moe_param(param)].append(param)
    return parts


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of the two kinds of parameters, each in its parameter's dtype; parameters without a gradient are
    left out.
    """
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return [param.grad.to(param.dtype) for param in shared], [param.grad.to(param.dtype) for param in experts]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = _GROUP_ELEMS,
) -> list[dict[str, Any]]:
    """Move the parameters of experts into new optimizer groups behind the given groups: one for each ``group_name``,
    cut into several if it has more than ``max_group_size`` elements.

    A list of groups, and the dictionaries in it, are changed in place; the list is returned. If there are experts, each
    group must have a ``name``. The new groups get copies of the other entries.

    Args:
        param_groups: one group or several, as for an optimizer, each with a list ``params``.
        max_group_size: most elements of one group of experts, except that a single parameter is never cut; None: no
            limit.

    Raises:
        ModelError: an argument that is no group, or a group without a name although there are experts.
    """
    if isinstance(param_groups, dict):
        groups = [param_groups]
    elif isinstance(param_groups, (list, tuple)):
        groups = param_groups if isinstance(param_groups, list) else list(param_groups)
    else:
        raise ModelError(
            f"is of type {type(param_groups).__name__}",
            where="param_groups",
            fix="pass an optimizer group (a dict), or a list or tuple of them",
        )
    # Each given group gets one group of experts for every ``group_name`` of any group, in the order of first use.
    names = {param.group_name: None for group in groups for param in group["params"] if is_moe_param(param)}
    found: dict[str, dict[str, list[nn.Parameter]]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for group in groups if names else ():
        if "name" not in group:
            raise ModelError(
                "an optimizer group has no name, and there are experts to tell apart",
                where="param_groups",
                fix='give each group a "name"',
            )
        found[group["name"]] = {name: [] for name in names}
        entries[group["name"]] = {key: value for key, value in group.items() if key != "params"}
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        for param in experts:
            found[group["name"]][param.group_name].append(param)
        group["params"] = shared
    for owner, by_name in found.items():
        for name, params in by_name.items():
            pieces = [params] if max_group_size is None else _cut(params, max_group_size)
            groups += [{**entries[owner], "name": name, "moe": True, "params": piece} for piece in pieces]
    return groups


def _cut(params: list[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    pieces: list[list[nn.Parameter]] = []
    elems = 0
    for param in params:
        if not pieces or elems + param.numel() > limit:
            pieces.append([])
            elems = 0
        pieces[-1].append(param)
        elems += param.numel()
    return pieces


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Make optimizer groups that separate experts, from a list of parameters or of groups. If any group has an entry
    ``moe``, the groups are returned unchanged.

    Raises:
        ModelError: the argument is not such a list.
    """
    if not isinstance(model_parameters, list) or not model_parameters:
        raise ModelError(
            f"is {model_parameters!r}"
            if isinstance(model_parameters, list)
            else f"is a {type(model_parameters).__name__}",
            where="model_parameters",
            fix="pass a list of parameters or of optimizer groups",
        )
    for each in model_parameters:
        if not isinstance(each, (torch.Tensor, dict)):
            raise ModelError(
                f"holds a {type(each).__name__}", where="model_parameters", fix="pass tensors or optimizer groups"
            )
    if isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
