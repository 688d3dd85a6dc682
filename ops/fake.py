"""Fake (meta) kernels of every operator that returns something: shapes and dtypes without data, for torch.compile and opcheck."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

IN_PLACE = (
    "optim_step_",
    "optim_step_q8_",
    "q8_quantize_",
    "q8_dequantize_",
    "optim_apply_",
    "muon_momentum_",
    "muon_apply_",
    "flat_scale_",
    "flat_cast_",
    "flat_zero_",
)


def _writes_only(*arguments: Any) -> None:
    """Mutates its arguments, which a fake tensor has no data for."""


for _name in IN_PLACE:
    torch.library.register_fake(f"deepspeed_c::{_name}", _writes_only)


@torch.library.register_fake("deepspeed_c::optim_norms_")
def _optim_norms(kind: str, params: list[Tensor], *rest: Any) -> Tensor:
    return params[0].new_empty((len(params), 2), dtype=torch.float64)


@torch.library.register_fake("deepspeed_c::flat_sumsq")
def _flat_sumsq(spans: list[Tensor]) -> Tensor:
    return spans[0].new_empty(2, dtype=torch.float64)


@torch.library.register_fake("deepspeed_c::flat_reduce_")
def _flat_reduce(srcs: list[Tensor], scale: float, accumulate: bool, acc: Tensor) -> Tensor:
    return acc.new_empty(2, dtype=torch.float64)
