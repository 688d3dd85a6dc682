"""Gates and layers of experts in float64, token by token and expert by expert, in the words of the papers."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Gated(NamedTuple):
    """The results of a gate in plain containers; tensors are float64 and differentiable."""

    l_aux: Tensor
    z_loss: Tensor
    chosen: list[list[int]]  # of each token, before any was dropped
    kept: list[list[int]]  # of each token; -1 where dropped
    locations: list[list[int]]
    weights: list[list[Tensor | float]]
    counts: list[int]
    capacity: int


def best_experts(row: Tensor, k: int) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def gate(
    logits: Tensor,
    k: int,
    capacity: int | None,
    *,
    order: str,
    used: list[bool] | None = None,
    chosen: list[list[int]] | None = None,
    priority: list[float] | None = None,
) -> Gated:
    """logits: float64 [tokens, experts]. capacity: None: nothing is dropped. order: "choice", "token", or "priority" (by
    probability, or by ``priority`` of each token).
    """
    n_tokens, n_experts = logits.shape
    used = [True] * n_tokens if used is None else used
    probabilities = [torch.exp(row) / torch.exp(row).sum() for row in logits]
    if chosen is None:
        chosen = [best_experts(row, k) for row in logits]
    chosen = [row if is_used else [-1] * k for row, is_used in zip(chosen, used)]
    counts = [sum(row.count(e) for row in chosen) for e in range(n_experts)]
    slots = [(t, j) for t in range(n_tokens) for j in range(k)]
    if order == "choice":
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    if order == "priority":
        value = {
            (t, j): (priority[t] if priority else probabilities[t][chosen[t][j]].item()) for t, j in slots if used[t]
        }
        slots.sort(key=lambda slot: (-value.get(slot, 0.0), slot))
    taken: dict[int, list[tuple[int, int]]] = {e: [] for e in range(n_experts)}
    for t, j in slots:
        e = chosen[t][j]
        if e >= 0 and (capacity is None or len(taken[e]) < capacity):
            taken[e].append((t, j))
    kept = [[-1] * k for _ in range(n_tokens)]
    locations = [[0] * k for _ in range(n_tokens)]
    for e, places in taken.items():
        for i, (t, j) in enumerate(sorted(places) if order == "priority" else places):
            kept[t][j], locations[t][j] = e, i
    weights: list[list[Tensor | float]] = []
    for t in range(n_tokens):
        row = [probabilities[t][e] if e >= 0 else 0.0 for e in kept[t]]
        total = sum(row) if k > 1 else 1.0
        weights.append([w / total if e >= 0 else 0.0 for w, e in zip(row, kept[t])])
    n_used = max(sum(used), 1)
    n_in_loss = 1 if k <= 2 else k
    l_aux = logits.sum() * 0
    mean_row = sum((p for p, is_used in zip(probabilities, used) if is_used), start=logits.sum() * 0) / n_used
    for e in range(n_experts if sum(used) else 0):
        mean = mean_row[e]
        share = sum(row[:n_in_loss].count(e) for row in chosen) / n_used
        l_aux = l_aux + n_experts * mean * share / n_in_loss
    squares = [torch.log(torch.exp(row).sum()) ** 2 for row, is_used in zip(logits, used) if is_used]
    z_loss = sum(squares, start=logits.sum() * 0) / n_used
    return Gated(l_aux, z_loss, chosen, kept, locations, weights, counts, max(counts) if capacity is None else capacity)


def capacity_of(n_tokens: int, n_experts: int, factor: float, least: int) -> int:
    return max(ceil(np.float32(n_tokens / n_experts) * np.float32(factor)), least)


def as_table(rows: list[list[Tensor | float]]) -> Tensor:
    """The weights as a tensor [tokens, k] with their graph."""
    flat = [torch.as_tensor(w, dtype=torch.float64) for row in rows for w in row]
    return torch.stack(flat).view(len(rows), -1) if flat else torch.zeros(0, 1, dtype=torch.float64)


def mixture(x: Tensor, gated: Gated, experts: list[torch.nn.Module], width: int) -> Tensor:
    """The outputs of all tokens: each expert runs on one token at a time."""
    rows = []
    for token, kept, weights in zip(x, gated.kept, gated.weights):
        out = torch.zeros(width, dtype=torch.float64) + 0 * token.sum()
        for e, weight in zip(kept, weights):
            if e >= 0:
                out = out + weight * experts[e](token.unsqueeze(0))[0]
        rows.append(out)
    return torch.stack(rows) if rows else x.new_zeros((0, width)) + 0 * x.sum()
