"""Adds this rank's experts of a checkpoint to a state dict, under DeepSpeed's name for it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, Read
from deepspeed_c.errors import CheckpointError, FeatureError, ModelError
from deepspeed_c.zero.layout.experts import ExpertNames

__all__ = ["load_moe_state_dict"]


def load_moe_state_dict(
    checkpoint_path: str,
    tag: str | None,
    state_dict: MutableMapping[str, Any],
    old_moe_load: bool,
    model: torch.nn.Module | None = None,
    mpu: Any = None,
    num_experts: int | list[int] = 1,
    checkpoint_engine: Any = None,
    autoep_layers: Any = None,
    folding_spec: Any = None,
    checkpoint_mp_rank: int | None = None,
) -> None:
    """Adds the weights of the experts that ``model`` has on this rank to ``state_dict``, under the model's own names.

    checkpoint_path, tag: a checkpoint of any format, saved with any ``ep_size``. model: has its ranks already, from
    ``deepspeed_c.initialize`` or ``MoE.set_deepspeed_parallelism``. The other arguments are accepted and ignored: the
    checkpoint and the model have what they say.

    Raises FeatureError for ``old_moe_load``, files of an expert that do not name its layer; ModelError without a model;
    CheckpointError for experts that the checkpoint does not have. ``state_dict`` is as it was then.
    """
    where = "load_moe_state_dict"
    if old_moe_load:
        raise FeatureError(
            "files of DeepSpeed before 0.5.5 do not say which layer an expert belongs to",
            where=f"{where}(old_moe_load=True)",
            fix="save the checkpoint with a later version of DeepSpeed, and load that",
        )
    if model is None:
        raise ModelError("a model is needed: it has the experts' names", where=where, fix="pass model=...")
    numbered = ExpertNames(model)
    found: dict[str, torch.Tensor] = {}
    with files.open.open_checkpoint(checkpoint_path, tag) as source:
        reads = []
        for name in model.state_dict(keep_vars=True):
            if not numbered.is_experts(name):
                continue
            logical = numbered.logical(name)
            kinds = (source.tensors.get((kind, logical)) for kind in (PARAM, MASTER, BUFFER))
            tensor = next((each for each in kinds if each is not None), None)
            if tensor is None:
                raise CheckpointError(f"it has no {logical}", where=source.where, fix="load the model that was saved")
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            reads.append(Read(tensor, 0, found[name].view(-1)))
        source.read(reads)
    state_dict.update(found)
