"""A cache in blocks holds the tensors of transformers' ``DynamicCache`` after the same calls, and each prompt once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepspeed_c.errors import FeatureError, StateError
from deepspeed_c.kv.cache import BlockCache, view_of
from tests.ops.data import DTYPES

transformers = pytest.importorskip("transformers")

WINDOW = 5
N_HEADS, DIM = 2, 3


def config(*layers: str) -> Any:
    layers = layers or ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
    return transformers.Gemma2Config(num_hidden_layers=len(layers), layer_types=list(layers), sliding_window=WINDOW)


class Pair:
    """A cache in blocks, and a ``DynamicCache`` that gets the same calls."""

    def __init__(self, *layers: str, n_blocks: int = 200, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.blocks = BlockCache(config(*layers), n_blocks)
        self.plain = transformers.DynamicCache(config=config(*layers))
        self.random = torch.Generator().manual_seed(3)

    def grow(self, n_rows: int, n_new: int) -> None:
        """The new tokens of a forward. Keys lie as a model's: [rows, tokens, heads, dim], seen from its heads."""
        for layer in range(len(self.plain.layers)):
            shape = (n_rows, n_new, N_HEADS, DIM)
            k, v = (torch.randn(shape, generator=self.random).to(self.dtype).transpose(1, 2) for _ in "kv")
            self.plain.update(k, v, layer)
            found = self.blocks.update(k, v, layer)
            view = view_of(found[0])
            assert view is not None and view.layer is self.blocks.layers[layer]
            assert torch.equal(found[0], k) and torch.equal(found[1], v)

    def call(self, name: str, *args: Any) -> None:
        for cache in (self.blocks, self.plain):
            getattr(cache, name)(*args)

    def require_same_sizes(self) -> None:
        assert self.blocks.is_sliding == self.plain.is_sliding
        for layer in range(len(self.plain.layers)):
            assert self.blocks.get_seq_length(layer) == self.plain.get_seq_length(layer), layer
            for n_queries in (1, 4):
                sizes = self.plain.get_mask_sizes(n_queries, layer)
                assert self.blocks.get_mask_sizes(n_queries, layer) == sizes, (layer, n_queries)

    def require_same(self) -> None:
        self.require_same_sizes()
        dense = self.blocks.dense()
        assert type(dense) is type(self.plain)
        for mine, other in zip(dense.layers, self.plain.layers, strict=True):
            assert type(mine) is type(other) and mine.get_seq_length() == other.get_seq_length()
            if other.get_seq_length():
                assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_growth(dtype: torch.dtype) -> None:
    pair = Pair(dtype=dtype)
    pair.require_same_sizes()
    for n_new in (3, 1, 1, 1, 1, 20, 1, 7, 40):
        pair.grow(3, n_new)
        pair.require_same()


def acts(pair: Pair, chance: random.Random, n_rows: int) -> int:
    """One random act on the rows of both caches. Returns their number afterwards."""
    act = chance.choice(("reorder", "repeat", "numbers", "bool"))
    if act == "reorder":
        pair.call("reorder_cache", torch.tensor(chance.choices(range(n_rows), k=n_rows)))
    elif act == "repeat" and n_rows < 5:
        pair.call("batch_repeat_interleave", 2)
        return 2 * n_rows
    elif act == "numbers":
        rows = chance.choices(range(n_rows), k=chance.randint(1, 4))
        pair.call("batch_select_indices", torch.tensor(rows))
        return len(rows)
    elif act == "bool":
        kept = torch.tensor([i == 0 or chance.random() < 0.7 for i in range(n_rows)])
        pair.call("batch_select_indices", kept)
        return int(kept.sum())
    return n_rows


@pytest.mark.parametrize("seed", range(3))
def test_rows_move_as_those_of_the_dense_cache(seed: int) -> None:
    pair, chance, n_rows = Pair(), random.Random(seed), 2
    for _ in range(60):
        pair.grow(n_rows, chance.choice((1, 1, 1, 3, 18)))
        pair.require_same()
        n_rows = acts(pair, chance, n_rows)
        pair.require_same()
        if pair.plain.get_seq_length() > 120:
            pair.call("reset")
            pair.require_same_sizes()
            n_rows = 2


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_taken_back(seed: int) -> None:
    pair, chance = Pair(), random.Random(seed)
    pair.call("activate_past_recording")
    for _ in range(40):
        n_new = chance.choice((1, 2, 6, 17))
        pair.grow(2, n_new)
        pair.call("crop", -chance.randint(0, n_new))
        pair.require_same()
    with pytest.raises(ValueError, match="negative"):
        pair.blocks.crop(3)


def test_tokens_behind_a_window_that_are_gone_are_not_taken_back() -> None:
    pair = Pair()
    pair.grow(2, 40)
    with pytest.raises(RuntimeError):
        pair.plain.crop(-30)
    before = pair.blocks.dense()
    with pytest.raises(StateError, match="window"):
        pair.blocks.crop(-30)
    for mine, other in zip(pair.blocks.dense().layers, before.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)


def test_samples_hold_their_prompt_once() -> None:
    pair = Pair("full_attention", "full_attention", n_blocks=20)
    (group,) = pair.blocks.groups.values()
    pair.grow(1, 157)
    assert group.n_used == 10
    pair.call("batch_repeat_interleave", 8)
    pair.require_same()
    assert group.n_used == 10
    pair.grow(8, 1)
    pair.require_same()
    assert group.n_used == 9 + 8


def test_a_thousand_tokens_move_nothing() -> None:
    pair = Pair("full_attention", "sliding_attention", n_blocks=200)
    places = None
    for n_new in (10, *[1] * 990):
        pair.grow(2, n_new)
        now = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in pair.blocks.layers]
        assert places in (None, now)
        places = now
        for group in pair.blocks.groups.values():
            assert group.step is not None and group.step.copies is None
    pair.require_same()
    assert pair.blocks.groups[WINDOW].n_used <= 4 and pair.blocks.groups[None].n_used == 2 * 63


def test_memory_of_ended_rows_is_used_again() -> None:
    pair = Pair(n_blocks=8)
    for n_rows in (2, 4, 1):
        pair.grow(n_rows, 20)
        pair.require_same()
        pair.call("reset")
        assert not any(group.n_used for group in pair.blocks.groups.values())
        pair.require_same_sizes()


def test_layers_of_another_kind_are_refused_by_name() -> None:
    other = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(FeatureError, match="LinearAttention"):
        BlockCache(other, 10)


@pytest.mark.parametrize("n_layers", [1, 2])
def test_an_attention_that_does_not_know_blocks_is_found(n_layers: int) -> None:
    """The next layer finds it, or the same layer at the next token."""
    cache = BlockCache(config(*["full_attention"] * n_layers), 10)
    k = torch.zeros(1, 2, 1, 3)
    cache.update(k, k, 0)
    with pytest.raises(FeatureError, match="layer 0"):
        cache.update(k.clone(), k, 1 % n_layers)
    assert view_of(torch.zeros(1)) is None


def test_masks() -> None:
    cache = BlockCache(config(), 10)
    assert cache.first_of(None) is None
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    assert cache.first_of(mask).tolist() == [2, 0, 4]
    assert cache.first_of(mask) is cache.first_of(mask), "of the next layer"
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    assert cache.first_of(mask[[1, 0, 0]]).tolist() == [0, 2, 2]
    with pytest.raises(FeatureError, match="no mask now"):
        cache.first_of(None)
    cache.reset()
    assert cache.first_of(None) is None


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 1]])
def test_masks_with_holes(row: list[int]) -> None:
    cache = BlockCache(config(), 10)
    with pytest.raises(FeatureError, match="behind its first token"):
        cache.first_of(torch.tensor([[1, 1, 1, 1], row]).bool())
