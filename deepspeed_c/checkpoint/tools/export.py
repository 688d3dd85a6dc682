"""Exports any checkpoint as a folder of whole weights in Hugging Face's layout, with a bounded amount of memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deepspeed_c.checkpoint.formats.model_folder import FORMATS, ModelFolderWriter
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source
from deepspeed_c.errors import CheckpointError

__all__ = ["Exported", "Weight", "export", "stream_weights", "weights_of"]

# Size of one read: many small tensors, or a piece of a large one.
BATCH_BYTES = 32 << 20


class Weight(NamedTuple):
    """One tensor of the model as it is to be written."""

    name: str
    tensor: LogicalTensor  # its source
    dtype: torch.dtype


class Exported(NamedTuple):
    """Result of an export."""

    files: list[str]
    n_tensors: int
    total_bytes: int
    not_finite: list[str]  # tensors that hold NaN or inf


def weights_of(source: Source, dtype: torch.dtype | None = None, exclude_frozen: bool = False) -> list[Weight]:
    """The model's state dict in ``source``: each parameter once, from its fp32 master where that is closer to
    ``dtype``, and the buffers.

    ``dtype`` applies to floating-point parameters, by default the dtype that they are trained in; buffers keep theirs,
    but become float32 from a narrower one where ``dtype`` is float32. Frozen parameters belong to no optimizer group; a
    checkpoint of weights alone does not know them.

    Raises CheckpointError if ``exclude_frozen`` is set and the checkpoint does not know, or if nothing is left.
    """
    if exclude_frozen and not source.params:
        raise CheckpointError(
            f"a checkpoint of format {source.format} does not say which parameters are frozen",
            where=source.where,
            fix="export it without exclude_frozen_parameters",
        )
    weights: list[Weight] = []
    done: set[str] = set()
    for kind, name in source.tensors:
        if kind not in (PARAM, MASTER, BUFFER) or name in done:
            continue
        done.add(name)
        if kind == BUFFER:
            tensor = source.tensors[BUFFER, name]
            widens = dtype == torch.float32 and tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
            weights.append(Weight(name, tensor, torch.float32 if widens else tensor.dtype))
            continue
        if exclude_frozen and name in source.params and source.params[name].group is None:
            continue
        param, master = source.tensors.get((PARAM, name)), source.tensors.get((MASTER, name))
        trained_in = (param or master).dtype
        wanted = trained_in if dtype is None or not trained_in.is_floating_point else dtype
        tensor = param if param is not None and (wanted == trained_in or master is None) else master
        weights.append(Weight(name, tensor, wanted))
    if not weights:
        raise CheckpointError("holds no weights to export", where=source.where, fix="name a checkpoint of a model")
    return weights


def stream_weights(source: Source, weights: Sequence[Weight]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the next elements of it) of all weights in order, read in batches of 32 MiB; each piece valid until the
    next is asked for.
    """
    batch: list[tuple[str, Read]] = []
    room = BATCH_BYTES
    for weight in weights:
        n_elems, begin = math.prod(weight.tensor.shape), 0
        while True:
            n = min(n_elems - begin, max(1, room // weight.dtype.itemsize))
            into = torch.empty(n, dtype=weight.dtype)
            batch.append((weight.name, Read(weight.tensor, begin, into)))
            begin += n
            room -= n * weight.dtype.itemsize
            if room <= 0:
                yield from _filled(source, batch)
                batch, room = [], BATCH_BYTES
            if begin == n_elems:
                break
    yield from _filled(source, batch)


def _filled(source: Source, batch: list[tuple[str, Read]]) -> Iterator[tuple[str, torch.Tensor]]:
    source.read([read for _, read in batch if read.into.numel()])
    for name, read in batch:
        yield name, read.into


def export(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    form: str = "safetensors",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    exclude_frozen: bool = False,
) -> Exported:
    """Writes the model of ``source`` to ``folder`` (see :class:`ModelFolderWriter`), holding 64 MiB of it besides the
    source's own memory.

    ``form`` is "safetensors" (``model.safetensors``) or "fp32-pt" (``pytorch_model.bin``). ``dtype`` defaults to the
    dtype that is trained in for the first and to float32 for the second. Raises CheckpointError if reading or writing
    fails; the folder is then as it was.
    """
    if form not in FORMATS:
        raise CheckpointError(f"{form!r} is no format", where="form", fix=f"write one of {', '.join(FORMATS)}")
    if dtype is None and form == "fp32-pt":
        dtype = torch.float32
    weights = weights_of(source, dtype, exclude_frozen)
    names = {weight.name for weight in weights}
    # Aliases of frozen weights that are left out go too.
    aliases = {alias: first for alias, first in source.aliases.items() if first in names}
    entries = [(weight.name, weight.tensor.shape, weight.dtype) for weight in weights]
    with ModelFolderWriter(folder, entries, aliases, form=form, max_shard_size=max_shard_size) as writer:
        for name, part in stream_weights(source, weights):
            writer.write_part(name, part)
    return Exported(writer.files, writer.n_tensors, writer.total_bytes, writer.not_finite)
