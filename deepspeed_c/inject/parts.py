"""The part of every parameter that one rank gets, and the ranks that sum its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.cut import Cut, CutBox
from deepspeed_c.inject.listing import CutList
from deepspeed_c.inject.plan import ParamCut, Planned, RankPlace

__all__ = ["RankParts", "column_sizes", "cut_along", "fit_parts", "parts_of"]

_KINDS = {"queries": _C.TP_QUERIES, "keys": _C.TP_KEYS, "columns": _C.TP_COLUMNS}


@dataclass
class RankParts:
    """The parts of the rank at ``listed.place``."""

    listed: CutList
    cuts: dict[torch.nn.Parameter, tuple[Cut, int]] = field(default_factory=dict)
    """With the dimension that is cut."""
    runs: dict[torch.nn.Parameter, list[tuple[int, int]]] = field(default_factory=dict)
    """(first element, number of elements) of the rank's part of a parameter that is whole on all ranks."""
    columns: dict[torch.nn.Parameter, list[int]] = field(default_factory=dict)
    """Number of columns of each rank, if they are gathered."""
    used_on_parts: set[torch.nn.Parameter] = field(default_factory=set)
    """Parameters that are whole by intent, although each rank uses them on its part."""
    sums: dict[torch.nn.Parameter, tuple[int, ...]] = field(default_factory=dict)
    """The ranks that sum the parameter's gradient."""
    reasons: dict[torch.nn.Parameter, str] = field(default_factory=dict)
    """The rule, or the reason why the parameter is whole."""

    @property
    def place(self) -> RankPlace:
        return self.listed.place

    def sum_whole(self, param: torch.nn.Parameter) -> None:
        """All ranks sum the gradient of ``param``."""
        self.sums[param] = tuple(range(self.place.n_ranks))

    def sum_on_all(self, param: torch.nn.Parameter, reason: str) -> None:
        """Keep ``param`` whole. All ranks use it on their parts, and sum its gradient."""
        self.used_on_parts.add(param)
        self.sum_whole(param)
        self.reasons[param] = reason


def fit_parts(listed: CutList) -> RankParts:
    """Raises ModelError where a dimension is no multiple of its parts or heads, or where two rules cut one parameter in
    two ways.
    """
    parts = RankParts(listed)
    for line in listed.params:
        if line.step is not None and line.dim is not None:
            _fit(line, line.dim, parts)
        elif line.is_summed and line.step is not None and line.step.rule.style == "experts":
            parts.sum_on_all(line.param, line.reason)
        else:
            parts.reasons[line.param] = line.reason
            if line.is_summed:
                parts.sum_whole(line.param)
    for param in listed.flow.summed:
        parts.sum_whole(param)
    return parts


def _fit(line: ParamCut, dim: int, parts: RankParts) -> None:
    param, step, place = line.param, line.step, parts.place
    attention = step.attention
    pieces, n_blocks = parts_of(step, param.shape[dim], line.grain, line.name)
    heads = (attention.n_heads, attention.n_key_heads) if attention is not None else (0, 0)
    cut = cut_along(param.shape, dim, pieces, n_blocks, heads, place)
    if isinstance(cut, list):
        parts.runs[param] = cut
        parts.sum_on_all(param, f"{step.source}: whole, each rank uses its heads' part")
        return
    if cut.n_copies == place.n_ranks:
        parts.sum_on_all(param, f"{step.source}: whole, its heads are every rank's")
        return
    if param in parts.cuts and parts.cuts[param] != (cut, dim):
        raise ModelError(
            f"two rules cut it in two ways; the second is {step.source}",
            where=line.name,
            fix="parameters that are tied must be cut alike: write one rule in tensor_parallel.partition_config",
        )
    parts.cuts[param] = (cut, dim)
    parts.sums[param] = cut.copies
    parts.reasons[param] = f"{step.source}: {step.rule.style} {' '.join(step.rule.parts)}"
    if step.rule.style == "column" and step.rule.gathers:
        parts.columns[param] = column_sizes(param.shape[dim], place.n_ranks, line.grain)


def parts_of(planned: Planned, n_elems: int, grain: int, where: str) -> tuple[list[tuple[int, int, int]], int]:
    """([(kind, elements, grain)] of the parts of one block, number of blocks) for a dimension of ``n_elems``.

    grain: columns that stay together. Raises ModelError with both numbers where the parts do not add up to ``n_elems``.
    """
    rule, attention = planned.rule, planned.attention
    if rule.sizes is not None:
        if sum(rule.sizes) != n_elems:
            raise ModelError(
                f"the parts {list(rule.sizes)} make {sum(rule.sizes)}, the dimension has {n_elems}",
                where=where,
                fix="write the size of each part in shape, in the order in which they lie",
            )
        return [(_C.TP_COLUMNS, size, grain) for size in rule.sizes], 1
    if attention is None:
        if n_elems % len(rule.parts):
            raise ModelError(
                f"{n_elems} elements are no {len(rule.parts)} equal parts",
                where=where,
                fix="name the sizes of the parts in tensor_parallel.partition_config",
            )
        return [(_C.TP_COLUMNS, n_elems // len(rule.parts), grain) for _ in rule.parts], 1
    n_heads = {"queries": attention.n_heads, "keys": attention.n_key_heads}
    n_all = sum(n_heads[part] for part in rule.parts)
    if n_elems % n_all:
        raise ModelError(
            f"{n_elems} elements are no multiple of {n_all} heads ({', '.join(rule.parts)})",
            where=where,
            fix="name the sizes of the parts in tensor_parallel.partition_config",
        )
    head_elems = n_elems // n_all
    n_blocks = attention.n_key_heads if rule.is_interleaved else 1
    return [(_KINDS[part], n_heads[part] // n_blocks * head_elems, head_elems) for part in rule.parts], n_blocks


def cut_along(
    shape: torch.Size,
    dim: int,
    parts: list[tuple[int, int, int]],
    n_blocks: int,
    heads: tuple[int, int],
    place: RankPlace,
) -> Cut | list[tuple[int, int]]:
    """Return the part of a parameter [shape], cut along ``dim``, that ``place`` holds.

    heads: numbers of query heads and of key heads. If on any rank some elements of the part have more copies than
    others, the parameter stays whole on all ranks, and the result is the runs (first element, number of elements) of
    the rank's part.
    """
    of_ranks = [_C.tp_runs(parts, n_blocks, *heads, place.n_ranks, rank) for rank in range(place.n_ranks)]
    runs, first, n_copies = of_ranks[place.rank]
    if any(copies == 0 for _, _, copies in of_ranks):
        return [(begin, n_elems) for _, begin, n_elems in runs]
    boxes = tuple(CutBox(*_along(shape, dim, run)) for run in runs or [(0, 0, 0)])
    return Cut(shape, boxes, n_copies, place.rank, place.n_ranks, tuple(range(first, first + n_copies)))


def column_sizes(n_elems: int, n_ranks: int, grain: int) -> list[int]:
    """Number of elements of each rank, if only the total number and ``grain`` decide."""
    parts = [(_C.TP_COLUMNS, n_elems, grain)]
    return [sum(run[2] for run in _C.tp_runs(parts, 1, 0, 0, n_ranks, rank)[0]) for rank in range(n_ranks)]


def _along(shape: torch.Size, dim: int, run: tuple[int, int, int]) -> Iterator[tuple[int, ...]]:
    zeros = (0,) * len(shape)
    local, logical, n_elems = run
    yield (*zeros[:dim], local, *zeros[dim + 1 :])
    yield (*zeros[:dim], logical, *zeros[dim + 1 :])
    yield (*shape[:dim], n_elems, *shape[dim + 1 :])
