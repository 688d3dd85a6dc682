"""Linear layers of any class: the function of their weight, and the order of the weight's dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["Product", "is_transposed", "product_of"]

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def product_of(module: torch.nn.Module) -> Product | None:
    """Return the linear layer's function of (x, weight [out, in], bias). It is the ``product`` of the layer's class if
    there is one. None if the function is unknown, because the class has its own forward.
    """
    own = getattr(type(module), "product", None)
    if callable(own):
        return own
    # FalconLinear is another class with the computation of a linear layer.
    if type(module).__name__ in ("Conv1D", "FalconLinear"):
        return F.linear
    is_plain = isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    return F.linear if is_plain else None


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether the linear layer's weight is [in, out]."""
    return type(module).__name__ == "Conv1D"
