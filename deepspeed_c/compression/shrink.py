"""Makes pruned layers really smaller: rows and heads that are pruned go, and so do the columns or rows of the modules
that ``related_modules`` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_c.compression.pruning import Kind
from deepspeed_c.compression.targets import check_own_weight, find
from deepspeed_c.config.compression import Compression
from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.zero.weights.param import shape_of, state_of

__all__ = ["Shrinking", "check_shrinkable", "shrink", "shrinkings", "warn_of_siblings"]

# Names of numbers in attention modules and configurations of transformers.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("embed_dim", "all_head_size", "inner_dim")
# Names of the number of rows of an MLP's first layer; None in some configurations: 4 times the width of the model.
_MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff")


@dataclass(frozen=True, kw_only=True)
class Shrinking:
    """A pruned layer and the layers that are cut along with it."""

    kind: Literal["row", "head"]
    name: str
    """The layer with the mask. Its rows go, or its columns in the case of heads."""
    related: tuple[str, ...]
    """The layers of which columns go, or rows in the case of heads."""
    siblings: tuple[str, ...]
    """Layers that lose the same rows: in a gated MLP, ``name`` and its sibling multiply their outputs."""
    num_heads: int
    """Equal blocks of columns; 0 for rows."""
    where: str
    """Key of the related modules."""

    @property
    def cuts(self) -> Iterator[tuple[str, int]]:
        """(layer, dimension of its weight) of each cut."""
        own = 0 if self.kind == "row" else 1
        yield self.name, own
        yield from ((name, 1 - own) for name in self.related)
        yield from ((name, 0) for name in self.siblings)


def shrinkings(model: nn.Module, section: Compression, mpu: Any = None) -> list[Shrinking]:
    """The layers that get smaller. The n-th module that a pattern matches belongs to the n-th of its related modules.

    Raises ConfigError for numbers and sizes that do not fit, and ModelError for a layer that cannot be cut.
    """
    made: list[Shrinking] = []
    for kind in ("row", "head"):
        technique = getattr(section, f"{kind}_pruning")
        groups = technique.different_groups if technique.shared_parameters.enabled else {}
        for group_name, group in groups.items():
            where = f"compression_training.{kind}_pruning.different_groups.{group_name}.related_modules"
            for pattern, words in zip(group.modules, group.related_modules or ()):
                names = _linear(model, pattern, where, mpu)
                found = [_linear(model, word, where, mpu) for word in words]
                for word, related in zip(words, found, strict=True):
                    _check_number(pattern, names, word, related, where)
                num_heads = getattr(technique.shared_parameters, "num_heads", 0)
                for name, *related in zip(names, *found, strict=True) if found else ():
                    siblings = [other for other in related if kind == "row" and _is_sibling(model, name, other)]
                    made.append(
                        Shrinking(
                            kind=kind,
                            name=name,
                            related=tuple(other for other in related if other not in siblings),
                            siblings=tuple(siblings),
                            num_heads=num_heads,
                            where=where,
                        )
                    )
    cut: set[tuple[str, int]] = set()
    for plan in made:
        _check_sizes(model, plan)
        for name, dim in plan.cuts:
            check_own_weight(model, name)
            if (name, dim) in cut:
                what = f"the {('rows', 'columns')[dim]} of {name} are cut twice"
                fix = "name each module once; layers whose outputs are multiplied are one of modules, and related ones"
                raise ConfigError(what, where=plan.where, fix=fix)
            cut.add((name, dim))
    return made


def _linear(model: nn.Module, pattern: str, where: str, mpu: Any) -> list[str]:
    return [name for name in find(model, pattern, where, mpu) if isinstance(model.get_submodule(name), nn.Linear)]


def _is_sibling(model: nn.Module, name: str, other: str) -> bool:
    """Whether the outputs of ``other`` may be multiplied by those of ``name``: it is a layer of the same module and
    shape, and its columns are not the rows of ``name``.
    """
    if name.rpartition(".")[0] != other.rpartition(".")[0]:
        return False
    shape, others = (shape_of(model.get_submodule(layer).weight) for layer in (name, other))
    return others == shape and others[1] != shape[0]


def warn_of_siblings(model: nn.Module, plans: Sequence[Shrinking]) -> None:
    """Logs a warning if layers like the pruned ones stay as they are: a gated MLP could no longer multiply."""
    cut = {name for plan in plans for name, _ in plan.cuts}
    for plan in plans:
        holder = plan.name.rpartition(".")[0]
        children = model.get_submodule(holder).named_children() if plan.kind == "row" else ()
        for last, layer in children:
            other = f"{holder}.{last}" if holder else last
            if isinstance(layer, nn.Linear) and other not in cut and _is_sibling(model, plan.name, other):
                logger.warning(
                    "rows of %s will go, and %s has the same shape; if their outputs are multiplied or added, name it too in %s",
                    plan.name, other, plan.where,
                )  # fmt: skip
                return


def _check_number(pattern: str, names: list[str], word: str, related: list[str], where: str) -> None:
    if len(names) != len(related):
        raise ConfigError(
            f"{word!r} matches {len(related)} linear layers, and {pattern!r} of modules matches {len(names)}",
            where=where,
            fix="write patterns that match one related module for each module",
        )


def _check_sizes(model: nn.Module, plan: Shrinking) -> None:
    n_rows, n_columns = shape_of(model.get_submodule(plan.name).weight)
    attention = numbers = None
    if plan.kind == "head":
        attention = _attention(model, plan)
        numbers = {**_numbers(getattr(attention, "config", None)), **_numbers(attention)}
        _check_heads(plan, attention, numbers)
    for name in plan.related:
        shape = shape_of(model.get_submodule(name).weight)
        what = ""
        if plan.kind == "row" and shape[1] != n_rows:
            what = f"{name} has {shape[1]} input columns, and {plan.name} has {n_rows} rows"
        elif plan.kind == "head" and shape[0] != n_columns:
            what = f"{name} has {shape[0]} rows, and {plan.name} has {n_columns} input columns"
            # Fewer rows are right where query heads share keys, and each of num_heads blocks has whole key heads.
            if {"num_key_value_heads", "num_kv_heads"} & set(numbers) and shape[0] % plan.num_heads == 0:
                what = ""
        if what:
            raise ConfigError(what, where=plan.where, fix="name the modules that it is connected to")


def _check_heads(plan: Shrinking, attention: nn.Module, numbers: Mapping[str, int]) -> None:
    if hasattr(attention, "has_relative_attention_bias"):
        raise ModelError(
            f"the relative positions of {type(attention).__name__} have a column for each head, which are not cut",
            where=plan.name,
            fix=f"leave out {plan.where}: heads are then masked",
        )
    for key, number in numbers.items():
        if number % plan.num_heads:
            raise ConfigError(
                f"{plan.num_heads} blocks of heads do not divide {key} = {number} of {type(attention).__name__}",
                where=f"{plan.where.partition('.different_groups')[0]}.shared_parameters.num_heads",
                fix=f"write {number}: query heads that share keys are pruned together",
            )


def _attention(model: nn.Module, plan: Shrinking) -> nn.Module:
    """The module that holds the first related module."""
    return model.get_submodule(plan.related[0].rpartition(".")[0])


def _numbers(holder: Any) -> dict[str, int]:
    """The numbers of heads that a module or a configuration has."""
    values = {name: getattr(holder, name, None) for name in _HEADS}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def check_shrinkable(model: nn.Module, plans: list[Shrinking]) -> None:
    """Raises StateError for a sharded weight."""
    for name in (name for plan in plans for name, _ in plan.cuts):
        if state_of(model.get_submodule(name).weight) is not None:
            raise StateError(
                "its weight is sharded, and cannot get smaller",
                where=name,
                fix="load the weights into a model without an engine, and clean that",
            )


def shrink(model: nn.Module, plans: list[Shrinking], masks: Mapping[str, Mapping[Kind, Tensor]]) -> None:
    """Cut the layers, which have passed ``check_shrinkable``, and tell attention modules and their configuration the
    new number of heads. masks: of each layer, by name."""
    heads: dict[nn.Module, tuple[int, int, int]] = {}
    widths: dict[str, tuple[int, int]] = {}
    for plan in plans:
        kept = masks[plan.name][plan.kind].view(-1)
        if plan.kind == "row":
            widths[plan.name] = (int(kept.sum()), len(kept))
        if plan.kind == "head":
            width = model.get_submodule(plan.name).in_features
            heads[_attention(model, plan)] = (int(kept.sum()), len(kept), width)
        for name, dim in plan.cuts:
            layer = model.get_submodule(name)
            _cut(layer, kept.repeat_interleave(layer.weight.shape[dim] // len(kept)), dim)
    _tell_widths(model, widths)
    _tell_configurations(model, heads)
    for attention, (n_kept, n_heads, width) in heads.items():
        same = {key: width for key in _WIDTHS if getattr(attention, key, None) == width}
        numbers = _numbers(attention) | same
        _write(attention, {key: number * n_kept // n_heads for key, number in numbers.items()})


def _cut(layer: nn.Linear, kept: Tensor, dim: int) -> None:
    """Keep some rows (dim 0) or columns (dim 1) of a layer. kept: bool, on any device."""
    index = kept.nonzero().view(-1).to(layer.weight.device)
    layer.register_parameter("weight", _part(layer.weight, index, dim))
    if dim == 1:
        layer.in_features = len(index)
        return
    layer.out_features = len(index)
    if layer.bias is not None:
        layer.register_parameter("bias", _part(layer.bias, index, 0))


def _part(param: nn.Parameter, index: Tensor, dim: int) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(param.index_select(dim, index), requires_grad=param.requires_grad)


def _tell_widths(model: nn.Module, widths: Mapping[str, tuple[int, int]]) -> None:
    """Writes the new number of rows into the modules that hold the layers, and into the configuration if it holds for
    all modules of these classes. widths: (new, old) of each layer.
    """
    holders = {model.get_submodule(name.rpartition(".")[0]): numbers for name, numbers in widths.items()}
    for holder, (n_kept, n_rows) in holders.items():
        _write(holder, {key: n_kept for key in _MLP_WIDTHS if getattr(holder, key, None) == n_rows})
    kinds = tuple({type(holder) for holder in holders})
    if len(set(widths.values())) != 1 or any(isinstance(m, kinds) and m not in holders for m in model.modules()):
        return
    ((n_kept, n_rows),) = set(widths.values())
    configs = [getattr(holder, "config", None) for holder in (*holders, model)]
    for config in {id(config): config for config in configs if config is not None}.values():
        values = {key: getattr(config, key) for key in _MLP_WIDTHS if hasattr(config, key)}
        known = [key for key, value in values.items() if value == n_rows]
        _write(config, dict.fromkeys(known or [key for key, value in values.items() if value is None], n_kept))


def _tell_configurations(model: nn.Module, heads: Mapping[nn.Module, tuple[int, int, int]]) -> None:
    """Writes the new numbers into the configuration if it holds for all attention modules. It has one for all layers."""
    configs = {id(a.config): a.config for a in heads if getattr(a, "config", None) is not None}
    for config in configs.values():
        cut = [attention for attention in heads if getattr(attention, "config", None) is config]
        kinds = tuple({type(attention) for attention in cut})
        others = (m for m in model.modules() if isinstance(m, kinds) and getattr(m, "config", None) is config)
        if len({heads[attention] for attention in cut}) > 1 or any(m not in heads for m in others):
            continue
        n_kept, n_heads, width = heads[cut[0]]
        numbers = _numbers(config)
        n_query = next((numbers[key] for key in _HEADS if key in numbers), 0)
        news = {key: number * n_kept // n_heads for key, number in numbers.items()}
        if n_query and getattr(config, "head_dim", None) is None:
            news["head_dim"] = width // n_query
        _write(config, news)


def _write(holder: Any, numbers: Mapping[str, int]) -> None:
    """Set the numbers of an attention module or a configuration."""
    for key, number in numbers.items():
        # A frozen configuration, or a property that is computed, stays as it is: the layers are smaller already.
        with suppress(AttributeError, ValueError):
            setattr(holder, key, number)
