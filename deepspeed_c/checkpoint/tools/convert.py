"""Converts checkpoints between any two formats, optimizer state included where both have it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.checkpoint.formats.dcp import write_dcp
from deepspeed_c.checkpoint.formats.deepspeed import stage_for, write_deepspeed, write_universal
from deepspeed_c.checkpoint.native.commit import write_latest
from deepspeed_c.checkpoint.native.save import write_native
from deepspeed_c.checkpoint.source import PARAM, Source
from deepspeed_c.checkpoint.tools.export import export
from deepspeed_c.checkpoint.tools.zero_to_fp32_script import write_script
from deepspeed_c.errors import CheckpointError

__all__ = ["TARGETS", "Target", "convert", "tag_for", "trained_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Options of the new checkpoint. None means: as in the old one."""

    tag: str | None = None
    """Name of the checkpoint, for formats that keep several in a folder."""
    world_size: int | None = None
    stage: int | None = None
    dtype: torch.dtype | None = None
    max_shard_size: int | str = "5GB"
    tensor_ranks: int | None = None
    """Number of tensor-parallel ranks that will load it; 1 if not given."""
    tensor_info: Mapping[str, Any] | None = None
    """How tensors are cut over them, as DeepSpeed's ``universal_checkpoint_info``; by default by Megatron's names."""
    expert_ranks: int | None = None
    """Number of ranks that will hold the experts of a layer together."""


def trained_dtype(source: Source) -> torch.dtype:
    """The dtype that most of the model is trained in. Without weights it is the configuration's, or float32 where that
    has none.
    """
    n_elems: dict[torch.dtype, int] = {}
    for (kind, _), tensor in source.tensors.items():
        if kind == PARAM and tensor.dtype.is_floating_point:
            n_elems[tensor.dtype] = n_elems.get(tensor.dtype, 0) + math.prod(tensor.shape)
    if n_elems:
        return max(n_elems, key=n_elems.__getitem__)
    config = source.state.get("config") or {}
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype
    return torch.float32


def tag_for(source: Source) -> str:
    """A tag for a conversion of ``source``: its step, as save_checkpoint names it, or the name of its folder."""
    steps = (source.state.get("counters") or {}).get("global_steps")
    return f"global_step{steps}" if isinstance(steps, int) else os.path.basename(os.path.abspath(source.where))


def _to_native(source: Source, folder: str, target: Target) -> str:
    tag = target.tag or tag_for(source)
    write_native(source, folder, tag)
    write_latest(folder, tag)
    write_script(folder)
    return os.path.join(folder, tag)


def _to_deepspeed(source: Source, folder: str, target: Target) -> str:
    path = write_deepspeed(
        source,
        folder,
        tag=target.tag or tag_for(source),
        world_size=source.topology.world_size if target.world_size is None else target.world_size,
        stage=stage_for(source, source.topology.stage) if target.stage is None else target.stage,
        dtype=target.dtype or trained_dtype(source),
        n_tensor_ranks=1 if target.tensor_ranks is None else target.tensor_ranks,
        tensor_info=target.tensor_info,
        expert_ranks=target.expert_ranks,
    )
    write_script(folder)
    return path


def _to_universal(source: Source, folder: str, target: Target) -> str:
    return write_universal(source, folder, target.tag or tag_for(source), dtype=target.dtype or trained_dtype(source))


def _to_dcp(source: Source, folder: str, target: Target) -> str:
    write_dcp(source, folder)
    return folder


def _to_safetensors(source: Source, folder: str, target: Target) -> str:
    export(source, folder, dtype=target.dtype, max_shard_size=target.max_shard_size)
    return folder


# Name of the format -> function that writes it and returns the path.
TARGETS: dict[str, Callable[[Source, str, Target], str]] = {
    "deepspeed_c": _to_native,
    "deepspeed": _to_deepspeed,
    "deepspeed-universal": _to_universal,
    "torch-dcp": _to_dcp,
    "safetensors": _to_safetensors,
}
# Options that each format takes.
TAKES = {
    "deepspeed_c": {"tag"},
    "deepspeed": {"tag", "world_size", "stage", "dtype", "tensor_ranks", "tensor_info", "expert_ranks"},
    "deepspeed-universal": {"tag", "dtype"},
    "torch-dcp": set(),
    "safetensors": {"dtype", "max_shard_size"},
}


def convert(source: Source, folder: str | os.PathLike[str], to: str, target: Target | None = None) -> str:
    """Writes ``source`` in the format ``to``, a key of ``TARGETS``, below or as ``folder``; returns the path of the new
    checkpoint.

    The formats of DeepSpeed and our own get a tag and ``latest`` (``latest_universal``). Memory as each of the writers
    says. Raises CheckpointError for an unknown format, an option that it does not take, and errors of reading or
    writing.
    """
    target = target or Target()
    write = TARGETS.get(to)
    if write is None:
        raise CheckpointError(f"{to!r} is no format", where="to", fix=f"write one of {', '.join(TARGETS)}")
    default = Target()
    for name in (
        "tag",
        "world_size",
        "stage",
        "dtype",
        "max_shard_size",
        "tensor_ranks",
        "tensor_info",
        "expert_ranks",
    ):
        if getattr(target, name) != getattr(default, name) and name not in TAKES[to]:
            raise CheckpointError(f"the format {to} has no {name}", where=name, fix=f"leave {name} out")
    if source.problem and to != "safetensors":
        raise CheckpointError(
            f"its optimizer states would be left behind: {source.problem}",
            where=source.where,
            fix="load it in an engine, whose optimizer tells their names, and save it there; the weights alone are written as safetensors",
        )
    return write(source, os.fspath(folder), target)
