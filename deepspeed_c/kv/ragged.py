"""A cache in blocks for sequences of any lengths, whose new tokens lie behind one another in one forward.

Importing this module imports transformers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from deepspeed_c import _C
from deepspeed_c.errors import StateError
from deepspeed_c.kv.cache import BlockLayer, CacheInBlocks, View
from deepspeed_c.kv.group import Step, blocks_of, own_cache, tables_of
from deepspeed_c.ops.kv import KvRows

__all__ = ["CachedSequence", "NewTokens", "RaggedCache"]


class NewTokens(Protocol):
    """The numbers of a forward's new tokens (``inference.v2.batch.RaggedBatchWrapper``)."""

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence."""

    @property
    def n_keys(self) -> torch.Tensor:
        """All tokens of each sequence, int64 [sequences]."""

    @property
    def n_columns(self) -> int:
        """Blocks of the longest sequence."""


class CachedSequence:
    """A sequence of a cache: the number of its tokens, and its number in the pool of each group.

    chain: its number in the index of prefixes; None without one.
    """

    def __init__(self, numbers: list[int], chain: int | None) -> None:
        self.length = 0
        """Tokens of forwards that have ended; within a step also the tokens that were found."""
        self.n_found = 0
        """Tokens that were found instead of computed."""
        self.chain = chain
        self._numbers = numbers

    def number(self, group: int) -> int:
        return self._numbers[group]


class _RaggedGroup:
    """The blocks of the layers that have one window."""

    def __init__(self, n_blocks: int, window: int | None, index: int) -> None:
        self.window, self.index = window, index
        self.pool = _C.KvPool(n_blocks)
        self.step: Step | None = None
        """The step of the forward that runs."""

    @property
    def n_blocks(self) -> int:
        return self.pool.n_blocks

    def numbers(self, sequences: Sequence[CachedSequence]) -> list[int]:
        return [sequence.number(self.index) for sequence in sequences]

    def grow(self, sequences: Sequence[CachedSequence], batch: NewTokens, n_new: torch.Tensor, number: int) -> None:
        """Makes room. Raises MemoryError where the pool has none."""
        numbers = self.numbers(sequences)
        copies = self.pool.grow(numbers, batch.lengths)
        rows = KvRows(n_new, batch.n_keys, tables_of(self.pool, numbers, batch.n_columns))
        moved = torch.tensor(copies).T if copies else None
        self.step = Step(number, rows, None if moved is None else (moved[0], moved[1]))

    def shrink(self, sequences: Sequence[CachedSequence]) -> None:
        """Takes back the tokens of a forward that has failed."""
        self.pool.cut(self.numbers(sequences), [sequence.length for sequence in sequences])
        self.step = None

    def slide(self, sequences: Sequence[CachedSequence]) -> None:
        """Gives back the blocks that the next token of each sequence does not see."""
        self.step = None
        if self.window is not None:
            first = [max(sequence.length - self.window + 1, 0) for sequence in sequences]
            self.pool.slide(self.numbers(sequences), first)


class _RaggedLayer(BlockLayer):
    """The keys and values of one layer. Its batch has one row, of the new tokens of all sequences."""

    is_croppable = False

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *cached: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.group.step
        if step is None:
            raise StateError(
                "a forward came outside of RaggedCache.step",
                where="cache of keys and values",
                fix="call put of the engine",
            )
        return self._write(step, key_states, value_states)

    def seen(self, view: View, mask: torch.Tensor | None, n_new: int) -> tuple[KvRows, None]:
        if mask is not None:
            raise own_cache(f"a layer has a mask of its own {tuple(mask.shape)}")
        return view.rows, None

    def get_seq_length(self) -> int:
        return 0  # positions come with the tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(query_length, 2), 0  # a bias of positions (ALiBi) tells its slopes from two tokens


class RaggedCache(CacheInBlocks):
    """The keys and values of sequences of any lengths.

    Args:
        config: of the model, as ``DynamicCache`` takes it.
        n_blocks: blocks of each group of layers with one window. Memory is taken when a block is written.
        finds_prefixes: full blocks of sequences that have ended stay until their memory is needed, and a sequence with
            the same tokens takes them.

    Raises NeedsOwnCache for a model with layers of another kind (recurrent states).
    """

    def __init__(self, config: Any, n_blocks: int, finds_prefixes: bool = False) -> None:
        super().__init__(config)
        windows = list(dict.fromkeys(self.windows)) or [None]
        self.groups = [_RaggedGroup(n_blocks, window, i) for i, window in enumerate(windows)]
        self.layers = [_RaggedLayer(self, self.groups[windows.index(w)], i) for i, w in enumerate(self.windows)]
        self._n_steps = 0
        self._prefixes: _C.KvPrefixes | None = None
        if finds_prefixes:
            pools, seen = [group.pool for group in self.groups], [window or 0 for window in windows]
            self._prefixes = _C.KvPrefixes(pools, seen, secrets.randbits(64))

    def fit(self, *states: torch.Tensor) -> None:
        """The number of blocks stays as it was given."""

    @property
    def n_free(self) -> list[int]:
        """Free blocks of each group."""
        return [group.pool.n_free for group in self.groups]

    def n_needed(self, length: int, n_new: int) -> int:
        """The blocks of a group that ``n_new`` tokens behind ``length`` ones take."""
        return blocks_of(length + n_new) - blocks_of(length)

    def table(self, sequence: CachedSequence, group: int) -> torch.Tensor:
        """The blocks of a sequence in the layers of a group, int32 [blocks]; -1 where a window has given one back."""
        pool = self.groups[group].pool
        return tables_of(pool, [sequence.number(group)], blocks_of(sequence.length))[0]

    def count_found(self, tokens: list[int], salt: str = "") -> int:
        """The tokens at the front that a new sequence would find."""
        return 0 if self._prefixes is None else self._prefixes.find(salt, tokens)

    def open(self, salt: str = "") -> CachedSequence:
        """A sequence without tokens. It finds blocks of sequences with the same salt."""
        numbers = [group.pool.add(1)[0] for group in self.groups]
        return CachedSequence(numbers, None if self._prefixes is None else self._prefixes.begin(numbers, salt))

    def share(self, sequence: CachedSequence, source: CachedSequence) -> None:
        """Gives a sequence without tokens those of ``source``. Both have the same blocks until one of them writes.

        Raises StateError in a cache that finds prefixes: its index would not know the tokens.
        """
        if self._prefixes is not None or sequence.length:
            raise StateError(
                f"a sequence of {sequence.length} tokens cannot begin as another one",
                where="cache of keys and values",
                fix="share with a new sequence, and set enable_prefix_caching to false",
            )
        for group in self.groups:
            group.pool.assign(group.numbers([sequence]), group.numbers([source]))
        sequence.length = source.length

    def close(self, sequence: CachedSequence) -> None:
        """Ends a sequence. Its blocks are free."""
        if self._prefixes is not None:
            self._prefixes.end(sequence.chain)
        for group in self.groups:
            group.pool.drop(group.numbers([sequence]))

    @contextmanager
    def step(self, sequences: Sequence[CachedSequence], tokens: Sequence[torch.Tensor]) -> Iterator[list[int]]:
        """Context of a forward with new tokens of each sequence. Gives the numbers of tokens at the front of each that
        were found, which count as tokens of the sequence already. ``grow`` makes room for the others.

        After an exception all sequences are as they were.
        """
        begins = [sequence.length for sequence in sequences]
        ids = [] if self._prefixes is None else [each.tolist() for each in tokens]
        try:
            for sequence, each in zip(sequences, ids):
                sequence.length += self._prefixes.take(sequence.chain, each)
            yield [sequence.length - begin for sequence, begin in zip(sequences, begins, strict=True)]
        except BaseException:
            for sequence, begin in zip(sequences, begins, strict=True):
                sequence.length = begin
            for group in self.groups:
                group.shrink(sequences)
            self.awaited = None
            raise
        for sequence, begin, each in zip(sequences, begins, tokens, strict=True):
            sequence.n_found += sequence.length - begin
            sequence.length = begin + len(each)
        for sequence, each in zip(sequences, ids):
            self._prefixes.note(sequence.chain, each)
        for group in self.groups:
            group.slide(sequences)

    def grow(self, sequences: Sequence[CachedSequence], batch: NewTokens) -> None:
        """Makes room for the new tokens of a batch, behind one another. Raises MemoryError where a pool has none."""
        n_new = torch.tensor(batch.lengths)
        for group in self.groups:
            group.grow(sequences, batch, n_new, self._n_steps)
        self._n_steps += 1
