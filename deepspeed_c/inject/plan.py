"""The modules of a model that the rules cut, and the heads of its attentions. Nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject.policy import Heads, Rule

__all__ = [
    "Attention",
    "ParamCut",
    "Planned",
    "RankPlace",
    "RuleSet",
    "ends_with",
    "find_attentions",
    "match_rules",
    "part_sizes",
]


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
    block: str = ""
    """Dotted name of the module that holds the layer, plain or adapted."""
    region: str = ""
    """Dotted name of the attention, or of ``block``: between its column and row layers each rank computes a part."""


@dataclass(frozen=True)
class ParamCut:
    """One line of the list of cuts: a parameter, and the dimension along which a rule cuts it."""

    param: torch.nn.Parameter
    name: str = ""
    """Dotted name of the parameter, as the rule's module has it."""
    dim: int | None = None
    """None: every rank holds the whole parameter."""
    step: Planned | None = None
    """The module with its rule, which says what lies along ``dim``."""
    grain: int = 1
    """Number of elements along ``dim`` that stay together."""
    reason: str = ""
    """The reason why the parameter is whole."""
    is_summed: bool = False
    """Whether ranks use the whole parameter on parts, so that its gradient is their sum."""


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
                own = attention if needs_heads else None
                block = name.rpartition(".")[0]
                region = block if own is None else own.name
                planned.append(Planned(name, module, rule, rules.source, own, block=block, region=region))
            break
    return planned, whole


def _attention_of(name: str, attentions: dict[str, Attention]) -> Attention | None:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in attentions:
            return attentions[name]
    return None


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
