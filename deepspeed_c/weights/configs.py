"""Writes the configurations of a model of transformers beside its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["save_configs"]


def save_configs(
    config: Any, generation_config: Any, architecture: str, folder: str, *, dtype: torch.dtype | None = None
) -> None:
    """Write config.json (and generation_config.json), so that ``from_pretrained`` knows the model. Nothing is written
    where ``config`` is no configuration of transformers.

    architecture: name of the class that the weights belong to, as in transformers' own save_pretrained. dtype: the
    dtype in which ``from_pretrained`` loads the weights; default: the configuration's.
    """
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    if callable(getattr(generation_config, "save_pretrained", None)):
        generation_config.save_pretrained(folder)
