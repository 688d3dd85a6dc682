"""A cache in blocks holds the tensors of transformers' ``DynamicCache`` after the same calls, and each prompt once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepspeed_c.errors import FeatureError, StateError
from deepspeed_c.kv.cache import BlockCache, CrossCache, EncodedCache, view_of
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


N_ENCODED = 19


def encoded(n_prompts: int, n_ways: int = 1) -> tuple[EncodedCache, Any]:
    """A cache with an encoder's tokens in two layers, each prompt ``n_ways`` times, and transformers' own."""
    cache, plain = EncodedCache(BlockCache(config(), 20), n_ways), transformers.DynamicCache()
    for layer in range(2):
        k, v = (torch.randn(n_prompts, N_HEADS, N_ENCODED, DIM).repeat_interleave(n_ways, 0) for _ in "kv")
        plain.update(k, v, layer)
        keys, values = cache.cross_attention_cache.update(k, v, layer)
        assert keys.shape == k.shape and values.shape == v.shape and view_of(keys) is not None
    return cache, plain


def require_same_encoded(cache: EncodedCache, plain: Any) -> None:
    dense = cache.cross_attention_cache.dense()
    for i, (layer, mine, other) in enumerate(zip(cache.cross_attention_cache.layers, dense.layers, plain.layers)):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
        assert layer.keys.shape == other.keys.shape and layer.values.shape == other.values.shape
        view = view_of(layer.keys)
        assert view is not None and view.layer is layer and layer.index == i


@pytest.mark.parametrize("n_ways", [1, 3])
def test_rows_share_the_tokens_of_an_encoder(n_ways: int) -> None:
    cache, plain = encoded(2, n_ways)
    cross = cache.cross_attention_cache
    n_rows = 2 * n_ways
    blocks = [layer.blocks[0].data_ptr() for layer in cross.layers]
    require_same_encoded(cache, plain)
    for call, argument in (
        ("reorder_cache", torch.arange(n_rows).flip(0)),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([1, 1, 3])),
        ("batch_select_indices", torch.tensor([True, False, True])),
    ):
        for each in (cross, plain):
            getattr(each, call)(argument)
        require_same_encoded(cache, plain)
    assert [layer.blocks[0].data_ptr() for layer in cross.layers] == blocks
    assert all(layer.blocks[0].shape[0] == 4 for layer in cross.layers), "two prompts of two blocks"
    cache.reset()
    assert cross.get_seq_length() == 0 and cross.n_rows == 0


def test_another_cache_for_the_tokens_of_an_encoder() -> None:
    """T5Gemma puts one of the same class in the place of the empty one, and it knows how many rows a prompt has."""
    cache = EncodedCache(BlockCache(config(), 20), n_ways=3)
    cache.cross_attention_cache = type(cache.cross_attention_cache)(config=config(), offloading=False)
    k = torch.randn(1, N_HEADS, N_ENCODED, DIM).repeat(3, 1, 1, 1)
    cache.cross_attention_cache.update(k, k, 0)
    assert cache.cross_attention_cache.layers[0].blocks[0].shape[0] == 2


def seen(cross: CrossCache, mask: torch.Tensor | None, n_new: int = 1) -> list[tuple[int, int]]:
    """The keys that each row sees: from, to."""
    rows, first = cross.rows_behind(mask, n_new)
    assert rows.n_new.tolist() == [n_new] * cross.n_rows
    return list(zip([0] * cross.n_rows if first is None else first.tolist(), rows.n_keys.tolist()))


def test_masks_of_an_encoders_tokens() -> None:
    cross = encoded(2)[0].cross_attention_cache
    assert seen(cross, None) == seen(cross, None, 4) == [(0, N_ENCODED)] * 2
    mask = torch.ones(2, 1, 1, N_ENCODED, dtype=torch.bool)
    assert seen(cross, mask) == [(0, N_ENCODED)] * 2
    mask = mask.clone()
    mask[0, ..., 7:], mask[1, ..., :3] = False, False
    assert seen(cross, mask) == seen(cross, mask.expand(2, 1, 5, N_ENCODED), 5) == [(0, 7), (3, N_ENCODED)]
    for dtype in (torch.float32, torch.float16):
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        assert seen(cross, added) == [(0, 7), (3, N_ENCODED)]
    assert seen(cross, mask[:1]) == [(0, 7)] * 2
    cross.reorder_cache(torch.tensor([1, 1]))
    assert seen(cross, None) == [(0, N_ENCODED)] * 2


@pytest.mark.parametrize("kind", ["hole", "nothing", "bias", "rows that differ"])
def test_masks_of_an_encoders_tokens_that_are_refused(kind: str) -> None:
    cross = encoded(1)[0].cross_attention_cache
    mask = torch.ones(1, 1, 2, N_ENCODED, dtype=torch.bool)
    if kind == "bias":
        mask = torch.full(mask.shape, 0.5)
    elif kind == "rows that differ":
        mask[:, :, 1, 5:] = False
    else:
        mask[..., 4:9] = False
        mask[..., :4] = mask[..., 9:] = kind == "hole"
    with pytest.raises(FeatureError, match="not one piece a row"):
        cross.rows_behind(mask, 2)
