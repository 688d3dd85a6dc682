"""Products of rows with stacked weights: rows lie behind one another by expert, and each expert multiplies its own.

Torch's ``grouped_mm`` wants rows of multiples of 16 bytes and computes bf16 only where it is fast. Here each expert's
product is one ``mm`` that writes to its place in the result, so nothing is padded, copied or put together afterwards,
and the gradient of a stack is written expert by expert into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_c.ops.first_derivative import first_derivative_only

__all__ = ["grouped_linear"]


def grouped_linear(
    rows: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None, *, is_in_out: bool
) -> Tensor:
    """``rows`` [n, in] times the weight of their expert, [n, out]. Differentiable once.

    counts: rows of each expert, in the order of experts; together n. weight: [experts, out, in], or [experts, in, out]
    if ``is_in_out``. bias: [experts, out]. Under autocast all are cast as ``torch.nn.functional.linear`` casts them.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _GroupedLinear.apply(rows, tuple(counts), weight, bias, is_in_out)


def _parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), for each expert that has rows."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None, is_in_out: bool
    ) -> Tensor:
        ctx.counts, ctx.is_in_out, ctx.has_bias = counts, is_in_out, bias is not None
        ctx.save_for_backward(rows, weight)
        matrices = weight if is_in_out else weight.transpose(1, 2)
        out = rows.new_empty((rows.shape[0], matrices.shape[2]))
        for expert, part in _parts(counts):
            if bias is None:
                torch.mm(rows[part], matrices[expert], out=out[part])
            else:
                torch.addmm(bias[expert], rows[part], matrices[expert], out=out[part])
        return out

    @staticmethod
    @first_derivative_only("a product of rows with the weights of their experts")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        needs_rows, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        matrices = weight.transpose(1, 2) if ctx.is_in_out else weight
        of_rows = torch.empty_like(rows) if needs_rows else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        if of_weight is not None:
            for expert, count in enumerate(ctx.counts):
                if not count:
                    of_weight[expert].zero_()
        of_bias = grad.new_zeros((weight.shape[0], grad.shape[1])) if needs_bias and ctx.has_bias else None
        for expert, part in _parts(ctx.counts):
            if of_rows is not None:
                torch.mm(grad[part], matrices[expert], out=of_rows[part])
            if of_weight is not None:
                one, other = (rows, grad) if ctx.is_in_out else (grad, rows)
                torch.mm(one[part].t(), other[part], out=of_weight[expert])
            if of_bias is not None:
                torch.sum(grad[part], 0, out=of_bias[expert])
        return of_rows, None, of_weight, of_bias, None
