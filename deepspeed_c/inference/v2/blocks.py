"""Blocks of keys and values by number, under DeepSpeed's names: which are free, and the two halves of a cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ModelError
from deepspeed_c.kv.group import tables_of

__all__ = ["BlockedAllocator", "split_kv"]


class BlockedAllocator:
    """The free ones of ``num_blocks`` blocks. It is a pool of the engine (``csrc/infer/blocks.c``) in which each
    sequence has one block.

    Raises ModelError for fewer than one block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise _wrong(f"num_blocks is {num_blocks}", "ask for one block or more")
        self._pool = _C.KvPool(num_blocks)
        self._sequences: dict[int, int] = {}  # a number in the pool, by block

    def allocate(self, num_blocks: int) -> torch.Tensor:
        """Takes free blocks. Returns their numbers, int32 [num_blocks].

        Raises ModelError where fewer are free; nothing is taken then.
        """
        if not 0 <= num_blocks <= self.free_blocks:
            raise _wrong(
                f"{num_blocks} blocks are asked for, and {self.free_blocks} are free", "free blocks, or ask for fewer"
            )
        sequences = self._pool.add(num_blocks)
        self._pool.grow(sequences, [1] * num_blocks)
        blocks = tables_of(self._pool, sequences, 1).flatten()
        self._sequences.update(zip(blocks.tolist(), sequences, strict=True))
        return blocks

    def free(self, blocks: Iterable[int] | int) -> None:
        """Gives blocks back: a number, numbers or an integer tensor.

        Raises ModelError for a number of no block, a block that is free already and one that comes twice; nothing
        is given back then.
        """
        numbers = torch.as_tensor(list(blocks) if not isinstance(blocks, (int, torch.Tensor)) else blocks)
        numbers = numbers.flatten().tolist()
        sequences = {}
        for block in numbers:
            if block not in self._sequences or block in sequences:
                is_twice = "comes twice" if block in sequences else "is not taken"
                raise _wrong(f"block {block} of {self._pool.n_blocks} {is_twice}", "free blocks of allocate, once each")
            sequences[block] = self._sequences[block]
        self._pool.drop(list(sequences.values()))
        for block in sequences:
            del self._sequences[block]

    @property
    def free_blocks(self) -> int:
        """Blocks that are free."""
        return self._pool.n_free


def split_kv(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values [blocks, tokens, heads, dim] of a cache [blocks, tokens, 2, heads, dim], as views.

    Raises ModelError for another shape. The engine's own keys and values are two tensors (``ops.kv``).
    """
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2:
        raise ModelError(
            f"the cache is {tuple(kv_cache.shape)}; [blocks, tokens, 2, heads, dim] is expected",
            where="split_kv",
            fix="pass keys and values beside one another",
        )
    keys, values = kv_cache.unbind(2)
    return keys, values


def _wrong(what: str, fix: str) -> ModelError:
    return ModelError(what, where="BlockedAllocator", fix=fix)
