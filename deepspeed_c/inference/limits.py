"""What a model has room for: the tokens of a prompt, and ranks that share its heads."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.errors import ModelError, StateError

__all__ = ["check_heads", "check_prompt", "positions_of"]

# Parts of the names of tables of learned positions in transformers' models.
_TABLES = ("wpe", "position_embed", "embed_positions", "pos_embed")


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


def check_prompt(args: tuple, kwargs: dict[str, Any], max_out_tokens: int, n_positions: int | None) -> None:
    """Raises StateError if a prompt for ``generate`` is longer than ``max_out_tokens``, or than the model's table of
    learned positions (``positions_of``)."""
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if not torch.is_tensor(ids) or ids.dim() != 2 or ids.is_floating_point():
        return
    n_tokens = ids.shape[-1]
    if n_tokens > max_out_tokens:
        raise StateError(
            f"a prompt of {n_tokens} tokens is longer than max_out_tokens, which is {max_out_tokens}",
            where="InferenceEngine.generate",
            fix=f"call init_inference with max_out_tokens={n_tokens} or more, or cut the prompt",
        )
    if n_positions is not None and n_tokens > n_positions:
        raise StateError(
            f"a prompt of {n_tokens} tokens is longer than the model's {n_positions} positions",
            where="InferenceEngine.generate",
            fix="cut the prompt; the model has no position for further tokens",
        )


def positions_of(model: torch.nn.Module) -> int | None:
    """The number of tokens that the model's smallest table of learned positions has room for; None without a table."""
    sizes = [
        module.num_embeddings - int(getattr(module, "offset", 0) or 0)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and any(table in name.rpartition(".")[2] for table in _TABLES)
    ]
    return min(sizes, default=None)
