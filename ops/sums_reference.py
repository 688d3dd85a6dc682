"""The operators of ``sums`` by PyTorch's operators: for devices without kernels, and for the tests of the kernels.

Results have the kernels' bits: additions in float32 in the same order, or sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LOWEST_EXPONENT", "N_LIMBS", "exact_squares", "n_levels", "tree_push_", "tree_sum_"]

N_LIMBS = 20
LOWEST_EXPONENT = -298
"""An exact sum is the sum over i of ``limbs[i] * 2**(32 * i + LOWEST_EXPONENT)``: 2**-298 is the square of the least
positive float32."""

_SLICE = 1 << 22
"""Elements that are handled at once: temporary tensors take 60 bytes an element."""
_N_ROWS = 256
"""Tables of sums by exponent. Neighbouring elements use different tables, so that devices need not add them one after
another."""


def n_levels(n_leaves: int) -> int:
    """Number of levels that a tree of ``n_leaves`` leaves occupies."""
    return n_leaves.bit_length()


def _check_vectors(op: str, tensors: dict[str, Tensor]) -> None:
    """Raise the ValueErrors of the kernels of the host."""
    first = next(iter(tensors), "")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"deepspeed_c::{op}: {name} must be a contiguous tensor")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"deepspeed_c::{op}: {name} is of {tensor.dtype}; float32, bfloat16 and float16 are supported"
            )
        if tensor.numel() != tensors[first].numel():
            raise ValueError(
                f"deepspeed_c::{op}: {name} has {tensor.numel()} elements, {first} has {tensors[first].numel()}"
            )


def _named(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)}


def _check_levels(op: str, levels: Sequence[Tensor], n_leaves: int) -> None:
    for i, level in enumerate(levels):
        if level.dtype != torch.float32:
            raise ValueError(f"deepspeed_c::{op}: levels[{i}] must be of float32")
    if len(levels) < n_levels(n_leaves):
        raise ValueError(f"deepspeed_c::{op}: {len(levels)} levels, but {n_leaves} leaves need {n_levels(n_leaves)}")


def tree_push_(levels: Sequence[Tensor], n_before: int, leaves: Sequence[Tensor]) -> None:
    _check_vectors("tree_push_", _named("levels", levels) | _named("leaves", leaves))
    if n_before < 0:
        raise ValueError(f"deepspeed_c::tree_push_: n_before is {n_before}, must not be negative")
    _check_levels("tree_push_", levels, n_before + len(leaves))
    for n_pushed, leaf in enumerate(leaves, n_before):
        node, level = leaf.reshape(-1).float(), 0
        while n_pushed >> level & 1:
            node = levels[level].view(-1) + node
            level += 1
        levels[level].view(-1).copy_(node)


def tree_sum_(out: Tensor, levels: Sequence[Tensor], n_leaves: int, scale: float) -> None:
    _check_vectors("tree_sum_", {"out": out, **_named("levels", levels)})
    if n_leaves < 1:
        raise ValueError(f"deepspeed_c::tree_sum_: n_leaves is {n_leaves}, must be at least 1")
    factor = float(torch.tensor(scale, dtype=torch.float32))
    if not math.isfinite(factor):
        raise ValueError(f"deepspeed_c::tree_sum_: scale is {scale}, must be finite")
    _check_levels("tree_sum_", levels, n_leaves)
    nodes = [levels[level].view(-1) for level in range(n_levels(n_leaves)) if n_leaves >> level & 1]
    total = nodes[0]
    for node in nodes[1:]:
        total = node + total
    out.view(-1).copy_(total if factor == 1.0 else total * factor)


def exact_squares(tensors: Sequence[Tensor]) -> Tensor:
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"deepspeed_c::flat_exact_squares: tensors[{i}] is of {tensor.dtype};"
                " float32, bfloat16 and float16 are supported"
            )
    device = tensors[0].device if tensors else torch.device("cpu")
    sums = torch.zeros(2, 256, dtype=torch.int64, device=device)
    result = torch.zeros(N_LIMBS + 1, dtype=torch.int64, device=device)
    for tensor in tensors:
        for elements in tensor.detach().reshape(-1).split(_SLICE):
            bits = elements.float().contiguous().view(torch.int32)
            _add_squares(bits, sums)
            result[N_LIMBS] += (bits & 0x7F800000 == 0x7F800000).sum()
    for by_field, offset in zip(sums, (0, 24)):
        # An element of exponent field e is its mantissa times 2**(e - 150).
        position = 2 * (torch.arange(256, device=device) - 1).clamp(min=0) + offset
        for words, first in ((by_field & 0xFFFFFFFF, position), (by_field >> 32, position + 32)):
            shifted = words << first % 32
            result.index_add_(0, first // 32, shifted & 0xFFFFFFFF)
            result.index_add_(0, first // 32 + 1, shifted >> 32)
    for i in range(N_LIMBS - 1):
        result[i + 1] += result[i] >> 32
        result[i] &= 0xFFFFFFFF
    return result


def _add_squares(bits: Tensor, sums: Tensor) -> None:
    """Adds the squares of the mantissas of finite elements to ``sums`` [2, exponent field], lower and upper 24 bits
    apart: int64 holds the sums of 2**39 elements."""
    field = bits >> 23 & 0xFF
    mantissas = torch.where(field < 255, (bits & 0x7FFFFF) | (field > 0).int() << 23, 0).long()
    squares = mantissas * mantissas
    rows = torch.arange(len(bits), dtype=torch.int32, device=bits.device) % _N_ROWS
    places = rows * 256 + field.clamp(min=1)
    for by_field, parts in zip(sums, (squares & 0xFFFFFF, squares >> 24)):
        by_field += sums.new_zeros(_N_ROWS * 256).index_add_(0, places, parts).view(_N_ROWS, 256).sum(0)
