"""The plain PyTorch formulas of ``deepspeed_c.ops.moe``: for devices without kernels, for float64, and for tests.

Nothing here loops over tokens or experts, and the functions on rows are differentiable. Sums of rows are computed in
float32 (float64 for float64 rows) and rounded once, gradients too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_c.ops.reference import philox

__all__ = ["combine_rows", "first_not_usable", "gather_rows", "permute_rows", "place", "route", "sort_slots", "uniform"]


def first_not_usable(logits: Tensor) -> tuple[int, int] | None:
    """Token and expert of the first logit without a score: NaN or +inf."""
    is_bad = logits.isnan() | logits.isposinf()
    if not is_bad.any():
        return None
    token, expert = is_bad.nonzero()[0].tolist()
    return token, expert


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "sigmoid":
        return logits.sigmoid()
    # A token whose logits are all -inf has scores of 0 instead of NaN.
    return logits.softmax(-1).nan_to_num(0.0)


def route(logits: Tensor, k: int, score: str, bias: Tensor | None, n_groups: int, n_limited_groups: int) -> Tensor:
    """Stable descending sorts, so that equal values keep the order of experts."""
    n_tokens, n_experts = logits.shape
    # Both scores grow with the logit, so logits order experts exactly, where scores may be equal after rounding.
    values = logits if bias is None else _scores(logits, score) + bias
    if n_limited_groups < n_groups:
        group_experts = n_experts // n_groups
        biased = _scores(logits, score) if bias is None else values
        two_best = biased.view(n_tokens, n_groups, group_experts).topk(min(2, group_experts), -1).values.sum(-1)
        groups = two_best.argsort(dim=-1, descending=True, stable=True)[:, :n_limited_groups]
        is_open = torch.zeros(n_tokens, n_groups, dtype=torch.bool, device=logits.device).scatter(1, groups, True)
        # Two keys, because an expert of an open group may itself have the value -inf.
        by_value = values.argsort(dim=-1, descending=True, stable=True)
        is_open = is_open.repeat_interleave(group_experts, 1).gather(1, by_value)
        return by_value.gather(1, is_open.int().argsort(dim=-1, descending=True, stable=True))[:, :k].int()
    return values.argsort(dim=-1, descending=True, stable=True)[:, :k].int()


def _ranks(experts: Tensor, n_experts: int) -> Tensor:
    """The place of each element among the elements of its expert, in order; n_experts stands for no expert."""
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=n_experts + 1)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(experts)
    ranks[order] = torch.arange(len(experts), device=experts.device) - starts[experts[order]]
    return ranks


def place(
    indices: Tensor, n_experts: int, capacity: int, order: str, priority: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    n_tokens, k = indices.shape
    experts = indices.long().where(indices >= 0, n_experts)
    counts = torch.bincount(experts.flatten(), minlength=n_experts + 1)[:n_experts]
    if order == "choice":
        ranks = _ranks(experts.t().flatten(), n_experts).view(k, n_tokens).t()
        kept = experts
    elif order == "token":
        ranks = _ranks(experts.flatten(), n_experts).view(n_tokens, k)
        kept = experts
    else:
        flat = experts.flatten()
        by_priority = priority.flatten().argsort(descending=True, stable=True)
        ranks = torch.empty_like(flat)
        ranks[by_priority] = _ranks(flat[by_priority], n_experts)
        kept = (flat if capacity < 0 else flat.where(ranks < capacity, n_experts)).view(n_tokens, k)
        ranks = _ranks(kept.flatten(), n_experts).view(n_tokens, k)
    is_kept = kept < n_experts
    if capacity >= 0:
        is_kept &= ranks < capacity
    return kept.where(is_kept, -1).int(), ranks.where(is_kept, 0).int(), counts


def uniform(shape: tuple[int, ...], seed: int, offset: int, device: torch.device) -> Tensor:
    """Word (offset + i) % 4 of Philox's counter (offset + i) // 4, its upper 24 bits as a fraction."""
    n = torch.Size(shape).numel()
    words = philox(seed, offset % 4 + n, device, first_counter=offset // 4)[offset % 4 :]
    return ((words >> 8).float() * 2.0**-24).view(shape)


def sort_slots(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = indices.flatten().long()
    experts = flat.where(flat >= 0, n_experts)
    counts = torch.bincount(experts, minlength=n_experts + 1)[:n_experts]
    order = experts.argsort(stable=True)[: int(counts.sum())]
    inverse = torch.full_like(flat, -1)
    inverse[order] = torch.arange(len(order), device=flat.device)
    return order, inverse.view(indices.shape), counts


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gather_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    return _wide(x)[order // k].to(x.dtype)


def combine_rows(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    n_tokens, k = inverse.shape
    wide = _wide(rows)
    # The empty sums keep both operands in the graph when no token has a choice.
    total = wide.new_zeros(n_tokens, rows.shape[1]) + (wide[:0].sum() + weights[:0].sum())
    for j in range(k):
        tokens = (inverse[:, j] >= 0).nonzero().squeeze(1)
        term = weights[tokens, j].to(wide.dtype).unsqueeze(1) * wide[inverse[tokens, j]]
        total = total.index_add(0, tokens, term)
    return total.to(rows.dtype)


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order]
