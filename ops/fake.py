"""Fake (meta) kernels of all operators: shapes and dtypes without data, for torch.compile and opcheck."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["drawn_dropout", "drawn_dropout_backward", "moe_route", "moe_sort"]

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
    "attention_merge_",
    "moe_route_",
    "moe_uniform_",
    "kv_write",
)


def _writes_only(*arguments: Any) -> None:
    """The operator mutates its arguments, and fake tensors have no data."""


# Kernels of the meta device, which fake tensors use too. torch.library.register_fake would look up the source line of
# each kernel, which takes 4 ms at every start.
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


# Operators of dsc/nn.h. Results have the operands' shapes, sums over rows have one element for each column, and results
# that were not requested have no elements.


@torch.library.impl(_LIBRARY, "nn_norm", "Meta")
def _nn_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = _dense_like(x)
    n_rows = x.numel() // max(x.shape[-1], 1)
    statistic = torch.float32
    return (
        y,
        x.new_empty(0) if residual is None else torch.empty_like(y),
        x.new_empty(0 if is_rms else n_rows, dtype=statistic),
        x.new_empty(n_rows, dtype=statistic),
    )


@torch.library.impl(_LIBRARY, "nn_norm_backward", "Meta")
def _nn_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    is_rms: bool,
    needs_weight: bool,
    needs_bias: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    like = weight if weight is not None else bias if bias is not None else total
    n_cols = total.shape[-1]
    return (
        torch.empty_like(total),
        like.new_empty(n_cols if needs_weight else 0),
        like.new_empty(n_cols if needs_bias else 0),
    )


@torch.library.impl(_LIBRARY, "nn_bias_act", "Meta")
def _nn_bias_act(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return _dense_like(x)


@torch.library.impl(_LIBRARY, "nn_bias_act_backward", "Meta")
def _nn_bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    return _dense_like(x), x.new_empty(x.shape[-1] if needs_bias else 0)


@torch.library.impl(_LIBRARY, "nn_gated", "Meta")
def _nn_gated(x: Tensor, up: Tensor | None, act: str) -> Tensor:
    return x.new_empty(x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2))


@torch.library.impl(_LIBRARY, "nn_gated_backward", "Meta")
def _nn_gated_backward(dy: Tensor, x: Tensor, up: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    return _dense_like(x), x.new_empty(0) if up is None else _dense_like(up)


@torch.library.impl(_LIBRARY, "nn_dropout", "Meta")
def _nn_dropout(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int) -> Tensor:
    return _dense_like(x)


@torch.library.impl(_LIBRARY, "nn_dropout_backward", "Meta")
def _nn_dropout_backward(dy: Tensor, p: float, seed: int, needs_bias: bool) -> tuple[Tensor, Tensor]:
    return _dense_like(dy), dy.new_empty(dy.shape[-1] if needs_bias else 0)


def drawn_dropout(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor) -> Tensor:
    return _dense_like(x)


def drawn_dropout_backward(dy: Tensor, p: float, seed: Tensor, needs_bias: bool) -> tuple[Tensor, Tensor]:
    return _nn_dropout_backward(dy, p, 0, needs_bias)


@torch.library.impl(_LIBRARY, "nn_rotary", "Meta")
def _nn_rotary(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, is_inverse: bool) -> Tensor:
    return torch.empty_like(x)


@torch.library.impl(_LIBRARY, "nn_softmax", "Meta")
def _nn_softmax(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    return _dense_like(x)


@torch.library.impl(_LIBRARY, "nn_softmax_backward", "Meta")
def _nn_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.empty_like(y)


@torch.library.impl(_LIBRARY, "nn_divergence", "Meta")
def _nn_divergence(
    student: Tensor, teacher: Tensor, is_counted: Tensor | None, beta: float, scale: float
) -> tuple[Tensor, Tensor]:
    n_rows = student.numel() // max(student.shape[-1], 1)
    return student.new_empty(n_rows, dtype=torch.float32), student.new_empty((n_rows, 5), dtype=torch.float32)


@torch.library.impl(_LIBRARY, "nn_divergence_backward", "Meta")
def _nn_divergence_backward(dlosses: Tensor, student: Tensor, *rest: Any) -> Tensor:
    return _dense_like(student)


@torch.library.impl(_LIBRARY, "nn_product", "Meta")
def _nn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@torch.library.impl(_LIBRARY, "nn_layers", "Meta")
def _nn_layers(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@torch.library.impl(_LIBRARY, "kv_attention", "Meta")
def _kv_attention(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], values.shape[3]))


@torch.library.impl(_LIBRARY, "sample_tokens", "Meta")
def _sample_tokens(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    n_rows = logits.shape[:1]
    return logits.new_empty(n_rows, dtype=torch.int64), logits.new_empty(n_rows, dtype=torch.float32)


@torch.library.impl(_LIBRARY, "sample_probabilities", "Meta")
def _sample_probabilities(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@torch.library.impl(_LIBRARY, "nn_attention", "Meta")
def _nn_attention(q: Tensor, k: Tensor, v: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.impl(_LIBRARY, "nn_attention_backward", "Meta")
def _nn_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *rules: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0 if sinks is None else q.shape[1], dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


# Operators of dsc/moe.h.


def moe_route(
    logits: Tensor, k: int, is_sigmoid: bool, bias: Tensor | None, n_groups: int, n_limited_groups: int
) -> Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


@torch.library.impl(_LIBRARY, "moe_place", "Meta")
def _moe_place(
    indices: Tensor, n_experts: int, capacity: int, order: str, priority: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    counts = indices.new_empty(n_experts, dtype=torch.int64)
    return torch.empty_like(indices), torch.empty_like(indices), counts


def moe_sort(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    n_kept = torch.library.get_ctx().new_dynamic_size()
    return (
        indices.new_empty(n_kept, dtype=torch.int64),
        indices.new_empty(indices.shape, dtype=torch.int64),
        indices.new_empty(n_experts, dtype=torch.int64),
    )


@torch.library.impl(_LIBRARY, "moe_gather", "Meta")
def _moe_gather(x: Tensor, order: Tensor, k: int, inverse: Tensor) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@torch.library.impl(_LIBRARY, "moe_permute", "Meta")
def _moe_permute(rows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return _dense_like(rows), torch.empty_like(order)


@torch.library.impl(_LIBRARY, "moe_combine", "Meta")
def _moe_combine(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(inverse.shape[0], rows.shape[1])


@torch.library.impl(_LIBRARY, "moe_combine_backward", "Meta")
def _moe_combine_backward(
    dout: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor | None, needs_weights: bool
) -> tuple[Tensor, Tensor]:
    n_tokens, k = inverse.shape
    return _dense_like(rows), rows.new_empty((n_tokens if needs_weights else 0, k), dtype=torch.float32)


def _dense_like(x: Tensor) -> Tensor:
    """The result of an operator that makes its operand contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
