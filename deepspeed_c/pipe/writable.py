"""Values that layers may write to. A stage may begin with a layer such as ``ReLU(inplace=True)``.

Three things would go wrong without this. torch refuses to write to a leaf of the graph, and a received value is one.
The data of the first stage belong to the loader, which may give them again. A recomputation needs the inputs as they
were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["copied", "needs_gradient", "writable"]


class _SameMemory(torch.autograd.Function):
    """The identity, without a copy. The result is neither a leaf nor, for autograd, a view of one."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()  # shares the version, so that autograd sees what is overwritten

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def needs_gradient(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor that requires a gradient."""
    return torch.is_tensor(leaf) and leaf.requires_grad


def writable(value: Any) -> Any:
    """``value``, in the same memory, with other tensors in place of leaves that require gradients. Their gradients go
    to the leaves.
    """
    return tree_map(lambda leaf: _SameMemory.apply(leaf) if needs_gradient(leaf) else leaf, value)


def copied(value: Any) -> Any:
    """``value`` with a copy of each tensor. A tensor that occurs several times has one copy. Gradients go through."""
    copies: dict[int, torch.Tensor] = {}

    def copy_of(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return tree_map(copy_of, value)
