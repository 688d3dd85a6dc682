"""Leaf modules, which are gathered as a whole because ranks may run different parts of them (the experts of a mixture)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.zero.weights.param import shape_of

__all__ = [
    "apply_zero_leaf_module_config",
    "find_expert_blocks",
    "get_z3_leaf_modules",
    "is_leaf",
    "mark_fine_modules",
    "mark_parameters",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_FLAG = "_z3_leaf"  # DeepSpeed's name: callers look at it


def is_leaf(module: torch.nn.Module) -> bool:
    return bool(module.__dict__.get(_FLAG, False))


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether ``model`` itself is marked as a leaf."""
    return is_leaf(model)


def z3_leaf_parameter(model: torch.nn.Parameter) -> bool:
    """Whether the parameter ``model`` (DeepSpeed's name for it) lay below a leaf when stage 3 placed its hooks."""
    return bool(getattr(model, _FLAG, False))


def mark_parameters(leaf: torch.nn.Module) -> None:
    """Marks the parameters below a leaf. The mark is no reference to the module, because a pickle of a parameter has
    its attributes."""
    for param in leaf.parameters():
        param.__dict__[_FLAG] = True


def set_z3_leaf_module(model: torch.nn.Module, flag: bool = True) -> None:
    """Marks (or unmarks) one module, before ``initialize``."""
    model.__dict__[_FLAG] = flag


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All marked modules below and including ``model``."""
    return [module for module in model.modules() if is_leaf(module)]


def _class_name(module: torch.nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _listed(given: Any) -> list[Any]:
    """Returns ``given`` as a list; a single class or name becomes a list of one."""
    return [given] if isinstance(given, (str, type)) else list(given)


def _mark(
    model: torch.nn.Module, wanted: Sequence[Any], matches: Any, flag: bool, what: str, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    found = [module for name, module in model.named_modules() if matches(name, module)]
    for module in found:
        set_z3_leaf_module(module, flag)
    if not found and raise_if_not_found:
        raise ModelError(
            f"no module of {type(model).__name__} has {what} {list(wanted)}",
            where="leaf modules",
            fix="look at model.named_modules()",
        )
    return found


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str] | type | str, raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks every module of the given classes (classes, their names or their full names). Returns the marked ones."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str] | type | str, raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Takes the marks of ``set_z3_leaf_modules`` away."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def _mark_classes(
    model: torch.nn.Module, classes: Sequence[type | str] | type | str, flag: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    classes = _listed(classes)
    for kind in classes:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            raise ModelError(
                f"{kind!r} is neither a module class nor the name of one",
                where="set_z3_leaf_modules",
                fix="pass classes, or names as type(module).__name__ gives them",
            )
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    return _mark(
        model,
        classes,
        lambda _, module: isinstance(module, kinds) or not names.isdisjoint(_class_name(module)),
        flag,
        "the class",
        raise_if_not_found,
    )


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks modules by their full names in ``model``. Returns (marked modules, names that were not found)."""
    names = set(_listed(module_names))
    found = _mark(model, module_names, lambda name, _: name in names, flag, "the name", raise_if_not_found)
    return found, sorted(names - {name for name, _ in model.named_modules()})


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks modules whose full names end with any of the suffixes. Returns (marked modules, suffixes that fit nothing)."""
    suffixes = _listed(module_name_suffixes)

    def fits(name: str, suffix: str) -> bool:
        return name == suffix or name.endswith("." + suffix)

    found = _mark(
        model,
        suffixes,
        lambda name, _: any(fits(name, s) for s in suffixes),
        flag,
        "a name that ends with",
        raise_if_not_found,
    )
    names = [name for name, _ in model.named_modules()]
    return found, [s for s in suffixes if not any(fits(name, s) for name in names)]


def apply_zero_leaf_module_config(model: torch.nn.Module, leaf_cfg: Any) -> list[torch.nn.Module]:
    """Marks the modules of the section ``zero_optimization.leaf_module``: classes, names, name_suffixes. A listed
    module that the model does not have is no error."""
    marked: list[torch.nn.Module] = []
    if leaf_cfg.classes:
        marked += set_z3_leaf_modules(model, leaf_cfg.classes, raise_if_not_found=False)
    if leaf_cfg.names:
        marked += set_z3_leaf_modules_by_name(model, leaf_cfg.names, raise_if_not_found=False)[0]
    if leaf_cfg.name_suffixes:
        marked += set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes, raise_if_not_found=False)[0]
    return list(dict.fromkeys(marked))


def mark_fine_modules(model: torch.nn.Module, threshold: int) -> list[torch.nn.Module]:
    """Marks the topmost modules that have at most ``threshold`` elements of parameters for each submodule below them
    (``stage3_module_granularity_threshold``)."""
    found: list[torch.nn.Module] = []
    todo = list(model.children())
    while todo:
        module = todo.pop()
        n_below = sum(1 for _ in module.modules()) - 1
        if n_below and sum(shape_of(p).numel() for p in module.parameters()) // n_below <= threshold:
            set_z3_leaf_module(module)
            found.append(module)
        else:
            todo.extend(module.children())
    return found


_EXPERTS = re.compile(r"experts?$")


def find_expert_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that hold a list of experts: a ModuleList or ModuleDict of at least two modules of one class, whose name
    ends in ``expert`` or ``experts``. The data decides which experts run, so ranks would gather different experts.
    Therefore the module that holds the list becomes a leaf, unless it says that it runs every expert each time
    (``runs_every_expert``)."""
    found = []
    for module in model.modules():
        if getattr(module, "runs_every_expert", False):
            continue
        for name, child in module.named_children():
            if not isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)) or not _EXPERTS.search(name):
                continue
            kinds = {type(expert) for expert in child.children()}
            if len(child) > 1 and len(kinds) == 1:
                found.append(module)
                break
    return found
