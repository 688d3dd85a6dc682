"""Gives layers with experts the ranks that their experts are spread over."""

from __future__ import annotations

import torch

from deepspeed_c.comm.axes import EP, PP, TOKENS
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.moe.experts import Experts, SpreadLayer
from deepspeed_c.moe.gate import TopKGate
from deepspeed_c.utils import groups
from deepspeed_c.zero.layout.experts import check_experts

__all__ = ["connect_experts"]


def connect_experts(model: torch.nn.Module, mesh: Mesh, *, seeds_differ: bool = False) -> None:
    """Makes the groups of ranks for the experts of ``model``, and connects its layers with them. Collective.

    seeds_differ: ranks with other tokens draw other numbers already, because random numbers follow the grain.
    Raises ModelError where the experts of a layer cannot be spread over the ranks of ``mesh``.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            module.mark()
    sizes = set(check_experts(model, mesh))
    if mesh.size(PP) > 1:
        sizes.update(*mesh.pipeline.gather_objects(sizes, label="experts of all stages"))
    for n_ranks in sorted(sizes):
        groups.create_expert_groups(n_ranks)
    for name, module in model.named_modules():
        if isinstance(module, SpreadLayer):
            if name:
                module.rename(name)
            module.connect(mesh.with_experts(module.ep_size).along(EP))
        if isinstance(module, TopKGate):
            module.draw_as(0 if seeds_differ else mesh.index(*TOKENS))
