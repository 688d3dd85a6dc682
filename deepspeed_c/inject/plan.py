"""The plan of a cut. It is made and checked before a weight is changed: each rule with its modules, heads and runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject.cut import Cut, CutBox
from deepspeed_c.inject.policy import Heads, Rule

__all__ = [
    "Attention",
    "Planned",
    "RankPlace",
    "RuleSet",
    "column_sizes",
    "cut_along",
    "ends_with",
    "find_attentions",
    "match_rules",
    "part_sizes",
    "parts_of",
]

_KINDS = {"queries": _C.TP_QUERIES, "keys": _C.TP_KEYS, "columns": _C.TP_COLUMNS}


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank in a tensor-parallel group, as numbers. A plan needs to know no more about the rank."""

    rank: int
    n_ranks: int


@dataclass(frozen=True)
class RuleSet:
    """Rules from one source."""

    source: str
    rules: tuple[Rule, ...]
    heads: tuple[Heads, ...] = ()


@dataclass
class Attention:
    """One attention module of the model, and the rank's part of it."""

    name: str
    owner: torch.nn.Module
    heads: Heads
    n_heads: int
    """Number of heads of one stripe, if heads lie in several stripes. The ranges below are for one stripe, too."""
    n_key_heads: int
    queries: tuple[int, int] = (0, 0)
    keys: tuple[int, int] = (0, 0)
    refusal: str = ""
    """The reason why the attention stays whole; "" if it is cut."""


@dataclass(frozen=True)
class Planned:
    """One module and the rule that cuts it."""

    name: str
    module: torch.nn.Module
    rule: Rule
    source: str
    attention: Attention | None = field(default=None)
    adapted: str = ""
    """Dotted name of the adapted layer that the module is a part of; empty for a plain layer."""

    @property
    def block(self) -> str:
        """Dotted name of the module that holds the layer."""
        return (self.adapted or self.name).rpartition(".")[0]


def ends_with(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches the end of a dotted name, from the beginning or from a dot on."""
    return re.search(rf"(^|\.)({pattern})$", name) is not None


def _count(owner: torch.nn.Module, names: Sequence[str]) -> int | None:
    for holder in (owner, getattr(owner, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def find_attentions(model: torch.nn.Module, sets: Sequence[RuleSet], place: RankPlace) -> dict[str, Attention]:
    """Every attention of the model, by its dotted name, with this rank's heads."""
    found: dict[str, Attention] = {}
    for name, module in model.named_modules():
        for heads in (heads for rules in sets for heads in rules.heads):
            if name in found or not ends_with(heads.pattern, name):
                continue
            owner = module.get_submodule(heads.owner) if heads.owner else module
            n_heads = _count(owner, heads.queries)
            if n_heads is None:
                continue
            n_key_heads = (_count(owner, heads.keys) or n_heads) // heads.stripes
            n_heads //= heads.stripes
            attention = Attention(name, owner, heads, n_heads, n_key_heads)
            try:
                q0, q1, k0, k1 = _C.tp_heads(n_heads, n_key_heads, place.n_ranks, place.rank)
                attention.queries, attention.keys = (q0, q1), (k0, k1)
            except ValueError as error:
                attention.refusal = str(error).partition(": ")[2] or str(error)
                if heads.stripes > 1:
                    attention.refusal += f" (of each of {heads.stripes} stripes)"
            found[name] = attention
    return found


def match_rules(
    model: torch.nn.Module, sets: Sequence[RuleSet], attentions: dict[str, Attention]
) -> tuple[list[Planned], dict[str, str]]:
    """(modules with their rules, reasons why other modules named by a rule stay whole). The first matching set and rule
    win.
    """
    planned: list[Planned] = []
    whole: dict[str, str] = {}
    for name, module in model.named_modules():
        for rules in sets:
            rule = next((rule for rule in rules.rules if ends_with(rule.pattern, name)), None)
            if rule is None:
                continue
            attention = attentions.get(name) if rule.style == "heads" else _attention_of(name, attentions)
            needs_heads = rule.sizes is None and ("queries" in rule.parts or "keys" in rule.parts)
            if needs_heads and attention is None:
                whole[name] = f"{rules.source} speaks of heads, and no attention is found around it"
            elif needs_heads and attention is not None and attention.refusal:
                whole[name] = attention.refusal
            elif rule.style == "skip":
                whole[name] = f"{rules.source} leaves it whole"
            else:
                planned.append(Planned(name, module, rule, rules.source, attention if needs_heads else None))
            break
    return planned, whole


def _attention_of(name: str, attentions: dict[str, Attention]) -> Attention | None:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in attentions:
            return attentions[name]
    return None


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


def part_sizes(
    shape: Sequence[int | Sequence[int]], weight_shape: Sequence[int], dim: int, name: str, where: str
) -> tuple[int, ...]:
    """Number of elements of each part along ``dim`` of the weight ``name``, from ``shape`` in DeepSpeed's notation.

    An entry of ``shape`` is a number of equal parts, a list of the parts' sizes, or -1 for one part. Raises ConfigError
    where ``shape`` has another number of dimensions than the weight, or where the parts would not be equal.
    """
    if len(shape) != len(weight_shape):
        raise ConfigError(
            f"shape has {len(shape)} entries, {name} {len(weight_shape)} dimensions",
            where=where,
            fix="write one entry a dimension: a number, a list of parts, or -1",
        )
    entry, n_elems = shape[dim], weight_shape[dim]
    if isinstance(entry, (list, tuple)):
        return tuple(int(size) for size in entry)
    if entry in (-1, n_elems):
        return (n_elems,)
    if entry < 1 or n_elems % entry:
        raise ConfigError(
            f"{n_elems} elements of {name} are no {entry} equal parts", where=where, fix="list the parts' sizes"
        )
    return (n_elems // entry,) * entry


def _along(shape: torch.Size, dim: int, run: tuple[int, int, int]) -> Iterator[tuple[int, ...]]:
    zeros = (0,) * len(shape)
    local, logical, n_elems = run
    yield (*zeros[:dim], local, *zeros[dim + 1 :])
    yield (*zeros[:dim], logical, *zeros[dim + 1 :])
    yield (*shape[:dim], n_elems, *shape[dim + 1 :])
