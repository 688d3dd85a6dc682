"""Blocks of sequences that have ended are found by their tokens: results stay, computed tokens are counted, and no block
is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepspeed_c.inference.v2 import InferenceEngineV2, SchedulingError
from tests.deepspeed_c.engine.test_families_in_blocks import make
from tests.deepspeed_c.inference.v2.test_ragged_engine import (
    N_BLOCKS,
    alone,
    assert_near,
    blocks_of,
    engine_of,
    tokens_of,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")

transformers = pytest.importorskip("transformers")


def count_computed(engine: InferenceEngineV2) -> list[int]:
    """Gets the number of tokens of each forward from now on."""
    counts: list[int] = []

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        counts.append(kwargs["input_ids"].shape[1])

    engine.model().register_forward_pre_hook(note, with_kwargs=True)
    return counts


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mixtral", "gpt_oss", "deepseek_v3"])
def test_what_was_found_is_what_would_be_computed(family: str) -> None:
    engine, model, text = engine_of(make(family), 40), make(family), tokens_of(50, 1)
    computed = count_computed(engine)
    engine.put([1], [text])
    engine.flush(1)
    assert engine.free_blocks.tolist() == [40] * engine.n_kv_cache_groups
    for uid, whole in ((2, text), (3, torch.cat([text[:33], tokens_of(9, 2)])), (4, text[:32])):
        n_found = 16 * ((len(whole) - 1) // 16) if uid != 3 else 32
        assert engine.count_found(whole) == n_found, (uid, engine.count_found(whole))
        assert_near(engine.put([uid], [whole])[0], alone(model, whole))
        assert computed[-1] == len(whole) - n_found, (uid, computed)
    nxt = tokens_of(1, 7)
    for row, whole in zip(engine.put([2, 4], [nxt, nxt]), (text, text[:32]), strict=True):
        assert_near(row, alone(model, torch.cat([whole, nxt])))
    for uid in (2, 3, 4):
        engine.flush(uid)
    assert engine.free_blocks.tolist() == [40] * engine.n_kv_cache_groups
    engine.destroy()


def test_pieces_of_a_prompt_are_found_one_by_one() -> None:
    engine, text = engine_of(make("llama")), tokens_of(60, 1)
    computed = count_computed(engine)
    expected = engine.put([1], [text])[0]
    engine.put([2], [text[:20]])  # 16 found
    engine.put([2], [text[20:30]])  # within a block
    engine.put([3], [text[:17]])  # 16 found
    engine.put([4], [text[:32]])  # 16 found: the last token is computed
    found = engine.put([4], [text[32:]])[0]  # 16 found, behind 32
    assert computed == [60, 4, 10, 1, 16, 12], computed
    assert_near(found, expected)
    engine.destroy()


def test_salts_share_nothing() -> None:
    engine, text = engine_of(make("llama")), tokens_of(40, 1)
    computed = count_computed(engine)
    engine.put([1, 2], [text, text], salts={2: "a"})  # both at once: nothing is there yet
    assert engine.count_found(text) == engine.count_found(text, "a") == 32
    assert engine.count_found(text, "b") == 0
    engine.put([3, 4], [text, text], salts={3: "b", 4: "a"})
    assert computed == [80, 48], computed
    engine.destroy()


def test_prefixes_can_be_turned_off() -> None:
    engine, text = engine_of(make("llama"), enable_prefix_caching=False), tokens_of(40, 1)
    computed = count_computed(engine)
    for uid in (1, 2):
        engine.put([uid], [text])
    assert computed == [40, 40] and engine.count_found(text) == 0
    engine.destroy()


def test_memory_is_taken_back_where_it_is_needed() -> None:
    engine, model = engine_of(make("llama"), 4), make("llama")
    for seed in (1, 2, 1, 3, 1):
        text = tokens_of(60, seed)
        assert_near(engine.put([0], [text])[0], alone(model, text))
        engine.flush(0)
        assert engine.free_blocks.tolist() == [4]
    engine.destroy()


def test_a_failed_forward_takes_back_what_was_found() -> None:
    engine, model, text = engine_of(make("gemma2")), make("gemma2"), tokens_of(59, 1)
    engine.put([1, 2], [text, tokens_of(16, 2)])
    engine.flush(1)
    free = engine.free_blocks.tolist()
    hook = engine.model().register_forward_hook(lambda *_: 1 / 0)
    for uids, tokens in (([5], [text]), ([2, 5], [tokens_of(3, 3), text])):
        with pytest.raises(ZeroDivisionError):
            engine.put(uids, tokens)
        assert engine.free_blocks.tolist() == free
    hook.remove()
    assert_near(engine.put([5], [text])[0], alone(model, text))
    engine.destroy()


def check_random_puts(engine: InferenceEngineV2, model: Any, n_blocks: int, seed: int, n_turns: int) -> None:
    """Sequences with common beginnings over a small pool, against each alone."""
    rng, texts = random.Random(seed), dict[int, torch.Tensor]()
    beginnings = [tokens_of(40, 100 + i) for i in range(3)]
    n_found = n_put = 0
    for turn in range(n_turns):
        uids = rng.sample(range(9), rng.randint(1, 5))
        new = {}
        for uid in uids:
            n = rng.choice([1, 1, 2, 16, 17, 32, 40])
            text = texts.get(uid, beginnings[0][:0])
            whole = rng.choice(beginnings)[len(text) : len(text) + n]
            new[uid] = whole if len(whole) and rng.random() < 0.8 else tokens_of(n, rng.randrange(1000))
        hook = engine.model().register_forward_hook(lambda *_: 1 / 0) if rng.random() < 0.15 else None
        before = engine.free_blocks.tolist()
        try:
            found = engine.put(uids, list(new.values()))
        except (SchedulingError, ZeroDivisionError):
            assert engine.free_blocks.tolist() == before
        else:
            n_put += 1
            for row, uid in zip(found, uids, strict=True):
                texts[uid] = torch.cat([texts.get(uid, new[uid][:0]), new[uid]])
                if turn % 4 == 0:
                    assert_near(row, alone(model, texts[uid]))
        finally:
            if hook is not None:
                hook.remove()
        for uid in rng.sample(sorted(texts), min(len(texts), rng.choice([0, 0, 1, 3]))):
            n_found += engine._state.get_sequence(uid).cached.n_found
            engine.flush(uid)
            del texts[uid]
        n_used = sum(blocks_of(len(text)) for text in texts.values())
        assert n_blocks - n_used <= engine.free_blocks.item() <= n_blocks
    assert n_put > n_turns // 8 and n_found > 16, (n_put, n_found)
    for uid in texts:
        engine.flush(uid)
    assert engine.free_blocks.tolist() == [n_blocks]


@pytest.mark.parametrize("n_blocks", [3, 7, 50])
def test_random_puts_with_common_beginnings(n_blocks: int) -> None:
    engine = engine_of(make("llama"), n_blocks)
    check_random_puts(engine, make("llama"), n_blocks, n_blocks, 120)
    engine.destroy()


@on_ranks(2)
def test_tensor_parallel_ranks_find_the_same(rank: int, world: int) -> None:
    engine = engine_of(make("llama"), N_BLOCKS, tp=2)
    check_random_puts(engine, make("llama"), N_BLOCKS, 5, 60)
    engine.destroy()
