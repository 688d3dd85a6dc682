"""An outline of a model: its modules, and its parameters on the meta device. Its forward and backward use the same
parameters as the model's, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_c.plan.sizes import ModelSizes, model_of
from deepspeed_c.zero.layout.leaf import set_z3_leaf_module
from deepspeed_c.zero.weights.param import state_of

__all__ = ["Outline", "outline_of"]


class _Use(torch.autograd.Function):
    """An operator that uses parameters. It computes nothing, and its backward returns gradients of the parameters'
    shapes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*(torch.empty((), dtype=p.dtype, device="cpu").expand(p.shape) for p in params))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *(torch.empty(like.shape, dtype=like.dtype, device="meta") for like in ctx.saved_tensors)


OnWork = Callable[[str, bool], None]


class Outline(torch.nn.Module):
    """A module that uses its own parameters and then calls its submodules.

    on_gradients: called with the bytes of the gradients that one operator returns. on_work: called with the module's
    path and False where its own operators would run in forward, and with True where they would run in backward. A
    backward does not reach modules before the first trained parameter.
    """

    def __init__(self, on_gradients: Callable[[int], None], on_work: OnWork | None = None) -> None:
        super().__init__()
        self._on_gradients, self._on_work = on_gradients, on_work
        self.path = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params = list(self._parameters.values())
        if self._on_work is not None:
            self._on_work(self.path, False)
        trained = [p for p in params if p.requires_grad]
        if trained or (params and x.requires_grad):
            # The backward of an operator reads the weights only if the input needs a gradient, and no bias.
            read = []
            if x.requires_grad:
                named = reversed(self._parameters.items())
                read = [p for name, p in named if state_of(p) is not None and name != "bias"]
            n_bytes = sum(p.nbytes for p in trained)
            for group in [[p] for p in trained] or [[]]:  # gradients come one by one, the last parameter's first
                x = _Use.apply(x, *group)
            if x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda _: self._begin_backward(read, n_bytes))
        elif x.requires_grad and self._on_work is not None:
            x = x.view_as(x)
            x.grad_fn.register_prehook(lambda _: self._on_work(self.path, True))
        for child in self.children():
            x = child(x)
        return x

    def _begin_backward(self, read: Sequence[torch.nn.Parameter], n_bytes: int) -> None:
        for param in read:
            state_of(param).open_for_edit(param)
        if self._on_work is not None:
            self._on_work(self.path, True)
        self._on_gradients(n_bytes)


def outline_of(
    sizes: ModelSizes, on_gradients: Callable[[int], None], on_work: OnWork | None = None
) -> tuple[Outline, list[list[torch.nn.Parameter]]]:
    """(the outline of a model of these sizes, its optimizer groups)."""
    model, groups = model_of(sizes, lambda: Outline(on_gradients, on_work))
    for name, module in model.named_modules():
        module.path = name
        if name in sizes.leaves:
            set_z3_leaf_module(module)
    return model, groups
