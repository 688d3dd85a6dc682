"""Experts of a model's own mixtures over ranks (AutoEP): the model's router chooses, and rows travel to the experts.

Mixtures of transformers keep the weights of a layer's experts stacked, [experts, ...], in one module that is called
with (rows, chosen experts, weights). ``RoutedExperts`` goes in front of that module's class: a rank then holds the
stack of its own experts (``zero/layout/experts.py``), and rows go the way of ``dispatch.py``. Names, router, shared
experts and losses stay the model's.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import DeepSpeedCError, ModelError, RoutingError, StateError
from deepspeed_c.inject.swap import swap_class
from deepspeed_c.moe.dispatch import find_way, from_experts, report_failure, to_experts
from deepspeed_c.moe.experts import SpreadLayer
from deepspeed_c.moe.grouped import grouped_linear
from deepspeed_c.ops import moe as ops

__all__ = ["ExpertWeights", "RoutedExperts", "as_routed"]


class ExpertWeights(NamedTuple):
    """The names of the stacked weights of a module of experts."""

    up: str
    """[experts, inner, hidden]; gate and up, one behind the other, if ``is_joined``."""
    down: str
    """[experts, hidden, inner]"""
    gate: str | None = None
    """[experts, inner, hidden] where the gate has a stack of its own."""
    is_joined: bool = False
    is_in_out: bool = False
    """Whether the last two dimensions are the other way round."""


class RoutedExperts(SpreadLayer):
    """The experts of one layer that this rank holds, in front of the model's own class of experts.

    ``forward(hidden, indices, weights)`` has transformers' form: hidden [..., width], indices int [tokens, k], weights
    [tokens, k]. An index below 0, or not below the number of experts, is a choice without an expert: it adds nothing.
    """

    _weights: ExpertWeights
    _activation: Callable[[Tensor], Tensor]
    _ranks: Collectives | None
    _twins: Collectives | None
    last_indices: Tensor | None
    """The experts of the last forward, int32 [tokens, k]."""

    def __init__(self) -> None:
        raise TypeError("as_routed makes a RoutedExperts of a module of experts")

    def set_up(
        self,
        weights: ExpertWeights,
        activation: Callable[[Tensor], Tensor],
        n_experts: int,
        n_ranks: int,
        name: str,
    ) -> None:
        """Takes the place of a constructor, for a module that has been made as another class."""
        self.ep_size, self.num_local_experts = n_ranks, n_experts // n_ranks
        self._weights, self._activation, self._name = weights, activation, name
        self._ranks = self._twins = self.last_indices = None
        self.balance_by(None)

    def __getstate__(self) -> dict[str, Any]:
        # Ranks belong to this process, and numbers to its last forward.
        return {**self.__dict__, "_ranks": None, "_twins": None, "exp_counts": None, "kept_counts": None}

    @property
    def n_experts(self) -> int:
        """Experts of all ranks."""
        return self.ep_size * self.num_local_experts

    def connect(self, ep: Collectives) -> None:
        self._ranks = ep if ep.world_size > 1 else None

    def compare_over(self, twins: Collectives) -> None:
        """Compare the indices of each forward over ``twins``, ranks that have the same tokens."""
        self._twins = twins if twins.world_size > 1 else None

    def balance_by(self, bias: Any) -> None:
        """Count tokens for the steps of ``bias``, the router's ``RouterBias``; None: do not count them."""
        self.router_bias = bias
        self._window_counts = None if bias is None else torch.zeros(self.n_experts, dtype=torch.int64)

    def take_window_counts(self) -> Tensor:
        """Tokens of each expert in the forwards of training since the last call, int64 [experts of all ranks]."""
        counts, self._window_counts = self._window_counts, torch.zeros_like(self._window_counts)
        return counts

    def forward(self, hidden_states: Tensor, *routing: Any, **named: Any) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        order, inverse, weights, counts = self._sorted(x, (*routing, *named.values()))
        rows = ops.gather_rows(x, order, inverse.shape[1], inverse)
        out = ops.combine_rows(self.run_spread(rows, counts), inverse, weights)
        return out.to(hidden_states.dtype).view(hidden_states.shape)

    def run_spread(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that are sorted by expert, ``counts`` of each expert, through the experts of all ranks."""
        if self.ep_size == 1:
            return self.run_own(rows, counts.tolist())
        if self._ranks is None:
            raise StateError(
                f"the experts lie on {self.ep_size} ranks, and this copy of the layer does not have these ranks",
                where=self._name,
                fix="run the model of the engine, not a copy of it",
            )
        way = find_way(self._ranks, counts, self._name)
        return from_experts(self.run_own(to_experts(rows, way), way.counts), way)

    def _sorted(self, x: Tensor, routing: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(order and inverse of the sort by expert, weights float32 [tokens, k], slots of each expert)."""
        try:
            indices, weights = _routing_of(routing, x.shape[0], self._name)
            is_chosen = (indices >= 0) & (indices < self.n_experts)
            indices = torch.where(is_chosen, indices, -1).to(torch.int32)
            if self._twins is not None:
                self._compare(indices)
            self.last_indices = indices
            order, inverse, counts = ops.sort_slots(indices, self.n_experts)
        except DeepSpeedCError:
            if self._ranks is not None:
                # The other ranks are about to wait for this rank's counts.
                report_failure(self._ranks, self.n_experts, x.device, self._name)
            raise
        self.exp_counts = self.kept_counts = counts
        # A layer that runs again within a backward has been counted in its forward.
        if self._window_counts is not None and self.training and torch._C._current_graph_task_id() == -1:
            self._window_counts += counts.cpu()
        return order, inverse, weights, counts

    def _compare(self, indices: Tensor) -> None:
        first = indices.clone()
        self._twins.broadcast(first, 0, label=f"choices of {self._name}")
        n_other = int((first != indices).any(1).sum())
        if any(others := self._twins.gather_numbers(n_other, label=f"choices of {self._name}")):
            rank = next(rank for rank, n in enumerate(others) if n)
            raise RoutingError(
                f"tensor-parallel rank {rank} chose other experts than rank 0 for {int(others[rank])} of"
                f" {indices.shape[0]} tokens",
                where=self._name,
                fix="give tensor-parallel ranks the same batch and the same random numbers",
            )

    def run_own(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of this rank's experts, sorted by expert, through their experts."""
        weights = self._weights
        hidden = self._product(rows, counts, weights.up)
        if weights.gate is not None:
            hidden = self._activation(self._product(rows, counts, weights.gate)) * hidden
        elif weights.is_joined and hasattr(self, "_apply_gate"):
            hidden = self._apply_gate(hidden)  # the family's own
        elif weights.is_joined:
            gate, up = hidden.chunk(2, -1)
            hidden = self._activation(gate) * up
        else:
            hidden = self._activation(hidden)
        out = self._product(hidden, counts, weights.down)
        return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out

    def _product(self, rows: Tensor, counts: Sequence[int], name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias", None)
        return grouped_linear(rows, counts, getattr(self, name), bias, is_in_out=self._weights.is_in_out)


def _routing_of(routing: Sequence[Any], n_tokens: int, where: str) -> tuple[Tensor, Tensor]:
    """(indices [tokens, k], weights float32 [tokens, k]) among the arguments of a call."""
    tensors = [value for value in routing if isinstance(value, Tensor)]
    indices = [value for value in tensors if not value.is_floating_point()]
    weights = [value for value in tensors if value.is_floating_point()]
    if len(indices) != 1 or len(weights) != 1 or indices[0].numel() != weights[0].numel():
        shapes = ", ".join(f"{tuple(value.shape)} {value.dtype}" for value in tensors)
        raise ModelError(
            f"was called with ({shapes}) beside the rows; the chosen experts and their weights are expected",
            where=where,
            fix="name such layers in no pattern of expert_parallel",
        )
    k = indices[0].numel() // max(n_tokens, 1)
    return indices[0].reshape(n_tokens, k), weights[0].reshape(n_tokens, k).float()


@cache
def _class_of(base: type) -> type:
    kind = ABCMeta(f"Routed{base.__name__}", (RoutedExperts, base), {"__module__": __name__})
    kind.__doc__ = RoutedExperts.__doc__
    return kind


def as_routed(
    experts: torch.nn.Module,
    weights: ExpertWeights,
    activation: Callable[[Tensor], Tensor],
    n_experts: int,
    n_ranks: int,
    name: str,
) -> None:
    """Makes ``experts``, a module with the stacked weights of ``n_experts`` experts, a ``RoutedExperts`` of ``n_ranks``
    ranks, in place. Its weights stay as they are: the caller cuts them. activation: used where the class has no
    ``_apply_gate``."""
    swap_class(experts, _class_of(type(experts)))
    experts.set_up(weights, activation, n_experts, n_ranks, name)
