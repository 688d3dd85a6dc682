"""GPT-2's linear layers as torch's: transformers' ``Conv1D`` holds its weight as [in, out]."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inject.swap import swap_class
from deepspeed_c.zero.weights.param import StandaloneShard, shape_of, state_of

__all__ = ["convert_conv1d_to_linear"]

_Model = TypeVar("_Model", bound=nn.Module)


def convert_conv1d_to_linear(model: _Model, convert_type: type[nn.Module]) -> _Model:
    """Make the modules of the class ``convert_type``, whose weights are [in, out], ``torch.nn.Linear``, in place.

    Names, parameters, hooks and shared weights stay; outputs are equal except for rounding. Returns ``model``.
    Collective if parameters are sharded (``zero.Init``). Raises, before anything changes, ModelError for a weight that
    is no matrix or that a module of another class shares and for a layer with its own forward, and StateError for a
    model that has an engine or is gathered.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, convert_type)}
    for name, layer in layers.items():
        _check(model, name, layer, convert_type)
    weights = {id(layer.weight): layer.weight for layer in layers.values()}  # a shared one is transposed once
    for weight in weights.values():
        _transpose(weight)
    for layer in layers.values():
        swap_class(layer, nn.Linear)
        n_outputs, n_inputs = shape_of(layer.weight)
        vars(layer).update(out_features=n_outputs, in_features=n_inputs)
        if "bias" not in layer._parameters:
            layer.register_parameter("bias", None)
    return model


def _check(model: nn.Module, name: str, layer: nn.Module, convert_type: type[nn.Module]) -> None:
    weight = layer._parameters.get("weight")
    n_dims = None if weight is None else len(shape_of(weight))
    if weight is None or n_dims != 2:
        raise ModelError(
            f"the {type(layer).__name__} holds no weight [in, out]"
            + ("" if weight is None else f": its weight has {n_dims} dimensions"),
            where=name,
            fix="pass transformers.pytorch_utils.Conv1D, the class of GPT-2's layers",
        )
    if type(layer).forward is not convert_type.forward or "forward" in vars(layer):
        raise ModelError(
            f"the {type(layer).__name__} has its own forward, which torch.nn.Linear would not run",
            where=name,
            fix=f"replace the layer by one of {convert_type.__name__}, or convert its weight by hand",
        )
    state = state_of(weight)
    if state is not None and (state.is_available or not isinstance(state, StandaloneShard)):
        raise StateError(
            "its weight is whole within GatheredParameters, or an engine trains it",
            where=name,
            fix="call convert_conv1d_to_linear before deepspeed_c.initialize, outside such contexts",
        )
    for other, holder in model.named_modules():
        if any(param is weight for param in holder._parameters.values()) and not isinstance(holder, convert_type):
            raise ModelError(
                f"it shares its weight with {other}, a {type(holder).__name__}, which needs it as it is",
                where=name,
                fix="give the layer a weight of its own: layer.weight = torch.nn.Parameter(layer.weight.detach().clone())",
            )


def _transpose(weight: nn.Parameter) -> None:
    state = state_of(weight)
    if state is not None:
        state.transpose()
        return
    grad, weight.grad = weight.grad, None  # torch compares the shapes when it sets one
    with torch.no_grad():
        weight.data = weight.data.t().contiguous()
    if grad is not None:
        weight.grad = grad.t().contiguous()
