"""Finds the modules that a configuration's patterns name, and the rules that their layers get."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed_c.compression.basic_layer import (
    ActivationRule,
    ColumnParallelLinear_Compress,
    CompressedLayer,
    Embedding_Compress,
    LinearLayer_Compress,
    RowParallelLinear_Compress,
    WeightRule,
)
from deepspeed_c.compression.pruning import Kind, PruneRule
from deepspeed_c.config.compression import Compression, n_of_m
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer
from deepspeed_c.zero.weights.param import shape_of

__all__ = [
    "activation_rules",
    "check_own_weight",
    "find",
    "is_compressible",
    "layer_class",
    "prune_rules",
    "weight_rules",
]

_KEY = "compression_training"
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LINEAR = (nn.Linear, LinearLayer, LinearAllreduce)


def is_compressible(module: nn.Module, mpu: Any = None) -> bool:
    """Whether DeepSpeed's compression looks at modules of this kind. mpu: Megatron's; its linear layers count too."""
    kinds: tuple[type, ...] = (*_LINEAR, nn.Conv2d, nn.Embedding, nn.BatchNorm2d)
    if mpu is not None:
        own = (getattr(mpu, name, None) for name in ("RowParallelLinear", "ColumnParallelLinear"))
        kinds += tuple(kind for kind in own if isinstance(kind, type))
    return isinstance(module, kinds)


def find(model: nn.Module, pattern: str, where: str, mpu: Any = None) -> list[str]:
    """Names of the compressible modules in whose names the regular expression is found; "*" stands for all.

    Raises ConfigError if it is no regular expression.
    """
    try:
        wanted = re.compile(".*" if pattern == "*" else pattern)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}", where=where, fix='write a part of the names, or "*"'
        ) from error
    return [name for name, module in model.named_modules() if is_compressible(module, mpu) and wanted.search(name)]


def layer_class(module: nn.Module, name: str) -> type[CompressedLayer]:
    """The compressed layer for a linear layer or an embedding.

    Raises ModelError for a module whose weight is not used as that of these classes is.
    """
    if isinstance(module, CompressedLayer):
        return type(module)
    kinds: tuple[tuple[type[nn.Module], type[CompressedLayer]], ...] = (
        (LinearLayer, ColumnParallelLinear_Compress),
        (LinearAllreduce, RowParallelLinear_Compress),
        (nn.Linear, LinearLayer_Compress),
        (nn.Embedding, Embedding_Compress),
    )
    for plain, compressed in kinds:
        if isinstance(module, plain):
            why = _obstacle(module, plain)
            if why is None:
                return compressed
            break
    else:
        why = "layers of this class are not built"
    raise ModelError(
        f"the {type(module).__name__} cannot be compressed: {why}",
        where=name,
        fix=f"write patterns in {_KEY} that leave it out",
    )


def _obstacle(module: nn.Module, plain: type[nn.Module]) -> str | None:
    if type(module).forward is not plain.forward or "forward" in vars(module):
        return "it has its own forward"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "torch.nn.MultiheadAttention reads its weight without a call of it"
    if isinstance(module, (LinearLayer, LinearAllreduce)) and module.is_transposed:
        return "its weight is [in, out]"
    if isinstance(module, LinearLayer) and module.picker is not None:
        return "each rank picks columns of a whole weight"
    return None


def _named(model: nn.Module, key: str, technique: Any, kinds: tuple[type, ...], mpu: Any) -> dict[str, Any]:
    """The group of each module that a technique names.

    Raises ConfigError if a pattern fits none of ``kinds``, or if two patterns fit one module.
    """
    modules = dict(model.named_modules())
    chosen: dict[str, Any] = {}
    for group_name, group in technique.different_groups.items():
        where = f"{_KEY}.{key}.different_groups.{group_name}.modules"
        for pattern in group.modules:
            names = find(model, pattern, where, mpu)
            _refuse_convolutions(modules, pattern, where, names)
            names = [name for name in names if not isinstance(modules[name], nn.BatchNorm2d)]
            names = [name for name in names if isinstance(modules[name], kinds) or not is_compressible(modules[name])]
            if not names:
                known = [name for name, module in modules.items() if isinstance(module, kinds)]
                near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
                wanted = " or ".join(kind.__name__ for kind in kinds if kind in (nn.Linear, nn.Embedding))
                raise ConfigError(
                    f"{pattern!r} matches no {wanted}",
                    where=where,
                    fix=f"write a part of a module's name: {', '.join(near)}" if near else "remove the group",
                )
            twice = [name for name in names if name in chosen]
            if twice:
                raise ConfigError(
                    f"{pattern!r} matches {twice[0]}, which another pattern of {key} matches already",
                    where=where,
                    fix="write patterns of which one matches each module",
                )
            chosen.update(dict.fromkeys(names, group))
    return chosen


def _refuse_convolutions(modules: dict[str, nn.Module], pattern: str, where: str, names: list[str]) -> None:
    for name in names:
        if isinstance(modules[name], _CONVOLUTIONS):
            raise ConfigError(
                f"{pattern!r} matches {name}, and convolutions are not built",
                where=where,
                fix="write patterns that match linear layers and embeddings only",
            )


def weight_rules(model: nn.Module, section: Compression, mpu: Any = None) -> dict[str, WeightRule]:
    """The rule of each layer whose weight is quantized. Layers that share a weight with one of these share its rule.

    Raises ConfigError or ModelError: see ``init_compression``.
    """
    technique, shared = section.weight_quantization, section.weight_quantization.shared_parameters
    if not shared.enabled:
        return {}
    chosen = _named(model, "weight_quantization", technique, (*_LINEAR, nn.Embedding), mpu)
    for name in chosen:
        layer_class(model.get_submodule(name), name)  # Megatron's layers are refused
    rules: dict[str, WeightRule] = {}
    for index, (names, weight) in enumerate(_by_weight(model)):
        groups = {name: chosen[name] for name in names if name in chosen}
        if not groups:
            continue
        bits = {group.params.target_bits for group in groups.values()}
        if len(bits) > 1:
            raise ConfigError(
                f"{', '.join(groups)} share one weight, and have {' and '.join(map(str, sorted(bits)))} bits",
                where=f"{_KEY}.weight_quantization.different_groups",
                fix="give them the same target_bits",
            )
        is_table = any(isinstance(model.get_submodule(name), nn.Embedding) for name in names)
        n_groups, offset = _groups(weight, names[0], None if is_table else shared.quantize_groups)
        rule = WeightRule(
            bits=bits.pop(),
            n_groups=n_groups,
            is_symmetric=shared.quantization_type == "symmetric",
            levels=shared.levels,
            is_stochastic=shared.rounding == "stochastic",
            first_step=shared.schedule_offset,
            index=index,
            offset=offset,
        )
        rules.update(dict.fromkeys(names, rule))
    return rules


def _by_weight(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """(names of the modules that hold it, weight) of each different weight of a linear layer or embedding."""
    holders: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (*_LINEAR, nn.Embedding)) and weight is not None:
            holders.setdefault(id(weight), ([], weight))[0].append(name)
    yield from holders.values()


def _groups(weight: torch.Tensor, name: str, n_groups: int | None) -> tuple[int, int]:
    """(groups of this rank's part, position of the part's first element for random numbers) for ``n_groups`` groups of
    the whole weight; None: a group for each row.

    Raises ConfigError if the groups are not equal, or if one lies on two tensor-parallel ranks.
    """
    cut: Cut | None = getattr(weight, "tp_cut", None)
    shape = shape_of(weight) if cut is None else cut.logical_shape
    n_elems, key = shape.numel(), f"{_KEY}.weight_quantization.shared_parameters.quantize_groups"
    if n_groups is None:
        n_groups = max(shape[0], 1)
    if n_elems == 0:
        return 1, 0
    if n_elems % n_groups:
        near = min((n for n in range(1, n_elems + 1) if n_elems % n == 0), key=lambda n: abs(n - n_groups))
        raise ConfigError(
            f"{n_groups} does not divide the {n_elems} elements of {name}.weight {list(shape)}",
            where=key,
            fix=f"write {near}, or leave the layer out",
        )
    if cut is None:
        return n_groups, 0
    n_each = n_elems // n_groups
    if not all(start % n_each == 0 and n % n_each == 0 for start, n in _runs(cut)):
        raise ConfigError(
            f"groups of {n_each} elements of {name}.weight {list(shape)} lie on two tensor-parallel ranks",
            where=key,
            fix=f"write {_fitting_groups(cut, n_groups)}, or leave the layer out",
        )
    n_own, runs = cut.local_shape.numel(), list(_runs(cut))
    # Positions of several runs are not consecutive. The part then counts as a piece of its own, behind other ranks'.
    return n_own // n_each, runs[0][0] if len(runs) == 1 else cut.copies[0] * n_own


def _runs(cut: Cut) -> Iterator[tuple[int, int]]:
    """(position in the whole weight [rows, columns], number) of consecutive elements of a part."""
    n_columns = cut.logical_shape[1]
    for box in cut.boxes:
        (row, column), (n_rows, n_own) = box.logical_offset, box.size
        if n_own == n_columns:
            yield row * n_columns, n_rows * n_columns
        else:
            yield from (((row + i) * n_columns + column, n_own) for i in range(n_rows))


def _fitting_groups(cut: Cut, n_groups: int) -> int:
    """The number of groups next above ``n_groups`` that fits the parts of all ranks."""
    n_elems, runs = cut.logical_shape.numel(), {size for run in _runs(cut) for size in run if size}
    sizes = (n for n in range(n_elems // n_groups, 0, -1) if n_elems % n == 0 and all(size % n == 0 for size in runs))
    return n_elems // next(sizes)


def activation_rules(model: nn.Module, section: Compression, mpu: Any = None) -> dict[str, ActivationRule]:
    """The rule of each linear layer whose input is quantized.

    Raises ConfigError: see ``init_compression``.
    """
    technique, shared = section.activation_quantization, section.activation_quantization.shared_parameters
    if not shared.enabled:
        return {}
    chosen = _named(model, "activation_quantization", technique, _LINEAR, mpu)
    return {
        name: ActivationRule(
            bits=group.params.bits,
            is_symmetric=shared.quantization_type == "symmetric",
            levels=shared.levels,
            is_static=shared.range_calibration == "static",
            first_step=shared.schedule_offset,
        )
        for name, group in chosen.items()
    }


def prune_rules(model: nn.Module, section: Compression, mpu: Any = None) -> dict[str, list[PruneRule]]:
    """The rules of each linear layer that is pruned.

    Raises ConfigError or ModelError: see ``init_compression``.
    """
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    rules: dict[str, list[PruneRule]] = {}
    kinds: tuple[Kind, ...] = ("sparse", "row", "head")
    for kind in kinds:
        key, technique = f"{kind}_pruning", getattr(section, f"{kind}_pruning")
        shared = technique.shared_parameters
        if not shared.enabled:
            continue
        excluded = {name for word in getattr(shared, "excluded_modules", ()) for name in find(model, word, key, mpu)}
        for name, group in _named(model, key, technique, _LINEAR, mpu).items():
            if name not in excluded:
                rule = _prune_rule(kind, shared, group.params.dense_ratio, order[name])
                _check_prunable(model, name, rule)
                rules.setdefault(name, []).append(rule)
    return rules


def _prune_rule(kind: Kind, shared: Any, dense_ratio: float | None, index: int) -> PruneRule:
    pattern = n_of_m(shared.block_pattern) if kind == "sparse" else None
    is_gradual = getattr(shared, "gradual", False)
    end = shared.schedule_offset_end if is_gradual else None
    return PruneRule(
        kind=kind,
        method=shared.method,
        dense_ratio=dense_ratio if pattern is None else pattern[0] / pattern[1],
        first_step=shared.schedule_offset,
        last_step=shared.schedule_offset if end is None else end,
        stride=shared.schedule_offset_stride if is_gradual else 1,
        n_of_m=pattern,
        num_heads=getattr(shared, "num_heads", 0),
        index=index,
    )


def check_own_weight(model: nn.Module, name: str) -> None:
    """Raises ModelError unless the module is a whole ``torch.nn.Linear`` that shares its weight with no other."""
    module, leave_out = model.get_submodule(name), f"write patterns in {_KEY} that leave it out"
    if layer_class(module, name) is not LinearLayer_Compress:
        raise ModelError("layers that are cut over tensor-parallel ranks are not pruned", where=name, fix=leave_out)
    if module.weight.is_meta:
        raise ModelError("a weight on the meta device has no magnitudes", where=name, fix="load the weights first")
    for other, holder in model.named_modules():
        if holder is not module and getattr(holder, "weight", None) is module.weight:
            what = f"it shares its weight with {other}, which would be pruned, too"
            raise ModelError(what, where=name, fix=leave_out)


def _check_prunable(model: nn.Module, name: str, rule: PruneRule) -> None:
    """Raises ModelError for a layer whose weight is not its own, ConfigError for a number that does not divide its
    columns."""
    check_own_weight(model, name)
    path, n_columns = f"{_KEY}.{rule.kind}_pruning", shape_of(model.get_submodule(name).weight)[1]
    divisors = {"num_heads": rule.num_heads, "block_pattern": 0 if rule.n_of_m is None else rule.n_of_m[1]}
    for key, divisor in divisors.items():
        if divisor and n_columns % divisor:
            raise ConfigError(
                f"{divisor} does not divide the {n_columns} input columns of {name}",
                where=f"{path}.shared_parameters.{key}",
                fix=f"write a number that divides them, or patterns in {path} that leave it out",
            )
