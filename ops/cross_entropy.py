"""Cross-entropy of logits whose vocabulary is cut over ranks: the computations of a rank before and after ranks
communicate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_c.ops.placement import has_kernels

__all__ = ["grad_", "join", "rows"]


def _is_of_core(logits: Tensor) -> bool:
    """Whether a kernel can compute these logits; kernels compute in float32."""
    return has_kernels(logits) and logits.dtype != torch.float64


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def rows(logits: Tensor, targets: Tensor) -> Tensor:
    """For each row of ``logits`` [n, vocabulary of this rank] (float32, bfloat16, float16; contiguous), [n, 4] float32:
    the largest logit, the sum of exp(logit - largest), the target's logit, the sum of logits. float64 for float64
    logits.

    targets: int64 [n], counted from this rank's first token id. The target's logit is 0 if another rank has the id.
    Devices with kernels (``deepspeed_c.ops.placement``) take one pass. Other devices and float64 use torch. ValueError
    for other dtypes and layouts.
    """
    if _is_of_core(logits):
        out = logits.new_empty((targets.numel(), 4), dtype=torch.float32)
        torch.ops.deepspeed_c.cross_entropy_rows_(logits, targets, out)
        return out
    wide = _wide(logits)
    vocab_size = wide.shape[1]
    if vocab_size == 0:
        return wide.new_tensor([-torch.inf, 0.0, 0.0, 0.0]).repeat(len(wide), 1)
    largest = wide.amax(1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    is_here = (targets >= 0) & (targets < vocab_size)
    target = wide.gather(1, targets.clamp(0, vocab_size - 1).unsqueeze(1)).squeeze(1)
    sums = torch.exp(wide - shift.unsqueeze(1)).sum(1)
    return torch.stack([largest, sums, torch.where(is_here, target, 0.0), wide.sum(1)], dim=1)


def join(parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(logarithm of the sum of exponentials, target's logit, sum of logits) of all ranks: each [n]."""
    stacked = torch.stack(parts)
    largest = stacked[..., 0].amax(0)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    total = torch.zeros_like(largest)
    for part in parts:
        total = total + part[:, 1] * torch.exp(part[:, 0] - shift)
    return shift + total.log(), stacked[..., 2].sum(0), stacked[..., 3].sum(0)


def grad_(
    logits: Tensor, targets: Tensor, log_sum: Tensor, scale: Tensor, smoothing: float, full_vocab_size: int
) -> None:
    """Puts the gradient in place of ``logits`` [n, vocab_size]: scale * (softmax - smoothing / full_vocab_size
    - (1 - smoothing) * (column is the target)). log_sum, scale: [n], of the dtype of ``rows``. A row of scale 0 becomes
    zeros.
    """
    if _is_of_core(logits):
        torch.ops.deepspeed_c.cross_entropy_grad_(logits, targets, log_sum, scale, smoothing, full_vocab_size)
        torch.autograd.graph.increment_version(logits)
        return
    grad = torch.exp(_wide(logits) - log_sum.unsqueeze(1)) - smoothing / full_vocab_size
    row, column = torch.nonzero(
        torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1), as_tuple=True
    )
    grad[row, column] -= 1 - smoothing
    grad *= scale.unsqueeze(1)
    logits.copy_(torch.where(scale.unsqueeze(1) == 0, 0.0, grad))
