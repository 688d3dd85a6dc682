"""Even loads without a loss (``load_balance_coeff``): routers with a correction bias get it moved after each step.

The bias counts in the choice of experts and not in their weights, so it costs no gradient. An expert with fewer tokens
than the mean gets ``coeff`` more, one with more tokens gets ``coeff`` less (Wang et al., "Auxiliary-Loss-Free Load
Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, algorithm 1).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError
from deepspeed_c.moe.auto import RoutedExperts

__all__ = ["LoadBalance", "RouterBias", "find_bias"]

_WHERE = "expert_parallel.load_balance_coeff"
_NAMES = re.compile(r"e_score_correction_bias|(correction|expert)_bias")


class RouterBias(NamedTuple):
    """The correction bias of one layer, a buffer [experts]."""

    owner: nn.Module
    key: str


def find_bias(named: dict[str, nn.Module], experts: str, n_experts: int, router: str | None) -> RouterBias:
    """The correction bias that chooses among the experts of the module ``experts`` of ``named``. It lies in the module
    around the experts, or in that module's child ``router`` (default: any child).

    Raises ConfigError for a router without one.
    """
    parent = experts.rpartition(".")[0]
    owners = [
        named[parent],
        *(named[parent]._modules.values() if router is None else [named.get(f"{parent}.{router}")]),
    ]
    if owners[-1] is None and router is not None:
        raise ConfigError(
            f"{parent} has no child {router!r}",
            where="expert_parallel.router_pattern",
            fix=f"name one of its children: {', '.join(named[parent]._modules)}",
        )
    for owner in owners:
        for key, buffer in {} if owner is None else owner._buffers.items():
            if buffer is not None and _NAMES.fullmatch(key) and buffer.shape == (n_experts,):
                return RouterBias(owner, key)
    raise ConfigError(
        f"the router of {parent} has no buffer for a correction bias, such as e_score_correction_bias: a bias that the"
        " model does not know would be lost in its files",
        where=_WHERE,
        fix="leave it out, and balance by the model's own loss (output_router_logits, router_aux_loss_coef)",
    )


class LoadBalance:
    """Moves the biases of the layers of ``model``, and keeps them in fp32: a step of 0.001 is lost in 16 bits.

    comm: the ranks that see different tokens.
    """

    def __init__(self, model: nn.Module, coeff: float, comm: Collectives) -> None:
        self._coeff, self._comm = coeff, comm
        self._layers = [
            module for module in model.modules() if isinstance(module, RoutedExperts) and module.router_bias
        ]
        for layer in self._layers:
            owner, key = layer.router_bias
            owner._buffers[key] = owner._buffers[key].float()

    def end_window(self, *, moves: bool) -> None:
        """Moves each bias by the loads since the last call, in training and over all ranks. Without ``moves``, after a
        skipped step, they are dropped. Collective."""
        counts = [layer.take_window_counts() for layer in self._layers]
        if not moves:
            return
        numbers = [float(n) for of_layer in counts for n in of_layer.tolist()]
        sums = torch.tensor(self._comm.sum_numbers(numbers, label="load of experts"), dtype=torch.float64)
        for layer, load in zip(self._layers, sums.split([len(of_layer) for of_layer in counts]), strict=True):
            bias = layer.router_bias.owner._buffers[layer.router_bias.key]
            bias.add_(torch.sign(load.mean() - load).to(bias), alpha=self._coeff)

    def close(self) -> None:
        """Counts no more."""
        for layer in self._layers:
            layer.balance_by(None)
