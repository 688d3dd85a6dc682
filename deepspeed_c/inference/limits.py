"""What a model has room for: tokens by its table of positions, and ranks that share its heads."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.errors import ModelError

__all__ = ["check_heads", "positions_of"]

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


def positions_of(model: torch.nn.Module) -> int | None:
    """The number of tokens that the model's smallest table of learned positions has room for; None without a table."""
    sizes = [
        module.num_embeddings - int(getattr(module, "offset", 0) or 0)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and any(table in name.rpartition(".")[2] for table in _TABLES)
    ]
    return min(sizes, default=None)
