"""The operators of ``sums`` by PyTorch's operators: for devices without kernels, and for the tests of the kernels.

Bits are those of the kernels: additions in float32 in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["n_levels", "tree_push_", "tree_sum_"]


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
