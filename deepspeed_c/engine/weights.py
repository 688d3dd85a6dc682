"""Moves the whole model's weights into and out of an engine, one gather unit at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.parts import Parts
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.gathered import GatheredParameters
from deepspeed_c.zero.weights.kinds import check_saved, code_layers, is_description, names_beside
from deepspeed_c.zero.weights.param import shape_of, state_of

if TYPE_CHECKING:
    from deepspeed_c.checkpoint.formats.stream import TensorFileWriter

__all__ = [
    "aliases_of",
    "check_weights",
    "consolidate",
    "load_custom",
    "load_weights",
    "named_tensors",
    "save_weights",
    "stream",
    "stream_order",
]


def named_tensors(module: torch.nn.Module, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by name. Parameters are the objects themselves, whether they are available or
    released."""
    state = module.state_dict(keep_vars=True)
    if exclude_frozen:
        frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        frozen |= names_beside(module, state)
        state = {name: value for name, value in state.items() if name not in frozen}
    return {name: value for name, value in state.items() if torch.is_tensor(value)}


def stream_order(tensors: Mapping[str, torch.Tensor]) -> tuple[list[str], dict[int, list[str]]]:
    """(names of tensors that are whole on this rank, names of the tensors of each gather unit). Each different tensor
    is listed once, under the first of its names."""
    seen: set[int] = set()
    whole: list[str] = []
    sharded: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        state = state_of(tensor)
        if isinstance(state, PlacedShard):
            sharded.setdefault(state.group.index, []).append(name)
        else:
            whole.append(name)
    return whole, dict(sorted(sharded.items()))


def stream(
    tensors: Mapping[str, torch.Tensor], fetcher: Fetcher | None, parts: Parts
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each different tensor in the order of ``stream_order`` while it is whole, and the experts of all ranks
    (``Parts.everyone``). Collective: iterate to the end."""
    whole, sharded = stream_order(tensors)
    for name in whole:
        yield from parts.everyone(name, tensors[name].detach())
    for index, names in sharded.items():
        group = fetcher.groups[index]
        fetcher.pin([group])
        try:
            for name in names:
                yield from parts.everyone(name, tensors[name].detach())
        finally:
            fetcher.unpin([group])


def aliases_of(tensors: Mapping[str, torch.Tensor], parts: Parts) -> dict[str, str]:
    """Other names of tied weights, of all ranks' experts too: name -> first name."""
    first: dict[int, str] = {}
    own = {name: first[id(t)] for name, t in tensors.items() if first.setdefault(id(t), name) != name}
    return {
        other: known
        for name, first_name in own.items()
        for other, known in zip(parts.names(name), parts.names(first_name))
    }


def consolidate(
    module: torch.nn.Module, fetcher: Fetcher | None, mesh: Mesh, *, exclude_frozen: bool, on_all_ranks: bool
) -> OrderedDict[str, torch.Tensor] | None:
    """The module's state dict of whole tensors in host memory, on rank 0 (None elsewhere) or on all ranks.
    Collective."""
    tensors = named_tensors(module, exclude_frozen)
    keeps = on_all_ranks or mesh.comm.rank == 0
    whole: dict[str, torch.Tensor] = {}
    parts = Parts(module, tensors, mesh)
    for name, tensor in stream(tensors, fetcher, parts):
        if keeps:
            whole[name] = tensor.to("cpu", copy=True)
    if not keeps:
        return None
    aliases = aliases_of(tensors, parts)
    return OrderedDict((name, whole[aliases.get(name, name)]) for own in tensors for name in parts.names(own))


def save_weights(
    module: torch.nn.Module, fetcher: Fetcher | None, mesh: Mesh, path: str, *, exclude_frozen: bool
) -> None:
    """Writes the module's weights to ``path`` on rank 0. No rank holds more of them than one gather unit. Codes are
    written as the matrices that they stand for, in the dtype that they were made from.

    Raises CheckpointError on all ranks if the file cannot be written. An older file of that name is intact then.
    """
    tensors = named_tensors(module, exclude_frozen)
    codes = {layer.named("weight"): layer for layer in code_layers(module)}
    for name in names_beside(module, tensors):
        del tensors[name]
    error: Exception | None = None
    writer: TensorFileWriter | None = None
    parts, comm = Parts(module, tensors, mesh), mesh.comm
    if comm.rank == 0:
        aliases = aliases_of(tensors, parts)
        entries = {
            name: (codes[own].shape, codes[own].dtype) if own in codes else (parts.shape(own, t), t.dtype)
            for own, t in tensors.items()
            for name in parts.names(own)
            if name not in aliases
        }
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            writer = files.stream.TensorFileWriter(path, entries, aliases)
            writer.__enter__()
        except (OSError, CheckpointError) as raised:
            error, writer = raised, None
    # A rank that cannot write still takes part in every gather, because the other ranks wait for it.
    for name, tensor in stream(tensors, fetcher, parts):
        if writer is not None and error is None:
            try:
                writer.write(name, codes[name].dense(tensor) if name in codes else tensor)
            except (OSError, CheckpointError) as raised:
                error = raised
    if writer is not None:
        try:
            writer.__exit__(type(error) if error else None, error, None)
        except (OSError, CheckpointError) as raised:
            error = error or raised
    if any(comm.gather_numbers(int(error is not None), label="weights written")):
        raise CheckpointError(
            f"the weights could not be written{f': {error}' if error else ' by rank 0'}",
            where=path,
            fix="look at rank 0's message: the folder must be writable and have room",
        ) from error


def check_weights(module: torch.nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
    """Raises StateError if the names or shapes of a state dict of whole tensors do not fit the module. The module's
    parameters may be sharded."""
    own = module.state_dict(keep_vars=True)
    problems, _ = check_saved(module, checkpoint, checkpoint.__getitem__)
    if strict:
        problems += [f"missing: {name}" for name in own if name not in checkpoint]
        problems += [f"unexpected: {name}" for name in checkpoint if name not in own]
    for name, tensor in own.items():
        value = checkpoint.get(name)
        if is_description(name) or not (torch.is_tensor(tensor) and torch.is_tensor(value)):
            continue
        if value.shape != shape_of(tensor):
            problems.append(f"{name} has shape {tuple(value.shape)}, the model's has {tuple(shape_of(tensor))}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise StateError(
            f"the state dict does not fit the model: {'; '.join(problems[:5])}{more}",
            where="load_module_state_dict",
            fix="load the state dict of this model, or pass strict=False for what is missing or unexpected",
        )


def load_weights(module: torch.nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Loads a state dict of whole tensors into a module with sharded parameters. The state dict is the same on every
    rank and has passed ``check_weights``.

    Each rank copies its own pieces; nothing is sent.
    """
    _, take_descriptions = check_saved(module, checkpoint, checkpoint.__getitem__)
    with torch.no_grad():
        take_descriptions()
        for name, tensor in module.state_dict(keep_vars=True).items():
            value = checkpoint.get(name)
            if is_description(name) or not torch.is_tensor(tensor) or not torch.is_tensor(value):
                continue
            state = state_of(tensor)
            if isinstance(state, PlacedShard):
                state.put_piece(state.own_part(value.detach().reshape(-1)))
            else:
                tensor.detach().copy_(value)


def load_custom(module: torch.nn.Module, load: Any, checkpoint: Any) -> None:
    """Calls the caller's load function with the whole module. Rank 0's result counts."""
    with GatheredParameters(module.parameters(), modifier_rank=0):
        load(src=checkpoint, dst=module)
