"""Where DeepSpeed keeps experts in its files, for writing them: optimizer groups of experts alone, and the experts of
each rank under the names that the rank has for them. See [Note: DeepSpeed's experts].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed_c.checkpoint.experts import ExpertPlacement, expert_name
from deepspeed_c.checkpoint.source import Source
from deepspeed_c.errors import CheckpointError

__all__ = ["ExpertLayout"]

# Largest number of elements of one optimizer group of experts on a rank (deepspeed/moe/utils.py).
GROUP_ELEMS = 178956971
# DeepSpeed's name for the group that it makes of the parameters of a model.
SHARED_GROUP = "dense-params"


class ExpertLayout:
    """The experts of ``source`` on ``placement.world_size`` data-parallel ranks.

    Raises CheckpointError for numbers of ranks that cannot hold them.
    """

    def __init__(self, source: Source, placement: ExpertPlacement, n_ranks: int | Mapping[str, int] | None) -> None:
        """n_ranks: the number of ranks that hold the experts together, of all layers or by layer; by default as the
        optimizer's groups say, or as in the run that saved."""
        self.placement = placement
        names = dict.fromkeys(name for _, name in source.tensors)
        counts: dict[str, int] = {}
        for name in names:
            if (split := expert_name(name)) is not None:
                counts[split.layer] = max(counts.get(split.layer, 0), split.number + 1)
        self.n_experts = counts
        """The number of experts of each layer, in the module's order."""
        if isinstance(n_ranks, int):
            self.n_ranks = dict.fromkeys(counts, n_ranks)
        elif n_ranks is not None:
            self.n_ranks = {layer: n_ranks.get(layer, 1) for layer in counts}
        else:
            said = _said_by_groups(source)
            self.n_ranks = {layer: said.get(layer, source.topology.expert_parallel) for layer in counts}
        for layer, n in self.n_ranks.items():
            if n < 1 or placement.world_size % n or counts[layer] % n:
                raise CheckpointError(
                    f"{counts[layer]} experts on {placement.world_size} ranks cannot be held by {n} ranks together",
                    where=f"{source.where}, {layer}",
                    fix="give a number of expert-parallel ranks that divides both, or another number of ranks",
                )

    def __bool__(self) -> bool:
        return bool(self.n_experts)

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks that hold the experts of a layer together."""
        return max(self.n_ranks.values(), default=1)

    def ranks_of(self, name: str) -> int:
        """The number of ranks that the tensor differs over; 1 for a tensor that is no expert's."""
        split = expert_name(name)
        return 1 if split is None else self.n_ranks[split.layer]

    def own(self, name: str, rank: int) -> str | None:
        """The name of the tensor on a data-parallel rank; None if the rank does not hold it."""
        split = expert_name(name)
        if split is None:
            return name
        n = self.n_ranks[split.layer]
        n_local = self.n_experts[split.layer] // n
        expert_rank, local = divmod(split.number, n_local)
        return str(split._replace(number=local)) if self.placement.of(rank, n)[0] == expert_rank else None

    def files_of(self, rank: int) -> list[tuple[int, str, int]]:
        """(number of the layer, layer, expert) of the weights that the rank writes."""
        found = []
        for i, (layer, n_experts) in enumerate(self.n_experts.items()):
            n = self.n_ranks[layer]
            expert_rank, holder = self.placement.of(rank, n)
            n_local = n_experts // n
            if holder == 0:
                found += [(i, layer, expert_rank * n_local + local) for local in range(n_local)]
        return found

    def split_groups(
        self,
        options: Sequence[Mapping[str, Any]],
        by_group: Sequence[Sequence[str]],
        sizes: Mapping[str, Sequence[int]],
    ) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """The optimizer's groups as DeepSpeed has them, options and names of parameters: experts in groups of their
        own, one for each number of ranks, behind all other groups. sizes: shapes of the parameters."""
        shared = [dict(group) for group in options]
        kept: list[list[str]] = [[] for _ in options]
        added: list[tuple[dict[str, Any], list[str]]] = []
        for g, names in enumerate(by_group):
            of_size: dict[int, list[str]] = {}
            for name in names:
                if expert_name(name) is None:
                    kept[g].append(name)
                else:
                    of_size.setdefault(self.ranks_of(name), []).append(name)
            for n, experts in sorted(of_size.items()):
                marks = {**options[g], "name": f"ep_size_{n}", "moe": True}
                parts = [experts] if options[g].get("moe") else self._parts(experts, n, sizes)
                added += [(dict(marks), part) for part in parts]
            shared[g].setdefault("name", SHARED_GROUP)
        # A group that has nothing but experts is replaced by its parts.
        stays = [bool(kept[g]) or not options[g].get("moe") for g in range(len(options))]
        groups = [(shared[g], kept[g]) for g in range(len(options)) if stays[g]] + added
        return [group for group, _ in groups], [names for _, names in groups]

    def _parts(self, names: Sequence[str], n_ranks: int, sizes: Mapping[str, Sequence[int]]) -> Iterable[list[str]]:
        """``names`` cut into groups that have at most ``GROUP_ELEMS`` elements on each rank."""
        # All expert-parallel ranks cut alike, because their experts have the same shapes.
        parts: list[list[str]] = []
        part_of: dict[tuple[str, int, str], int] = {}
        filled, at = 0, 0
        for name in names:
            split = expert_name(name)
            local = split.number % (self.n_experts[split.layer] // n_ranks)
            key = split.layer, local, split.rest
            if key not in part_of:
                n_elems = math.prod(sizes[name])
                if filled and filled + n_elems > GROUP_ELEMS:
                    filled, at = 0, at + 1
                filled += n_elems
                part_of[key] = at
            if part_of[key] == len(parts):
                parts.append([])
            parts[part_of[key]].append(name)
        return parts


def _said_by_groups(source: Source) -> dict[str, int]:
    """The numbers of ranks in the names of the optimizer's groups, by layer."""
    found: dict[str, int] = {}
    for name, info in source.params.items():
        split = expert_name(name)
        if split is None or info.group is None or info.group >= len(source.groups):
            continue
        group = source.groups[info.group]
        number = str(group.get("name", "")).removeprefix("ep_size_")
        if group.get("moe") and number.isdigit() and int(number) > 0:
            found[split.layer] = int(number)
    return found
