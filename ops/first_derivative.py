"""Makes backwards that cannot be differentiated safe: a second derivative through such a backward is an error and never
a silently lost term.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed_c.errors import BackwardError

__all__ = ["first_derivative_only"]


def first_derivative_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the ``backward(ctx, *grads)`` of operator ``what``: differentiating the gradients that ``backward``
    returns raises BackwardError.

    torch's ``once_differentiable`` is not enough: if the incoming gradient is a constant, as for a sum, its results are
    outside of any graph; and its node has no edges to the operands, so ``autograd.grad`` for an operand does not reach
    it. In both cases the second-order term is lost silently. All tensors that ``backward`` computes from must be its
    arguments or in ``ctx.saved_tensors``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            operands = ctx.saved_tensors  # taken before backward, which may overwrite a gradient
            with torch.no_grad():
                found = backward(ctx, *grads)
            outputs = found if isinstance(found, tuple) else (found,)
            outputs = tuple(each.detach() if torch.is_tensor(each) else each for each in outputs)
            refused = _Refusal.apply(what, len(outputs), *outputs, *grads, *operands)
            return refused if isinstance(found, tuple) else refused[0]

        return checked

    return decorate


class _Refusal(torch.autograd.Function):
    """Puts gradients into a graph with edges to all tensors that they were computed from. The backward of this node
    raises.
    """

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
