"""``generate`` of a model of transformers with its keys and values in blocks, where the model's attention can find them
there; with the model's own cache elsewhere."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_c import kv
from deepspeed_c.accelerator import Accelerator
from deepspeed_c.engine.prompts import are_tokens, find_tokens, has_encoder, n_tokens_of, prompts_of, setting_of
from deepspeed_c.inject.few_rows import few_row_products
from deepspeed_c.kv.group import CallNeedsOwnCache, NeedsOwnCache, blocks_of, own_cache
from deepspeed_c.logging import log_dist

__all__ = ["KeptCache", "generate_in_blocks"]

# Tokens that a rejected proposal of an assistant may take beyond the length of the result.
_ASSISTED_TOKENS = 256
# New tokens of a call without a limit.
_DEFAULT_TOKENS = 20
# Ways to generate that look into the cache, or choose their own.
_OWN_CACHE = (
    "past_key_values",
    "cache_params",
    "cache_implementation",
    "custom_generate",
    "penalty_alpha",
    "dola_layers",
)
# Tensors that a prompt of text consists of.
_TEXT = {"inputs", "input_ids", "attention_mask"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Models whose attention does not find blocks.
_unfit: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class KeptCache:
    """The cache of an engine, which its calls use one after the other: memory that was written once stays with it.

    most_tokens: of a sequence, by which the first call makes the cache.
    """

    def __init__(self, most_tokens: int = 0) -> None:
        self._most_tokens = most_tokens
        self._cache: Any = None

    def take(self, config: Any, n_rows: int, n_tokens: int) -> Any:
        """A cache without rows that has room for so many rows of so many tokens. Calls that run at one time get caches
        of their own."""
        cache, self._cache = self._cache, None
        if cache is None or not cache.holds(config, _n_blocks(n_rows, n_tokens)):
            cache = None  # its memory counts as free for the next one
            cache = _new_cache(config, n_rows, max(n_tokens, self._most_tokens))
        cache.reset()
        return cache

    def give(self, cache: Any) -> None:
        """Keeps a cache that nobody uses any more, whatever its rows are."""
        self._cache = cache


def _n_blocks(n_rows: int, n_tokens: int) -> int:
    # One block more a row: a row that ends is written to until the others have ended, and a shared block is copied.
    return n_rows * (blocks_of(n_tokens) + 1)


def _new_cache(config: Any, n_rows: int, n_tokens: int) -> Any:
    host = Accelerator("cpu")  # the blocks of a model in host memory, also on a machine with an accelerator
    return kv.cache.BlockCache(config, _n_blocks(n_rows, n_tokens), host.available_memory() // host.device_count())


def generate_in_blocks(
    model: torch.nn.Module,
    generate: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    kept: KeptCache | None = None,
) -> Any:
    """Returns the result of ``generate(*args, **kwargs)``. ``generate``: of ``model``, a model of transformers. kept:
    the cache of earlier calls; None: this call alone has the cache.

    A model whose attention does not find blocks begins anew with its own cache, as if nothing had been: the same random
    numbers are drawn. The log says why: once for a model, else at each call.
    """
    if model in _unfit or not getattr(type(model).generate, "__module__", "").startswith("transformers."):
        return generate(*args, **kwargs)
    names = list(inspect.signature(type(model).generate).parameters)[1:]
    kwargs = {**dict(zip(names, args)), **kwargs}
    if not _fits(model, kwargs):
        return generate(**kwargs)
    if kwargs.get("streamer") is not None:
        kwargs["streamer"] = _Streamer(kwargs["streamer"])
    random = torch.get_rng_state()
    cache = None
    try:
        cache = _cache_of(model, kwargs, kept)
        with kv.attention.attention_in_blocks(model), few_row_products(model):
            _read_prompts_once(model, cache, kwargs)
            found = generate(**{**kwargs, "past_key_values": cache})
            if getattr(found, "past_key_values", None) is cache:
                found.past_key_values = kv.cache.dense(cache)
            return found
    except NeedsOwnCache as error:
        if not isinstance(error, CallNeedsOwnCache):
            _unfit.add(model)
        log_dist(f"{type(model).__name__} generates with its own cache: {error.what}", ranks=[0])
        torch.set_rng_state(random)
        cache = None
        if kwargs.get("streamer") is not None:
            kwargs["streamer"].begin_anew()
        return generate(**kwargs)
    finally:
        if kept is not None and cache is not None:
            kept.give(getattr(cache, "self_attention_cache", cache))


class _Streamer:
    """A streamer that gets each value of a generation once, though it begins anew."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._n_put, self._n_again = streamer, 0, 0

    def put(self, value: torch.Tensor) -> None:
        if self._n_again:
            self._n_again -= 1
            return
        self._n_put += 1
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()

    def begin_anew(self) -> None:
        """The values that are put next have been put before."""
        self._n_again = self._n_put


def _fits(model: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a cache of ours may take the place of the cache that ``generate`` would make."""
    prompts = prompts_of((), kwargs)
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    return (
        are_tokens(prompts)
        and prompts.numel() > 0
        and prompts.device.type == "cpu"
        and weight is not None
        and weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and setting_of(model, kwargs, "use_cache") is not False
        and not any(module._compiled_call_impl is not None for module in model.modules())  # its graphs know no marks
        and not any(kwargs.get(name) is not None or setting_of(model, kwargs, name) for name in _OWN_CACHE)
    )


def _n_ways(model: torch.nn.Module, kwargs: dict[str, Any]) -> int:
    """The rows that ``generate`` makes of each prompt."""
    return max(setting_of(model, kwargs, name) or 1 for name in ("num_beams", "num_return_sequences"))


def _read_prompts_once(model: torch.nn.Module, cache: Any, kwargs: dict[str, Any]) -> None:
    """Runs the prompts without their last tokens where several samples or beams begin from each, which then share the
    blocks of their prompt. Transformers would run each prompt once for each of them.
    """
    prompts, n_ways = prompts_of((), kwargs), _n_ways(model, kwargs)
    others = {name for name, value in kwargs.items() if torch.is_tensor(value)} - _TEXT
    if n_ways == 1 or has_encoder(model) or model.training or prompts.shape[1] < 2 or others:
        return
    if not kv.attention.has_plain_inputs(model):
        return
    is_token = find_tokens(model, (), kwargs)
    inputs = {"input_ids": prompts[:, :-1], "past_key_values": cache, "use_cache": True}
    if not bool(is_token.all()):
        positions = is_token.long().cumsum(1) - 1
        inputs |= {"attention_mask": is_token[:, :-1].long(), "position_ids": positions.clamp(min=0)[:, :-1]}
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        inputs["logits_to_keep"] = 1
    with torch.no_grad():
        model(**inputs)
    cache.batch_repeat_interleave(n_ways)


def _cache_of(model: torch.nn.Module, kwargs: dict[str, Any], kept: KeptCache | None) -> Any:
    """A cache that has room for all tokens of the call. Raises NeedsOwnCache where the model's layers need another."""
    if not kv.attention.finds_blocks(model):
        raise own_cache("its attention is part of its layers")
    n_prompt, n_new = n_tokens_of(model, (), kwargs)
    n_tokens = max(n_new, _DEFAULT_TOKENS) + (1 if has_encoder(model) else n_prompt)
    if kwargs.get("assistant_model") is not None or setting_of(model, kwargs, "prompt_lookup_num_tokens"):
        n_tokens += _ASSISTED_TOKENS
    n_ways = _n_ways(model, kwargs)
    config = model.config.get_text_config(decoder=True)
    cache = (kept or KeptCache()).take(config, len(prompts_of((), kwargs)) * n_ways, n_tokens)
    return kv.cache.EncodedCache(cache, n_ways) if has_encoder(model) else cache
