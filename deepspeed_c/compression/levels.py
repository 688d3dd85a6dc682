"""The numbers that quantized weights and activations can have: 2^bits multiples of a scale.

"deepspeed" divides the range of a group by 2^bits, as DeepSpeed does, so the largest magnitude lies one step above the
last code. "compressed-tensors" divides it by 2^bits - 1, so both ends have a code, and includes 0 in each range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_c import ops  # ops.quant is loaded on first use: engines that compress nothing load this module, too
from deepspeed_c.config.compression import Levels
from deepspeed_c.ops.quant_reference import LEAST_EXPONENT, stepped

__all__ = ["Grid", "Levels", "codes_on", "grid_of", "on_grid", "quantize_rows", "rows_grid"]


class Grid(NamedTuple):
    """Number q of a row stands for (q - zero point) * scale."""

    bits: int
    scales: Tensor
    """float32 [rows, 1]."""
    zero_points: Tensor | None
    """Whole numbers, float32 [rows, 1]; None if symmetric. They are no codes where a range is far from 0."""


def grid_of(
    low: Tensor, high: Tensor, bits: int, *, levels: Levels, is_symmetric: bool, scale_type: str = "float32"
) -> Grid:
    """The numbers for ranges ``low`` to ``high`` [rows, 1]. scale_type: the dtype that scales are rounded to."""
    half, is_whole = 2 ** (bits - 1), levels == "deepspeed"
    dtype = getattr(torch, scale_type)
    low, high = low.float(), high.float()
    if is_symmetric:
        scales = (torch.maximum(low.abs(), high.abs()) / (half if is_whole else half - 0.5)).to(dtype).float()
        return Grid(bits, torch.where(scales < 2.0**LEAST_EXPONENT, 1, scales), None)
    if not is_whole:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scales = ((high - low) / (2 * half - (not is_whole))).to(dtype).float()
    is_flat = scales == 0
    # A range of one number has that number, where DeepSpeed divides by 0.
    scales = torch.where(is_flat & (low == high), low.abs(), scales)
    scales = torch.where(scales == 0, 1, scales)
    if not is_whole:
        return Grid(bits, scales, (-half - low / scales).round().clamp(-half, half - 1))
    first = torch.where(is_flat, low.clamp(max=0), low) / scales
    return Grid(bits, scales, -half - first.round())


def codes_on(rows: Tensor, grid: Grid, seed: int | None = None, offset: int = 0) -> Tensor:
    """The numbers of ``rows`` [rows, n], float32. seed: None rounds to the nearest; offset: position of the first
    element for the random numbers."""
    bits, scales, zeros = grid
    rows, name, group = rows.detach().float(), f"int{bits}", max(rows.shape[1], 1)
    if zeros is None:
        return stepped(rows, scales, None, name, group, seed, offset)
    # Differences to the lowest number keep their precision where the range is far from 0.
    lowest = -(2 ** (bits - 1))
    above = rows - (lowest - zeros) * scales
    if seed is None:
        return above.div_(scales).round_().clamp_(0, 2**bits - 1).add_(lowest)
    return stepped(above, scales, torch.full_like(zeros, lowest), name, group, seed, offset)


class _StraightThrough(torch.autograd.Function):
    """``values``, with the gradient going to ``rows``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def on_grid(rows: Tensor, grid: Grid) -> Tensor:
    """``rows`` [rows, n] rounded to the nearest of their grid, in their dtype. The gradient passes unchanged."""
    if grid.zero_points is None:
        return ops.quant.fake_quantize_with(rows, grid.scales, None, f"int{grid.bits}")
    return _around_zero_points(rows, grid)


def _around_zero_points(rows: Tensor, grid: Grid, seed: int | None = None, offset: int = 0) -> Tensor:
    """``rows`` on an asymmetric grid. seed and offset: as in ``codes_on``."""
    codes = codes_on(rows, grid, seed, offset)
    return _StraightThrough.apply(rows, codes.sub_(grid.zero_points).mul_(grid.scales).to(rows.dtype))


def quantize_rows(
    x: Tensor,
    bits: int,
    *,
    levels: Levels,
    is_symmetric: bool,
    scale_type: str = "float32",
    seed: int | None = None,
    offset: int = 0,
) -> Tensor:
    """x [..., n] with each row rounded to the numbers of its own range. Other arguments as in ``grid_of`` and
    ``codes_on``."""
    if x.numel() == 0:
        return x
    if levels == "compressed-tensors" or is_symmetric:
        name = f"int{bits}" if levels == "compressed-tensors" else f"int{bits}_over_{2**bits}"
        return ops.quant.fake_quantize(x, name, symmetric=is_symmetric, scale_type=scale_type, seed=seed, offset=offset)
    rows = x.reshape(-1, x.shape[-1])
    grid = rows_grid(rows, bits, levels, is_symmetric, scale_type)
    return _around_zero_points(rows, grid, seed, offset).view(x.shape)


def rows_grid(rows: Tensor, bits: int, levels: Levels, is_symmetric: bool, scale_type: str = "float32") -> Grid:
    """The numbers for the range of each of ``rows`` [rows, n], n > 0."""
    low, high = rows.detach().aminmax(dim=1, keepdim=True)
    return grid_of(low, high, bits, levels=levels, is_symmetric=is_symmetric, scale_type=scale_type)
