"""A ``transformers.Cache`` in blocks: it grows without a copy, rows share their prompt, and beams move numbers.

Importing this module imports transformers.
"""

from __future__ import annotations

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
from deepspeed_c.kv.group import CallNeedsOwnCache, Group, own_cache
from deepspeed_c.ops import kv

__all__ = ["BlockCache", "BlockLayer", "View", "by_token", "dense", "view_of"]

_VIEW = "_deepspeed_c_view"


class View(NamedTuple):
    """All keys of some rows. The keys of new tokens stand for them between ``update`` and attention."""

    layer: BlockLayer
    rows: kv.KvRows


def view_of(key: torch.Tensor) -> View | None:
    """The view that keys stand for; None for keys of no block cache. Its layer's keys count as attended to then."""
    view = getattr(key, _VIEW, None)
    if view is not None:
        view.layer.cache.awaited = None
    return view


def by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, dim] as [batch * tokens, heads, dim], dense in dim."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class BlockLayer(CacheLayerMixin):
    """The keys and values of one layer. They grow in place, in blocks whose numbers its group decides."""

    is_croppable = True

    def __init__(self, cache: BlockCache, group: Group, index: int) -> None:
        super().__init__()
        self.cache, self.group, self.index = cache, group, index
        self.length = 0
        self.is_sliding = group.window is not None
        self._last_step = -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = kv.new_blocks(self.group.n_blocks, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values [batch, heads, tokens, dim] of new tokens.

        Returns them as they are: attention finds all others by ``view_of``.
        """
        self.cache.expect(self)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        try:
            step = self.group.reach(self.length + key_states.shape[2], key_states.shape[0])
        except MemoryError as error:
            raise own_cache(f"more tokens come than the call asked for ({error})", CallNeedsOwnCache) from error
        self.length += key_states.shape[2]
        if step.copies is not None and step.number != self._last_step:
            source, target = step.copies
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]
        self._last_step = step.number
        kv.write(by_token(key_states), by_token(value_states), self.keys, self.values, step.rows)
        setattr(key_states, _VIEW, View(self, step.rows))
        return key_states, value_states

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


class BlockCache(DynamicCache):
    """The keys and values of a model's layers of full and of sliding attention.

    Args:
        config: of the model, as ``DynamicCache`` takes it.
        n_blocks: blocks of each group of layers that hold the same tokens. Memory is taken when a block is written.

    Raises NeedsOwnCache for a model with layers of another kind (recurrent states).
    """

    def __init__(self, config: Any, n_blocks: int) -> None:
        super().__init__(config=config)
        self._config = config
        self.groups: dict[int | None, Group] = {}
        self.awaited: BlockLayer | None = None
        """The layer whose keys were written last, until attention has found them."""
        self._first: torch.Tensor | None = None  # behind the padding of each row; None: no row is padded
        self._mask: torch.Tensor | None = None  # whose first tokens these are
        windows = [self._window_of(layer) for layer in self.layers]
        for window in windows:
            self.groups.setdefault(window, Group(n_blocks, window))
        self.layers = [BlockLayer(self, self.groups[window], i) for i, window in enumerate(windows)]

    @staticmethod
    def _window_of(layer: Any) -> int | None:
        if type(layer) is DynamicLayer:
            return None
        if type(layer) is DynamicSlidingWindowLayer:
            return layer.sliding_window
        raise own_cache(f"a layer of the model keeps a {type(layer).__name__}")

    def expect(self, layer: BlockLayer) -> None:
        """Notes that attention must find the keys of ``layer`` next.

        Raises NeedsOwnCache where it has not found the keys of the layer before.
        """
        if self.awaited is not None:
            raise own_cache(
                f"the keys of layer {self.awaited.index} were read by an attention that does not know blocks"
            )
        self.awaited = layer

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

    def batch_repeat_interleave(self, repeats: int) -> None:
        n_rows = max((group.n_rows for group in self.groups.values()), default=0)
        self._choose([row for row in range(n_rows) for _ in range(repeats)])

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
                n_kept = layer.get_mask_sizes(0)[0]
                own.update(*kv.read(layer.keys, layer.values, layer.group.rows(), n_kept))
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


def dense(cache: BlockCache | EncoderDecoderCache) -> DynamicCache | EncoderDecoderCache:
    """The same keys and values as transformers' own cache holds them."""
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(cache.self_attention_cache.dense(), cache.cross_attention_cache)
    return cache.dense()
