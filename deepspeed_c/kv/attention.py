"""Attention over a block cache, for the ``AttentionInterface`` of transformers.

Importing this module imports transformers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.masking_utils import causal_mask_function

from deepspeed_c.kv.cache import View, by_token, expands, stands_for, view_of
from deepspeed_c.kv.group import CallNeedsOwnCache, own_cache
from deepspeed_c.kv.written_out import Keys
from deepspeed_c.ops import kv

__all__ = ["Attending", "attention_in_blocks", "finds_blocks", "has_plain_inputs"]

NAME = "deepspeed_c_blocks"
# Pairs of query and key that are compared at once: a mask of a long prompt would take gigabytes.
_MASK_PLACES = 1 << 22
# The method of a layer of transformers that caches latents, and makes keys and values of them.
_EXPANDS = "expand_kv"
# The types of models whose layers write their attention out, in operations that ``written_out`` knows.
_WRITTEN_OUT = frozenset({"bloom", "codegen", "falcon", "gptj"})
_is_here: ContextVar[bool] = ContextVar("is_here", default=False)  # whether this thread runs in such a context
# The own attention of each configuration in a context, by its id, and the number of its contexts: threads may generate
# with one model at a time.
_running: dict[int, tuple[str | None, int]] = {}
_lock = threading.Lock()


class Attending(NamedTuple):
    """The parts of a model that ``attention_in_blocks`` needs. A walk over all modules finds them."""

    configs: dict[int, Any]
    """By id: those that name an attention."""
    expands: bool
    """Whether layers cache latents."""
    writes_out: bool
    """Whether layers write their attention out."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Attending:
        configs, expands = {}, False
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                configs[id(config)] = config
            expands = expands or hasattr(module, _EXPANDS)
        return cls(configs, expands, _writes_out(model))


@contextmanager
def attention_in_blocks(model: torch.nn.Module | Attending) -> Iterator[None]:
    """Context in which attention in ``model`` finds the keys of a ``BlockCache``.

    Attention without such a cache runs as the model's own, and so does all attention of other threads.
    """
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    configs, is_expanding, writes_out = model if isinstance(model, Attending) else Attending.of(model)
    with _lock:
        for key, config in configs.items():
            own, n_contexts = _running.get(key, (config._attn_implementation, 0))
            _running[key] = own, n_contexts + 1
            config._attn_implementation_internal = NAME
    token = _is_here.set(True)
    try:
        with ExitStack() as ways:
            if is_expanding:
                ways.enter_context(expands())
            if writes_out:
                ways.enter_context(stands_for(partial(Keys, attend=_attend_written_out)))
            yield
    finally:
        _is_here.reset(token)
        with _lock:
            for key, config in configs.items():
                own, n_contexts = _running.pop(key)
                if n_contexts > 1:
                    _running[key] = own, n_contexts - 1
                else:
                    config._attn_implementation_internal = own


def _writes_out(model: torch.nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in _WRITTEN_OUT


def finds_blocks(model: torch.nn.Module) -> bool:
    """Whether the layers of a model may find keys in blocks. A call tells whether they do."""
    file = sys.modules.get(type(model).__module__)
    has_interface = getattr(model, "_supports_attention_backend", False) or hasattr(file, "ALL_ATTENTION_FUNCTIONS")
    return has_interface or _writes_out(model)


def has_plain_inputs(model: torch.nn.Module) -> bool:
    """Whether transformers prepares the inputs of a forward. A model that does it by itself may run other tokens: peft
    puts virtual ones before a prompt."""
    name = GenerationMixin.prepare_inputs_for_generation.__name__
    return getattr(type(model), name, None) is getattr(GenerationMixin, name) and name not in vars(model)


def _own_name(config: Any) -> str:
    """The attention that a configuration names without us."""
    running = _running.get(id(config))
    name = running[0] if running else getattr(config, "_attn_implementation", None)
    return "sdpa" if name in (None, NAME) else name


def _own_attention(module: torch.nn.Module) -> Callable[..., Any]:
    """The attention that a layer has without us. ``eager`` is a function of the model's own file, which no table has."""
    name = _own_name(getattr(module, "config", None))
    if name != "eager":
        return AttentionInterface()[name]
    attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if attend is None:
        raise own_cache(f"{type(module).__name__} has an attention of its own")
    return attend


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """None for a causal mask, which a block cache knows by itself; bool [batch, tokens], as it came, where rows are
    padded; the model's own mask for any other rule."""
    rule = (mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, local_size)
    if (
        _is_here.get() and not kwargs.get("use_vmap") and _is_causal(*rule)
    ):  # a rule of somebody else may not take tensors of places
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    name = _own_name(kwargs.get("config"))
    mask_of = AttentionMaskInterface().get(name)
    if mask_of is None:
        raise own_cache(f"masks of the attention {name!r} are its own")
    return mask_of(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )


def _is_causal(
    mask_function: Callable[..., Any],
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    window: int | None,
) -> bool:
    """Whether a rule is that each query sees the keys before it and its own, within the window. It is compared in host
    memory, also for a model on the meta device."""
    if mask_function is causal_mask_function:
        return True
    arange = partial(torch.arange, device="cpu")
    key = kv_offset + arange(kv_length).view(1, 1, 1, -1)
    batch, head = arange(batch_size).view(-1, 1, 1, 1), arange(1).view(1, 1, 1, 1)
    queries = q_offset + arange(q_length).view(1, 1, -1, 1)
    for query in queries.split(max(_MASK_PLACES // max(batch_size * kv_length, 1), 1), dim=2):
        seen = mask_function(batch, head, query, key)
        rule = (key <= query) if window is None else (key <= query) & (key > query - window)
        if not torch.is_tensor(seen) or not bool((seen == rule).all()):
            return False
    return True


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer: over blocks where its keys are those of a block cache, else the model's own."""
    view = view_of(key, value)
    if view is None:
        is_ours = getattr(module, "is_causal", True) if attention_mask is None else attention_mask.ndim == 2
        if _is_here.get() and is_ours and query.shape[2] > 1:
            raise own_cache(f"{type(module).__name__} attends to keys that no cache holds")
        given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        given = {name: value for name, value in given.items() if value is not None}
        return _own_attention(module)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given, **kwargs
        )
    layer = view.layer
    if getattr(module, "is_causal", True) != layer.is_causal:
        raise own_cache(
            f"{type(module).__name__} attends to {'later tokens' if layer.is_causal else 'earlier tokens of an encoder'}"
        )
    if position_bias is not None:
        raise own_cache(f"{type(module).__name__} adds a bias of positions")
    if dropout:
        raise own_cache(f"{type(module).__name__} drops attention", CallNeedsOwnCache)
    if layer.window is not None and sliding_window != layer.window:
        raise own_cache(f"{type(module).__name__} has a window of {sliding_window}, its cache one of {layer.window}")
    for name, given in kwargs.items():
        if torch.is_tensor(given) and given.is_floating_point():
            raise own_cache(f"{type(module).__name__} gives its attention {name}")
    out = _over_blocks(
        view,
        query,
        attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sinks=None if s_aux is None else s_aux.float(),
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
    )
    return out, None


def _attend_written_out(
    view: View, query: torch.Tensor, mask: torch.Tensor | None, scale: float, slopes: torch.Tensor | None
) -> torch.Tensor:
    view.layer.cache.note_found()
    return _over_blocks(view, query, mask, scale, slopes=slopes)


def _over_blocks(view: View, query: torch.Tensor, mask: torch.Tensor | None, scale: float, **rule: Any) -> torch.Tensor:
    """Attention of ``query`` [batch, heads, tokens, dim] over blocks, [batch, tokens, heads, dim]. rule: of
    ``ops.kv.attention``."""
    layer = view.layer
    batch, _, n_tokens, _ = query.shape
    rows, first = layer.seen(view, mask, n_tokens)
    out = kv.attention(
        by_token(query), *layer.blocks, rows, scale=scale, first=first, is_causal=layer.is_causal, **rule
    )
    return out.unflatten(0, (batch, n_tokens))
