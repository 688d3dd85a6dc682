"""Layers that hold the same tokens share the numbers of their blocks: one pool, one sequence a row, one table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.errors import FeatureError, StateError
from deepspeed_c.ops.kv import BLOCK_TOKENS, KvRows

__all__ = ["CallNeedsOwnCache", "Group", "NeedsOwnCache", "Step", "blocks_of", "own_cache", "tables_of"]


def blocks_of(n_tokens: int) -> int:
    """The blocks of so many tokens."""
    return -(-n_tokens // BLOCK_TOKENS)


def tables_of(pool: _C.KvPool, sequences: list[int], n_columns: int) -> torch.Tensor:
    """The blocks of some sequences of ``pool``, int32 [sequences, n_columns]."""
    memory = pool.tables(sequences, n_columns)
    tables = torch.frombuffer(memory, dtype=torch.int32) if memory else torch.empty(0, dtype=torch.int32)
    return tables.view(len(sequences), n_columns)


class NeedsOwnCache(FeatureError):
    """A model needs the cache of transformers. The text says why."""


class CallNeedsOwnCache(NeedsOwnCache):
    """This call needs the cache of transformers; another call of the model may not."""


def own_cache(what: str, kind: type[NeedsOwnCache] = NeedsOwnCache) -> NeedsOwnCache:
    return kind(what, where="keys and values in blocks", fix="generate with the model's own cache")


class Step(NamedTuple):
    """The rows and copies of one forward, which all layers of a group share."""

    number: int
    rows: KvRows
    copies: tuple[torch.Tensor, torch.Tensor] | None
    """Blocks to copy before a token is written: (from, to), integers [copies]."""


class Group:
    """The blocks of some layers. All rows of the cache have the same number of tokens.

    window: tokens that a query of these layers sees; None: all. n_blocks: of the pool.
    """

    def __init__(self, n_blocks: int, window: int | None) -> None:
        self.window = window
        self.length = 0
        """Tokens of each row, with those in blocks that are gone."""
        self._keeps_past = False
        self.step: Step | None = None
        self._pool = _C.KvPool(n_blocks)
        self._sequences: list[int] = []
        self._tables = torch.empty(0, 0, dtype=torch.int32)
        self._is_changed = True

    @property
    def n_blocks(self) -> int:
        return self._pool.n_blocks

    def limit(self, n_blocks: int) -> None:
        """Makes the pool smaller, before it has rows."""
        self._pool = _C.KvPool(n_blocks)

    @property
    def n_used(self) -> int:
        """Blocks that are not free."""
        return self._pool.n_blocks - self._pool.n_free

    @property
    def n_rows(self) -> int:
        return len(self._sequences)

    def reach(self, length: int, n_rows: int) -> Step:
        """The step that brings each row to ``length`` tokens. The first layer of a forward makes it, the others get it.

        Raises StateError for another number of rows than the cache has, and MemoryError where the pool has no room for
        the tokens; nothing is changed then.
        """
        if self._sequences and n_rows != self.n_rows:
            raise StateError(
                f"a forward of {n_rows} rows meets a cache of {self.n_rows}",
                where="cache of keys and values",
                fix="use the cache with the batch that filled it, or a new cache",
            )
        if self.step is None or length != self.length:
            self.step = self._grow(length, n_rows)
        return self.step

    def _grow(self, length: int, n_rows: int) -> Step:
        n_new = length - self.length
        if not self._keeps_past:
            self._slide()
        sequences = self._sequences or self._pool.add(n_rows)
        try:
            copies = self._pool.grow(sequences, [n_new] * n_rows)
        except MemoryError:
            if not self._sequences:
                self._pool.drop(sequences)
            raise
        self._sequences = sequences
        if copies or blocks_of(length) != blocks_of(self.length):
            self._is_changed = True
        self.length = length
        number = 0 if self.step is None else self.step.number + 1
        moved = torch.tensor(copies).T if copies else None
        return Step(number, self.rows(n_new), None if moved is None else (moved[0], moved[1]))

    def rows(self, n_new: int = 0) -> KvRows:
        """The rows as they are now. Their last ``n_new`` tokens count as new."""
        if self._is_changed:
            self._tables = tables_of(self._pool, self._sequences, blocks_of(self.length))
            self._is_changed = False
        lengths = (torch.full((self.n_rows,), n) for n in (n_new, self.length))
        return KvRows(*lengths, self._tables)

    def _slide(self) -> None:
        """Gives back blocks that the next token does not see."""
        if self.window is None or not self._sequences:
            return
        first = max(self.length - self.window + 1, 0)
        if first // BLOCK_TOKENS:
            n_free = self._pool.n_free
            self._pool.slide(self._sequences, [first] * self.n_rows)
            self._is_changed = self._is_changed or self._pool.n_free != n_free

    def keep_past(self) -> None:
        """From now on blocks that no window reaches stay until ``cut``, because tokens may be taken back. Ends with
        ``clear``."""
        self._keeps_past = True

    def cut(self, n_removed: int) -> None:
        """Takes back the last ``n_removed`` tokens of each row.

        Raises StateError where tokens before them would need keys behind the window, which are gone.
        """
        if n_removed and self.window is not None and self.length >= self.window and not self._keeps_past:
            raise StateError(
                f"tokens are taken back behind a window of {self.window}, and the keys before it are gone",
                where="cache of keys and values",
                fix="call activate_past_recording before these tokens come",
            )
        self.length -= n_removed
        self._pool.cut(self._sequences, [self.length] * self.n_rows)
        self._slide()
        self._end_step()

    def choose(self, rows: list[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``. Blocks are shared, and none is copied."""
        if not self._sequences:
            return
        sources = [self._sequences[row] for row in rows]
        added = self._pool.add(max(len(rows) - self.n_rows, 0))
        sequences = (self._sequences + added)[: len(rows)]
        self._pool.assign(sequences, sources)
        self._pool.drop(self._sequences[len(rows) :])
        self._sequences = sequences
        self._end_step()

    def clear(self) -> None:
        """Ends all rows, and gives their blocks back."""
        self._pool.drop(self._sequences)
        self._sequences, self.length, self._keeps_past = [], 0, False
        self._end_step()

    def _end_step(self) -> None:
        """The next forward makes a new step, with new tables."""
        self._is_changed = True
        if self.step is not None:
            self.step = self.step._replace(copies=None)
