"""Experts whose weights are three-dimensional, cut along their inner dimension: every rank has a part of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["EmptyExperts", "ExpertCut", "ExpertsBorder", "expert_cuts"]

_OUT_BIAS = "down_proj_bias"


class ExpertCut(NamedTuple):
    """How one parameter of experts is cut."""

    dim: int
    n_parts: int
    """Equal parts one behind the other along ``dim``: gate and up."""
    n_mixed: int
    """Elements of ``dim`` for one column of the inner dimension: 2 where gate and up lie column by column."""


def expert_cuts(experts: torch.nn.Module) -> dict[str, ExpertCut | None] | str:
    """Return each parameter's cut, None for a bias that stays whole; or the reason why the experts cannot be cut."""
    # [experts, out, in], or [experts, in, out] in some families.
    out, inner = (2, 1) if _are_transposed(experts) else (1, 2)
    is_mixed = not getattr(experts, "is_concatenated", True)
    gate_up = (1, 2) if is_mixed else (2, 1)
    known = {
        "gate_up_proj": ExpertCut(out, *gate_up),
        "gate_up_proj_bias": ExpertCut(1, *gate_up),
        "gate_proj": ExpertCut(out, 1, 1),
        "up_proj": ExpertCut(out, 1, 1),
        "up_proj_bias": ExpertCut(1, 1, 1),
        "down_proj": ExpertCut(inner, 1, 1),
        _OUT_BIAS: None,
    }
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    inside = [name for name, _ in experts.named_parameters() if "." in name]
    if inside or getattr(experts, "has_post_expert_norm", False):
        # Behind down_proj lies a sum over ranks, which no norm of one expert's output may come before.
        return f"its experts have modules in them ({', '.join(inside) or 'a norm behind down_proj'})"
    if "down_proj" not in names or any(name not in known or experts.get_parameter(name).dim() < 2 for name in names):
        return f"its experts have other weights than are known ({', '.join(names)})"
    return {name: known[name] for name in names}


def _are_transposed(experts: torch.nn.Module) -> bool:
    """Whether the experts' weights are [experts, in, out]: as their shapes say, and their class where both fit."""
    first = getattr(experts, "gate_up_proj", getattr(experts, "up_proj", None))
    last = getattr(experts, "down_proj", None)
    if first is None or last is None or first.dim() != 3 or last.dim() != 3 or first.shape[2] == last.shape[1]:
        return bool(getattr(experts, "is_transposed", False))
    return first.shape[1] == last.shape[2]


class ExpertsBorder:
    """Tokens and their weights enter the cut region here, and the output of the experts leaves it as a sum."""

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
        """Have the module's own forward see the bias behind ``down_proj`` on the first rank, and zeros on others.

        The first rank has the bias' whole gradient then, and the sum over ranks is the gradient. All ranks go through
        the same operator, so their backwards send in one order."""
        bias = module._parameters[_OUT_BIAS]
        is_mine = torch.full((), self.ranks.rank == 0, dtype=torch.bool, device=bias.device)
        module.__dict__[_OUT_BIAS] = torch.where(is_mine, bias, 0)


def _show_bias(module: torch.nn.Module, args: Any, output: Any) -> None:
    module.__dict__.pop(_OUT_BIAS, None)


class EmptyExperts(torch.nn.Module):
    """The experts of a rank without columns: zeros, connected to every tensor that needs a gradient."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        for name, param in experts.named_parameters(recurse=False):
            self.register_parameter(name, param)
        self.train(experts.training)

    def forward(self, hidden: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        """hidden: [tokens, width] to zeros of the same shape."""
        # Other ranks wait for the gradients of all that enters the region, so the graph must hold it.
        never = torch.zeros((), dtype=torch.bool, device=hidden.device)
        output = torch.where(never, hidden, 0)
        for value in (*others, *more.values(), *self.parameters()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output = output + torch.where(never, value.sum(), 0).to(hidden.dtype)
        return output
