"""The cache that an inference engine keeps between calls of ``generate``: made once, never larger than the memory that
is left, and without rows of a call that failed."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.engine import cached_generation
from deepspeed_c.errors import StateError

transformers = pytest.importorskip("transformers")

N_LAYERS, N_HEADS, HEAD_DIM, N_WORDS = 2, 2, 8, 61
# Keys and values of 16 tokens in all layers, in fp32.
BLOCK_BYTES = N_LAYERS * 2 * N_HEADS * HEAD_DIM * 16 * 4
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The caches that calls have made."""
    caches: list[Any] = []
    new = cached_generation._new_cache
    monkeypatch.setattr(cached_generation, "_new_cache", lambda *args: caches.append(new(*args)) or caches[-1])
    return caches


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the bytes of memory that are left."""

    class Host:
        n_bytes = 1 << 40

        def available_memory(self) -> int:
            return self.n_bytes

        def device_count(self) -> int:
            return 1

    host = Host()
    monkeypatch.setattr(cached_generation, "Accelerator", lambda kind: host)
    return host


def llama(window: int | None = None) -> Any:
    torch.manual_seed(7)
    kind = "Llama" if window is None else "Mistral"
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": N_LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": N_HEADS, "vocab_size": N_WORDS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096,
    }  # fmt: skip
    if window is not None:
        sizes["sliding_window"] = window
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def ids(n_rows: int, n_tokens: int) -> torch.Tensor:
    return torch.randint(3, N_WORDS, (n_rows, n_tokens), generator=torch.Generator().manual_seed(n_tokens))


def test_calls_use_one_cache(made: list[Any]) -> None:
    model = llama()
    engine = deepspeed_c.init_inference(copy.deepcopy(model), {"dtype": torch.float32, "max_out_tokens": 200})
    places = set()
    calls = [
        (2, 17, 40, {}),
        (1, 3, 1, {}),
        (1, 60, 9, {"num_beams": 2}),
        (2, 150, 50, {}),
        (2, 5, 20, {"prompt_lookup_num_tokens": 3}),
    ]
    for n_rows, n_prompt, n_new, how in calls:
        if how.get("prompt_lookup_num_tokens"):
            n_rows = 1
        given = {**GREEDY, **how, "max_new_tokens": n_new}
        found = engine.generate(ids(n_rows, n_prompt), **given)
        assert torch.equal(found, model.generate(ids(n_rows, n_prompt), **given)), (n_rows, n_prompt, n_new, how)
        places.add(made[-1].layers[0].keys.data_ptr())
    assert (len(made), len(places)) == (1, 1), (made, places)
    engine.generate(ids(12, 3), **GREEDY, max_new_tokens=2)
    assert len(made) == 2 and made[-1].groups[None].n_blocks == 12 * (200 // 16 + 2), made[-1].groups[None].n_blocks
    engine.close()
    assert engine._generation.kept is None


def test_a_window_that_ends_with_its_call(made: list[Any]) -> None:
    """Candidates keep tokens behind the window for the time of their call alone."""
    model = llama(window=8)
    engine = deepspeed_c.init_inference(copy.deepcopy(model), {"dtype": torch.float32, "max_out_tokens": 1000})
    n_used = []
    for how in ({}, {"prompt_lookup_num_tokens": 3}, {}):
        given = {**GREEDY, **how, "max_new_tokens": 90}
        assert torch.equal(engine.generate(ids(1, 40), **given), model.generate(ids(1, 40), **given)), how
        n_used.append(made[-1].groups[8].n_used)
    assert len(made) == 1 and n_used == [2, 2, 2], n_used


def test_weights_of_another_dtype(made: list[Any]) -> None:
    engine = deepspeed_c.init_inference(llama(), {"dtype": torch.float32})
    engine.generate(ids(2, 20), **GREEDY, max_new_tokens=3)
    engine.module.bfloat16()
    found = engine.generate(ids(2, 20), **GREEDY, max_new_tokens=3)
    assert torch.equal(found, llama().bfloat16().generate(ids(2, 20), **GREEDY, max_new_tokens=3))
    assert len(made) == 1 and made[0].layers[1].keys.dtype == torch.bfloat16


class Fails(transformers.LogitsProcessor):
    """Raises at a token."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.at:
            raise ZeroDivisionError
        return scores


def test_no_block_is_lost_with_an_exception(made: list[Any]) -> None:
    model = llama()
    engine = deepspeed_c.init_inference(copy.deepcopy(model), {"dtype": torch.float32, "max_out_tokens": 64})
    for at in (20, 21, 40):
        with pytest.raises(ZeroDivisionError):
            engine.generate(ids(3, 20), **GREEDY, max_new_tokens=30, logits_processor=[Fails(at)])
    attend = engine.module.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):  # between two layers
        engine.generate(ids(3, 20), **GREEDY, max_new_tokens=30)
    attend.remove()
    given = {**GREEDY, "max_new_tokens": 44}
    assert torch.equal(engine.generate(ids(3, 20), **given), model.generate(ids(3, 20), **given))
    (cache,) = made
    assert cache.groups[None].n_used == 3 * 4, cache.groups[None].n_used


def test_calls_at_one_time_have_their_own(made: list[Any]) -> None:
    model = llama()
    engine = deepspeed_c.init_inference(copy.deepcopy(model), {"dtype": torch.float32})
    given = {**GREEDY, "max_new_tokens": 20}
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda n: engine.generate(ids(2, n), **given), (5, 17, 33, 5, 17, 33)))
    for n, y in zip((5, 17, 33) * 2, found, strict=True):
        assert torch.equal(y, model.generate(ids(2, n), **given)), n
    assert 1 <= len(made) <= 6


def test_a_pool_that_does_not_hold_the_prompts(made: list[Any], free: Any) -> None:
    engine = deepspeed_c.init_inference(llama(), {"dtype": torch.float32})
    free.n_bytes = 6 * BLOCK_BYTES - 1  # 3 rows of 17 tokens need 6 blocks
    with pytest.raises(StateError) as info:
        engine.generate(ids(3, 17), **GREEDY, max_new_tokens=1)
    for words in (
        "3 rows of 17 tokens need 6 blocks",
        f"{6 * BLOCK_BYTES} bytes",
        f"{6 * BLOCK_BYTES - 1} bytes left",
        "5 blocks",
    ):
        assert words in str(info.value), (words, str(info.value))
    assert not any(layer.is_initialized for layer in made[0].layers)
    free.n_bytes = 6 * BLOCK_BYTES
    assert engine.generate(ids(3, 17), **GREEDY, max_new_tokens=1).shape == (3, 18)


def test_a_pool_that_ends_within_a_call(made: list[Any], free: Any) -> None:
    model = llama()
    engine = deepspeed_c.init_inference(copy.deepcopy(model), {"dtype": torch.float32})
    free.n_bytes = 5 * BLOCK_BYTES
    given = {**GREEDY, "max_new_tokens": 26}
    with pytest.raises(StateError, match=r"(?s)pool of 5 blocks.*full.*raise the limit of memory"):
        engine.generate(ids(2, 17), **given)
    # Tokens up to the end of the blocks come; and with more memory a cache of more blocks is made.
    assert torch.equal(engine.generate(ids(1, 17), **given), model.generate(ids(1, 17), **given))
    free.n_bytes = 6 * BLOCK_BYTES
    assert torch.equal(engine.generate(ids(2, 17), **given), model.generate(ids(2, 17), **given))
    assert [cache.groups[None].n_blocks for cache in made] == [5, 5, 6]
