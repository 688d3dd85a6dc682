"""Checkpoints of DeepSpeed: its engine's files and its universal format, read and written, without DeepSpeed."""

from __future__ import annotations

import os

from deepspeed_c.checkpoint.formats.deepspeed.model_file import count_tensor_ranks, is_deepspeed
from deepspeed_c.checkpoint.formats.deepspeed.read import DeepSpeedSource
from deepspeed_c.checkpoint.formats.deepspeed.universal import UniversalSource, is_universal
from deepspeed_c.checkpoint.formats.deepspeed.write import (
    stage_for,
    write_deepspeed,
    write_rank_files,
    write_universal,
)
from deepspeed_c.checkpoint.formats.tensor_ranks import MergedSource, TensorRules
from deepspeed_c.checkpoint.source import Source
from deepspeed_c.errors import CheckpointError

__all__ = [
    "DeepSpeedSource",
    "UniversalSource",
    "is_deepspeed",
    "is_universal",
    "open_deepspeed",
    "stage_for",
    "write_deepspeed",
    "write_rank_files",
    "write_universal",
]


def open_deepspeed(path: str, tag: str | None = None, *, rules: TensorRules | None = None) -> Source:
    """Opens a checkpoint of DeepSpeed, in its engine's files or its universal format, whichever is there.

    path: the folder that ``save_checkpoint`` was given, or a tag's folder. tag: by default the tag that the file
    ``latest`` names, then the one in ``latest_universal``. rules: how tensors of tensor-parallel ranks are cut; by
    default as the files say. Raises CheckpointError if neither format is there (naming the files it looked for), or if
    a file cannot be read.
    """
    path = os.fspath(path)
    looked_for = []
    if tag is not None:
        folders = [os.path.join(path, tag)]
    else:
        folders = [path]
        for name in ("latest", "latest_universal"):
            file = os.path.join(path, name)
            try:
                with open(file, encoding="utf-8") as text:
                    folders.append(os.path.join(path, text.read().strip()))
            except OSError as error:
                looked_for.append(f"{file}: {error.strerror}")
    for folder in folders:
        if is_universal(folder):
            return UniversalSource(folder)
        if is_deepspeed(folder):
            return _open_ranks(folder, rules)
        looked_for.append(
            f"{folder}: no zero/optimizer_state.pt, mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt"
        )
    raise CheckpointError(
        "no checkpoint of DeepSpeed found; " + "; ".join(looked_for),
        where=path,
        fix="give the folder that DeepSpeed's save_checkpoint was given, and the tag",
    )


def _open_ranks(folder: str, rules: TensorRules | None) -> Source:
    n_ranks = count_tensor_ranks(folder)
    if n_ranks == 1:
        return DeepSpeedSource(folder)
    sources: list[DeepSpeedSource] = []
    try:
        for rank in range(n_ranks):
            sources.append(DeepSpeedSource(folder, rank, n_ranks))
        return MergedSource(sources, rules or sources[0].tensor_rules())
    except BaseException:
        for source in sources:
            source.close()
        raise
