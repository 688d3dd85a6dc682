"""The plain PyTorch formulas of ``deepspeed_c.ops.quant`` (dsc/quant.h): for devices without kernels, and for tests.

Rows [n_rows, n_cols] in float32 are cut into groups of ``group`` elements; the last group of a row may be shorter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_c.ops.reference import philox

__all__ = [
    "FORMATS",
    "LEAST_EXPONENT",
    "Format",
    "decode",
    "encode",
    "numbers_of",
    "pack",
    "scales_of",
    "stepped",
    "unpack",
]


class Format(NamedTuple):
    """The numbers that a format can represent, before they are multiplied by a scale."""

    lowest: float
    largest: float
    span: float
    """The largest magnitude of a group over its scale, if the format is symmetric."""
    mantissa_bits: int | None = None
    """None: integers."""
    least_exponent: int = 0
    """Exponent of the smallest normal number."""
    exponent: int = 0
    """Exponent of the largest power of two, for scales that are powers of two (e8m0)."""

    @property
    def is_integer(self) -> bool:
        return self.mantissa_bits is None

    @property
    def is_half_byte(self) -> bool:
        """Whether two codes lie in a byte."""
        return self.largest == 7.0


LEAST_EXPONENT = -100
"""Of scales: a group whose scale would be less than 2 to this power is zeros, with the scale 1."""

FORMATS = {
    "int8": Format(-128.0, 127.0, 127.5, exponent=6),
    "int4": Format(-8.0, 7.0, 7.5, exponent=2),
    "int8_over_256": Format(-128.0, 127.0, 128.0, exponent=6),
    "int4_over_16": Format(-8.0, 7.0, 8.0, exponent=2),
    "e4m3": Format(-448.0, 448.0, 448.0, 3, -6, 8),
    "e5m2": Format(-57344.0, 57344.0, 57344.0, 2, -14, 15),
}


def _by_group(rows: Tensor, group: int) -> Tensor:
    """[n_rows, n_groups, group]; short groups are filled with zeros."""
    n_rows, n_cols = rows.shape
    n_groups = -(-n_cols // group)
    return torch.nn.functional.pad(rows, (0, n_groups * group - n_cols)).view(n_rows, n_groups, group)


def _by_element(of_groups: Tensor, n_cols: int, group: int) -> Tensor:
    return of_groups.repeat_interleave(group, 1)[:, :n_cols]


def scales_of(
    rows: Tensor, format_name: str, group: int, is_symmetric: bool, scale_type: str
) -> tuple[Tensor, Tensor | None]:
    """(scales, zero points or None), float32 [n_rows, n_groups]."""
    format_ = FORMATS[format_name]
    groups = _by_group(rows, group)
    largest = groups.abs().amax(2)
    if is_symmetric:
        scales = largest / format_.span
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / (format_.largest - format_.lowest)
    if scale_type == "e8m0":
        exponents = torch.frexp(largest).exponent - 1 - format_.exponent
        scales = torch.ldexp(torch.ones_like(largest), exponents.clamp(min=LEAST_EXPONENT))
        scales = torch.where(largest > 0, scales, 1.0)
    elif scale_type != "float32":
        scales = scales.to(getattr(torch, scale_type)).float()
    scales = torch.where(scales < 2.0**LEAST_EXPONENT, 1.0, scales)
    scales = torch.where(largest.isfinite() & scales.isfinite(), scales, torch.nan)
    if is_symmetric:
        return scales, None
    zeros = (format_.lowest - low / scales).round().clamp(format_.lowest, format_.largest)
    return scales, torch.where(scales.isnan(), 0.0, zeros)


def stepped(
    rows: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    format_name: str,
    group: int,
    seed: int | None = None,
    offset: int = 0,
) -> Tensor:
    """The numbers of the format for ``rows``, as floats: rounded to the nearest, ties to even, or with a seed up or
    down at random. offset: position of the first element for the random numbers."""
    format_ = FORMATS[format_name]
    n_cols = rows.shape[1]
    values = rows / _by_element(scales, n_cols, group)
    if zero_points is not None:
        values = values + _by_element(zero_points, n_cols, group)
    values = torch.maximum(torch.minimum(values, values.new_tensor(format_.largest)), values.new_tensor(format_.lowest))
    step = torch.ones_like(values)
    if not format_.is_integer:
        exponents = (torch.frexp(values).exponent - 1).clamp(min=format_.least_exponent)
        exponents = torch.where(values == 0, format_.least_exponent, exponents)
        step = torch.ldexp(step, exponents - format_.mantissa_bits)
    counts = values / step
    if seed is None:
        counts = counts.round()
    else:
        words = philox(seed, offset % 4 + rows.numel(), rows.device, first_counter=offset // 4)[offset % 4 :]
        counts = (counts + (words >> 8).view(rows.shape).to(rows.dtype) * 2.0**-24).floor()
    numbers = (counts * step).clamp(format_.lowest, format_.largest)
    return numbers + 0.0 if format_.is_integer else numbers.copysign(rows)  # integers have no -0


def decode(numbers: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    """The values that the numbers of a format stand for."""
    n_cols = numbers.shape[1]
    if zero_points is not None:
        numbers = numbers - _by_element(zero_points, n_cols, group)
    return numbers * _by_element(scales, n_cols, group)


def encode(numbers: Tensor, format_name: str) -> Tensor:
    """The codes of a format's numbers: int8, for formats of 4 bits two in a byte, or bytes of float8 (uint8)."""
    format_ = FORMATS[format_name]
    if format_.is_integer:
        codes = numbers.nan_to_num(nan=0.0)
        return pack(codes) if format_.is_half_byte else codes.to(torch.int8)
    magnitudes = numbers.abs()
    exponents = (torch.frexp(magnitudes).exponent - 1).clamp(min=format_.least_exponent)
    exponents = torch.where(magnitudes == 0, format_.least_exponent, exponents)
    # The leading one of a normal number's mantissa carries into the exponent.
    codes = torch.ldexp(magnitudes, format_.mantissa_bits - exponents)
    codes = codes + (exponents - format_.least_exponent) * 2**format_.mantissa_bits + 128.0 * numbers.signbit()
    return torch.where(numbers.isnan(), 127.0, codes).to(torch.uint8)  # NaN without a sign


def numbers_of(codes: Tensor, format_name: str, n_cols: int) -> Tensor:
    """The numbers that the codes of rows stand for, float32 [n_rows, n_cols]: what encode's results came from."""
    format_ = FORMATS[format_name]
    if format_.is_integer:
        return (unpack(codes, n_cols) if format_.is_half_byte else codes.view(torch.int8)).float()
    magnitudes = codes.to(torch.int32) & 127
    exponents = (magnitudes >> format_.mantissa_bits).clamp(min=1)
    counts = magnitudes - ((exponents - 1) << format_.mantissa_bits)
    values = torch.ldexp(counts.float(), exponents - 1 + format_.least_exponent - format_.mantissa_bits)
    is_inf = (magnitudes == 0x7C) & (format_.mantissa_bits == 2)  # e5m2 alone has inf
    values = torch.where(is_inf, torch.inf, torch.where(values > format_.largest, torch.nan, values))
    return torch.where(codes > 127, -values, values)


def pack(numbers: Tensor) -> Tensor:
    """uint8 [n_rows, 4 * ceil(n_cols / 8)]: two codes (number + 8) in a byte, the first in the low half. Zeros fill up
    the end of a row."""
    codes = torch.nn.functional.pad((numbers + 8).to(torch.uint8), (0, -numbers.shape[1] % 8))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor, n_cols: int) -> Tensor:
    """int8 [n_rows, n_cols]."""
    both = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    return both[:, :n_cols].to(torch.int8) - 8
