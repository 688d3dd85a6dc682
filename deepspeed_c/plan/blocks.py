"""Keys and values of generation in blocks (``deepspeed_c.kv``), counted for ``deepspeed_c plan --inference``.

Whether a model finds its keys in blocks is tried: its forward runs on the meta device with such a cache. The number of
blocks comes from the tables that ``generate`` itself uses, which hold no tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deepspeed_c import kv
from deepspeed_c.kv.group import Group, blocks_of, own_cache

__all__ = ["CallShape", "GroupBlocks", "groups_of", "layers_in_blocks", "reads_prompts_once"]

# The rule of a mask is compared for all pairs of tokens, so few tokens are tried.
_TRIAL_TOKENS = 64


class CallShape(NamedTuple):
    """One call of ``generate``."""

    n_prompts: int
    n_ways: int
    """Samples of each prompt."""
    n_tokens: int
    """Prompt and new tokens of a sample."""
    n_prompt: int | None
    """Tokens of a prompt; None: not known."""

    @property
    def n_rows(self) -> int:
        return self.n_prompts * self.n_ways


class GroupBlocks(NamedTuple):
    """The blocks of the layers that hold the same tokens, which each of these layers has."""

    window: int | None
    n_layers: int
    n_blocks: int


def layers_in_blocks(model: torch.nn.Module, shape: CallShape) -> list[Any]:
    """The layers (``BlockLayer``) of a cache in blocks after a forward by a model on the meta device.

    Raises NeedsOwnCache where ``generate`` keeps the model's own cache. Errors of the model's code pass through.
    """
    config: Any = model.config
    cache = kv.cache.BlockCache(config.get_text_config(decoder=True), shape.n_rows * blocks_of(_TRIAL_TOKENS))
    if config.is_encoder_decoder:
        raise own_cache("blocks are not counted for a model with an encoder")
    ids = torch.zeros(shape.n_rows, min(_TRIAL_TOKENS, shape.n_tokens), dtype=torch.long, device="meta")
    with kv.attention.attention_in_blocks(model), torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    if cache.awaited is not None:
        raise own_cache("its attention is part of its layers")
    return cache.layers


def reads_prompts_once(model: torch.nn.Module, shape: CallShape) -> bool:
    """Whether ``generate`` in blocks reads each prompt in one row, which all its samples share."""
    return shape.n_ways > 1 and (shape.n_prompt or 1) > 1 and kv.attention.has_plain_inputs(model)


def groups_of(layers: list[Any], shape: CallShape, *, is_shared: bool) -> list[GroupBlocks]:
    """The blocks of each group of ``layers`` in such a call.

    is_shared: prompts are read once (``reads_prompts_once``).
    """
    windows = [layer.group.window for layer in layers]
    return [
        GroupBlocks(window, windows.count(window), _n_blocks(window, shape, is_shared=is_shared))
        for window in dict.fromkeys(windows)
    ]


def _n_blocks(window: int | None, shape: CallShape, *, is_shared: bool) -> int:
    """The most blocks that hold tokens at a time: after the prompts, or at the end.

    A prompt is written whole, also where a window then gives blocks back. These are used again, so memory does not grow
    between both moments. The last new token ends the call, and its keys are not computed.
    """
    last = max(shape.n_tokens - 1, 1)
    group = Group(shape.n_rows * (blocks_of(last) + 1), window)
    n_first = shape.n_prompt or 1
    if is_shared:
        group.reach(n_first - 1, shape.n_prompts)
        n_used = group.n_used
        group.choose([row for row in range(shape.n_prompts) for _ in range(shape.n_ways)])
    else:
        group.reach(n_first, shape.n_rows)
        n_used = group.n_used
    for length in (last - 1, last):
        if length > group.length:
            group.reach(length, shape.n_rows)
    return max(n_used, group.n_used)
