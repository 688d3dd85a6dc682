"""Operators of mixtures of experts: the choice of experts, places within them, and rows on their way there and back.

A *slot* is one choice of one token: slot ``t * k + j`` is choice j of token t. A slot without an expert has the index
-1.
Results have the same bits for any number of threads and any instruction set. Rows are float32, bfloat16 or float16;
sums of rows are computed in float32 in the order of j and rounded once, gradients too. Kernels of a CUDA device compute
the operators on rows (``gather_rows``, ``combine_rows``, ``permute_rows``), with the host's bits but for gradients of
weights, whose sums have another order. The formulas of ``deepspeed_c.ops.moe_reference`` compute the other operators
there, all operators on other devices, and float64 rows. A second derivative of ``combine_rows`` or ``gather_rows``
raises BackwardError where kernels compute them.

On the host, an order or inverse that does not fit its rows is a ValueError. A kernel of a device does not wait for the
contents of a tensor: there, the rows and gradients that a wrong number concerns are NaN.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.errors import RoutingError
from deepspeed_c.ops import fake
from deepspeed_c.ops import moe_reference as reference
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.ops.placement import has_kernels

__all__ = ["combine_rows", "gather_rows", "permute_rows", "place", "route", "sort_slots", "uniform"]

Score = Literal["softmax", "sigmoid"]
Order = Literal["choice", "token", "priority"]

_ops = torch.ops.deepspeed_c
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def _has_kernels(rows: Tensor) -> bool:
    """Whether kernels compute these rows: rows of the host or of CUDA, with at least one element."""
    return has_kernels(rows) and rows.dtype in _KERNEL_DTYPES and rows.shape[1] > 0


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
        raise ValueError(
            f"k is {k}, but {n_limited_groups} of {n_groups} groups have only"
            f" {n_experts // n_groups * n_limited_groups} experts"
        )
    if bias is not None:
        _require(bias, "bias", torch.float32, "experts")
        _require_shape(bias, "bias", (n_experts,), "the experts")
    logits, bias = logits.detach(), bias if bias is None else bias.detach()
    if not _is_on_host(logits):
        bad = reference.first_not_usable(logits)
        if bad is not None:
            _refuse_logit(logits, *bad)
        return reference.route(logits, k, score, bias, n_groups, n_limited_groups)
    return _ops.moe_route(logits, k, score == "sigmoid", bias, n_groups, n_limited_groups)


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
    if priority is not None:
        _require(priority, "priority", torch.float32, "tokens", "k")
        _require_shape(priority, "priority", tuple(indices.shape), "indices")
        priority = priority.detach().contiguous()
    if _is_on_host(indices):
        return _ops.moe_place(indices.contiguous(), n_experts, capacity, order, priority)
    _require_experts(indices, n_experts)
    if priority is not None and priority.isnan().any():
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
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        return reference.uniform(tuple(shape), seed, offset, device)
    out = torch.empty(shape, dtype=torch.float32, device=device)
    _ops.moe_uniform_(out.view(-1), seed, offset)
    return out


def sort_slots(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots that have an expert by expert, stably.

    Returns (order int64 [M]: the slots, sorted; inverse int64 [T, k]: the place of each slot in ``order``, -1 without
    an expert; counts int64 [E]).
    """
    _require(indices, "indices", torch.int32, "tokens", "k")
    if _is_on_host(indices):
        return _ops.moe_sort(indices.contiguous(), n_experts)
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
    if _has_kernels(x):
        return _ops.moe_gather(x, order.contiguous(), k, inverse.contiguous())
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
    if _has_kernels(rows):
        return _ops.moe_combine(rows, inverse.contiguous(), weights)
    return reference.combine_rows(rows, inverse, weights)


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    """rows[order] for a permutation ``order``, int64 [M]. ValueError on the host if it is none."""
    _require(rows, "rows", None, "slots", "hidden")
    _require(order, "order", torch.int64, "slots")
    _require_shape(order, "order", (rows.shape[0],), "the first dimension of rows")
    if _has_kernels(rows):
        return _ops.moe_permute(rows, order.contiguous())[0]
    return reference.permute_rows(rows, order)


def _route(
    logits: Tensor, k: int, is_sigmoid: bool, bias: Tensor | None, n_groups: int, n_limited_groups: int
) -> Tensor:
    logits, bias = logits.contiguous(), bias if bias is None else bias.contiguous()
    indices = logits.new_empty((logits.shape[0], k), dtype=torch.int32)
    bad = torch.empty(1, dtype=torch.int64)
    _ops.moe_route_(logits, bias, is_sigmoid, n_groups, n_limited_groups, indices, bad)
    at = int(bad)
    if at >= 0:
        _refuse_logit(logits, *divmod(at, logits.shape[1]))
    return indices


# The operator in Python raises the typed error, and can be traced: a compiler cannot read the core's answer.
_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
_LIBRARY.define(
    "moe_route(Tensor logits, int k, bool is_sigmoid, Tensor? bias, int n_groups, int n_limited_groups) -> Tensor"
)
_LIBRARY.impl("moe_route", _route, "CompositeExplicitAutograd")
_LIBRARY.impl("moe_route", fake.moe_route, "Meta")
# The number of sorted slots depends on data, which only register_fake can express.
torch.library.register_fake("deepspeed_c::moe_sort", fake.moe_sort, lib=_LIBRARY)


def _gather_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, _, inverse = inputs
    ctx.save_for_backward(inverse)


@first_derivative_only("deepspeed_c.ops.moe.gather_rows")
def _gather_backward(ctx: Any, drows: Tensor) -> tuple:
    (inverse,) = ctx.saved_tensors
    return _ops.moe_combine(drows, inverse, None), None, None, None


def _combine_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@first_derivative_only("deepspeed_c.ops.moe.combine_rows")
def _combine_backward(ctx: Any, dout: Tensor) -> tuple:
    rows, inverse, weights = ctx.saved_tensors
    needs_weights = ctx.needs_input_grad[2]
    drows, dweights = _ops.moe_combine_backward(dout, rows, inverse, weights, needs_weights)
    return drows, None, dweights if needs_weights else None


def _permute_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, inverse = output
    ctx.mark_non_differentiable(inverse)
    ctx.save_for_backward(inverse)


def _permute_backward(ctx: Any, dout: Tensor, _: Any) -> tuple:
    (inverse,) = ctx.saved_tensors
    return _ops.moe_permute(dout, inverse)[0], None


for _name, _backward, _context in (
    ("moe_gather", _gather_backward, _gather_context),
    ("moe_combine", _combine_backward, _combine_context),
    ("moe_permute", _permute_backward, _permute_context),
):
    torch.library.register_autograd(f"deepspeed_c::{_name}", _backward, setup_context=_context)
