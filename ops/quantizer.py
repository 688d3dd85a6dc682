"""DeepSpeed's name for quantization in one call. ``deepspeed_c.ops.quant`` has formats, codes and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_c.ops.quant import fake_quantize

__all__ = ["ds_quantizer"]


@torch.no_grad()
def ds_quantizer(input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False) -> Tensor:
    """Rounds ``input`` in place to 2**bit_num values a group, and returns it.

    input: float32, bfloat16 or float16, any shape. groups: number of equal groups of consecutive elements. bit_num: 8
    or 4. sr: stochastic rounding, with a seed from torch's default generator. asym: a group has a zero point.

    Scales are those of ``fake_quantize``, over 2**bit_num - 1, where DeepSpeed's kernels divide by 2**bit_num.

    Raises ValueError, with nothing written, for other bits and for groups that do not divide the elements.
    """
    if bit_num not in (8, 4):
        raise ValueError(f"bit_num is {bit_num}, must be 8 or 4")
    if groups < 1 or input.numel() % groups:
        raise ValueError(f"{input.numel()} elements cannot be cut into {groups} equal groups")
    if input.numel() == 0:
        return input
    seed = int(torch.randint(2**63 - 1, ())) if sr else None
    rows = input.reshape(groups, -1)
    return input.copy_(fake_quantize(rows, f"int{bit_num}", symmetric=not asym, seed=seed).view(input.shape))
