"""Experts of DeepSpeed's ``MoE`` layers in checkpoints: their names by number, the ranks that hold them, and optimizer
groups that hold nothing but experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from deepspeed_c.checkpoint.source import Source

__all__ = ["EXPERT_LIST", "ExpertName", "ExpertPlacement", "expert_name", "join_expert_groups"]

# Path from a layer's ``deepspeed_moe`` to the list of its experts.
EXPERT_LIST = "experts.deepspeed_experts"
# Numbers of more digits come from damaged files only.
_NAME = re.compile(rf"((?:.*?\.)?deepspeed_moe)\.{re.escape(EXPERT_LIST)}\.(\d{{1,7}})\.(.+)", re.DOTALL)


class ExpertName(NamedTuple):
    """The parts of the name of an expert's tensor."""

    layer: str  # path of the layer's ``deepspeed_moe``
    number: int
    rest: str  # name of the tensor within the expert

    def __str__(self) -> str:
        return f"{self.layer}.{EXPERT_LIST}.{self.number}.{self.rest}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of ``name``; None if it is not the name of an expert's tensor."""
    found = _NAME.fullmatch(name)
    return None if found is None else ExpertName(found[1], int(found[2]), found[3])


class ExpertPlacement(NamedTuple):
    """How groups of ranks that hold a layer's experts together lie among the data-parallel ranks."""

    world_size: int
    is_strided: bool
    """Whether the ranks of such a group are spaced out (``use_data_before_expert_parallelism``); otherwise they are
    next to each other."""

    def of(self, rank: int, n_ranks: int) -> tuple[int, int]:
        """(index of ``rank`` among the ``n_ranks`` ranks of its group, index among the ranks with the same experts)."""
        n_holders = self.world_size // n_ranks
        return divmod(rank, n_holders) if self.is_strided else divmod(rank, n_ranks)[::-1]

    def holders(self, expert_rank: int, n_ranks: int) -> list[int]:
        """The ranks that have index ``expert_rank`` in their groups."""
        return [rank for rank in range(self.world_size) if self.of(rank, n_ranks)[0] == expert_rank]


def join_expert_groups(source: Source, names: Sequence[Sequence[str]]) -> None:
    """Put experts back into the optimizer groups that DeepSpeed has split them off from, if the optimizer at hand has
    not split its groups. ``names``: the parameters of each of its groups.

    Does nothing where the numbers of groups do not fit, or where the group of an expert stays unknown.
    """
    shared = [g for g, group in enumerate(source.groups) if not group.get("moe")]
    if len(names) == len(source.groups) or len(names) != len(shared):
        return
    joined = {old: new for new, old in enumerate(shared)}
    # This rank's optimizer has its own experts only. The same parameter of other experts is in the same group.
    of_experts = {
        (split.layer, split.rest): g
        for g, of_group in enumerate(names)
        for name in of_group
        if (split := expert_name(name)) is not None
    }
    params = dict(source.params)
    for name, info in source.params.items():
        if info.group is None:
            continue
        group = joined.get(info.group)
        if group is None:
            split = expert_name(name)
            group = None if split is None else of_experts.get((split.layer, split.rest))
        if group is None:
            return
        params[name] = replace(info, group=group)
    source.regroup([source.groups[g] for g in shared], params)
