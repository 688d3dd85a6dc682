"""A ``transformers.Cache`` in blocks: it grows without a copy, rows share their prompt, and beams move numbers.

Importing this module imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from deepspeed_c.errors import StateError
from deepspeed_c.kv.group import CallNeedsOwnCache, Group, Step, blocks_of, own_cache
from deepspeed_c.ops import kv
from deepspeed_c.ops.kv import BLOCK_TOKENS

__all__ = [
    "BlockCache",
    "BlockLayer",
    "CacheInBlocks",
    "CrossCache",
    "CrossLayer",
    "EncodedCache",
    "View",
    "by_token",
    "dense",
    "expands",
    "stands_for",
    "view_of",
]

_VIEW = "_deepspeed_c_view"
_stands: ContextVar[Callable[[torch.Tensor, View], Any] | None] = ContextVar("stands", default=None)
_waits: ContextVar[_Expansion | None] = ContextVar("waits", default=None)


class View(NamedTuple):
    """All keys of some rows. Another tensor stands for them between ``update`` and attention."""

    layer: BlockLayer | CrossLayer
    rows: kv.KvRows | None
    """None: those of the layer's cache."""


class _Expansion:
    """The latents of a layer between ``update`` and attention."""

    layer: BlockLayer | None = None
    cached: tuple[torch.Tensor, torch.Tensor]


@contextmanager
def expands() -> Iterator[None]:
    """Context of a model that caches latents, and makes keys and values of them before attention (DeepSeek,
    arXiv 2405.04434). Blocks hold these keys and values: each token is expanded once."""
    token = _waits.set(_Expansion())
    try:
        yield
    finally:
        _waits.reset(token)


def view_of(key: torch.Tensor, value: torch.Tensor | None = None) -> View | None:
    """The view that keys stand for; None for keys of no block cache. Its layer's keys count as attended to then.

    value: of attention, which within ``expands`` writes both [batch, heads, tokens, dim].
    """
    waiting = _waits.get()
    if value is not None and waiting is not None and waiting.layer is not None:
        layer, waiting.layer = waiting.layer, None
        if key.shape[2] != waiting.cached[0].shape[2]:
            raise own_cache(f"{key.shape[2]} keys were made of {waiting.cached[0].shape[2]} new tokens")
        key, _ = layer.write(key, value, *(() if key is waiting.cached[0] else waiting.cached))
    view = getattr(key, _VIEW, None)
    if view is not None:
        view.layer.cache.note_found()
    return view


@contextmanager
def stands_for(make: Callable[[torch.Tensor, View], Any]) -> Iterator[None]:
    """Context of a model whose layers get ``make(keys of new tokens, view)`` in the place of keys."""
    token = _stands.set(make)
    try:
        yield
    finally:
        _stands.reset(token)


def _stand_in(key_states: torch.Tensor, view: View) -> Any:
    """Returns ``key_states``, which stand for the view from now on, or what ``stands_for`` makes of them."""
    make = _stands.get()
    if make is not None:
        return make(key_states, view)
    setattr(key_states, _VIEW, view)
    return key_states


def by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, dim] as [batch * tokens, heads, dim], dense in dim."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _write_latents(states: tuple[torch.Tensor, ...], blocks: tuple[torch.Tensor, ...], rows: kv.KvRows) -> None:
    """Writes two tensors [batch, heads, tokens, dim] of new tokens, of any ``dim``: ``kv_write`` takes dimensions of
    attention. All rows have the same number of tokens."""
    (first, second), (keys, values) = states, blocks
    length = int(rows.n_keys[0])
    places = torch.arange(length - first.shape[2], length)
    numbers, slots = rows.tables[:, places // BLOCK_TOKENS].long(), places % BLOCK_TOKENS
    keys[numbers, :, :, slots] = first.transpose(1, 2)
    values[numbers, :, slots] = second.transpose(1, 2)


class BlockLayer(CacheLayerMixin):
    """The keys and values of one layer. They grow in place, in blocks whose numbers its group decides."""

    is_croppable = True
    is_causal = True

    def __init__(self, cache: BlockCache, group: Group, index: int) -> None:
        super().__init__()
        self.cache, self.group, self.index = cache, group, index
        self.length, self.window = 0, group.window
        self.is_sliding = group.window is not None
        self._last_step = -1
        self._own: tuple[torch.Tensor, ...] = ()  # blocks of latents

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, *cached: torch.Tensor) -> None:
        self.cache.fit(key_states, value_states, *cached)
        if cached:
            self._own = kv.new_blocks(self.group.n_blocks, *cached)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = kv.new_blocks(self.group.n_blocks, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values [batch, heads, tokens, dim] of new tokens; within ``expands``, attention does.

        Returns them as they are: attention finds all others by ``view_of``.
        """
        self.cache.expect(self)
        waiting = _waits.get()
        if waiting is None:
            return self.write(key_states, value_states)
        waiting.layer, waiting.cached = self, (key_states, value_states)
        return key_states, value_states

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *cached: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values of new tokens. cached: their latents.

        Returns them, and they stand for all keys and values of their rows.
        """
        if not self.is_initialized or (not self.length and self.dtype is not key_states.dtype):
            self.lazy_initialization(key_states, value_states, *cached)
        try:
            step = self.group.reach(self.length + key_states.shape[2], key_states.shape[0])
        except MemoryError as error:
            if self.cache.is_cut_short:
                raise StateError(
                    f"the pool of {self.group.n_blocks} blocks, which is what the memory had room for, is full: {error}",
                    where="keys and values in blocks",
                    fix="ask for fewer rows or new tokens, or raise the limit of memory",
                ) from error
            raise own_cache(f"more tokens come than the call asked for ({error})", CallNeedsOwnCache) from error
        self.length += key_states.shape[2]
        return self._write(step, key_states, value_states, *cached)

    def _write(
        self, step: Step, key_states: torch.Tensor, value_states: torch.Tensor, *cached: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if step.copies is not None and step.number != self._last_step:
            source, target = step.copies
            for blocks in self.tensors:
                blocks[target] = blocks[source]
        self._last_step = step.number
        kv.write(by_token(key_states), by_token(value_states), self.keys, self.values, step.rows)
        if cached:
            _write_latents(cached, self._own, step.rows)
        return _stand_in(key_states, View(self, step.rows)), value_states

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that lies in blocks."""
        return (*self.blocks, *self._own)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors [batch, heads, tokens, dim] of the visible tokens, for the model's own cache."""
        return kv.read(*(self._own or self.blocks), self.group.rows(), self.get_mask_sizes(0)[0])

    @property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def seen(self, view: View, mask: torch.Tensor | None, n_new: int) -> tuple[kv.KvRows, torch.Tensor | None]:
        """The rows of ``n_new`` tokens, and the first token of each row that they see. mask: of ``_mask``."""
        if mask is not None and mask.ndim != 2:
            raise own_cache(f"a layer has a mask of its own {tuple(mask.shape)}")
        return view.rows, self.cache.first_of(mask)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.group.window is None else self.group.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.group.window is None:
            return self.length + query_length, 0
        kept = min(self.length, self.group.window - 1)
        return kept + query_length, self.length - kept

    def reset(self) -> None:
        self.length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise StateError(
            "rows move with all layers of their cache",
            where="BlockLayer.reorder_cache",
            fix="call reorder_cache of the BlockCache",
        )


class CrossLayer(CacheLayerMixin):
    """The keys and values of an encoder's tokens in one layer. They come once; the rows of a prompt share them."""

    is_sliding = False
    is_croppable = False
    is_causal = False
    window = None

    def __init__(self, cache: CrossCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values [batch, heads, tokens, dim] of an encoder's tokens, those of each prompt once."""
        self.cache.expect(self)
        self.lazy_initialization(key_states, value_states)
        n_rows, self.length = key_states.shape[0], key_states.shape[2]
        prompts, n_ways = self.cache.hold(n_rows, self.length)
        keys, values = key_states[::n_ways], value_states[::n_ways]
        self.blocks = kv.new_blocks(prompts.tables.numel(), keys, values)
        kv.write(by_token(keys), by_token(values), *self.blocks, prompts)
        self.keys, self.values = key_states.new_empty(()), value_states.new_empty(())
        self.stand_for(n_rows, key_states.shape, value_states.shape)
        return self.keys, self.values

    def stand_for(self, n_rows: int, keys: torch.Size, values: torch.Size) -> None:
        """Makes ``keys`` and ``values``, which a model reads at each forward, tensors of ``n_rows`` rows of no memory."""
        self.keys = _stand_in(self.keys.new_empty(()).expand(n_rows, *keys[1:]), View(self, None))
        self.values = self.values.new_empty(()).expand(n_rows, *values[1:])

    def seen(self, view: View, mask: torch.Tensor | None, n_new: int) -> tuple[kv.KvRows, torch.Tensor | None]:
        """The rows of ``n_new`` tokens, and the first key of each row that they see. mask: of the model."""
        return self.cache.rows_behind(mask, n_new)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class CacheInBlocks(DynamicCache):
    """The base of caches whose keys attention must find by ``view_of``. config: of the model, as ``DynamicCache`` takes
    it. Raises NeedsOwnCache for a model with layers of another kind (recurrent states)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.awaited: BlockLayer | CrossLayer | None = None
        """The layer whose keys were written last, until attention has found them."""
        self.windows = [_window_of(layer) for layer in self.layers]
        """Tokens that a query of each layer sees; None: all."""

    def expect(self, layer: BlockLayer | CrossLayer) -> None:
        """Notes that attention must find the keys of ``layer`` next.

        Raises NeedsOwnCache where it has not found the keys of the layer before.
        """
        if self.awaited is not None:
            raise own_cache(
                f"the keys of layer {self.awaited.index} were read by an attention that does not know blocks"
            )
        self.awaited = layer

    def note_found(self) -> None:
        """Attention has found the keys of the layer that was expected."""
        self.awaited = None


def _window_of(layer: Any) -> int | None:
    if type(layer) is DynamicLayer:
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window
    raise own_cache(f"a layer of the model keeps a {type(layer).__name__}")


class BlockCache(CacheInBlocks):
    """The keys and values of a model's layers of full and of sliding attention.

    Args:
        config: of the model, as ``DynamicCache`` takes it.
        n_blocks: blocks of each group of layers that hold the same tokens. Memory is taken when a block is written.
        most_bytes: of all blocks; the cache has fewer blocks where this asks for it. None: any number.

    Raises NeedsOwnCache for a model with layers of another kind (recurrent states).
    """

    def __init__(self, config: Any, n_blocks: int, most_bytes: int | None = None) -> None:
        super().__init__(config)
        self._config, self._most_bytes = config, most_bytes
        self.is_cut_short = False
        """Whether ``most_bytes`` has left fewer blocks than were asked for."""
        self.groups: dict[int | None, Group] = {}
        self._first: torch.Tensor | None = None  # behind the padding of each row; None: no row is padded
        self._mask: torch.Tensor | None = None  # whose first tokens these are
        for window in self.windows:
            self.groups.setdefault(window, Group(n_blocks, window))
        self.layers = [BlockLayer(self, self.groups[window], i) for i, window in enumerate(self.windows)]

    def holds(self, config: Any, n_blocks: int) -> bool:
        """Whether a call that needs so many blocks may use this cache."""
        n_own = min((group.n_blocks for group in self.groups.values()), default=0)
        return config is self._config and n_blocks <= n_own and not self.is_cut_short

    def fit(self, *states: torch.Tensor) -> None:
        """Cuts the pools to ``most_bytes``, before the first layer takes its memory. Layers are taken for equal.

        states: the new tokens of all tensors in blocks, each [batch, heads, tokens, dim].

        Raises StateError where not even the tokens that come now have room.
        """
        if self._most_bytes is None or any(layer.is_initialized for layer in self.layers):
            return
        n_rows, _, n_tokens, _ = states[0].shape
        tensors = [each[0, :, 0] for each in states]
        n_bytes = BLOCK_TOKENS * len(self.layers) * sum(each.numel() * each.itemsize for each in tensors)
        n_least, n_most = n_rows * blocks_of(n_tokens), self._most_bytes // n_bytes
        self.is_cut_short = any(group.n_blocks > n_most for group in self.groups.values())
        if n_most < n_least:
            raise StateError(
                f"{n_rows} rows of {n_tokens} tokens need {n_least} blocks of keys and values, {n_least * n_bytes}"
                f" bytes; the memory has {self._most_bytes} bytes left, {n_most} blocks",
                where="keys and values in blocks",
                fix="ask for fewer rows or shorter prompts, or raise the limit of memory",
            )
        for group in self.groups.values():
            group.limit(min(group.n_blocks, n_most))

    def first_of(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The first token of each row that is no padding, int64 [batch]; None where no row is padded.

        mask: bool [batch, tokens]. All layers of a forward get the same one. Raises CallNeedsOwnCache for a mask with
        holes.
        """
        if mask is not None and mask is not self._mask:
            n_tokens = mask.sum(1)
            first = mask.shape[1] - n_tokens
            has_holes = bool(((mask.int().argmax(1) != first) & (n_tokens > 0)).any())
            if has_holes:
                raise own_cache("the mask of a row has padding behind its first token", CallNeedsOwnCache)
            self._first, self._mask = first, mask
        elif mask is None and self._first is not None:
            raise own_cache("a row was padded, and has no mask now", CallNeedsOwnCache)
        return self._first

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._choose(beam_idx.tolist())

    @property
    def n_rows(self) -> int:
        return max((group.n_rows for group in self.groups.values()), default=0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose([row for row in range(self.n_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._choose(indices.tolist())

    def _choose(self, rows: list[int]) -> None:
        for group in self.groups.values():
            group.choose(rows)
        if self._first is not None:
            self._first, self._mask = self._first[rows], None

    def activate_past_recording(self) -> None:
        for group in self.groups.values():
            group.keep_past()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens of each row."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        for group in self.groups.values():
            if group.n_rows:
                group.cut(-tokens_to_remove)
        for layer in self.layers:
            layer.length = max(layer.length + tokens_to_remove, 0)

    def dense(self) -> DynamicCache:
        """The same keys and values as transformers' own cache holds them."""
        found = DynamicCache(config=self._config)
        for layer, own in zip(self.layers, found.layers, strict=True):
            if layer.length:
                own.update(*layer.dense())
                if own.is_sliding:
                    own.cumulative_length = layer.length
        return found

    def reset(self) -> None:
        """Ends all rows. Their blocks are free for the next ones."""
        for group in self.groups.values():
            group.clear()
        for layer in self.layers:
            layer.reset()
        self.awaited = self._first = self._mask = None


class CrossCache(BlockCache):
    """The keys and values of an encoder's tokens for all layers of its decoder. Its rows are numbers of prompts, so
    beams and samples of a prompt hold it once, and nothing moves with them.

    T5Gemma makes one with these arguments. Layers have no windows here.
    """

    def __init__(self, config: Any = None, offloading: bool = False) -> None:
        super().__init__(None, 0)
        self._n_ways, self._n_tokens = 1, 0
        self._prompts = torch.empty(0, dtype=torch.long)  # of each row
        self._rows: kv.KvRows | None = None  # of this forward

    def share(self, n_ways: int) -> None:
        """So many rows, one after the other, come from the same prompt."""
        self._n_ways = n_ways

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(CrossLayer(self, len(self.layers)))
        return self.layers[layer_idx].update(key_states, value_states)

    def hold(self, n_rows: int, n_tokens: int) -> tuple[kv.KvRows, int]:
        """The prompts of ``n_rows`` new rows with new tokens alone, and the number of rows of a prompt."""
        n_ways = self._n_ways if n_rows % self._n_ways == 0 else 1
        n_prompts, self._n_tokens = n_rows // n_ways, n_tokens
        self._prompts, self._rows = torch.arange(n_prompts).repeat_interleave(n_ways), None
        return kv.KvRows(*[torch.full((n_prompts,), n_tokens)] * 2, self._tables(n_prompts)), n_ways

    def _tables(self, n_prompts: int) -> torch.Tensor:
        n_blocks = blocks_of(self._n_tokens)
        return torch.arange(n_prompts * n_blocks, dtype=torch.int32).view(n_prompts, n_blocks)

    def rows_behind(self, mask: torch.Tensor | None, n_new: int) -> tuple[kv.KvRows, torch.Tensor | None]:
        """The rows for ``n_new`` tokens of the decoder, and the first key of each row that they see; None: all.

        mask: of the model, [batch, 1, new tokens, keys], True or 0 where a key is seen. All layers of a forward get the
        same one. Raises CallNeedsOwnCache where the keys that a row sees are not one piece, the same for its tokens.
        """
        if self._rows is None or mask is not self._mask or n_new != int(self._rows.n_new[0]):
            n_rows = self.n_rows
            ends = torch.full((n_rows,), self._n_tokens)
            self._first, self._mask = None, mask
            if mask is not None:
                self._first, ends = _pieces(mask.expand(n_rows, *mask.shape[1:]))
            tables = self._tables(int(self._prompts.max()) + 1)[self._prompts]
            self._rows = kv.KvRows(torch.full((n_rows,), n_new), ends, tables)
        return self._rows, self._first

    @property
    def n_rows(self) -> int:
        return len(self._prompts)

    def _choose(self, rows: list[int]) -> None:
        if not self.layers:
            return
        self._prompts, self._rows = self._prompts[rows], None
        for layer in self.layers:
            layer.stand_for(len(rows), layer.keys.shape, layer.values.shape)

    def dense(self) -> DynamicCache:
        found = DynamicCache()
        rows, _ = self.rows_behind(None, 1)
        for layer in self.layers:
            found.update(*kv.read(*layer.blocks, rows, layer.length), layer.index)
        return found

    def reset(self) -> None:
        """Ends all rows. The next ones may have any number of tokens."""
        super().reset()
        self.layers, self._prompts, self._rows = [], self._prompts[:0], None


def _pieces(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key of each row that is seen, and the key behind its last one: int64 [batch]."""
    is_seen, is_bias = mask, False
    if mask.is_floating_point():
        is_seen = mask > torch.finfo(mask.dtype).min / 2
        is_bias = bool(mask[is_seen].any())
    row = is_seen[:, 0, 0]
    first = row.int().argmax(1)
    end = row.shape[1] - row.flip(1).int().argmax(1)
    if is_bias or not bool((is_seen == row[:, None, None]).all() & (end - first == row.sum(1)).all()):
        raise own_cache(f"a mask {tuple(mask.shape)} of an encoder's tokens is not one piece a row", CallNeedsOwnCache)
    return first, end


class EncodedCache(EncoderDecoderCache):
    """The caches of a decoder behind an encoder: of its own tokens, and of the encoder's.

    cache: the first of them. n_ways: rows that come from the same prompt, one after the other.
    """

    def __init__(self, cache: BlockCache, n_ways: int = 1) -> None:
        self._n_ways = n_ways
        super().__init__(cache, CrossCache())

    @property
    def cross_attention_cache(self) -> CrossCache:
        return self._cross

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: CrossCache) -> None:
        """T5Gemma puts a new cache of the same class in the place of the empty one."""
        self._cross = cache
        cache.share(self._n_ways)


def dense(cache: BlockCache | EncodedCache) -> DynamicCache | EncoderDecoderCache:
    """The same keys and values as transformers' own cache holds them."""
    if isinstance(cache, EncodedCache):
        return EncoderDecoderCache(cache.self_attention_cache.dense(), cache.cross_attention_cache.dense())
    return cache.dense()
