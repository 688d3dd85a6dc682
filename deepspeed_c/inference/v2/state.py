"""The sequences of the ragged engine, and what they hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from deepspeed_c.config.ragged import DSStateManagerConfig
from deepspeed_c.errors import StateError
from deepspeed_c.kv.group import blocks_of
from deepspeed_c.ops.kv import BLOCK_TOKENS

__all__ = ["BaseSequenceDescriptor", "DSSequenceDescriptor", "DSStateManager", "PlaceholderSequenceDescriptor"]


class BaseSequenceDescriptor(ABC):
    """The numbers of a sequence that schedulers and batches read."""

    @property
    @abstractmethod
    def seen_tokens(self) -> int:
        """Tokens whose forward has ended."""

    @property
    @abstractmethod
    def cur_allocated_blocks(self) -> int:
        """Blocks of one group."""

    @property
    @abstractmethod
    def kv_blocks_ptr(self) -> int:
        """The address of their numbers, int32."""


class PlaceholderSequenceDescriptor(BaseSequenceDescriptor):
    """A sequence that the engine does not know yet."""

    def __init__(self, seen_tokens: int = 0, cur_allocated_blocks: int = 0, kv_blocks_ptr: int = 0) -> None:
        self._seen_tokens, self._n_blocks, self._pointer = seen_tokens, cur_allocated_blocks, kv_blocks_ptr

    @property
    def seen_tokens(self) -> int:
        return self._seen_tokens

    @property
    def cur_allocated_blocks(self) -> int:
        return self._n_blocks

    @property
    def kv_blocks_ptr(self) -> int:
        return self._pointer


class DSSequenceDescriptor(BaseSequenceDescriptor):
    """A sequence that the engine holds. cached: its keys and values (``kv.ragged.CachedSequence``) in ``cache``."""

    def __init__(self, uid: int, cached: Any, cache: Any) -> None:
        self.uid, self.cached, self._cache = uid, cached, cache
        self._blocks = torch.empty(0, dtype=torch.int32)

    @property
    def seen_tokens(self) -> int:
        """Tokens whose forward has ended."""
        return self.cached.length

    @property
    def cur_allocated_blocks(self) -> int:
        """Blocks of one group that its tokens take, those that a window has given back among them."""
        return blocks_of(self.cached.length)

    @property
    def kv_blocks_ptr(self) -> int:
        """The address of ``all_block_ids()``, which is valid until the next call."""
        self._blocks = self.all_block_ids()
        return self._blocks.data_ptr()

    def all_block_ids(self, cache_group: int = 0) -> torch.Tensor:
        """The blocks of a group in the order of their tokens, int32 [blocks]; -1 for a block that a window has given
        back."""
        return self._cache.table(self.cached, cache_group)


class DSStateManager:
    """The sequences by uid, over one cache (``kv.ragged.RaggedCache``)."""

    def __init__(self, config: DSStateManagerConfig, cache: Any) -> None:
        self.config, self.cache = config, cache
        self._sequences: dict[int, DSSequenceDescriptor] = {}

    @property
    def tracked_sequences(self) -> dict[int, DSSequenceDescriptor]:
        """The sequences by uid."""
        return self._sequences

    @property
    def n_tracked_sequences(self) -> int:
        return len(self._sequences)

    @property
    def kv_block_size(self) -> int:
        """Tokens of a block."""
        return BLOCK_TOKENS

    @property
    def n_kv_cache_groups(self) -> int:
        """Groups of layers with one window."""
        return len(self.cache.groups)

    @property
    def free_blocks(self) -> torch.Tensor:
        """Free blocks, int64 [groups]."""
        return torch.tensor(self.cache.n_free)

    def get_sequence(self, uid: int) -> DSSequenceDescriptor | None:
        """The sequence; None if the engine does not know it."""
        return self._sequences.get(uid)

    def get_or_create_sequence(self, uid: int, salt: str = "") -> DSSequenceDescriptor:
        """The sequence, which is made without tokens if the engine does not know it. salt: of a new one."""
        found = self._sequences.get(uid)
        if found is None:
            found = self._sequences[uid] = DSSequenceDescriptor(uid, self.cache.open(salt), self.cache)
        return found

    def flush_sequence(self, uid: int) -> None:
        """Ends a sequence. Its blocks are free. Raises StateError for a uid that the engine does not know."""
        found = self._sequences.pop(uid, None)
        if found is None:
            raise StateError(
                f"the engine knows no sequence {uid}; it holds {len(self._sequences)} others",
                where="flush",
                fix="flush a uid once, after a put",
            )
        self.cache.close(found.cached)
