"""Operators of mixtures of experts: the choice of experts, places within them, and rows on their way there and back.

A *slot* is one choice of one token: slot ``t * k + j`` is choice j of token t. A slot without an expert has the index
-1.
Results have the same bits for any number of threads and any instruction set. Rows are float32, bfloat16 or float16;
sums of rows are computed in float32 in the order of j and rounded once, gradients too. On devices without kernels, and
for float64 rows, the formulas of ``deepspeed_c.ops.moe_reference`` compute the operators.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepspeed_c.errors import RoutingError
from deepspeed_c.ops import moe_reference as reference

__all__ = ["combine_rows", "gather_rows", "permute_rows", "place", "route", "sort_slots", "uniform"]

Score = Literal["softmax", "sigmoid"]
Order = Literal["choice", "token", "priority"]


def _require(tensor: Tensor, name: str, dtype: torch.dtype | None, *dims: str) -> None:
    """ValueError unless the tensor has this dtype and number of dimensions."""
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, must be {dtype}")
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be [{', '.join(dims)}]")


def _require_shape(tensor: Tensor, name: str, shape: tuple[int, ...], of: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}, the shape of {of}")


def route(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias: Tensor | None = None,
    n_groups: int = 1,
    n_limited_groups: int = 1,
) -> Tensor:
    """The k experts of each token, best first: int32 [T, k] for float32 ``logits`` [T, E].

    ``bias`` float32 [E] is added to the scores for this choice only (DeepSeek-V3, arXiv 2412.19437). Without a bias the
    logits themselves are compared, which have the order of the scores, before rounding. Equal values go to the lower
    expert. With ``n_limited_groups`` < ``n_groups``, experts come from the ``n_limited_groups`` best groups of E /
    n_groups experts each; a group is as good as the sum of its two best scores with bias (of its only one). The result
    has no gradient. RoutingError for logits that are NaN or +inf, with token and expert.
    """
    _require(logits, "logits", torch.float32, "tokens", "experts")
    n_experts = logits.shape[1]
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f'score is {score!r}, must be "softmax" or "sigmoid"')
    if not 0 <= k <= n_experts:
        raise ValueError(f"k is {k}, must be 0 to {n_experts}, the number of experts")
    if n_groups < 1 or n_experts % n_groups:
        raise ValueError(f"n_groups is {n_groups}, must divide {n_experts} experts")
    if not 1 <= n_limited_groups <= n_groups:
        raise ValueError(f"n_limited_groups is {n_limited_groups}, must be 1 to {n_groups}, the number of groups")
    if k > n_experts // n_groups * n_limited_groups:
        raise ValueError(f"k is {k}, but {n_limited_groups} of {n_groups} groups have only"
                         f" {n_experts // n_groups * n_limited_groups} experts")
    if bias is not None:
        _require(bias, "bias", torch.float32, "experts")
        _require_shape(bias, "bias", (n_experts,), "the experts")
    logits, bias = logits.detach(), bias if bias is None else bias.detach()
    place_of_bad = reference.first_not_usable(logits)
    if place_of_bad is not None:
        _refuse_logit(logits, *place_of_bad)
    return reference.route(logits, k, score, bias, n_groups, n_limited_groups)


def _refuse_logit(logits: Tensor, token: int, expert: int) -> None:
    raise RoutingError(
        f"the router's logit of token {token} for expert {expert} is {float(logits[token, expert])}",
        where=f"routing of {logits.shape[0]} tokens to {logits.shape[1]} experts",
        fix="look for the first layer whose output is not finite; a lower learning rate, a router in float32 or a"
        " z-loss keeps logits small",
    )


def place(
    indices: Tensor, n_experts: int, capacity: int, *, order: Order = "choice", priority: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Give each slot its place within its expert, and drop slots beyond ``capacity`` (-1: none is dropped).

    indices: int32 [T, k], -1 for an unused slot. Returns (indices, -1 also for dropped slots; locations int32 [T, k], 0
    without an expert; counts int64 [E] before dropping). Orders: "choice": all first choices come before all second
    ones (GShard, arXiv 2006.16668); "token": token by token; "priority": each expert keeps the slots of the largest
    ``priority`` (float32 [T, k], never NaN; equal ones: the earlier slot), and locations count the kept slots token by
    token.
    """
    _require(indices, "indices", torch.int32, "tokens", "k")
    if order not in ("choice", "token", "priority"):
        raise ValueError(f'order is {order!r}, must be "choice", "token" or "priority"')
    if capacity < -1:
        raise ValueError(f"capacity is {capacity}, must be -1 (nothing is dropped) or at least 0")
    if (priority is None) == (order == "priority"):
        raise ValueError(f"order is {order!r}, priority is {'missing' if priority is None else 'given'}")
    _require_experts(indices, n_experts)
    if priority is not None:
        _require(priority, "priority", torch.float32, "tokens", "k")
        _require_shape(priority, "priority", tuple(indices.shape), "indices")
        priority = priority.detach()
        if priority.isnan().any():
            token, j = priority.isnan().nonzero()[0].tolist()
            raise ValueError(f"priority[{token}, {j}] is nan, which has no order")
    return reference.place(indices, n_experts, capacity, order, priority)


def _require_experts(indices: Tensor, n_experts: int) -> None:
    if n_experts < 0:
        raise ValueError(f"n_experts is {n_experts}, must not be negative")
    is_bad = (indices < -1) | (indices >= n_experts)
    if is_bad.any():
        token, j = is_bad.nonzero()[0].tolist()
        raise ValueError(f"indices[{token}, {j}] is {int(indices[token, j])}, must be -1 or one of {n_experts} experts")


def uniform(shape: tuple[int, ...], seed: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Random numbers, float32 in [0, 1), multiples of 2^-24: element i depends on (seed, offset + i) alone.

    They are words of the generator of dropout (Philox4x32-7): an operator that must be independent needs another seed.
    """
    if offset < 0:
        raise ValueError(f"offset is {offset}, must not be negative")
    return reference.uniform(tuple(shape), seed, offset, torch.device(device))


def sort_slots(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots that have an expert by expert, stably.

    Returns (order int64 [M]: the slots, sorted; inverse int64 [T, k]: the place of each slot in ``order``, -1 without
    an expert; counts int64 [E]).
    """
    _require(indices, "indices", torch.int32, "tokens", "k")
    _require_experts(indices, n_experts)
    return reference.sort_slots(indices, n_experts)


def gather_rows(x: Tensor, order: Tensor, k: int, inverse: Tensor) -> Tensor:
    """The rows of sorted slots: row i is x[order[i] // k], [M, H], for ``x`` [T, H].

    order, inverse: of ``sort_slots``. The gradient of x[t] is the sum over the token's slots.
    """
    _require(x, "x", None, "tokens", "hidden")
    _require(order, "order", torch.int64, "slots")
    _require(inverse, "inverse", torch.int64, "tokens", "k")
    _require_shape(inverse, "inverse", (x.shape[0], k), "(tokens of x, k)")
    return reference.gather_rows(x, order, k)


def combine_rows(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows: out[t] = sum over j of weights[t, j] * rows[inverse[t, j]], [T, H].

    inverse: int64 [T, k], -1 for a slot without a row, and no row twice; weights: float32 [T, k]. A token without rows
    is 0. rows and weights have gradients.
    """
    _require(rows, "rows", None, "slots", "hidden")
    _require(inverse, "inverse", torch.int64, "tokens", "k")
    _require(weights, "weights", torch.float32, "tokens", "k")
    _require_shape(weights, "weights", tuple(inverse.shape), "inverse")
    return reference.combine_rows(rows, inverse, weights)


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    """rows[order] for a permutation ``order``, int64 [M]."""
    _require(rows, "rows", None, "slots", "hidden")
    _require(order, "order", torch.int64, "slots")
    _require_shape(order, "order", (rows.shape[0],), "the first dimension of rows")
    return reference.permute_rows(rows, order)
