"""Optimizer states of 8 bits: one code for each element and one float32 scale for each block, by the formulas of
``csrc/include/dsc/optim.h`` (after arXiv 2110.02861).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK_ELEMS", "dequantize", "n_scales", "quantize_", "scale_name"]

BLOCK_ELEMS = 256
"""Elements that one scale covers, counted from the tensor's start; DSC_Q8_BLOCK_ELEMS."""


SCALE_SUFFIX = "_scale"


def n_scales(n_elems: int) -> int:
    """Number of blocks of a tensor of ``n_elems`` elements. The last block may be short."""
    return -(-n_elems // BLOCK_ELEMS)


def scale_name(name: str) -> str:
    """Key of the scales of state ``name`` in ``optimizer.state``. The codes are there under ``name``."""
    return f"{name}{SCALE_SUFFIX}"


def quantize_(codes: Tensor, scales: Tensor, values: Tensor, begin: int = 0) -> None:
    """Writes ``values``, elements from ``begin`` on, as codes and scales.

    ``codes`` is int8 (signed values) or uint8 (values >= 0), dense, in any shape; elements are in the order of memory.
    ``scales`` is float32 [n_scales(codes.numel())]; ``values`` float32 [n]. The range must be whole blocks: ``begin`` a
    multiple of BLOCK_ELEMS, its end another or the end of the tensor. Values from :func:`dequantize` give the original
    codes and scales, bit for bit.

    Raises ValueError, with nothing written, for a range that cuts a block, other dtypes and sizes, and negative values
    for uint8.
    """
    flat, end = in_memory_order(codes), begin + values.numel()
    if begin < 0 or end > flat.numel() or begin % BLOCK_ELEMS or (end % BLOCK_ELEMS and end != flat.numel()):
        raise ValueError(
            f"elements [{begin}, {end}) of {flat.numel()} are no whole blocks of {BLOCK_ELEMS}: one scale covers a block,"
            " so put the values of whole blocks together in float32 first"
        )
    torch.ops.deepspeed_c.q8_quantize_(
        in_memory_order(values), flat[begin:end], scales[begin // BLOCK_ELEMS : n_scales(end)]
    )


def dequantize(codes: Tensor, scales: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
    """The elements [``begin``, ``end``) that codes and scales stand for, in the order of memory: float32 [end - begin].

    The range may begin and end anywhere.
    """
    flat = in_memory_order(codes)
    out = torch.empty(max(0, (flat.numel() if end is None else end) - begin), dtype=torch.float32, device=codes.device)
    torch.ops.deepspeed_c.q8_dequantize_(flat, scales, begin, out)
    return out


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, of any strides, as one row in memory order."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
