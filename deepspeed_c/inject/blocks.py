"""Rules from the structure of a model and the names of its blocks' row layers (``injection_policy``).

``{Block: ("attn.out", "mlp.down")}``: in every block these linear layers are cut by rows, and all others by columns.
The family's policy says which layers belong to heads. Without a policy the sizes say it: if the row layer of an
attention has ``n`` inputs, a column layer with ``n`` outputs makes queries, and a column layer with fewer outputs makes
keys or values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject.linear import is_transposed
from deepspeed_c.inject.plan import RuleSet, ends_with
from deepspeed_c.inject.policy import Heads, Policy, Rule, find_policy

__all__ = ["block_rules"]

_WHERE = "injection_policy"
_COUNTS = (*Heads("").queries, "n_head", "nhead")
# Attributes of an attention that hold the number of columns of all heads together; families differ in the name.
_WIDTHS = ("all_head_size", "embed_dim", "split_size", "inner_dim", "dim")


def block_rules(model: torch.nn.Module, blocks: Mapping[type, Sequence[str]]) -> RuleSet:
    """The rules for every linear layer in the blocks of these classes. Nothing is changed.

    Raises ConfigError where the model has no such block, or a block no such layer. Raises ModelError for a layer whose
    contents cannot be told from its sizes.
    """
    family = find_policy(getattr(getattr(model, "config", None), "model_type", ""))
    rules: list[Rule] = []
    heads = list(() if family is None else family.heads)
    for kind, names in blocks.items():
        names = (names,) if isinstance(names, str) else tuple(names)
        found = [(name, module) for name, module in model.named_modules() if type(module) is kind]
        if not found:
            raise ConfigError(
                f"the model has no {kind.__name__}", where=_WHERE, fix="name the very class of the model's blocks"
            )
        for name, block in found:
            _add_block(name, block, names, family, rules, heads)
    return RuleSet(_WHERE, tuple(rules), tuple(heads))


def _add_block(
    name: str,
    block: torch.nn.Module,
    names: tuple[str, ...],
    family: Policy | None,
    rules: list[Rule],
    heads: list[Heads],
) -> None:
    linears = {inner: module for inner, module in block.named_modules() if _is_linear(module)}
    for row in names:
        if not any(_ends(inner, row) for inner in linears):
            raise ConfigError(
                f"{row!r} is no linear layer of {type(block).__name__} ({', '.join(linears) or 'it has none'})",
                where=_WHERE,
                fix="write the end of the dotted name of a linear layer within the block",
            )
    styles = {inner: "row" if any(_ends(inner, row) for row in names) else "column" for inner in linears}
    for inner, linear in linears.items():
        pattern = re.escape(f"{name}.{inner}" if name else inner)
        known = None
        if family is not None:
            known = next((rule for rule in family.rules if ends_with(rule.pattern, f"{name}.{inner}")), None)
        if known is not None and known.style == styles[inner]:
            rules.append(Rule(pattern, known.style, known.parts, known.is_interleaved))
            continue
        root = _attention_of(block, inner, [other for other, style in styles.items() if style == "row"])
        if root is None:
            rules.append(Rule(pattern, styles[inner]))
            continue
        width = max(
            (_inputs(linears[other]) for other, style in styles.items() if style == "row" and _is_in(other, root[0])),
            default=0,
        )
        part = _part_of(linear, styles[inner], width, f"{name}.{inner}")
        rules.append(Rule(pattern, styles[inner], (part,)))
        where = re.escape(f"{name}.{root[0]}" if name else root[0])
        if family is None and all(each.pattern != where for each in heads):
            owner = block.get_submodule(f"{root[0]}.{root[1]}" if root[1] else root[0])
            widths = tuple(each for each in _WIDTHS if vars(owner).get(each) == width)
            heads.append(Heads(where, owner=root[1], queries=_COUNTS, widths=widths))


def _part_of(linear: torch.nn.Module, style: str, width: int, where: str) -> str:
    if style == "row":
        return "queries"
    n_outputs = linear.weight.shape[1 if is_transposed(linear) else 0]
    if not width or n_outputs > width:
        raise ModelError(
            f"makes {n_outputs} columns, and the row layer of its attention takes {width}: several things lie in it,"
            " or the attention has no row layer",
            where=where,
            fix="name the attention's last layer in injection_policy; cut what is fused by"
            " tensor_parallel.partition_config",
        )
    return "queries" if n_outputs == width else "keys"


def _attention_of(block: torch.nn.Module, inner: str, rows: Sequence[str]) -> tuple[str, str] | None:
    """Return (name of the attention around the layer, name of its child with the counts of heads, or "" if it has them
    itself). The nearest module with counts is taken; modules that contain a row layer come first. None if there is
    none.
    """
    found: list[tuple[str, str]] = []
    while "." in inner:
        inner = inner.rpartition(".")[0]
        module = block.get_submodule(inner)
        child = next((name for name, child in module.named_children() if _has_counts(child)), "")
        if _has_counts(module) or child:
            found.append((inner, "" if _has_counts(module) else child))
    holders = [each for each in found if any(_is_in(row, each[0]) for row in rows)]
    return next(iter([*holders, *found]), None)


def _has_counts(module: torch.nn.Module) -> bool:
    return any(isinstance(vars(module).get(name), int) for name in _COUNTS)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or is_transposed(module)


def _inputs(linear: torch.nn.Module) -> int:
    return linear.weight.shape[0 if is_transposed(linear) else 1]


def _is_in(name: str, root: str) -> bool:
    return name.startswith(f"{root}.")


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
