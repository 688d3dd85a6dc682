"""Autocast for operators that torch's autocast does not know.

Under autocast torch casts the operands of its own matrix products and of its own attention to one dtype. An operator
here that replaces one of these casts its operands in the same way. Autocast mixes dtypes in what lies between, so
operators there join them as torch's do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["bias_by_autocast", "cast_by_autocast", "join_by_autocast", "without_autocast"]


def cast_by_autocast(*operands: Any) -> tuple[Any, ...]:
    """The operands as torch's matrix products take them: under autocast in its dtype, otherwise unchanged.

    The first operand is a tensor, and its device decides. As in torch, float64 stays, and so does everything that is no
    tensor of that device with a fraction. The cast has a gradient.
    """
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if _is_cast(x, device) else x for x in operands)


def _is_cast(x: Any, device: str) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device


def bias_by_autocast(bias: Tensor | None, x: Tensor) -> Tensor | None:
    """A linear layer's bias in the dtype of its product ``x``, which autocast decides. Without autocast unchanged."""
    return bias if bias is None or not torch.is_autocast_enabled(x.device.type) else bias.to(x.dtype)


def join_by_autocast(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Two operands of a sum or a product of elements: under autocast in the wider dtype, otherwise unchanged."""
    if b is None or a.dtype == b.dtype or not torch.is_autocast_enabled(a.device.type):
        return a, b
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """In the body, products of tensors on ``x``'s device keep the dtype of their operands."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
