"""How the tokens of the last forward were spread over experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.moe.experts import SpreadLayer

__all__ = ["ExpertLoad", "expert_load"]


class ExpertLoad(NamedTuple):
    """Numbers of one layer, by expert. A token counts once for each expert that its gate chose."""

    tokens: list[int]
    """Tokens that chose the expert, before any was dropped."""
    dropped: list[int]
    """The part of them for which the expert had no place."""


def expert_load(module: torch.nn.Module, comm: Collectives) -> dict[str, ExpertLoad]:
    """The load of each layer of experts within ``module`` in its last forward, summed over ``comm``, the ranks that see
    different tokens. Layers that have not run on any rank are left out. Collective."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, SpreadLayer)}
    numbers: list[int] = []
    for layer in layers.values():
        chosen, kept = layer.exp_counts, layer.kept_counts
        n_experts = layer.ep_size * layer.num_local_experts
        has_run = chosen is not None
        numbers += [int(has_run)]
        numbers += chosen.tolist() if has_run else [0] * n_experts
        numbers += kept.tolist() if has_run else [0] * n_experts
    sums = iter(comm.sum_numbers(numbers, label="load of experts"))
    found: dict[str, ExpertLoad] = {}
    for name, layer in layers.items():
        has_run, n_experts = next(sums) > 0, layer.ep_size * layer.num_local_experts
        chosen, kept = ([int(next(sums)) for _ in range(n_experts)] for _ in range(2))
        if has_run:
            found[name] = ExpertLoad(chosen, [a - b for a, b in zip(chosen, kept)])
    return found
