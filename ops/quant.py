"""Quantization by groups: a code of 8 or 4 bits for each element, and a scale for each group of elements of a row.

Formats: "int8" (-128 to 127), "int4" (-8 to 7), "e4m3" and "e5m2" (float8, arXiv 2209.05433). An element is (code -
zero point) * scale; symmetric formats have no zero points. A group's scale is its largest magnitude over 127.5, 7.5,
448 or 57344; an asymmetric group's is its range, which includes 0, over 255 or 15. A group of zeros has the scale 1. A
group with NaN or inf has the scale NaN, so that every element reads as NaN. The formulas are in ``dsc/quant.h``; results
have the same bits for any number of threads and any instruction set.

Rounding is to the nearest, ties to even. With a seed it is stochastic: up or down with the probability that keeps the
mean, by a random number (Philox) that depends on the seed and on the element's position only. So it does not depend on
how a tensor is cut over ranks, if each passes its ``offset``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepspeed_c.ops import quant_reference as reference

__all__ = ["FORMATS", "Quantized", "dequantize", "fake_quantize", "quantize"]

FormatName = Literal["int8", "int4", "e4m3", "e5m2"]
ScaleType = Literal["float32", "bfloat16", "float16", "e8m0"]

FORMATS: tuple[str, ...] = tuple(reference.FORMATS)


class Quantized(NamedTuple):
    """A quantized tensor of any shape [..., n_cols]; leading dimensions are rows."""

    codes: Tensor
    """int8, float8, or for "int4" uint8 [..., 4 * ceil(n_cols / 8)]: two codes + 8 in a byte, the first in the low half
    (compressed-tensors' int32 words)."""
    scales: Tensor
    """float32 [..., n_groups]."""
    zero_points: Tensor | None
    """int8 [..., n_groups]; None if symmetric."""
    format: FormatName
    group: int
    n_cols: int


def _rows(x: Tensor) -> Tensor:
    return x.detach().float().reshape(-1, x.shape[-1] if x.dim() else 1)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, format_name, group, is_symmetric, scale_type, seed, offset):
        rows = _rows(x)
        group = group or max(rows.shape[1], 1)
        scales, zeros = reference.scales_of(rows, format_name, group, is_symmetric, scale_type)
        numbers = reference.stepped(rows, scales, zeros, format_name, group, seed, offset)
        return reference.decode(numbers, scales, zeros, group).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None, None, None, None


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
    return _FakeQuantize.apply(x, format, group, symmetric, scale_type, seed, offset)


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
    rows = _rows(x)
    group = group or max(rows.shape[1], 1)
    scales, zeros = reference.scales_of(rows, format, group, symmetric, scale_type)
    codes = reference.encode(reference.stepped(rows, scales, zeros, format, group, seed, offset), format)
    lead = x.shape[:-1]
    return Quantized(
        codes.view(*lead, codes.shape[1]),
        scales.view(*lead, scales.shape[1]),
        None if zeros is None else zeros.to(torch.int8).view(*lead, zeros.shape[1]),
        format,
        group,
        rows.shape[1],
    )


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., n_cols] that codes stand for."""
    codes, n_cols = quantized.codes, quantized.n_cols
    rows = codes.reshape(-1, codes.shape[-1])
    numbers = reference.unpack(rows, n_cols) if quantized.format == "int4" else rows
    zeros = quantized.zero_points
    values = reference.decode(
        numbers.float(),
        quantized.scales.reshape(len(rows), -1),
        None if zeros is None else zeros.reshape(len(rows), -1).float(),
        quantized.group,
    )
    return values.view(*codes.shape[:-1], n_cols).to(dtype)
