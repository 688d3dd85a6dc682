"""The numbers of blocks against rows as lists: hundreds of random acts leave each row its own tokens, and lose no block."""

from __future__ import annotations

import random

import pytest
import torch

from deepspeed_c.errors import StateError
from deepspeed_c.kv.group import Group, blocks_of
from deepspeed_c.ops.kv import BLOCK_TOKENS


class Twin:
    """A group, the tokens that its blocks hold, and each row's tokens as a list."""

    def __init__(self, n_blocks: int, window: int | None) -> None:
        self.group, self.window = Group(n_blocks, window), window
        self.blocks = [[-1] * BLOCK_TOKENS for _ in range(n_blocks)]
        self.rows: list[list[int]] = []
        self.n_tokens = 0

    def grow(self, n_new: int, n_rows: int) -> None:
        self.rows = self.rows or [[] for _ in range(n_rows)]
        seen_from = 0 if self.window is None else max(self.group.length + 1 - self.window, 0)
        length = len(self.rows[0]) + n_new
        step = self.group.reach(length, len(self.rows))
        assert self.group.reach(length, len(self.rows)) is step, "of the next layer"
        assert self.group.length == length and step.rows.n_new.tolist() == [n_new] * len(self.rows)
        assert step.rows.n_keys.tolist() == [length] * len(self.rows)
        tables = step.rows.tables.tolist()
        assert step.rows.tables.dtype == torch.int32 and step.rows.tables.shape == (len(self.rows), blocks_of(length))
        if step.copies is not None:
            for source, target in zip(*(blocks.tolist() for blocks in step.copies), strict=True):
                self.blocks[target] = list(self.blocks[source])
        for row, table in zip(self.rows, tables, strict=True):
            for place in range(len(row), length):
                self.n_tokens += 1
                row.append(self.n_tokens)
                self.blocks[table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS] = self.n_tokens
        for row, table in zip(self.rows, tables, strict=True):
            held = [self.blocks[table[i // BLOCK_TOKENS]][i % BLOCK_TOKENS] for i in range(seen_from, length)]
            assert held == row[seen_from:]
            assert -1 not in table[seen_from // BLOCK_TOKENS :]
        assert self.group.n_used == len({block for table in tables for block in table} - {-1})

    def choose(self, rows: list[int]) -> None:
        self.group.choose(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        assert self.group.n_rows == len(rows)

    def cut(self, n_removed: int) -> None:
        self.group.cut(n_removed)
        for row in self.rows:
            del row[len(row) - n_removed :]

    def clear(self) -> None:
        self.group.clear()
        self.rows = []
        assert (self.group.n_used, self.group.length, self.group.n_rows) == (0, 0, 0)


@pytest.mark.parametrize("keeps_past", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_random_acts(window: int | None, keeps_past: bool) -> None:
    chance, twin = random.Random(f"{window} {keeps_past}"), Twin(400, window)
    if keeps_past:
        twin.group.keep_past()
    n_since_cut = 0
    for _ in range(400):
        act = chance.choices(("grow", "choose", "cut", "clear"), (12, 4, 3, 0.3))[0]
        if act == "grow" or not twin.rows:
            n_new = chance.choice((1, 1, 1, 2, 7, 16, 33))
            twin.grow(n_new, chance.randint(1, 4))
            n_since_cut += n_new
        elif act == "choose":
            twin.choose(chance.choices(range(len(twin.rows)), k=chance.randint(1, 6)))
        elif act == "cut":
            # Tokens behind the window are there since the last cut, where the past is kept; else they are gone.
            length = len(twin.rows[0])
            n_most = length if window is None or length < window else n_since_cut if keeps_past else 0
            twin.cut(chance.randint(0, n_most))
            n_since_cut = 0
        if act == "clear" or (twin.rows and len(twin.rows[0]) > 200):
            twin.clear()
            n_since_cut = 0
            if keeps_past:
                twin.group.keep_past()
    twin.clear()


def test_samples_hold_their_prompt_once() -> None:
    group = Group(100, None)
    group.reach(160, 1)
    group.choose([0] * 8)
    assert group.n_used == 10
    step = group.reach(161, 8)
    assert step.copies is None and group.n_used == 10 + 8, "the prompt ends with a block"
    group.clear()
    group.reach(155, 1)
    group.choose([0] * 8)
    step = group.reach(156, 8)
    assert step.copies is not None and len(step.copies[0]) == 7, "one sample keeps the block"
    assert group.n_used == 9 + 8
    for length in range(157, 160):
        assert group.reach(length, 8).copies is None


def test_a_window_holds_few_blocks() -> None:
    group = Group(4, 16)
    for length in range(1, 1000):
        group.reach(length, 2)
        assert group.n_used <= 4


@pytest.mark.parametrize("n_rows", [1, 3])
def test_other_rows(n_rows: int) -> None:
    group = Group(10, None)
    before = group.reach(20, 2)
    with pytest.raises(StateError, match=f"a forward of {n_rows} rows meets a cache of 2"):
        group.reach(21, n_rows)
    assert (group.length, group.n_used, group.n_rows) == (20, 4, 2) and group.step is before


def test_a_full_pool() -> None:
    """The error has both numbers, and the group goes on as if nothing had been."""
    group = Group(5, None)
    step = group.reach(32, 2)
    with pytest.raises(MemoryError, match=r"\b2\b.*\b1\b"):
        group.reach(33, 2)
    assert (group.length, group.n_used) == (32, 4) and group.step is step
    group.choose([1])
    assert group.reach(33, 1).rows.tables.shape == (1, 3)
    with pytest.raises(MemoryError):
        Group(1, None).reach(17, 1)


def test_a_new_group_that_is_full_has_no_rows() -> None:
    group = Group(1, None)
    with pytest.raises(MemoryError):
        group.reach(1, 2)
    assert (group.length, group.n_used, group.n_rows, group.step) == (0, 0, 0, None)
    group.reach(1, 1)


def test_tokens_behind_a_window_are_not_taken_back() -> None:
    """Keys that the tokens before them need are gone then."""
    group = Group(8, 5)
    for length in range(1, 35):
        group.reach(length, 1)
    with pytest.raises(StateError, match="window"):
        group.cut(16)
    assert group.length == 34
