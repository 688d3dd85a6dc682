"""Weights that are codes: frozen matrices in 4 or 8 bits, in layers of bitsandbytes.

A row of ``KINDS`` is one class of parameters. It says how codes are recognized, which tensors lie beside them, and how
their layer computes. To the engine codes are bytes: they are sharded, gathered, offloaded and saved as they are. No
cast touches them, although codes in ``bnb_4bit_quant_storage=torch.bfloat16`` look like weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from deepspeed_c.zero.weights.param import shape_of

__all__ = [
    "KINDS",
    "CodeLayer",
    "beside_codes",
    "check_saved",
    "code_layers",
    "describe_codes",
    "is_codes",
    "is_description",
    "kind_of",
    "layers_of",
    "library",
    "names_beside",
]

_DESCRIPTION = "weight.quant_state.bitsandbytes__"


class CodeKind(NamedTuple):
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
    """Moves the tensors beside the codes to the device, and drops other references to the codes."""
    give_back: Callable[[torch.nn.Module], None]
    """Undoes ``settle`` where the library's own forward needs it."""
    dtype: Callable[[torch.nn.Module, torch.Tensor], torch.dtype]
    """A layer computes with an input in this dtype."""
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
    kind: CodeKind

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


def library() -> ModuleType | None:
    """bitsandbytes, if the process has imported it: without it no layer is of it."""
    found = sys.modules.get("bitsandbytes")
    return found if hasattr(found, "nn") else None


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
        vars(layer).update(compute_type_is_set=True)
    return layer.compute_dtype or x.dtype


def _product_4bit(
    layer: torch.nn.Module, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return library().matmul_4bit(x, codes, bias=bias, quant_state=layer._parameters["weight"].quant_state)


def _dense_4bit(layer: torch.nn.Module, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return library().functional.dequantize_4bit(codes, layer._parameters["weight"].quant_state).to(dtype)


def _scales(layer: torch.nn.Module) -> torch.Tensor:
    scales = layer._parameters["weight"].SCB
    return layer.state.SCB if scales is None else scales


def _settle_8bit(layer: torch.nn.Module, device: torch.device) -> None:
    weight = layer._parameters["weight"]
    # The weight has the scales, because the library loads a state dict into these; peft reads those of the state.
    scales = _scales(layer).to(device)
    vars(weight).update(CB=None, SCB=scales)
    vars(layer.state).update(CB=None, SCB=scales)


def _give_back_8bit(layer: torch.nn.Module) -> None:
    weight = layer._parameters["weight"]
    vars(weight).update(CB=weight.data)


def _product_8bit(
    layer: torch.nn.Module, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    state = copy.copy(layer.state)
    vars(state).update(CB=codes.data, SCB=_scales(layer), is_training=layer.training)
    return library().matmul(x, codes, bias=bias, state=state)


def _dense_8bit(layer: torch.nn.Module, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.data.to(dtype, copy=True).mul_(_scales(layer).unsqueeze(1).mul(1.0 / 127.0))


KINDS: tuple[CodeKind, ...] = (
    CodeKind(
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
    CodeKind(
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


def kind_of(param: Any) -> CodeKind | None:
    """The row of a parameter's class."""
    bnb = library()
    if bnb is None:
        return None
    return next((kind for kind in KINDS if isinstance(param, getattr(bnb.nn, kind.param))), None)


def is_codes(tensor: Any) -> bool:
    """Whether a parameter holds codes. Their dtype may be that of weights."""
    kind = kind_of(tensor)
    return kind is not None and kind.is_quantized(tensor)


def describe_codes(tensor: Any) -> str:
    """The format of a parameter's codes; "" if it holds none."""
    return kind_of(tensor).describe(tensor) if is_codes(tensor) else ""


def layers_of(model: torch.nn.Module) -> Iterator[CodeLayer]:
    """The layers of a model whose weight holds codes, or will when the model is moved to a device."""
    bnb = library()
    if bnb is None:
        return
    for name, module in model.named_modules():
        kind = next((kind for kind in KINDS if isinstance(module, getattr(bnb.nn, kind.layer))), None)
        # Linear8bitLt may hold 16-bit weights, which each forward quantizes anew. These are ordinary weights.
        if kind is not None and not getattr(getattr(module, "state", None), "has_fp16_weights", False):
            yield CodeLayer(name, module, kind)


def code_layers(model: torch.nn.Module) -> Iterator[CodeLayer]:
    """The layers of a model whose weight holds codes."""
    return (layer for layer in layers_of(model) if is_codes(layer.module._parameters["weight"]))


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
    return library().utils.unpack_tensor_to_dict(description.cpu())
