"""Models of Hugging Face folders: the configuration, and the model without its weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.errors import ConfigError, FeatureError, ModelError

__all__ = ["config_of", "model_on_meta", "tokenizer_of", "transformers_for"]


def transformers_for(command: str) -> Any:
    """The package transformers. Raises FeatureError, which names ``command``, where it cannot be imported."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise FeatureError(
            f"reads models with transformers, which cannot be imported: {error}",
            where=command,
            fix="pip install transformers (or the extra: deepspeed_c[hf])",
        ) from error


def config_of(folder: Path, command: str) -> Any:
    """transformers' configuration of the model in ``folder``.

    Raises ConfigError for a folder without a configuration, ModelError where transformers does not know the model.
    """
    file = folder / "config.json"
    if not file.is_file():
        is_there = folder.is_dir()
        raise ConfigError(
            "no config.json is there" if is_there else "no config.json is there: there is no such folder",
            where=str(folder),
            fix="name the folder of a Hugging Face model",
        )
    transformers = transformers_for(command)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the model's own checks may raise anything
        raise _cannot_build(file, error) from error


def tokenizer_of(folder: Path, command: str, otherwise: str) -> Any:
    """The tokenizer of the model in ``folder``. Raises ConfigError, which names ``otherwise`` as a second way, where
    none can be read, and FeatureError where transformers cannot be imported.
    """
    transformers = transformers_for(command)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raise errors of many types where their files are missing
        raise ConfigError(
            f"no tokenizer can be read there: {error}",
            where=str(folder),
            fix=f"save the model's tokenizer in the folder, {otherwise}",
        ) from error


def model_on_meta(folder: Path, command: str) -> torch.nn.Module:
    """The model whose configuration lies in ``folder``, on the meta device. Raises the errors of ``config_of``."""
    config = config_of(folder, command)
    transformers = transformers_for(command)
    (architecture,) = (getattr(config, "architectures", None) or [None])[:1]
    made = getattr(transformers, architecture or "", None)
    try:
        with torch.device("meta"):
            return transformers.AutoModel.from_config(config) if made is None else made._from_config(config)
    except Exception as error:  # the model's own code, and its checks, may raise anything
        raise _cannot_build(folder / "config.json", error) from error


def _cannot_build(file: Path, error: Exception) -> ModelError:
    return ModelError(
        f"transformers cannot build it: {error}",
        where=str(file),
        fix="a model of transformers' own is needed: what model_type and architectures name must be one",
    )
