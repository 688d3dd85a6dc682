"""What a model has room for: tokens by its tables of positions and of words, and ranks that share its heads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from deepspeed_c.engine.prompts import has_encoder
from deepspeed_c.errors import ModelError

__all__ = ["Positions", "check_heads", "positions_of", "trained_length"]

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")


def check_heads(config: Any, n_ranks: int) -> None:
    """Raises ModelError if a model's configuration (of transformers, or None) has fewer attention heads than there are
    tensor-parallel ranks."""
    heads = next((n for key in _HEADS if isinstance(n := getattr(config, key, None), int)), None)
    if heads is not None and heads < n_ranks:
        raise ModelError(
            f"the model has {heads} attention heads, fewer than the {n_ranks} tensor-parallel ranks",
            where="init_inference: tensor_parallel.tp_size",
            fix=f"set tp_size to {heads} or less; more ranks may hold copies of the model",
        )


def trained_length(model: torch.nn.Module) -> int | None:
    """Tokens of a text in the training of a model of transformers; None: unknown. Rotary positions go on beyond it."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


class Positions(NamedTuple):
    """Tokens for which a model has learned positions; None: any number, or unknown."""

    prompt: int | None
    """Of the encoder; None in a model without an encoder of tokens."""
    sequence: int | None
    """Of the decoder: prompt and new tokens together in a model without an encoder."""


def positions_of(model: torch.nn.Module) -> Positions:
    """The positions of a model of transformers. Only learned tables limit: rotary positions go on beyond the length of
    the training. Tables of other parts, such as the patches of a picture, are no positions of tokens.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "get_input_embeddings"):
        return Positions(None, None)
    text = config.get_text_config(decoder=True)
    sizes = [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    if not has_encoder(model):
        return Positions(None, _least(model, sizes))
    of_encoder = config.get_text_config(encoder=True)
    encoder_sizes = [getattr(of_encoder, name, None) for name in ("max_position_embeddings", "max_source_positions")]
    return Positions(_least(model.get_encoder(), encoder_sizes), _least(model.get_decoder(), sizes))


def _least(part: Any, sizes: list[Any]) -> int | None:
    return min(_tables(part, sizes), default=None)


def _tables(part: torch.nn.Module, sizes: list[Any]) -> Iterator[int]:
    """The number of positions of each learned table. Such a table lies beside the table of words, and has the size that
    the configuration names.
    """
    words = None
    with contextlib.suppress(NotImplementedError):  # a model of two parts, such as CLIP, has no one table of words
        words = part.get_input_embeddings()
    for module in part.modules():
        children = list(module.children())
        if words is None or all(child is not words for child in children):
            continue
        for child in children:
            if isinstance(child, torch.nn.Embedding) and child is not words:
                n_tokens = child.num_embeddings - int(getattr(child, "offset", 0) or 0)
                if n_tokens in sizes:
                    # The first position is the one after padding's (RoBERTa).
                    yield n_tokens - (0 if child.padding_idx is None else child.padding_idx + 1)
