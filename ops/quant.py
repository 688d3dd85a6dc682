"""Quantization by groups: a code of 8 or 4 bits for each element, and a scale for each group of elements of a row.

Formats: "int8" (-128 to 127), "int4" (-8 to 7), "e4m3" and "e5m2" (float8, arXiv 2209.05433). An element is (code -
zero point) * scale; symmetric formats have no zero points. A group's scale is its largest magnitude over 127.5, 7.5,
448 or 57344, and with DeepSpeed's "int8_over_256" and "int4_over_16" over 128 or 8; an asymmetric group's is its range,
which includes 0, over 255 or 15. A group of zeros has the scale 1. A
group with NaN or inf has the scale NaN, so that every element reads as NaN. The formulas are in ``dsc/quant.h``.
Results have the same bits for any number of threads, any instruction set, and on CUDA devices.

Rounding is to the nearest, ties to even. With a seed it is stochastic: up or down with the probability that keeps the
mean, by a random number (Philox) that depends on the seed and on the element's position only. So it does not depend on
how a tensor is cut over ranks, if each passes its ``offset``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import nn
from deepspeed_c.ops import quant_reference as reference
from deepspeed_c.ops.autocast import cast_by_autocast
from deepspeed_c.ops.product_times import product_times

__all__ = [
    "FEW_ROWS",
    "FORMATS",
    "Quantized",
    "dequantize",
    "fake_quantize",
    "fake_quantize_with",
    "packed_linear",
    "packed_weight",
    "quantize",
]

FormatName = Literal["int8", "int4", "int8_over_256", "int4_over_16", "e4m3", "e5m2"]
ScaleType = Literal["float32", "bfloat16", "float16", "e8m0"]

FORMATS: tuple[str, ...] = tuple(reference.FORMATS)


class Quantized(NamedTuple):
    """A quantized tensor of any shape [..., n_cols]; leading dimensions are rows."""

    codes: Tensor
    """int8, float8, or uint8 [..., 4 * ceil(n_cols / 8)] for 4 bits: two codes + 8 in a byte, the first in the low half
    (compressed-tensors' int32 words)."""
    scales: Tensor
    """float32 [..., n_groups]."""
    zero_points: Tensor | None
    """int8 [..., n_groups]; None if symmetric."""
    format: FormatName
    group: int
    n_cols: int


_ops = torch.ops.deepspeed_c
_SCALE_TYPES = ("float32", "bfloat16", "float16", "e8m0")
_CODE_DTYPES = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "int8_over_256": torch.int8,
    "int4_over_16": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def _scale_type(name: str) -> int:
    if name not in _SCALE_TYPES:
        raise ValueError(f"there is no type of scales {name!r}; the types are {', '.join(_SCALE_TYPES)}")
    return _SCALE_TYPES.index(name)


def fake_quantize(
    x: Tensor,
    format: FormatName = "int8",
    *,
    group: int = 0,
    symmetric: bool = True,
    scale_type: ScaleType = "float32",
    seed: int | None = None,
    offset: int = 0,
) -> Tensor:
    """``dequantize(quantize(x))`` in one pass, in x's shape and dtype (float32, bfloat16, float16).

    The gradient is passed on as it is (straight-through estimator, arXiv 1308.3432). group: elements of a row that
    share a scale; 0: the whole row. scale_type: the type that scales are rounded to; "e8m0": a power of two (OCP MX
    1.0). seed: None rounds to the nearest. offset: position of the first element for the random numbers.

    Raises ValueError for a format that does not exist, and for float8 formats that are not symmetric.
    """
    return _ops.quant_fake(x, format, group, symmetric, _scale_type(scale_type), seed, offset)


def fake_quantize_with(
    x: Tensor, scales: Tensor, zero_points: Tensor | None = None, format: FormatName = "int8", *, group: int = 0
) -> Tensor:
    """``fake_quantize`` with given scales, float32 [..., n_groups], and zero points, int8 [..., n_groups].

    Elements outside of the format's range become its ends, and pass their gradient on as all do. A NaN stays.
    """
    return _ops.quant_fake_with(x, scales, zero_points, format, group)


def quantize(
    x: Tensor,
    format: FormatName = "int8",
    *,
    group: int = 0,
    symmetric: bool = True,
    scale_type: ScaleType = "float32",
    seed: int | None = None,
    offset: int = 0,
) -> Quantized:
    """The codes and scales of ``x`` [..., n_cols]; arguments as in ``fake_quantize``."""
    codes, scales, zeros = _ops.quant_quantize(
        x.detach(), format, group, symmetric, _scale_type(scale_type), seed, offset
    )
    n_cols = x.shape[-1]
    return Quantized(
        codes.view(_CODE_DTYPES[format]), scales, None if symmetric else zeros, format, group or max(n_cols, 1), n_cols
    )


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., n_cols] that codes stand for. dtype: float32, bfloat16 or float16."""
    codes, scales, zeros, format_name, group, n_cols = quantized
    out = torch.empty((*codes.shape[:-1], n_cols), dtype=dtype, device=codes.device)
    _ops.quant_dequantize_(codes.view(torch.uint8), scales, zeros, format_name, group, out)
    return out


FEW_ROWS = 32
"""Rows of x up to which a product reads the packed codes as it goes; above, the weight is dequantized once for torch's
own product. 32 is an estimate: benchmarks/ops/packed_linear.py measures where the two take equally long."""


def packed_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int,
    group: int = 0,
    zero_points: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.linear`` with a weight in compressed-tensors' format "pack-quantized".

    x: [..., n_cols], float32, bfloat16 or float16. packed: int32 [n_outputs, ceil(n_cols * bits / 32)], codes + 2^(bits
    - 1) of 8 or 4 bits, the first in the lowest ones. scales: [n_outputs, n_groups], of any of these dtypes; group:
    elements of a row that share a scale, 0: the whole row. bias: [n_outputs]. zero_points: int32 [ceil(n_outputs * bits
    / 32), n_groups], packed down the rows as codes are along them; None if the weight is symmetric.

    Returns [..., n_outputs] in x's dtype, or autocast's. The gradients of x and bias are exact; packed and scales have
    none. With few rows of x on the host and no zero points, products are summed in float32 from weights that are not
    rounded to x's dtype.
    """
    (x,) = cast_by_autocast(x)
    if zero_points is None and x.device.type == "cpu" and x.numel() <= FEW_ROWS * x.shape[-1]:
        return _ops.quant_packed_linear(x, packed, scales, bias, bits, group)
    return _formula_packed_linear(x, packed, scales, bias, bits, group, zero_points)


def packed_weight(
    packed: Tensor,
    scales: Tensor,
    bits: int,
    group: int,
    n_cols: int,
    dtype: torch.dtype,
    zero_points: Tensor | None = None,
) -> Tensor:
    """The values [n_outputs, n_cols] of ``packed_linear``'s weight, in ``dtype``."""
    codes, zeros = packed.view(torch.uint8), None
    if bits == 8:
        codes = _signed(codes, n_cols)
    if zero_points is not None:
        down = zero_points.T.flatten().view(torch.uint8).view(zero_points.shape[1], -1)
        zeros = (_signed(down, len(packed)) if bits == 8 else reference.unpack(down, len(packed))).T.contiguous()
    return dequantize(Quantized(codes, scales.float(), zeros, f"int{bits}", group or max(n_cols, 1), n_cols), dtype)


def _signed(codes: Tensor, n_cols: int) -> Tensor:
    """int8 [n_rows, n_cols] of codes + 128, uint8 [n_rows, n_cols or more]."""
    return codes[:, :n_cols].bitwise_xor(128).view(torch.int8)


# Devices without kernels compute the formulas.


def _formula_packed_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    bits: int,
    group: int,
    zero_points: Tensor | None = None,
) -> Tensor:
    # Rounded to x's dtype on every processor.
    weight = packed_weight(packed, scales, bits, group, x.shape[-1], x.dtype, zero_points)
    is_slow = x.device.type == "cpu" and x.itemsize == 2 and _is_torch_slow(x.dtype)
    return (nn.linear if is_slow else torch.nn.functional.linear)(x, weight, bias)


@cache
def _is_torch_slow(dtype: torch.dtype) -> bool:
    return product_times(dtype).is_torch_slow


def _rows(x: Tensor) -> Tensor:
    return x.float().reshape(-1, x.shape[-1] if x.dim() else 1)


def _formula_numbers(
    x: Tensor, format_name: str, group: int, is_symmetric: bool, scale_type: int, seed: int | None, offset: int
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    rows = _rows(x)
    group = group or max(rows.shape[1], 1)
    scales, zeros = reference.scales_of(rows, format_name, group, is_symmetric, _SCALE_TYPES[scale_type])
    return reference.stepped(rows, scales, zeros, format_name, group, seed, offset), scales, zeros, group


def _formula_fake(x: Tensor, *how: Any) -> Tensor:
    return reference.decode(*_formula_numbers(x, *how)).view(x.shape).to(x.dtype)


def _formula_fake_with(x: Tensor, scales: Tensor, zero_points: Tensor | None, format_name: str, group: int) -> Tensor:
    rows = _rows(x)
    group = group or max(rows.shape[1], 1)
    of_rows = scales.reshape(len(rows), -1)
    zeros = None if zero_points is None else zero_points.reshape(len(rows), -1).float()
    numbers = reference.stepped(rows, of_rows, zeros, format_name, group)
    return reference.decode(numbers, of_rows, zeros, group).view(x.shape).to(x.dtype)


def _formula_quantize(x: Tensor, format_name: str, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    numbers, scales, zeros, _ = _formula_numbers(x, format_name, *how)
    codes = reference.encode(numbers, format_name).view(torch.uint8)
    lead = x.shape[:-1]
    return (
        codes.view(*lead, codes.shape[1]),
        scales.view(*lead, scales.shape[1]),
        (scales[:, :0] if zeros is None else zeros).to(torch.int8).view(*lead, -1),
    )


def _formula_dequantize(
    codes: Tensor, scales: Tensor, zero_points: Tensor | None, format_name: str, group: int, out: Tensor
) -> None:
    rows = codes.reshape(-1, codes.shape[-1])
    numbers = reference.numbers_of(rows, format_name, out.shape[-1])
    zeros = None if zero_points is None else zero_points.reshape(len(rows), -1).float()
    values = reference.decode(numbers, scales.reshape(len(rows), -1), zeros, group or max(out.shape[-1], 1))
    out.copy_(values.view(out.shape))


# Fakes: shapes and dtypes without data.


def _fake_like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_quantized(
    x: Tensor, format_name: str, group: int, is_symmetric: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *lead, n_cols = x.shape
    has_elements = x.numel() > 0
    n_groups = -(-n_cols // (group or max(n_cols, 1))) if has_elements else 0
    n_bytes = 4 * -(-n_cols // 8) if reference.FORMATS[format_name].is_half_byte else n_cols
    return (
        x.new_empty((*lead, n_bytes if has_elements else 0), dtype=torch.uint8),
        x.new_empty((*lead, n_groups), dtype=torch.float32),
        x.new_empty((*lead, 0 if is_symmetric else n_groups), dtype=torch.int8),
    )


def _fake_dequantized(*arguments: Any) -> None:
    """The operator writes to its argument, and fake tensors have no data."""


def _fake_packed_linear(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
for _name, _formula, _fake in (
    ("quant_fake", _formula_fake, _fake_like),
    ("quant_fake_with", _formula_fake_with, _fake_like),
    ("quant_quantize", _formula_quantize, _fake_quantized),
    ("quant_dequantize_", _formula_dequantize, _fake_dequantized),
    ("quant_packed_linear", _formula_packed_linear, _fake_packed_linear),
):
    _LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _fake, "Meta")


def _straight_through(ctx: Any, dy: Tensor) -> tuple:
    """Passes the gradient of the result on to x."""
    return dy, *[None] * (ctx.n_operands - 1)


def _note_operands(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.n_operands = len(inputs)


for _name in ("quant_fake", "quant_fake_with"):
    torch.library.register_autograd(f"deepspeed_c::{_name}", _straight_through, setup_context=_note_operands)


def _note_packed(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, packed, scales, bias, ctx.bits, ctx.group = inputs
    ctx.n_cols, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype
    ctx.save_for_backward(packed, scales)


def _packed_linear_gradients(ctx: Any, dy: Tensor) -> tuple:
    packed, scales = ctx.saved_tensors
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = dy @ packed_weight(packed, scales, ctx.bits, ctx.group, ctx.n_cols, dy.dtype)
    if ctx.needs_input_grad[3]:
        dbias = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype)
    return dx, None, None, dbias, None, None


torch.library.register_autograd(
    "deepspeed_c::quant_packed_linear", _packed_linear_gradients, setup_context=_note_packed
)
