"""Experts whose weights are three-dimensional. They are cut along the inner dimension, so every rank has a part of each
expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["EmptyExperts", "ExpertsBorder"]

_OUT_BIAS = "down_proj_bias"


class ExpertsBorder:
    """The border of the experts' cut region. Tokens and their weights enter the region here, and the experts' output
    leaves it as a sum over ranks.
    """

    def __init__(self, ranks: TensorRanks, label: str) -> None:
        self.ranks, self.label = ranks, label

    def surround(self, experts: torch.nn.Module) -> None:
        experts.register_forward_pre_hook(self.enter, with_kwargs=True)
        experts.register_forward_hook(self.leave)
        if _OUT_BIAS in experts._parameters and not isinstance(experts, EmptyExperts):
            experts.register_forward_pre_hook(self._count_bias_once)
            experts.register_forward_hook(_show_bias, always_call=True)

    def enter(self, module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        return tuple(map(self._enter, args)), {name: self._enter(value) for name, value in kwargs.items()}

    def _enter(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return self.ranks.enter(value, self.label)
        return value

    def leave(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ranks.leave(output, self.label)

    def _count_bias_once(self, module: torch.nn.Module, args: Any) -> None:
        """Let the module's own forward see the bias that follows ``down_proj`` on the first rank, and zeros on others.

        So the whole gradient of the bias is on the first rank, and the sum over ranks is the gradient. All ranks call
        the same operator, so that their backwards send in one order."""
        bias = module._parameters[_OUT_BIAS]
        is_mine = torch.full((), self.ranks.rank == 0, dtype=torch.bool, device=bias.device)
        module.__dict__[_OUT_BIAS] = torch.where(is_mine, bias, 0)


def _show_bias(module: torch.nn.Module, args: Any, output: Any) -> None:
    module.__dict__.pop(_OUT_BIAS, None)


class EmptyExperts(torch.nn.Module):
    """The experts of a rank without columns. The output is zeros, but connected to every tensor that needs a gradient."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        for name, param in experts.named_parameters(recurse=False):
            self.register_parameter(name, param)
        self.train(experts.training)

    def forward(self, hidden: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        """Maps ``hidden`` [tokens, width] to zeros of the same shape."""
        # Other ranks wait for the gradients of every tensor that enters the region, so the graph must hold these
        # tensors.
        never = torch.zeros((), dtype=torch.bool, device=hidden.device)
        output = torch.where(never, hidden, 0)
        for value in (*others, *more.values(), *self.parameters()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output = output + torch.where(never, value.sum(), 0).to(hidden.dtype)
        return output
