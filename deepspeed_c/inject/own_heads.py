"""The changes to an attention besides its layers, for one rank: counts of heads, rows of arguments, the shared key, and
weights that no rank has for all heads.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.inject.plan import Attention

__all__ = ["RegionEntry", "SharedKey", "count_own_heads", "refuse_attentions"]


class RegionEntry(Protocol):
    """The entry to a cut region: ``TensorRanks``, or the ranks of a trial."""

    def enter(self, x: torch.Tensor, label: str) -> torch.Tensor: ...


class SharedKey:
    """Latent attention's rotary key: the last ``n_columns`` of an output. Every head on every rank uses this key."""

    def __init__(self, ranks: RegionEntry, n_columns: int, label: str) -> None:
        self.ranks, self.n_columns, self.label = ranks, n_columns, label

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        first, last = output.split([output.shape[-1] - self.n_columns, self.n_columns], dim=-1)
        return torch.cat([first, self.ranks.enter(last, self.label)], dim=-1)


class _OwnRows:
    """Gives the attention the rows of this rank's heads from arguments that are made for all heads.

    Such arguments are [batch * heads, rows, columns], or [batch, heads, rows, columns]. A mask
    [batch, tokens] is for all heads.
    """

    def __init__(self, names: tuple[str, ...], n_heads: int, queries: tuple[int, int]) -> None:
        self.names, self.n_heads, self.queries = names, n_heads, queries

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for name in self.names:
            value = kwargs.get(name)
            if value is None or value.dim() == 2:
                continue
            if value.dim() == 4:  # a mask may be one for all heads
                rows = value[:, slice(*self.queries)] if value.shape[1] == self.n_heads else value
            else:
                rows = value.view(-1, self.n_heads, *value.shape[1:])[:, slice(*self.queries)].flatten(0, 1)
            kwargs = {**kwargs, name: rows}
        return args, kwargs


def count_own_heads(module: torch.nn.Module, attention: Attention) -> None:
    """Set an attention's counts to the numbers of the rank's own heads. module: the module that ``attention`` is for."""
    heads, owner = attention.heads, attention.owner
    n_queries = (attention.queries[1] - attention.queries[0]) * heads.stripes
    n_keys = (attention.keys[1] - attention.keys[0]) * heads.stripes
    holders: list[Any] = [owner]
    if heads.has_own_config:
        owner.config = copy.copy(owner.config)
        holders.append(owner.config)
    for names, value in ((heads.queries, n_queries), (heads.keys, n_keys), (heads.groups, n_queries // n_keys)):
        for holder in holders:
            for name in names:
                if name in vars(holder):
                    setattr(holder, name, value)
    for name in heads.widths:
        if name in vars(owner):
            setattr(owner, name, getattr(owner, name) // (attention.n_heads * heads.stripes) * n_queries)
    if heads.per_head:
        module.register_forward_pre_hook(
            _OwnRows(heads.per_head, attention.n_heads, attention.queries), with_kwargs=True
        )


def refuse_attentions(model: torch.nn.Module) -> None:
    """Let ``model``, and models inside it, refuse to return attention weights, because a rank has only the weights of
    its heads.
    """
    for module in model.modules():
        if hasattr(module, "config") and hasattr(type(module), "get_input_embeddings"):
            module.register_forward_pre_hook(_ask_for_no_attentions, with_kwargs=True)


def _ask_for_no_attentions(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_attentions")
    if getattr(module.config, "output_attentions", False) if wanted is None else wanted:
        raise StateError(
            "each rank has the attention weights of its own heads",
            where="output_attentions of a model that is cut over tensor-parallel ranks",
            fix="set it to false; look at attention weights in one process",
        )
