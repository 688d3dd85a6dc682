"""The functions of DeepSpeed's script ``zero_to_fp32.py`` that other converters call; the script is
``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.compat.checkpoint_folder import load_file
from deepspeed_c.errors import CheckpointError

__all__ = ["parse_model_states", "parse_optim_states", "zero3_partitioned_param_info", "zero_model_state"]


@dataclass
class zero_model_state:
    """The description of the model in a file of model states."""

    buffers: dict[str, torch.Tensor]
    """Buffers by name, in fp32."""
    param_shapes: list[dict[str, torch.Size]]
    """Shapes by name, for each optimizer group."""
    shared_params: list[list[str]]
    """Pairs: a name of a parameter, and the first name of the same parameter."""
    ds_version: str | None
    frozen_param_shapes: dict[str, torch.Size] | None
    frozen_param_fragments: dict[str, torch.Tensor] | None


def parse_model_states(files: Sequence[str]) -> list[zero_model_state]:
    """The model of each file. Raises CheckpointError: a file is no file of model states."""
    return [_parse_model_state(file) for file in files]


def _parse_model_state(file: str) -> zero_model_state:
    content = load_file(file)
    if not isinstance(content, dict) or "buffer_names" not in content:
        raise CheckpointError("is no file of model states", where=file, fix="pass those that end in _model_states.pt")
    names = content["buffer_names"]
    return zero_model_state(
        buffers={name: value.float() for name, value in content["module"].items() if name in names},
        param_shapes=content["param_shapes"],
        shared_params=[[name, first] for name, first in content["shared_params"].items()],
        ds_version=content.get("ds_version"),
        frozen_param_shapes=content.get("frozen_param_shapes"),
        frozen_param_fragments=content.get("frozen_param_fragments"),
    )


def parse_optim_states(files: Sequence[str], ds_checkpoint_dir: str) -> tuple[int, int, list[Any]]:
    """(stage, ranks, each rank's flat fp32 groups) of the optimizer files of a folder.

    Raises:
        CheckpointError: a file was not written by ZeRO, or the number of files differs from the number of ranks that
            wrote them.
    """
    states = [load_file(file).get("optimizer_state_dict", {}) for file in files]
    if not states or "zero_stage" not in states[0]:
        raise CheckpointError(
            "is no checkpoint of ZeRO", where=files[0] if files else ds_checkpoint_dir, fix="pass optimizer files"
        )
    stage, counts = states[0]["zero_stage"], states[0]["partition_count"]
    stage = int(getattr(stage, "value", stage))  # an enumeration, in files of DeepSpeed
    # At stages 1 and 2 each group has its own number.
    n_ranks = max(counts) if isinstance(counts, list) else counts
    if n_ranks != len(files):
        raise CheckpointError(
            f"{n_ranks} ranks wrote the checkpoint, and there are {len(files)} optimizer files",
            where=ds_checkpoint_dir,
            fix="a rank's file is missing, or files of an older checkpoint were not removed",
        )
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return stage, n_ranks, [state[key] for state in states]


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """(elements of each rank, total elements of padding) of a parameter that is cut over ``world_size`` ranks."""
    padding = -unpartitioned_numel % world_size
    return (unpartitioned_numel + padding) // world_size, padding
