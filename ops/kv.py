"""Keys and values of attention in blocks (``dsc/infer.h``; arXiv 2309.06180), for tensors in host memory.

A *row* is one sequence of a call. ``tables`` (int32 [rows, columns]) names the blocks of each row in the order of its
tokens, ``n_keys`` (int64 [rows]) counts its tokens, and ``n_new`` (int64 [rows]) its new tokens, the last ones. New
tokens of a call are [tokens, heads, dim], row after row. Blocks lie in two tensors of float32, bfloat16 or float16:
``keys`` [blocks, kv_heads, head_dim, BLOCK_TOKENS] and ``values`` [blocks, kv_heads, BLOCK_TOKENS, value_dim].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_c import _C

__all__ = ["BLOCK_TOKENS", "KvRows", "attention", "new_blocks", "read", "write"]

BLOCK_TOKENS: int = _C.KV_TOKENS
_ops = torch.ops.deepspeed_c


class KvRows(NamedTuple):
    """The rows of a call."""

    n_new: Tensor
    n_keys: Tensor
    tables: Tensor


def new_blocks(n_blocks: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors (keys, values) of so many blocks, for keys and values [..., heads, tokens, dim] like ``k`` and ``v``.

    Their memory is not written: the system gives a page when its first token comes.
    """
    return (
        k.new_empty(n_blocks, k.shape[-3], k.shape[-1], BLOCK_TOKENS),
        v.new_empty(n_blocks, v.shape[-3], BLOCK_TOKENS, v.shape[-1]),
    )


def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: KvRows) -> None:
    """Write the keys and values of new tokens, ``k`` and ``v`` [tokens, kv_heads, dim], to their blocks."""
    _ops.kv_write(k, v, keys, values, *rows)


def read(keys: Tensor, values: Tensor, rows: KvRows, n_tokens: int) -> tuple[Tensor, Tensor]:
    """The keys and values of the last ``n_tokens`` tokens of each row, [rows, kv_heads, n_tokens, dim].

    All rows have the same number of tokens, and their blocks are there.
    """
    length = int(rows.n_keys[0])
    first = (length - n_tokens) // BLOCK_TOKENS
    tables = rows.tables[:, first:].long()
    k = keys[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
    v = values[tables].transpose(1, 2).flatten(2, 3)
    begin, end = length - n_tokens - first * BLOCK_TOKENS, length - first * BLOCK_TOKENS
    return k[:, :, begin:end], v[:, :, begin:end]


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: KvRows,
    *,
    scale: float,
    first: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    is_causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attention of new tokens over their rows, [tokens, heads, value_dim], as ``ops.nn.attention`` defines it.

    ``first`` (int64 [rows]): the first key that a row sees. ``sinks`` and ``slopes``: float32 [heads]. ``window``: a
    token sees so many keys, itself among them; 0: all. A token's result has the same bits in any company: with any
    other rows, in any pieces of its prompt, on any number of threads and any instruction set. Raises ValueError for
    shapes that do not fit, before anything is computed.
    """
    return _ops.kv_attention(q, keys, values, *rows, first, sinks, slopes, scale, is_causal, window, soft_cap)
