"""Tokenizers of served models, and their end tokens."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.errors import ModelError

__all__ = ["end_tokens", "read_tokenizer"]


def read_tokenizer(folder: str) -> Any:
    """The tokenizer of a Hugging Face folder. Code that lies in the folder does not run.

    Raises ModelError for a folder without one.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ModelError(
            f"the tokenizer cannot be read: {error}",
            where=folder,
            fix="name a folder that save_pretrained of a tokenizer wrote",
        ) from error


def end_tokens(model: torch.nn.Module, own: int | None) -> frozenset[int]:
    """The tokens that end an answer: ``own``, of the tokenizer, and those of the model's generation_config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    of_model = [] if named is None else [named] if isinstance(named, int) else list(named)
    return frozenset(of_model if own is None else [*of_model, own])
