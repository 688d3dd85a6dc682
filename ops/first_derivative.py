"""Backwards that cannot be differentiated: a second derivative through one is an error and never a lost term."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed_c.errors import BackwardError

__all__ = ["first_derivative_only"]


def first_derivative_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of the ``backward(ctx, *grads)`` of operator ``what``: gradients that it gives raise BackwardError as
    soon as somebody differentiates them.

    torch's ``once_differentiable`` is not enough: where the incoming gradient is a constant (a sum's) it gives results
    outside of any graph, and its node has no edges to the operands, so that ``autograd.grad`` for an operand passes it
    by. Both lose the term of second order silently. All tensors that ``backward`` computes from must be its
    arguments or in ``ctx.saved_tensors``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            operands = ctx.saved_tensors  # before backward, which may overwrite one
            with torch.no_grad():
                found = backward(ctx, *grads)
            outputs = found if isinstance(found, tuple) else (found,)
            outputs = tuple(each.detach() if torch.is_tensor(each) else each for each in outputs)
            refused = _Refusal.apply(what, len(outputs), *outputs, *grads, *operands)
            return refused if isinstance(found, tuple) else refused[0]

        return checked

    return decorate


class _Refusal(torch.autograd.Function):
    """Gradients in a graph that leads to all that they were computed from, and cannot be gone through."""

    what: str
    """Attribute of each call's context: the operator's name."""

    @staticmethod
    def forward(ctx: Any, what: str, n_outputs: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.what = what
        return tensors[:n_outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise BackwardError(
            f"a second derivative is taken through {ctx.what}, whose gradient has none",
            where="backward through a gradient that was computed with create_graph=True",
            fix="compute the part of the model that a gradient penalty goes through with torch's own operators"
            ' ("replace_with_kernel_inject": false for kernels that were put into a model), or detach() its gradient',
        )
