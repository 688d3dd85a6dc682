"""Attention over keys in blocks: its formula over all pairs of tokens in float64, equal bits in any company, and errors
before anything is written.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from deepspeed_c.ops import kv
from tests.ops.data import DTYPES, bits, normal, on_each_setup

# The result is rounded once to its dtype.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# New tokens and all tokens of each row: a prompt, a token behind 600, a row without new tokens, an end of a prompt,
# rows that end with a block, and a row without tokens.
ROWS = [(5, 5), (1, 601), (0, 20), (13, 40), (1, 32), (16, 16), (0, 0), (1, 1)]


class Blocks:
    """Rows of random keys and values, [tokens, heads, dim] each, and the blocks that hold them in mixed order."""

    def __init__(self, rows, n_kv_heads=2, head_dim=8, value_dim=8, dtype=torch.float32):
        n_keys = [n for _, n in rows]
        self.k, self.v = (
            [normal(n * n_kv_heads * dim, seed + i, dtype).view(n, n_kv_heads, dim) for i, n in enumerate(n_keys)]
            for seed, dim in ((10, head_dim), (90, value_dim))
        )
        counts = [-(-n // kv.BLOCK_TOKENS) for n in n_keys]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        tables = torch.full((len(rows), max(counts, default=0)), -1, dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        self.rows = kv.KvRows(
            torch.tensor([n for n, _ in rows], dtype=torch.int64), torch.tensor(n_keys).long(), tables
        )
        n_blocks = sum(counts) + 3
        self.keys = torch.full((n_blocks, n_kv_heads, head_dim, kv.BLOCK_TOKENS), torch.nan, dtype=dtype)
        self.values = torch.full((n_blocks, n_kv_heads, kv.BLOCK_TOKENS, value_dim), torch.nan, dtype=dtype)
        if rows:
            whole = self.rows._replace(n_new=self.rows.n_keys)
            kv.write(torch.cat(self.k), torch.cat(self.v), self.keys, self.values, whole)

    def attend(self, q, rows=None, **rules):
        return kv.attention(q, self.keys, self.values, rows or self.rows, **{"scale": 0.3, **rules})


def queries(rows, n_heads=4, head_dim=8, dtype=torch.float32):
    """[tokens, heads, dim], a view of [heads, tokens, dim]."""
    n = sum(n for n, _ in rows)
    return normal(n * n_heads * head_dim, 5, dtype).view(n_heads, n, head_dim).transpose(0, 1)


def formula(q, blocks, scale=0.3, first=None, sinks=None, slopes=None, is_causal=True, window=0, soft_cap=0.0):
    found, begin = [], 0
    for row, (n_new, n_keys) in enumerate(zip(blocks.rows.n_new.tolist(), blocks.rows.n_keys.tolist())):
        mine, begin = q[begin : begin + n_new].double(), begin + n_new
        n_shared = q.shape[1] // blocks.keys.shape[1]
        k, v = (x[row].double().repeat_interleave(n_shared, 1) for x in (blocks.k, blocks.v))
        scores = torch.einsum("ihd,jhd->hij", mine, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at, key = torch.arange(n_keys - n_new, n_keys)[:, None], torch.arange(n_keys)
        if slopes is not None:
            scores = scores - slopes.double()[:, None, None] * (at - key).abs()
        seen = key >= (0 if first is None else int(first[row])) + 0 * at
        if is_causal:
            seen = seen & (key <= at)
        if window:
            seen = seen & ((at - key).abs() < window)
        scores = scores.masked_fill(~seen, -torch.inf)
        extra = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
        weights = torch.cat((scores, extra.double()[:, None, None].expand(-1, n_new, 1)), 2).softmax(2)[..., :-1]
        found.append(torch.einsum("hij,jhd->ihd", weights.nan_to_num(0), v))
    return torch.cat(found)


def close(got, wanted, what=""):
    assert got.shape == wanted.shape, what
    size = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[got.dtype] * size, msg=lambda m: what + m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_heads, n_kv_heads, dim, value_dim", [(4, 2, 8, 8), (3, 1, 33, 20), (2, 2, 5, 64)])
def test_rules(dtype, n_heads, n_kv_heads, dim, value_dim):
    blocks = Blocks(ROWS, n_kv_heads, dim, value_dim, dtype)
    q = queries(ROWS, n_heads, dim, dtype)
    rules = {
        "is_causal": (True, False),
        "window": (0, 1, 17),
        "soft_cap": (0.0, 3.0),
        "first": (None, torch.tensor([2, 77, 0, 30, 33, 16, 0, 0])),
        "sinks": (None, normal(n_heads, 7)),
        "slopes": (None, 2.0 ** -torch.arange(1, n_heads + 1).float()),
    }
    for choice in itertools.product(*rules.values()):
        given = dict(zip(rules, choice))
        got = blocks.attend(q, **given)
        assert got.dtype == dtype and got.shape == (len(q), n_heads, value_dim)
        close(got, formula(q, blocks, **given), f"{given}: ")


def test_more_queries_than_keys():
    """Queries of a decoder see all keys of its encoder."""
    rows = [(5, 3), (2, 0)]
    blocks, q = Blocks(rows), queries(rows)
    for is_causal in (False, True):
        close(blocks.attend(q, is_causal=is_causal), formula(q, blocks, is_causal=is_causal))


def test_scores_of_any_size_are_finite():
    blocks, q = Blocks(ROWS), queries(ROWS)
    for scale in (0.0, 40.0, -40.0):
        got, wanted = blocks.attend(q, scale=scale), formula(q, blocks, scale)
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_in_any_company(dtype):
    """A token's result has the same bits in a batch, alone, in its prompt's pieces, and on any setup."""
    blocks, q = Blocks(ROWS, dtype=dtype), queries(ROWS, dtype=dtype)
    rules = {"window": 300, "soft_cap": 5.0, "sinks": normal(4, 7)}
    for given in ({}, rules):
        wanted = blocks.attend(q, **given)
        for setup, got in on_each_setup(lambda given=given: blocks.attend(q, **given), (1, 2)).items():
            assert torch.equal(bits(got), bits(wanted)), setup
        begin = 0
        for row, (n_new, n_keys) in enumerate(ROWS):
            table = blocks.rows.tables[row : row + 1]
            for piece in (n_new, 1, 3):
                for start in range(0, n_new, max(piece, 1)):
                    end = min(start + piece, n_new)
                    seen = n_keys - n_new + end
                    rows = kv.KvRows(torch.tensor([end - start]), torch.tensor([seen]), table)
                    got = blocks.attend(q[begin + start : begin + end], rows, **given)
                    assert torch.equal(bits(got), bits(wanted[begin + start : begin + end])), (row, piece, start)
            begin += n_new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_keys", [1, 16, 37, 130])
def test_what_was_written_is_read(dtype, n_keys):
    blocks = Blocks([(n_keys, n_keys)] * 3, 3, 5, 7, dtype)
    assert blocks.rows.tables.unique().numel() == blocks.rows.tables.numel()
    for n_tokens in {1, min(n_keys, 17), n_keys}:
        k, v = kv.read(blocks.keys, blocks.values, blocks.rows, n_tokens)
        for got, given in ((k, blocks.k), (v, blocks.v)):
            assert torch.equal(got, torch.stack(given).transpose(1, 2)[:, :, n_keys - n_tokens :])


def test_only_new_tokens_are_written():
    rows = [(2, 18), (0, 3), (1, 1)]
    blocks = Blocks(rows)
    before = blocks.keys.clone(), blocks.values.clone()
    heads_first = torch.ones(2, 3, 8).transpose(0, 1)  # strided
    kv.write(heads_first, heads_first * 2, blocks.keys, blocks.values, blocks.rows)
    tables = blocks.rows.tables.tolist()
    for block, place in ((tables[0][1], 0), (tables[0][1], 1), (tables[2][0], 0)):
        assert bool((blocks.keys[block, :, :, place] == 1).all()) and bool((blocks.values[block, :, place] == 2).all())
        before[0][block, :, :, place], before[1][block, :, place] = 1, 2
    assert torch.equal(bits(blocks.keys), bits(before[0])) and torch.equal(bits(blocks.values), bits(before[1]))


def test_nothing():
    no_rows = Blocks([])
    kv.write(*no_rows.keys.new_empty(2, 0, 2, 8), no_rows.keys, no_rows.values, no_rows.rows)
    assert no_rows.attend(queries([])).shape == (0, 4, 8)
    no_tokens = Blocks([(0, 20), (0, 0)])
    assert no_tokens.attend(queries([])).shape == (0, 4, 8)


def test_a_block_that_is_gone_is_not_read():
    """Keys that no window reaches may lie in blocks that other rows have by now."""
    rows = [(1, 50), (2, 40)]
    blocks, q = Blocks(rows), queries(rows)
    wanted = blocks.attend(q, window=7)
    gone = blocks.rows.tables.clone()
    gone[:, :2] = -1
    assert torch.equal(blocks.attend(q, blocks.rows._replace(tables=gone), window=7), wanted)


# An argument, and another value of it for BAD_ROWS, whose blocks hold 2 heads of 8 elements.
BAD_ROWS = [(2, 18), (1, 1)]
BAD_BLOCKS = {
    "dims": ("keys", torch.zeros(6, 2, 8)),
    "block": ("keys", torch.zeros(6, 2, 8, 15)),
    "value-block": ("values", torch.zeros(6, 2, 15, 8)),
    "value-count": ("values", torch.zeros(5, 2, 16, 8)),
    "value-heads": ("values", torch.zeros(6, 3, 16, 8)),
    "value-dtype": ("values", torch.zeros(6, 2, 16, 8).half()),
    "strided": ("keys", torch.zeros(6, 2, 16, 8).mT),
    "table-dims": ("tables", torch.zeros(2, dtype=torch.int32)),
    "table-dtype": ("tables", torch.zeros(2, 2)),
    "few-keys": ("n_keys", torch.tensor([18])),
    "keys-dtype": ("n_keys", torch.tensor([18.0, 1.0])),
    "few-new": ("n_new", torch.tensor([3])),
}
BAD_LENGTHS = {
    "row 1 has -1 new tokens": ("n_new", torch.tensor([4, -1])),
    "row 1 has 2 new tokens among 1 keys": ("n_new", torch.tensor([1, 2])),
    "row 1 has 1 new tokens and 33 keys, and its table room for 32": ("n_keys", torch.tensor([18, 33])),
    "row 0 has 2 new tokens and -3 keys": ("n_keys", torch.tensor([-3, 1])),
}
BAD_TOKENS = {
    "tokens": torch.zeros(2, 2, 8),
    "heads": torch.zeros(3, 1, 8),
    "dim": torch.zeros(3, 2, 7),
    "dims": torch.zeros(3, 16),
    "dtype": torch.zeros(3, 2, 8).bfloat16(),
    "strides": torch.zeros(3, 8, 2).mT,
}


def raises(message, call):
    with pytest.raises(ValueError, match=rf"\b{re.escape(message)}\b"):
        call()


def arguments(name=None, value=None):
    blocks = Blocks(BAD_ROWS)
    given = {"keys": blocks.keys, "values": blocks.values, **blocks.rows._asdict()}
    if name:
        given[name] = value
    return given["keys"], given["values"], kv.KvRows(*(given[field] for field in kv.KvRows._fields))


@pytest.mark.parametrize(
    "message, name, value",
    [*((name, name, value) for name, value in BAD_BLOCKS.values()), *((key, *bad) for key, bad in BAD_LENGTHS.items())],
    ids=[*BAD_BLOCKS, *BAD_LENGTHS],
)
def test_bad_blocks_and_rows(message, name, value):
    keys, values, rows = arguments(name, value)
    before = bits(keys).clone(), bits(values).clone()
    raises(message, lambda: kv.write(torch.ones(3, 2, 8), torch.ones(3, 2, 8), keys, values, rows))
    if "among" not in message:  # queries may be more than keys
        raises(message, lambda: kv.attention(torch.ones(3, 2, 8), keys, values, rows, scale=1.0))
    assert torch.equal(bits(keys), before[0]) and torch.equal(bits(values), before[1])


@pytest.mark.parametrize("value", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_bad_tokens(value):
    keys, values, rows = arguments()
    before = bits(keys).clone(), bits(values).clone()
    good = torch.ones(3, 2, 8)
    raises("k", lambda: kv.write(value, good, keys, values, rows))
    raises("v", lambda: kv.write(good, value, keys, values, rows))
    if value.shape != (3, 1, 8):  # any number of queries' heads that heads of keys divide
        raises("q", lambda: kv.attention(value, keys, values, rows, scale=1.0))
    assert torch.equal(bits(keys), before[0]) and torch.equal(bits(values), before[1])


def test_bad_rules():
    keys, values, rows = arguments()
    q = torch.ones(3, 2, 8)
    raises("3 heads of q", lambda: kv.attention(torch.ones(3, 3, 8), keys, values, rows, scale=1.0))
    for name, rule in {
        "first": torch.tensor([0]),
        "sinks": torch.zeros(3),
        "slopes": torch.zeros(2).double(),
        "window": -1,
        "soft_cap": -1.0,
    }.items():
        raises(name, lambda name=name, rule=rule: kv.attention(q, keys, values, rows, scale=1.0, **{name: rule}))


def test_tokens_without_a_block():
    keys, values, rows = arguments()
    rows.tables[0, 1] = -1
    before = bits(keys).clone()
    raises("row 0", lambda: kv.write(torch.ones(3, 2, 8), torch.ones(3, 2, 8), keys, values, rows))
    rows.tables[0, 1] = 7
    raises("row 0", lambda: kv.write(torch.ones(3, 2, 8), torch.ones(3, 2, 8), keys, values, rows))
    raises("row 0", lambda: kv.attention(torch.ones(3, 2, 8), keys, values, rows, scale=1.0))
    assert torch.equal(bits(keys), before)
