"""DeepSpeed's linear layer for stage 3, under DeepSpeed's names.

In this package no layer keeps gathered weights for backward. This layer therefore does the same as torch's.
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

    As in DeepSpeed, this is no subclass of torch.nn.Linear, so that code that replaces linear layers does not replace
    it.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly from +-1/sqrt(in_features)."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return zero3_linear_wrap(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
