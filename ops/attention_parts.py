"""Merges partial results of attention. Each partial result covers some of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_"]


def merge_(out: Tensor, log_sum: Tensor, part: Tensor, part_log_sum: Tensor, first_row: int) -> None:
    """Merges ``part`` into ``out``, the softmax over other keys, in place (arXiv 2310.01889).

    out: [groups, rows, width], float32 or float64, contiguous; log_sum: [groups, rows] of the dtype of out, the
    logarithm of the sum of exponentials that out was divided by. Before the first part, out is 0 and log_sum is -inf.
    part: [groups, some rows, width] of any floating dtype, part_log_sum: [groups, some rows]; they belong to the rows
    from ``first_row`` on. A row of part_log_sum that is -inf changes nothing.

    float32 on the host takes one pass; other dtypes and devices use torch. ValueError for shapes that do not fit.
    """
    rows = slice(first_row, first_row + part.shape[1])
    if out.device.type in ("cpu", "meta") and out.dtype == torch.float32:
        torch.ops.deepspeed_c.attention_merge_(
            out, log_sum, part.contiguous(), part_log_sum.contiguous(), out.shape[0], first_row
        )
        for tensor in (out, log_sum):
            torch.autograd.graph.increment_version(tensor)
        return
    old, added = log_sum[:, rows], part_log_sum.to(log_sum.dtype)
    merged = torch.logaddexp(old, added)
    is_empty = merged == -torch.inf
    keep = torch.where(is_empty, 1.0, torch.exp(old - merged)).unsqueeze(-1)
    add = torch.where(is_empty, 0.0, torch.exp(added - merged)).unsqueeze(-1)
    values = torch.where(added.unsqueeze(-1) == -torch.inf, 0.0, part.to(out.dtype))
    out[:, rows] = keep * out[:, rows] + add * values
    log_sum[:, rows] = merged
