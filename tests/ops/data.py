"""Inputs for the operator tests: awkward sizes, special values, and buffers that start at odd addresses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_c import _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# 0, 1, sizes near the vector widths, primes, and a size of several chunks.
SIZES = (0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 127, 1009, 4095, 4097, 100_003)


def normal(n: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, offset: int = 0) -> Tensor:
    """n normal numbers that begin ``offset`` elements into their allocation."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n + offset, generator=generator) * scale
    return values.to(dtype)[offset:]


def positive(n: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, offset: int = 0) -> Tensor:
    return normal(n, seed, torch.float32, scale, offset).abs().add_(0.01 * scale).to(dtype)


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """The largest difference of each, over the largest element."""
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-300)).item() if b.numel() else 0.0
        for a, b in zip(found, wanted, strict=True)
    ]


def on_each_setup(run: Callable[[], Any], thread_counts: Sequence[int] = (1, 2, 5)) -> dict[tuple[str, int], Any]:
    """The results by instruction set and number of threads."""
    found = {}
    try:
        for isa in [name for name, is_runnable in _C.cpu_isas() if is_runnable]:
            for n_threads in thread_counts:
                _C.cpu_isa_force(isa)
                _C.pool_resize(n_threads)
                found[isa, n_threads] = run()
    finally:
        _C.pool_resize(0)
        _C.cpu_isa_force(None)
    return found


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes. Comparing bytes distinguishes -0 from 0 and one NaN from another."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class OptimizerKind(NamedTuple):
    name: str
    n_states: int
    needs_norms: bool


def optimizer_kinds() -> list[OptimizerKind]:
    """The optimizers that the cores have, as their registry lists them."""
    registry = (Path(__file__).resolve().parents[2] / "csrc" / "optim" / "optimizers.inc").read_text()
    lines = re.findall(r"^DSC_OPTIMIZER(_NORMS)?\((\w+), (\d)", registry, re.MULTILINE)
    return [OptimizerKind(name, int(n_states), bool(norms)) for norms, name, n_states in lines]
