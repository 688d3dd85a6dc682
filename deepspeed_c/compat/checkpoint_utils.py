"""Small helpers that integrations import under DeepSpeed's names: file names of its layout, and copies for torch.save."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Path of the model states of a model-parallel rank ("00") in DeepSpeed's layout."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Path of the optimizer states of a rank in DeepSpeed's layout."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Path of a pipeline layer's weights ("layer_00") in DeepSpeed's layout."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """``item`` (a tensor, or lists, tuples and dictionaries of tensors) with copies of its tensors on ``device``. Other
    values are not copied.

    torch.save writes the whole storage of a tensor. For a small view into a large flat buffer, that is the whole
    buffer. The storage of a copy holds only the copy.
    """
    if torch.is_tensor(item):
        # to() may keep the strides of a view with gaps; contiguous_format removes the gaps.
        return item.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    if isinstance(item, dict):
        # copy.copy keeps the extra state of the class (state_dict's _metadata, a default factory).
        clone = copy.copy(item)
        clone.update((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
        return clone
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
