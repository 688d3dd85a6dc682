"""Gives the weights of a rank's stages, which are on the meta device, their values: from files, a model or seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CheckpointError, DeepSpeedCError, ModelError
from deepspeed_c.offload.place import raise_together
from deepspeed_c.weights.files import open_weights
from deepspeed_c.weights.meta import TensorHolders, check_buffers, compute_buffers, device_of
from deepspeed_c.weights.names import named_as_in_model
from deepspeed_c.zero.weights.gathered import GatheredParameters
from deepspeed_c.zero.weights.param import shape_of

__all__ = ["fill_from_files", "fill_from_model", "fill_from_seeds"]

_WHERE = "from_transformers"
NAMES_SHOWN = 5


# Is called with each new parameter and its name, and may shard it.
Then = Callable[[torch.nn.Parameter, str], None]


def fill_from_files(
    own: torch.nn.Module, whole: torch.nn.Module, folder: str, comm: Collectives, then: Then | None
) -> None:
    """Read the tensors of ``own``, the part of ``whole`` that this rank has. Tensors of other ranks are not read.
    Collective.

    Raises CheckpointError on all ranks if a weight is missing or has another shape, before anything is read, and if a
    file cannot be read.
    """
    problem: DeepSpeedCError | None = None
    source: Source | None = None
    try:
        source = open_weights(folder, base_dir="", rank=0, n_ranks=1).source
        names: dict[int, list[str]] = {}
        for name, tensor in whole.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        source = named_as_in_model(source, whole, [name for of_one in names.values() for name in of_one])
        wanted = _wanted(own, names, source, folder)
    except DeepSpeedCError as error:
        problem = error
    try:
        raise_together(problem, CheckpointError, folder, comm)
        try:
            device = device_of(own)
            compute_buffers(own, device)
            holders = TensorHolders(own)
            for tensor, found in wanted:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                source.read([Read(found, 0, values.view(-1))])
                _place(holders, tensor, values, found.name, then)
        except DeepSpeedCError as error:
            problem = error
        raise_together(problem, CheckpointError, folder, comm)
    finally:
        if source is not None:
            source.close()


def _wanted(
    own: torch.nn.Module, names: Mapping[int, list[str]], source: Source, folder: str
) -> list[tuple[torch.Tensor, LogicalTensor]]:
    """The tensors to read, in the order of the files."""
    check_buffers(own)
    wanted, problems, seen = [], [], set()
    for tensor in own.state_dict(keep_vars=True).values():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        known = [*names[id(tensor)], *(source.aliases[name] for name in names[id(tensor)] if name in source.aliases)]
        keys = [(kind, name) for name in known for kind in (PARAM, BUFFER, MASTER)]
        found = next((source.tensors[key] for key in keys if key in source.tensors), None)
        if found is None:
            problems.append(f"{known[0]} is missing")
        elif tuple(found.shape) != tuple(tensor.shape):
            problems.append(f"{known[0]} has shape {tuple(found.shape)}, the model's has {tuple(tensor.shape)}")
        elif tensor.is_floating_point() and found.dtype.itemsize < 2:
            problems.append(f"{known[0]} is quantized ({found.dtype}), and its scales would be lost")
        else:
            wanted.append((tensor, found))
    if problems:
        more = f"; and {len(problems) - NAMES_SHOWN} more" if len(problems) > NAMES_SHOWN else ""
        raise CheckpointError(
            f"does not fit {type(own).__name__}: {'; '.join(problems[:NAMES_SHOWN])}{more}",
            where=folder,
            fix="name a folder that save_pretrained has written, with the configuration of its own weights",
        )
    order = {key: at for at, key in enumerate(source.tensors)}
    return sorted(wanted, key=lambda pair: order[pair[1].key])


def _place(
    holders: TensorHolders, tensor: torch.Tensor, values: torch.Tensor, name: str, then: Then | None
) -> torch.Tensor:
    new = holders.replace(tensor, values)
    if then is not None and isinstance(new, torch.nn.Parameter):
        then(new, name)
    return new


def fill_from_model(own: torch.nn.Module, model: torch.nn.Module, comm: Collectives, then: Then | None) -> None:
    """Copy the tensors of ``own`` from a whole model with the same names. Its parameters may be sharded. Collective.

    Raises ModelError on all ranks where it has others.
    """
    given = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    named = dict(own.named_parameters()) | dict(own.named_buffers())
    problem = None
    for name, tensor in named.items():
        if name not in given or shape_of(given[name]) != tensor.shape:
            problem = ModelError(
                f"{name} of shape {tuple(tensor.shape)} is not in the model, or has another shape there",
                where=_WHERE,
                fix="pass a model as its configuration makes it, or one with adapters of peft on it",
            )
            break
    raise_together(problem, ModelError, _WHERE, comm)
    holders = TensorHolders(own)
    names: dict[int, list[str]] = {}
    for name, source in given.items():
        names.setdefault(id(source), []).append(name)
    for of_one in names.values():
        source = given[of_one[0]]
        mine = [name for name in of_one if name in named]
        # The ranks of all stages gather a sharded weight together.
        with GatheredParameters(source):
            copies = [source.detach().to(dtype=named[name].dtype, copy=True) for name in mine]
        for name, values in zip(mine, copies):
            new = _place(holders, named[name], values, name, then)
            new.requires_grad_(source.requires_grad)


def fill_from_seeds(
    own: Any, layers: Mapping[int, Sequence[torch.nn.Module]], seed: Callable[[int], None], then: Then | None = None
) -> None:
    """Draw values as the model's ``_init_weights`` does, after ``seed(index)`` for each of ``layers``.

    Raises ModelError if it leaves a weight as it was.
    """
    device = device_of(own)
    check_buffers(own)
    compute_buffers(own, device)
    holders = TensorHolders(own)
    paths = {id(module): path for path, module in own.named_modules()}
    for index, modules in layers.items():
        made: list[tuple[torch.nn.Parameter, str]] = []
        for module in modules:
            named = [*module.named_parameters(), *module.named_buffers()]
            for name, tensor in named:
                if tensor.is_meta:
                    # A weight that is still NaN at the end has not been given a value.
                    blank = float("nan") if tensor.is_floating_point() else 0
                    values = torch.full(tensor.shape, blank, dtype=tensor.dtype, device=device)
                    new = holders.replace(tensor, values)
                    if isinstance(new, torch.nn.Parameter):
                        made.append((new, f"{paths[id(module)]}.{name}"))
        seed(index)
        with torch.no_grad():
            for module in modules:
                module.apply(own._init_weights)
        blank = [name for param, name in made if param.is_floating_point() and bool(param.isnan().any())]
        if blank:
            raise ModelError(
                f"{type(own).__name__}._init_weights gives {len(blank)} weights no value:"
                f" {', '.join(blank[:NAMES_SHOWN])}",
                where=_WHERE,
                fix="save a model once with transformers, and pass its folder",
            )
        for param, name in made if then is not None else ():
            then(param, name)
