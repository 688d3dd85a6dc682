"""Activation checkpointing under DeepSpeed's names: layers whose activations are recomputed in the backward.

``initialize`` takes its settings from the section ``activation_checkpointing``, ``configure`` from its arguments. Calls
within an engine's forward use the engine's settings if its section enables something. All other calls use the settings
of the last ``configure``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from deepspeed_c.config import load_config
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.config.offload import Aio
from deepspeed_c.config.parallel import Comm
from deepspeed_c.errors import ConfigError
from deepspeed_c.recompute import nests, packers, rng
from deepspeed_c.recompute.configured import checkpoint, configured, non_reentrant_checkpoint
from deepspeed_c.recompute.nests import detach_variable, extract_tensors, merge_tensors
from deepspeed_c.recompute.offload_activations import offload_activations
from deepspeed_c.recompute.rng import CudaRNGStatesTracker, get_cuda_rng_tracker

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "detach_variable",
    "extract_tensors",
    "gather_partitioned_activations",
    "get_cpu_activations_for_backward",
    "get_cuda_rng_tracker",
    "get_offloaded_activations_for_backward",
    "get_partition_size",
    "get_partition_start",
    "get_partitioned_activations_for_backward",
    "is_activation_to_checkpoint",
    "is_configured",
    "merge_tensors",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "offload_activations",
    "partition_activations",
    "partition_activations_in_checkpoint",
    "profile_of_layers",
    "reset",
    "restore_offloaded_activations",
    "set_num_layers",
]

# Argument of configure -> key of the section.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how ``checkpoint`` keeps the inputs of layers. Arguments given here win over ``deepspeed_config``.

    mpu_: an object with ``get_tensor_model_parallel_group()`` or ``get_model_parallel_group()``, or None: activations
        are cut over the ranks of that group. All of them call ``configure``, together.
    deepspeed_config: a configuration (a dict, or a path). Its sections ``activation_checkpointing`` and ``aio`` and its
        key ``comm.local`` are read.

    profile: count times and bytes of each layer, for ``profile_of_layers``.

    Raises ConfigError where ``contiguous_checkpointing`` lacks a setting that it needs, or a file cannot be made.
    Raises CommError where ``comm.local`` is "shm" and the ranks cannot share memory.
    """
    given = locals()
    section, aio, local = ActivationCheckpointing(), Aio(), Comm().local
    if deepspeed_config is not None:
        config = load_config(deepspeed_config, world_size=1, batch="skip")
        section, aio, local = config.activation_checkpointing, config.aio, config.comm.local
    wanted = {key: given[argument] for argument, key in _KEYS.items() if given[argument] is not None}
    section = msgspec.structs.replace(section, **wanted)
    if section.budget is not None:
        raise ConfigError(
            "a budget is kept forward by forward, which an engine knows and configure does not",
            where="checkpointing.configure(deepspeed_config=...): activation_checkpointing.budget",
            fix="give the section to initialize, whose engine's calls of checkpoint() then follow it",
        )
    configured.set_up(section, mpu_, aio, local)


def is_configured() -> bool:
    """Whether ``configure`` has been called."""
    return configured.is_done


def reset() -> None:
    """Free the memory that is kept between steps. The settings are kept."""
    configured.recomputer.clear()


def profile_of_layers() -> dict[str, dict[str, int]]:
    """Times (ns) and bytes of each layer since ``configure(profile=True)``: ``counters.LayerFigures`` by label. Empty
    if nothing was profiled.
    """
    counters = configured.recomputer.counters
    return {} if counters is None else counters.as_dict()


def set_num_layers(nlayers: int) -> None:
    """Set the number of layers for ``contiguous_checkpointing``. This is a hint, used if no other setting gives the
    number."""
    configured.count_layers(nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch the cutting of activations on or off, from the next layer on."""
    configured.cut(partition_activation)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank's device: one random stream that tensor-parallel ranks share, and a separate stream for each rank,
    used by ``get_cuda_rng_tracker().fork()``. The argument ``mpu_`` of ``configure`` gives the ranks.
    """
    rng.seed_all(seed, configured.mpu)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the separate stream of each rank again."""
    rng.reseed_tensor_parallel(seed, configured.mpu)


def _ranks() -> tuple[int, int]:
    """(this rank, number of ranks) in the group that activations are cut over."""
    comm = configured.comm
    return (0, 1) if comm is None else (comm.rank, comm.world_size)


def is_activation_to_checkpoint(item: Any) -> bool:
    """Whether ``item`` is an activation that is cut: a floating-point tensor with at least one element for each rank,
    and without the attribute ``no_checkpointing = True``.
    """
    return nests.is_activation(item, _ranks()[1])


def get_partition_start(item: torch.Tensor) -> int:
    """The first of the elements that this rank keeps."""
    return packers.own_range(item.numel(), *_ranks())[0]


def get_partition_size(item: torch.Tensor) -> int:
    """The number of elements that this rank keeps. The last ranks keep fewer if the number of ranks does not divide the
    size."""
    return packers.own_range(item.numel(), *_ranks())[1]


def partition_activations(args: Sequence[Any], cpu_checkpoint: bool, contiguous_checkpoint: bool) -> list[Any]:
    """Replace each activation in ``args`` by this rank's part, in host memory with ``cpu_checkpoint``. Other arguments
    stay unchanged.

    contiguous_checkpoint: has no effect: ``checkpoint`` always keeps inputs in one piece of memory.
    """
    found = []
    for arg in args:
        if is_activation_to_checkpoint(arg):
            part = arg.detach().reshape(-1).narrow(0, get_partition_start(arg), get_partition_size(arg))
            arg = part.to("cpu", copy=True) if cpu_checkpoint else part.clone()
        found.append(arg)
    return found


def get_partitioned_activations_for_backward(
    args: Sequence[Any], inputs: Sequence[Any], contiguous_checkpoint: bool
) -> list[Any]:
    """Return arguments for ``gather_partitioned_activations``: for each of ``args`` a part and a shape. The part is its
    entry in ``inputs``, the result of ``partition_activations``. The shape is None if the argument is no activation.
    ``args`` are not changed.
    """
    found: list[Any] = []
    for arg, part in zip(args, inputs, strict=True):
        is_cut = is_activation_to_checkpoint(arg)
        found += [part, torch.tensor(arg.shape) if is_cut else None]
    return found


def get_cpu_activations_for_backward(args: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return ``args`` with activations replaced by their copies in host memory, taken from ``inputs``. ``args`` is not
    changed.
    """
    return [new if is_activation_to_checkpoint(arg) else arg for arg, new in zip(args, inputs, strict=True)]


def get_offloaded_activations_for_backward(args: Sequence[Any], engine: offload_activations) -> list[Any]:
    """Return ``args`` with each activation replaced by the copy that ``engine`` keeps. ``args`` is not changed."""
    return [_Offloaded(engine.put(arg)) if is_activation_to_checkpoint(arg) else arg for arg in args]


def restore_offloaded_activations(tensors: Sequence[Any], engine: offload_activations) -> list[Any]:
    """The arguments of ``get_offloaded_activations_for_backward`` again, detached from any graph."""
    return [engine.get(each.kept) if isinstance(each, _Offloaded) else each for each in tensors]


class _Offloaded(NamedTuple):
    kept: Any


def gather_partitioned_activations(tensors: Sequence[Any], device: Any = None) -> tuple:
    """The whole activations of a list of (part, shape), one after the other. Collective."""
    found = []
    for part, shape in zip(tensors[::2], tensors[1::2], strict=True):
        if shape is None:
            found.append(part)
            continue
        numel = shape.prod().item() if shape.numel() else 1
        there = part.device if device is None else torch.device(device)
        flat = packers.Gather(configured.comm, numel, part, part.dtype, there).wait()
        found.append(flat.view(shape.tolist()))
    return tuple(found)
