"""Layer reduction: a student that begins as some of its teacher's layers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepspeed_c.config.compression import LayerReduction
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.zero.weights.gathered import GatheredParameters
from deepspeed_c.zero.weights.param import shape_of, state_of

__all__ = ["initialize_student"]

_KEY = "compression_training.layer_reduction"


def initialize_student(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copies parameters and buffers of the teacher into the student: layer ``teacher_layer[i]`` of
    ``module_name_prefix`` into layer i, and the modules of ``other_module_name``. Values take the student's dtypes.

    Collective if parameters are sharded. Raises ConfigError for a key that is missing or names no module, ModelError
    for modules whose tensors differ; the student is then unchanged.
    """
    copies = [
        copy for name, source in _pairs(student, teacher, section) for copy in _tensors(student, name, teacher, source)
    ]
    for target, source in copies:
        _copy(target, source)


def _pairs(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> Iterator[tuple[str, str]]:
    """(name of the student's module, name of the teacher's) of each module that is copied."""
    prefix, numbers = section.module_name_prefix, section.teacher_layer
    if numbers and prefix is None:
        raise ConfigError(
            "is missing", where=f"{_KEY}.module_name_prefix", fix='name the list of layers, for example "transformer.h"'
        )
    if not numbers and not section.other_module_name:
        raise ConfigError(
            "is missing", where=f"{_KEY}.teacher_layer", fix="list the numbers of the teacher's layers, from 0"
        )
    if numbers:
        yield from _layers(student, teacher, section)
    for name in section.other_module_name or ():
        for model, whose in ((teacher, "teacher"), (student, "student")):
            _find(model, name, whose, "other_module_name")
        yield name, name


def _layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> Iterator[tuple[str, str]]:
    prefix, numbers = section.module_name_prefix, section.teacher_layer
    held = _find(student, prefix, "student", "module_name_prefix")
    offered = _find(teacher, prefix, "teacher", "module_name_prefix")
    n_kept, n_offered = len(list(held.children())), len(list(offered.children()))
    if section.keep_number_layer not in (None, len(numbers)):
        raise ConfigError(
            f"is {section.keep_number_layer}, and teacher_layer names {len(numbers)} layers",
            where=f"{_KEY}.keep_number_layer",
            fix=f"write {len(numbers)}, or name as many layers",
        )
    if n_kept != len(numbers):
        raise ConfigError(
            f"names {len(numbers)} layers, and the student has {n_kept} in {prefix}",
            where=f"{_KEY}.teacher_layer",
            fix=f"name {n_kept} layers, or make the student with {len(numbers)}",
        )
    for i, number in enumerate(numbers):
        if number >= n_offered:
            raise ConfigError(
                f"names layer {number}, and the teacher has {n_offered} in {prefix}",
                where=f"{_KEY}.teacher_layer",
                fix=f"write numbers from 0 to {n_offered - 1}",
            )
        yield f"{prefix}.{i}", f"{prefix}.{number}"


def _find(model: nn.Module, name: str, whose: str, key: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name in modules:
        return modules[name]
    near = difflib.get_close_matches(name, [known for known in modules if known], n=3, cutoff=0.3)
    raise ConfigError(
        f"the {whose} has no module {name!r}",
        where=f"{_KEY}.{key}",
        fix=f"write the name of a module: {', '.join(near)}" if near else "write a name of named_modules()",
    )


def _tensors(student: nn.Module, name: str, teacher: nn.Module, source: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(student's tensor, teacher's tensor) of each parameter and buffer of a module that state dictionaries hold."""
    own, others = (_held(model.get_submodule(at)) for model, at in ((student, name), (teacher, source)))
    for key in {**own, **others}:
        sizes = [list(shape_of(tensors[key])) if key in tensors else None for tensors in (own, others)]
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"is {sizes[0] or 'not there'}, and {source}.{key} of the teacher is {sizes[1] or 'not there'}",
                where=f"{name}.{key}",
                fix="make the student with the teacher's sizes, in all but the number of layers",
            )
        yield own[key], others[key]


def _held(module: nn.Module) -> dict[str, Tensor]:
    persistent = module.state_dict(keep_vars=True).keys()
    return {
        name: tensor
        for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        for name, tensor in tensors
        if name in persistent
    }


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    state = state_of(target)
    writer = None if state is None else state.everyone.global_ranks[0]
    with GatheredParameters([source]), GatheredParameters([target], modifier_rank=writer):
        target.copy_(source)
