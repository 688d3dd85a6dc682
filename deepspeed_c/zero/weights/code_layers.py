"""The layers of codes (``kinds.py``) under an engine, with a forward of ours.

The library's own forward would repack 4-bit codes in place on some processors, keep a second reference to 8-bit codes,
keep gathered codes for the backward, and cast a trained bias in place. Ours computes the same bits, and saves the
parameter: at stage 3 a backward gathers it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import torch

from deepspeed_c.errors import MissingPackageError, ModelError
from deepspeed_c.zero.weights.kinds import CodeLayer, is_codes, kind_of, layers_of, library
from deepspeed_c.zero.weights.param import is_released, state_of

__all__ = ["check_layers", "take_over_layers"]

OLDEST = (0, 50)
TESTED = "0.50.2"


class _CodeProduct(torch.autograd.Function):
    """The product of an input with frozen codes. Autograd saves the parameter, and no matrix."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, layer: CodeLayer
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(codes)
        return layer.kind.product(layer.module, x, codes, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_x = of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        if ctx.needs_input_grad[0]:
            (codes,) = ctx.saved_tensors
            of_x = torch.matmul(grad, ctx.layer.kind.dense(ctx.layer.module, codes, grad.dtype))
        return of_x, None, of_bias, None


def _forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight  # gathers it, if it is sharded
    layer = CodeLayer("", module, kind_of(weight))
    dtype = layer.kind.dtype(module, x)
    bias = None if module.bias is None else module.bias.to(dtype)
    return _CodeProduct.apply(x.to(dtype), weight, bias, layer).to(x.dtype)


def _apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """As ``Module._apply``, beneath ``half()``, ``to()`` and the like, but codes that look like weights are not cast."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not is_codes(tensor) or not tensor.is_floating_point() or is_released(tensor):
            return fn(tensor)
        return fn(tensor.data.view(torch.uint8)).view(tensor.dtype)

    type(module)._apply(module, moved, recurse)
    kind_of(module._parameters["weight"]).settle(module, module._parameters["weight"].device)
    return module


def _place_of_forward(module: torch.nn.Module) -> str:
    """The attribute for a forward of ours. accelerate's hooks wrap a module's forward, and call the one beneath."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _is_ours(module: torch.nn.Module) -> bool:
    return getattr(vars(module).get(_place_of_forward(module)), "__func__", None) is _forward


def check_layers(model: torch.nn.Module, *, is_cut: bool) -> None:
    """Raises ModelError for a layer of codes that an engine cannot run, and MissingPackageError for a bitsandbytes that
    is too old. ``is_cut``: the model is about to be cut over tensor-parallel ranks. Layers that are not quantized yet
    are checked too: a move to the device quantizes them."""
    for layer in layers_of(model):
        _check_version(library(), layer.name)
        _check_layer(layer, getattr(library().nn, layer.kind.layer), is_cut)


def _check_version(bnb: ModuleType, name: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", bnb.__version__)[:2])
    if numbers < OLDEST:
        raise MissingPackageError(
            f"bitsandbytes {bnb.__version__} is too old for layers of codes; {TESTED} is tested",
            where=name,
            fix=f'pip install "bitsandbytes>={OLDEST[0]}.{OLDEST[1]}"',
            package="bitsandbytes",
        )


def _check_layer(layer: CodeLayer, base: type, is_cut: bool) -> None:
    name, module = layer.name, layer.module
    weight = module._parameters["weight"]
    if weight.requires_grad:
        raise ModelError(
            "quantized weights require gradients, and codes cannot be trained",
            where=f"{name}.weight",
            fix="freeze them with requires_grad_(False) and train an adapter (peft's LoRA), or train a torch.nn.Linear",
        )
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        raise ModelError(
            "a forward of bitsandbytes has repacked the codes for this processor, and has rounded their scales",
            where=name,
            fix="load the model again, and call deepspeed_c.initialize before its first forward in eval mode",
        )
    if is_cut or getattr(weight, "tensor_model_parallel", False):
        raise ModelError(
            "a tensor-parallel cut would split blocks of its codes",
            where=name,
            fix="leave tensor_parallel out and shard the codes with ZeRO stage 3, or cut the model before it is quantized",
        )
    if type(module).forward is not base.forward or ("forward" in vars(module) and not _has_known_forward(module)):
        raise ModelError(
            f"has a forward of its own in place of that of bitsandbytes.nn.{base.__name__}",
            where=name,
            fix=f"put a bitsandbytes.nn.{base.__name__} as it is into the model, and the forward into a module around it",
        )


def _has_known_forward(module: torch.nn.Module) -> bool:
    return _is_ours(module) or "_old_forward" in vars(module)


def take_over_layers(model: torch.nn.Module, device: torch.device) -> Callable[[], None]:
    """Gives the layers of codes our forward. Returns the function that gives them the library's back. A layer whose
    codes are sharded then keeps ours, because the library's would not read them.

    Raises ModelError for a layer that is not quantized yet."""
    layers = list(layers_of(model))
    for layer in layers:
        if not is_codes(layer.module._parameters["weight"]):
            raise ModelError(
                f"the weight of this {layer.kind.layer} is not quantized yet",
                where=layer.name,
                fix="move the model to its device (model.to(...)) before deepspeed_c.initialize, outside of zero.Init",
            )
    undos = [_take_over(layer, device) for layer in layers]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _take_over(layer: CodeLayer, device: torch.device) -> Callable[[], None]:
    module, place = layer.module, _place_of_forward(layer.module)
    layer.kind.settle(module, device)
    if not _is_ours(module):
        vars(module).update({place: MethodType(_forward, module), "_apply": MethodType(_apply, module)})

    def undo() -> None:
        state = state_of(module._parameters["weight"])
        if not _is_ours(module) or (state is not None and not state.persists):
            return
        layer.kind.give_back(module)
        del vars(module)["_apply"], vars(module)[place]
        if place == "_old_forward":
            vars(module)[place] = MethodType(type(module).forward, module)

    return undo
