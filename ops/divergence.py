"""Divergence of a student's distribution from its teacher's, row by row: the loss of distillation, with the student's
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import reference
from deepspeed_c.ops.first_derivative import first_derivative_only

__all__ = ["rows"]

_ops = torch.ops.deepspeed_c
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(
    student: Tensor, teacher: Tensor, is_counted: Tensor | None, beta: float, scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """The generalized Jensen-Shannon divergence of each row (arXiv 2306.13649, equation 1; ``dsc/nn.h`` has it too).

    student, teacher: logits [n, vocabulary] of float32, bfloat16, float16 or float64, not necessarily of one dtype.
    is_counted: bool [n]; None: all rows are. beta: 0 to 1. scale: above 0; both logits are multiplied by it.

    Returns (losses [n], is_empty [n]): losses in float32 (float64 for a student of float64), 0 in rows that are not
    counted; is_empty is true in counted rows whose student or teacher has only logits of -inf. The student has a
    gradient (a second derivative raises BackwardError), the teacher has none.

    On the host a kernel reads both logits in blocks and makes no tensor of their size in the forward. Other devices
    and float64 compute ``reference.nn_divergence`` with torch, on ``chunk`` rows at a time, and again in the backward.
    """
    if is_counted is not None:
        is_counted = is_counted.contiguous()
    is_of_core = student.device.type in ("cpu", "meta") and {student.dtype, teacher.dtype} <= set(_KERNEL_DTYPES)
    if is_of_core and student.shape[-1]:
        mask = None if is_counted is None else is_counted.view(torch.uint8)
        losses, found = _ops.nn_divergence(student, teacher.detach(), mask, beta, scale)
        return losses, (found[:, [1, 3]] == -torch.inf).any(1)
    is_empty = (student.detach() == -torch.inf).all(1) | (teacher.detach() == -torch.inf).all(1)
    if is_counted is not None:
        is_empty &= is_counted
    return _InChunks.apply(student, teacher.detach(), is_counted, beta, scale, chunk), is_empty


class _InChunks(torch.autograd.Function):
    """The formula in torch, on some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        is_counted: Tensor | None,
        beta: float,
        scale: float,
        chunk: int,
    ) -> Tensor:
        ctx.save_for_backward(student, teacher, is_counted)
        ctx.call = beta, scale, chunk
        losses = [
            _counted(reference.nn_divergence(own, wanted, beta, scale), mask)
            for own, wanted, mask in _chunks(chunk, student, teacher, is_counted)
        ]
        dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
        return torch.cat(losses).to(dtype) if losses else student.new_empty(0, dtype=dtype)

    @staticmethod
    @first_derivative_only("deepspeed_c.ops.divergence.rows")
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, is_counted = ctx.saved_tensors
        beta, scale, chunk = ctx.call
        gradient = torch.empty_like(student)
        parts = _chunks(chunk, student, teacher, is_counted, dlosses, gradient)
        for own, wanted, mask, slope, into in parts:
            with torch.enable_grad():
                leaf = own.detach().requires_grad_()
                losses = reference.nn_divergence(leaf, wanted, beta, scale)
                (found,) = torch.autograd.grad(losses, leaf, slope.to(losses.dtype))
            into.copy_(_counted(found, mask))
        return (gradient, *[None] * 5)


def _chunks(chunk: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """Parts of up to ``chunk`` rows of all tensors."""
    n_rows = len(tensors[0]) if tensors[0] is not None else 0
    return [
        tuple(None if each is None else each[begin : begin + chunk] for each in tensors)
        for begin in range(0, n_rows, chunk)
    ]


def _counted(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values`` [n, ...], with zeros in rows that are not counted."""
    return values if mask is None else torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, 0)


def _context(ctx: Any, inputs: tuple, output: tuple) -> None:
    student, teacher, is_counted, ctx.beta, ctx.scale = inputs
    _, found = output
    ctx.mark_non_differentiable(found)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(student, teacher, is_counted, found)


@first_derivative_only("deepspeed_c.ops.divergence.rows")
def _backward(ctx: Any, dlosses: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    student, teacher, is_counted, found = ctx.saved_tensors
    if dlosses is None or not ctx.needs_input_grad[0]:
        return (None,) * 5
    return (
        _ops.nn_divergence_backward(dlosses, student, teacher, is_counted, found, ctx.beta, ctx.scale),
        *[None] * 4,
    )


torch.library.register_autograd("deepspeed_c::nn_divergence", _backward, setup_context=_context)
