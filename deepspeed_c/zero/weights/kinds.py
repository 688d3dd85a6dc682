"""Weights that are codes: frozen matrices in 4 or 8 bits, in layers of bitsandbytes.

A row of ``KINDS`` is one class of parameters. It says how codes are recognized, which tensors lie beside them, and how
their layer computes. To the engine codes are bytes: they are sharded, gathered, offloaded and saved as they are, and no
cast touches them, although codes in ``bnb_4bit_quant_storage=torch.bfloat16`` look like weights.

The layers get a forward of ours (``take_over_layers``). The library's own forward would repack 4-bit codes in place on some
processors, keep a second reference to 8-bit codes, keep gathered codes for the backward, and cast a trained bias in
place. Ours computes the same bits, and saves the parameter: at stage 3 a backward gathers it again.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from deepspeed_c.errors import MissingPackageError, ModelError
from deepspeed_c.zero.weights.param import is_released, shape_of, state_of

__all__ = [
    "KINDS",
    "CodeLayer",
    "beside_codes",
    "check_layers",
    "check_saved",
    "code_layers",
    "describe_codes",
    "is_codes",
    "is_description",
    "names_beside",
    "take_over_layers",
]

OLDEST = (0, 50)
TESTED = "0.50.2"

_DESCRIPTION = "weight.quant_state.bitsandbytes__"


class Kind(NamedTuple):
    """The codes in parameters of the class ``param``, and the class ``layer`` whose forward reads them (both in
    ``bitsandbytes.nn``)."""

    param: str
    layer: str
    is_quantized: Callable[[Any], bool]
    """Whether a parameter of the class holds codes already. The library quantizes when a model is moved to a device."""
    describe: Callable[[Any], str]
    """The format of a parameter's codes. Codes of one format are noise in another."""
    beside: Callable[[torch.nn.Module], dict[str, torch.Tensor]]
    """The tensors that belong to a layer's codes, the objects themselves."""
    names: tuple[str, ...]
    """How the names of these tensors begin in a layer's state dict."""
    settle: Callable[[torch.nn.Module, torch.device], None]
    """Moves what lies beside the codes to the device, and drops other references to the codes."""
    give_back: Callable[[torch.nn.Module], None]
    """Undoes ``settle`` where the library's own forward needs it."""
    dtype: Callable[[torch.nn.Module, torch.Tensor], torch.dtype]
    """The dtype in which a layer computes with an input."""
    product: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """The library's product of an input with codes, and the bias."""
    dense: Callable[[torch.nn.Module, torch.Tensor, torch.dtype], torch.Tensor]
    """The matrix that codes stand for, in a dtype."""
    shape: Callable[[torch.nn.Module], torch.Size]
    """The shape of this matrix."""
    dense_dtype: Callable[[torch.nn.Module], torch.dtype]
    """The dtype that the codes were made from."""


class CodeLayer(NamedTuple):
    """A module whose parameter ``weight`` holds codes."""

    name: str
    module: torch.nn.Module
    kind: Kind

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that the codes stand for."""
        return self.kind.shape(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the codes were made from."""
        return self.kind.dense_dtype(self.module)

    def dense(self, codes: torch.Tensor) -> torch.Tensor:
        """The matrix that ``codes`` stand for, where they are whole."""
        return self.kind.dense(self.module, codes, self.dtype)

    def named(self, key: str) -> str:
        """The name in the model of something that the layer calls ``key``."""
        return f"{self.name}.{key}" if self.name else key


def _library() -> ModuleType | None:
    """bitsandbytes, if the process has imported it: without it no layer is of it."""
    library = sys.modules.get("bitsandbytes")
    return library if hasattr(library, "nn") else None


# -- 4 bits ------------------------------------------------------------------------------------------------------------


def _format_4bit(kind: str, blocksize: int, shape: Sequence[int], twice: bool) -> str:
    matrix = " x ".join(map(str, shape))
    return f"{kind} of {matrix} in blocks of {blocksize}{', scales quantized too' if twice else ''}"


def _describe_4bit(param: Any) -> str:
    state = param.quant_state
    return _format_4bit(state.quant_type, state.blocksize, state.shape, state.nested)


def _beside_4bit(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = layer._parameters["weight"].quant_state
    found = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        found |= {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
    return found


def _settle_4bit(layer: torch.nn.Module, device: torch.device) -> None:
    layer._parameters["weight"].quant_state.to(device)


def _dtype_4bit(layer: torch.nn.Module, x: torch.Tensor) -> torch.dtype:
    if not layer.compute_type_is_set:
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    return layer.compute_dtype or x.dtype


def _product_4bit(
    layer: torch.nn.Module, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return _library().matmul_4bit(x, codes, bias=bias, quant_state=layer._parameters["weight"].quant_state)


def _dense_4bit(layer: torch.nn.Module, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _library().functional.dequantize_4bit(codes, layer._parameters["weight"].quant_state).to(dtype)


# -- 8 bits ------------------------------------------------------------------------------------------------------------


def _scales(layer: torch.nn.Module) -> torch.Tensor:
    scales = layer._parameters["weight"].SCB
    return layer.state.SCB if scales is None else scales


def _settle_8bit(layer: torch.nn.Module, device: torch.device) -> None:
    weight = layer._parameters["weight"]
    # The weight has the scales, because the library loads a state dict into these; peft reads those of the state.
    weight.SCB = layer.state.SCB = _scales(layer).to(device)
    weight.CB = layer.state.CB = None


def _give_back_8bit(layer: torch.nn.Module) -> None:
    weight = layer._parameters["weight"]
    weight.CB = weight.data


def _product_8bit(
    layer: torch.nn.Module, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    state = copy.copy(layer.state)
    state.CB, state.SCB, state.is_training = codes.data, _scales(layer), layer.training
    return _library().matmul(x, codes, bias=bias, state=state)


def _dense_8bit(layer: torch.nn.Module, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.to(dtype, copy=True).mul_(_scales(layer).unsqueeze(1).mul(1.0 / 127.0))


KINDS: tuple[Kind, ...] = (
    Kind(
        "Params4bit",
        "Linear4bit",
        is_quantized=lambda param: param.bnb_quantized and param.quant_state is not None,
        describe=_describe_4bit,
        beside=_beside_4bit,
        names=("weight.",),
        settle=_settle_4bit,
        give_back=lambda layer: None,
        dtype=_dtype_4bit,
        product=_product_4bit,
        dense=_dense_4bit,
        shape=lambda layer: torch.Size(layer._parameters["weight"].quant_state.shape),
        dense_dtype=lambda layer: layer._parameters["weight"].quant_state.dtype,
    ),
    Kind(
        "Int8Params",
        "Linear8bitLt",
        is_quantized=lambda param: param.dtype == torch.int8,
        describe=lambda param: "int8 in rows",
        beside=lambda layer: {"SCB": _scales(layer)},
        names=("SCB", "weight_format"),
        settle=_settle_8bit,
        give_back=_give_back_8bit,
        dtype=lambda layer, x: x.dtype,
        product=_product_8bit,
        dense=_dense_8bit,
        shape=lambda layer: shape_of(layer._parameters["weight"]),
        dense_dtype=lambda layer: torch.float16,
    ),
)


# -- recognition -------------------------------------------------------------------------------------------------------


def _kind_of(param: Any) -> Kind | None:
    library = _library()
    if library is None:
        return None
    return next((kind for kind in KINDS if isinstance(param, getattr(library.nn, kind.param))), None)


def is_codes(tensor: Any) -> bool:
    """Whether a parameter holds codes. Their dtype may be that of weights."""
    kind = _kind_of(tensor)
    return kind is not None and kind.is_quantized(tensor)


def describe_codes(tensor: Any) -> str:
    """The format of a parameter's codes; "" if it holds none."""
    return _kind_of(tensor).describe(tensor) if is_codes(tensor) else ""


def _layers(model: torch.nn.Module) -> Iterator[CodeLayer]:
    library = _library()
    if library is None:
        return
    for name, module in model.named_modules():
        kind = next((kind for kind in KINDS if isinstance(module, getattr(library.nn, kind.layer))), None)
        # Linear8bitLt may hold 16-bit weights, which each forward quantizes anew. These are ordinary weights.
        if kind is not None and not getattr(getattr(module, "state", None), "has_fp16_weights", False):
            yield CodeLayer(name, module, kind)


def code_layers(model: torch.nn.Module) -> Iterator[CodeLayer]:
    """The layers of a model whose weight holds codes."""
    return (layer for layer in _layers(model) if is_codes(layer.module._parameters["weight"]))


def beside_codes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors beside the codes of a model, the objects themselves."""
    return {
        layer.named(key): tensor
        for layer in code_layers(model)
        for key, tensor in layer.kind.beside(layer.module).items()
    }


def names_beside(model: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Those ``names`` of a model's state dict that belong to codes."""
    prefixes = tuple(layer.named(begin) for layer in code_layers(model) for begin in layer.kind.names)
    return {name for name in names if name.startswith(prefixes)} if prefixes else set()


# -- layers under an engine --------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """The product of an input with frozen codes. Autograd saves the parameter, and no matrix."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, layer: CodeLayer
    ) -> torch.Tensor:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        ctx.save_for_backward(codes)
        return layer.kind.product(layer.module, x, codes, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_x = of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            (codes,) = ctx.saved_tensors
            of_x = torch.matmul(grad, ctx.layer.kind.dense(ctx.layer.module, codes, grad.dtype))
        return of_x, None, of_bias, None


def _forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight  # gathers it, if it is sharded
    layer = CodeLayer("", module, _kind_of(weight))
    dtype = layer.kind.dtype(module, x)
    bias = None if module.bias is None else module.bias.to(dtype)
    return _Product.apply(x.to(dtype), weight, bias, layer).to(x.dtype)


def _apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """As ``Module._apply``, beneath ``half()``, ``to()`` and the like, but codes that look like weights are not cast."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not is_codes(tensor) or not tensor.is_floating_point() or is_released(tensor):
            return fn(tensor)
        return fn(tensor.data.view(torch.uint8)).view(tensor.dtype)

    type(module)._apply(module, moved, recurse)
    _kind_of(module._parameters["weight"]).settle(module, module._parameters["weight"].device)
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
    for layer in _layers(model):
        _check_version(_library(), layer.name)
        _check_layer(layer, getattr(_library().nn, layer.kind.layer), is_cut)


def _check_version(library: ModuleType, name: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", library.__version__)[:2])
    if numbers < OLDEST:
        raise MissingPackageError(
            f"bitsandbytes {library.__version__} is too old for layers of codes; {TESTED} is tested",
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
    layers = list(_layers(model))
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


# -- saved codes -------------------------------------------------------------------------------------------------------


def is_description(name: str) -> bool:
    """Whether the entry ``name`` of a state dict describes 4-bit codes in a text, whose length may differ from that of
    the model's own description. ``check_saved`` reads it."""
    return _DESCRIPTION in name


def check_saved(
    model: torch.nn.Module, saved: Iterable[str], read: Callable[[str], torch.Tensor]
) -> tuple[list[str], Callable[[], None]]:
    """(what does not fit the model's 4-bit codes, a function that takes the numbers in the saved descriptions over).

    saved: the names of all saved tensors. read: returns one of them.
    """
    descriptions = {name.rpartition(_DESCRIPTION)[0]: name for name in saved if is_description(name)}
    problems: list[str] = []
    offsets: list[tuple[torch.Tensor, float]] = []
    for layer in code_layers(model) if descriptions else ():
        name, state = (
            descriptions.get(layer.named("")),
            getattr(layer.module._parameters["weight"], "quant_state", None),
        )
        if name is None or state is None:
            continue
        about = _unpack(read(name))
        twice = "nested_blocksize" in about
        theirs = _format_4bit(name.rpartition(_DESCRIPTION)[2], about["blocksize"], about["shape"], twice)
        ours = _format_4bit(state.quant_type, state.blocksize, state.shape, state.nested)
        if theirs != ours:
            problems.append(f"{layer.name} was saved as {theirs}, the model's is {ours}")
        elif twice:
            offsets.append((state.offset, about["nested_offset"]))

    def take() -> None:
        for offset, value in offsets:
            offset.fill_(value)

    return problems, take


def _unpack(description: torch.Tensor) -> Mapping[str, Any]:
    return _library().utils.unpack_tensor_to_dict(description.cpu())
