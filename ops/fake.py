"""Fake (meta) kernels of every operator that returns something: shapes and dtypes without data, for torch.compile and
opcheck.
"""

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
    "cross_entropy_rows_",
    "cross_entropy_grad_",
)


def _writes_only(*arguments: Any) -> None:
    """Mutates its arguments, which a fake tensor has no data for."""


# Kernels of the meta device, which fake tensors use too. torch.library.register_fake would look up the source line of
# each, in 4 ms of every start.
_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
for _name in IN_PLACE:
    _LIBRARY.impl(_name, _writes_only, "Meta")


@torch.library.impl(_LIBRARY, "optim_norms_", "Meta")
def _optim_norms(kind: str, params: list[Tensor], *rest: Any) -> Tensor:
    return params[0].new_empty((len(params), 2), dtype=torch.float64)


@torch.library.impl(_LIBRARY, "flat_sumsq", "Meta")
def _flat_sumsq(spans: list[Tensor]) -> Tensor:
    return spans[0].new_empty(2, dtype=torch.float64)


@torch.library.impl(_LIBRARY, "flat_reduce_", "Meta")
def _flat_reduce(srcs: list[Tensor], scale: float, accumulate: bool, acc: Tensor) -> Tensor:
    return acc.new_empty(2, dtype=torch.float64)
