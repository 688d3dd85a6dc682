"""DeepSpeed's linear layer for stage 3, by its names.

No gathered weight is kept for backward here, in any layer: these do the same as torch's.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional, init

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]


def zero3_linear_wrap(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``input`` [..., in] times ``weight`` [out, in] transposed, plus ``bias`` [out]: [..., out]."""
    return functional.linear(input, weight, bias)


class LinearModuleForZeroStage3(torch.nn.Module):
    """A linear layer with ``weight`` [out_features, in_features] and, unless ``bias`` is False, ``bias``
    [out_features], as torch.nn.Linear initialises them.

    No subclass of torch.nn.Linear, as in DeepSpeed: code that looks for layers to replace passes it by.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(in_features), weight and bias alike."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return zero3_linear_wrap(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
