"""Writes the model of an engine in Hugging Face's layout, one gather unit at a time, so that ``from_pretrained`` can
read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.parts import Parts
from deepspeed_c.engine.weights import aliases_of, named_tensors, stream, stream_order
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.weights.configs import save_configs
from deepspeed_c.zero.states.access import safe_get_full_fp32_param, safe_get_local_fp32_param
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.kinds import is_codes

if TYPE_CHECKING:
    from deepspeed_c.checkpoint.formats.model_folder import ModelFolderWriter

__all__ = ["save_model"]

CONVERTED_ELEMS = 4 << 20


def save_model(
    module: torch.nn.Module,
    fetcher: Fetcher | None,
    mesh: Mesh,
    folder: str,
    *,
    max_shard_size: int | str,
    exclude_frozen: bool,
    dtype: torch.dtype | None,
) -> None:
    """Writes the model to ``folder`` on rank 0. No rank holds more of the model than one gather unit, or one fp32
    master. Collective.

    If ``dtype`` differs from the dtype in training, the fp32 masters are converted to it and written. Buffers keep
    their dtype. Raises CheckpointError on all ranks if the folder cannot be written. The folder is unchanged then.
    """
    files.model_folder.parse_size(max_shard_size)  # before the first collective
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise StateError(f"{dtype!r} is no floating-point dtype", where="dtype", fix="pass torch.bfloat16, for example")
    tensors = named_tensors(module, exclude_frozen)
    parts, comm = Parts(module, tensors, mesh), mesh.comm
    params = {id(p) for p in module.parameters()}
    own_dtypes = {
        name: t.dtype if dtype is None or id(t) not in params or not t.is_floating_point() or is_codes(t) else dtype
        for name, t in tensors.items()
    }
    has_master = {
        name for name, t in tensors.items() if own_dtypes[name] != t.dtype != torch.float32 and _is_trained(t)
    }
    aliases = aliases_of(tensors, parts)
    masters = [name for name in tensors if name in has_master and parts.names(name)[0] not in aliases]
    others = {name: t for name, t in tensors.items() if name not in has_master}
    whole, sharded = stream_order(others)
    order = [*masters, *whole, *(name for names in sharded.values() for name in names)]
    dtypes = {name: own_dtypes[own] for own in tensors for name in parts.names(own)}

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in masters:
            yield from parts.everyone(name, safe_get_full_fp32_param(tensors[name]))
        yield from stream(others, fetcher, parts)

    error: CheckpointError | None = None
    writer: ModelFolderWriter | None = None
    if comm.rank == 0:
        try:
            entries = [
                (name, tuple(parts.shape(own, tensors[own])), dtypes[name])
                for own in order
                for name in parts.names(own)
            ]
            writer = files.model_folder.ModelFolderWriter(
                folder, entries, aliases, max_shard_size=max_shard_size
            ).__enter__()
        except CheckpointError as raised:
            error = raised
    try:
        # A rank that cannot write still takes part in every gather, because the other ranks wait for it.
        for name, tensor in values():
            if writer is not None and error is None:
                try:
                    _write(writer, name, tensor, dtypes[name])
                except CheckpointError as raised:
                    error = raised
        if writer is not None and error is None:
            try:
                config, generation = (getattr(module, name, None) for name in ("config", "generation_config"))
                written = (own_dtypes[name] for name, t in tensors.items() if id(t) in params and t.is_floating_point())
                architecture = type(module).__name__
                save_configs(config, generation, architecture, writer.staging, dtype=next(written, None))
            except (OSError, ValueError) as raised:
                error = CheckpointError(f"the model's configuration cannot be saved: {raised}", where=folder)
    except BaseException as failure:
        if writer is not None:
            writer.__exit__(type(failure), failure, None)
        raise
    if writer is not None:
        try:
            writer.__exit__(type(error) if error else None, error, None)
        except CheckpointError as raised:
            error = error or raised
    if any(comm.gather_numbers(int(error is not None), label="model saved")):
        raise error or CheckpointError(
            "the model could not be written by rank 0",
            where=folder,
            fix="look at rank 0's message: the folder must be writable and have room",
        )


def _is_trained(tensor: torch.Tensor) -> bool:
    """Whether an optimizer of ours has a master of it."""
    return safe_get_local_fp32_param(tensor) is not None


def _write(writer: ModelFolderWriter, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype == dtype:
        writer.write(name, tensor)
        return
    # The tensor is converted in pieces, so that memory need not hold a second copy of a large tensor.
    for piece in tensor.reshape(-1).split(CONVERTED_ELEMS):
        writer.write_part(name, piece.to(dtype))
