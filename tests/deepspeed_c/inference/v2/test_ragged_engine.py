"""The ragged engine: each sequence gets the logits that it gets alone, in any batch and in any pieces; a refused batch
and a failed forward change nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.config.ragged import AllocationMode, MemoryConfig
from deepspeed_c.errors import CheckpointError, ConfigError, FeatureError, ModelError, StateError
from deepspeed_c.inference.engine import init_inference
from deepspeed_c.inference.v2 import (
    InferenceEngineV2,
    RaggedInferenceEngineConfig,
    SchedulingError,
    SchedulingResult,
    build_engine_from_ds_checkpoint,
    build_hf_engine,
)
from deepspeed_c.ops.kv import BLOCK_TOKENS
from tests.deepspeed_c.engine.test_families_in_blocks import DECODERS, MORE, make
from tests.deepspeed_c.inject import families
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")

N_BLOCKS = 30
LIMITS = {"max_context": 60, "max_ragged_batch_size": 100, "max_ragged_sequence_count": 6, "max_tracked_sequences": 8}
REFUSED = {"falcon": "bias of positions", "t5": "behind one another", "mpt": "behind one another"}


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


def settings(
    n_blocks: int = N_BLOCKS, tp: int = 1, deterministic: bool = False, **limits: Any
) -> RaggedInferenceEngineConfig:
    memory = {"mode": "allocate", "size": n_blocks}
    manager = {**LIMITS, "memory_config": memory, **limits}
    return RaggedInferenceEngineConfig(tp={"tp_size": tp}, manager=manager, deterministic=deterministic)


def engine_of(model: Any, n_blocks: int = N_BLOCKS, tp: int = 1, **limits: Any) -> InferenceEngineV2:
    host = init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": tp})
    return InferenceEngineV2(host, settings(n_blocks, tp, **limits))


def tokens_of(n: int, seed: int) -> torch.Tensor:
    return torch.randint(3, families.VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def alone(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the last token, without a cache."""
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0, -1]


def assert_near(found: torch.Tensor, expected: torch.Tensor, near: float = 2e-4) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=near, atol=near * float(expected.abs().max()))


def compare_pieces(engine: InferenceEngineV2, model: Any) -> None:
    """Three sequences in other pieces, orders and company."""
    texts = {1: tokens_of(41, 1), 22: tokens_of(16, 2), 333: tokens_of(1, 3)}
    steps = [{1: 20, 22: 3}, {333: 1, 1: 33}, {22: 16}, {1: 40}, {1: 41}]
    seen = dict.fromkeys(texts, 0)
    for step in steps:
        found = engine.put(list(step), [texts[uid][seen[uid] : end] for uid, end in step.items()])
        for row, (uid, end) in zip(found, step.items(), strict=True):
            assert_near(row, alone(model, texts[uid][:end]))
        seen |= step
    for uid in texts:
        engine.flush(uid)
    assert engine.free_blocks.tolist() == [N_BLOCKS] * engine.n_kv_cache_groups


@pytest.mark.parametrize("family", (*DECODERS, *MORE))
def test_each_sequence_gets_what_it_gets_alone(family: str) -> None:
    engine = engine_of(make(family))
    compare_pieces(engine, make(family))
    engine.destroy()


@on_ranks(2)
def test_tensor_parallel_ranks_get_the_same(rank: int, world: int) -> None:
    for family in ("llama", "gemma2", "gpt2", "deepseek_v3"):
        engine = engine_of(make(family), tp=2)
        compare_pieces(engine, make(family))
        engine.destroy()


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_is_refused_by_name(family: str) -> None:
    model = make(family) if family == "t5" else families.make(family)
    with pytest.raises(FeatureError) as caught:
        engine_of(model)
    assert REFUSED[family] in str(caught.value)
    assert type(model).__name__ in str(caught.value)


def blocks_of(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK_TOKENS)


@pytest.mark.parametrize("n_blocks", [1, 2, 7, 50])
def test_random_calls_lose_no_block(n_blocks: int) -> None:
    """Puts, refusals, failures and flushes, against each sequence alone and a count of blocks."""
    model, rng = make("llama"), random.Random(n_blocks)
    engine, texts = engine_of(make("llama"), n_blocks), dict[int, torch.Tensor]()
    n_put = n_refused = n_failed = 0
    for turn in range(120):
        uids = rng.sample(range(12), rng.randint(1, 7))
        new = {uid: tokens_of(rng.choice([1, 1, 2, 15, 16, 17, 40]), rng.randrange(1000)) for uid in uids}
        before = engine.free_blocks.tolist()
        verdict = engine.can_schedule(uids, [len(new[uid]) for uid in uids])
        fails = rng.random() < 0.3
        hook = engine.model().register_forward_hook(lambda *_: 1 / 0) if fails else None
        try:
            found = engine.put(uids, [new[uid] for uid in uids], do_checks=rng.random() < 0.8 or verdict.value != 4)
        except SchedulingError as error:
            n_refused += 1
            assert verdict is not SchedulingResult.Success and error.result is verdict
            assert engine.free_blocks.tolist() == before
        except ZeroDivisionError:
            n_failed += 1
            assert engine.free_blocks.tolist() == before
        else:
            n_put += 1
            for row, uid in zip(found, uids, strict=True):
                texts[uid] = torch.cat([texts.get(uid, new[uid][:0]), new[uid]])
                if turn % 5 == 0:
                    assert_near(row, alone(model, texts[uid]))
        finally:
            if hook is not None:
                hook.remove()
        for uid in rng.sample(sorted(texts), min(len(texts), rng.choice([0, 0, 1, 3]))):
            engine.flush(uid)
            del texts[uid]
        assert engine.free_blocks.tolist() == [n_blocks - sum(blocks_of(len(text)) for text in texts.values())]
        for uid, text in texts.items():
            assert engine.get_remaining_block_capacity(uid) == -len(text) % BLOCK_TOKENS
    assert n_put > 5 and n_refused > 5 and n_failed > 0, (n_put, n_refused, n_failed)
    engine.destroy()


def test_a_query_counts_tokens_and_blocks() -> None:
    engine = engine_of(make("llama"), 10)
    engine.put([1], [tokens_of(20, 0)])
    assert engine.free_blocks.tolist() == [8] and engine.n_kv_cache_groups == 1
    assert engine.query(1, 10, 8) == (10, 0)
    assert engine.query(1, 13, 8) == (13, 1)
    assert engine.query(1, 100, engine.free_blocks) == (40, 2)  # max_context
    assert engine.query(1, 30, 1) == (28, 1)  # one block more
    assert engine.query(5, 30, 1) == (16, 1)
    assert engine.query(5, 30, 0) == (0, 0)
    assert engine.get_remaining_block_capacity(1) == 12 and engine.get_remaining_block_capacity(5) == 0
    engine.put(range(10, 17), [tokens_of(1, 0)] * 7, do_checks=False)
    assert engine.query(99, 5, 5) == (0, 0)
    engine.destroy()


def test_limits_have_upstreams_results() -> None:
    engine, one = engine_of(make("llama"), 9), tokens_of(1, 0)
    result = SchedulingResult
    cases = [
        ([1], [61], result.SequenceTokenLimitExceeded, ("61", "60")),
        ([1, 2], [60, 41], result.BatchTokenLimitExceeded, ("101", "100")),
        (list(range(7)), [1] * 7, result.BatchSequenceLimitExceeded, ("7", "6")),
        ([1, 2, 3, 4], [33, 33, 17, 17], result.KVCacheLimitExceeded, ("10", "9")),
    ]
    for uids, lengths, expected, numbers in cases:
        assert engine.can_schedule(uids, lengths) is expected
        with pytest.raises(SchedulingError) as caught:
            engine.put(uids, [tokens_of(n, 0) for n in lengths])
        assert caught.value.result is expected and isinstance(caught.value, RuntimeError)
        assert all(number in str(caught.value) for number in numbers), str(caught.value)
        assert engine.free_blocks.tolist() == [9]
    engine.put(range(5), [one] * 5)
    engine.put(range(5, 8), [one] * 3)
    assert engine.can_schedule([8], [1]) is result.EngineSequenceLimitExceeded
    assert engine.can_schedule([7], [1]) is result.Success
    engine.destroy()


def test_a_wrong_batch_is_refused_before_anything_changes() -> None:
    engine, one = engine_of(make("llama")), tokens_of(1, 0)
    wrong = [
        ([], [], "no sequence"),
        ([1], [], "1 uids came with tokens of 0"),
        ([1, 1], [one, one], "comes twice"),
        ([1], [one[:0]], "integers"),
        ([1], [one.float()], "float32"),
        ([1], [one[None]], "(1, 1)"),
        ([1, 2], [one, torch.tensor([2, families.VOCAB])], f"token {families.VOCAB} of 2"),
        ([1], [torch.tensor([-1])], "token -1"),
    ]
    for uids, tokens, words in wrong:
        with pytest.raises(ModelError) as caught:
            engine.put(uids, tokens)
        assert words in str(caught.value)
        assert engine.free_blocks.tolist() == [N_BLOCKS]
    with pytest.raises(StateError) as found:
        engine.flush(77)
    assert "77" in str(found.value)
    engine.put([1], [[3, 4, 5]])  # lists of numbers, and generators
    engine.put((uid for uid in (1, 2)), (tokens for tokens in (one, one)))
    engine.destroy()


def test_a_window_gives_its_blocks_back() -> None:
    engine = engine_of(make("gemma2"), max_context=64)
    engine.put([1], [tokens_of(60, 0)])
    local, full = sorted(engine.free_blocks.tolist(), reverse=True)
    assert (local, full) == (N_BLOCKS - 1, N_BLOCKS - 4)
    engine.destroy()


def test_wrong_settings_are_refused() -> None:
    for keys, words in [
        ({"manager": {"max_ragged_sequence_count": 9, "max_tracked_sequences": 8}}, "max_tracked_sequences"),
        ({"manager": {"offload": True}}, "offload"),
        ({"quantization": {"quantization_mode": "wf6af16"}}, "wf6af16"),
        ({"manager": {"max_contxt": 1}}, "max_context"),
        ({"tp": {"tp_size": 0}}, "tp_size"),
    ]:
        with pytest.raises(ConfigError) as caught:
            RaggedInferenceEngineConfig(**keys)
        assert words in str(caught.value)
    assert RaggedInferenceEngineConfig().state_manager.memory_config.mode in (AllocationMode.RESERVE, "reserve")
    with pytest.raises(StateError) as found:
        host = init_inference(make("llama"), dtype=torch.float32)
        memory = MemoryConfig(size=1 << 60)
        InferenceEngineV2(host, RaggedInferenceEngineConfig(manager={"memory_config": memory}))
    assert "memory_config" in str(found.value)


def bytes_of_a_block(config: Any) -> int:
    """16 tokens of keys and values in float32."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 16 * 4


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bytes_of_keys_and_values_become_blocks(family: str) -> None:
    model = make(family)
    size, n_least = bytes_of_a_block(model.config), 3  # 49 tokens, and the last one has no keys
    for n_bytes, n_blocks in ((size * n_least, n_least), (size * 8 - 1, 7), (size * 8, 8)):
        host = init_inference(model, dtype=torch.float32)
        engine = InferenceEngineV2(host, settings(max_context=49), n_bytes)
        assert engine.limits.n_blocks == n_blocks
        assert engine.free_blocks.tolist() == [n_blocks] * engine.n_kv_cache_groups
        engine.destroy()
    host = init_inference(model, dtype=torch.float32)
    for n_bytes, says in (
        (size * n_least - 1, f"(?s)room for 32 tokens.*up to 49.*write {size * n_least} or more"),
        (0, "room for 0 tokens"),
        (1 << 70, "are free for each rank"),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            InferenceEngineV2(host, settings(max_context=49), n_bytes)
        assert error.value.where == "kv_cache_memory_bytes"


@on_ranks(2)
def test_bytes_are_those_of_a_rank(rank: int, world: int) -> None:
    model = make("llama")
    n_bytes = bytes_of_a_block(model.config) * 5  # a rank has half of the heads
    host = init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": 2})
    engine = InferenceEngineV2(host, settings(tp=2, max_context=49), n_bytes)
    assert engine.limits.n_blocks == 10
    engine.destroy()


@on_ranks(2)
def test_a_written_engine_is_read_on_any_number_of_ranks(rank: int, world: int, folder: str) -> None:
    model, text = make("llama"), tokens_of(9, 4)
    engine = engine_of(make("llama"), tp=2)
    engine.serialize(folder)
    engine.destroy()
    dist.barrier()
    for tp in (1, 2):
        engine = build_engine_from_ds_checkpoint(folder, settings(tp=tp))
        assert_near(engine.put([0], [text])[0], alone(model, text))
        engine.destroy()
    names = {path.suffix for path in Path(folder).iterdir()}
    assert names == {".json", ".safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_folders_of_hugging_face_are_read_and_pickles_are_not(tmp_path: Path) -> None:
    model = make("qwen2")
    model.save_pretrained(tmp_path)
    engine, text = build_hf_engine(str(tmp_path), settings()), tokens_of(12, 5)
    assert_near(engine.put([0], [text])[0], alone(model, text))
    engine.destroy()
    packed = build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig(quantization={"quantization_mode": "int8"}))
    off = (packed.put([0], [text])[0] - alone(model, text)).abs().max() / alone(model, text).abs().max()
    assert 0 < off < 0.2
    packed.destroy()
    with pytest.raises(CheckpointError) as caught:
        build_engine_from_ds_checkpoint(str(tmp_path), settings())
    assert "ds_engine_v2.json" in str(caught.value)
    (tmp_path / "ds_model_config.pkl").write_bytes(b"")
    for build in (build_hf_engine, build_engine_from_ds_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            build(str(tmp_path), settings())
        assert "pickle" in str(caught.value)


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_threads_of_a_step_end_with_it_and_with_an_exception(deterministic: bool) -> None:
    """Where the core multiplies, torch has one thread within a step. Products of torch keep theirs."""
    host = init_inference(make("llama"), dtype=torch.float32)
    engine = InferenceEngineV2(host, settings(deterministic=deterministic))
    found: list[int] = []
    fails = False

    def note(*_: Any) -> None:
        found.append(torch.get_num_threads())
        if fails:
            raise KeyError("hook")

    hook = engine.model().register_forward_pre_hook(note)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine.put([0], [tokens_of(5, 0)])
        after = [torch.get_num_threads()]
        fails = True
        with pytest.raises(KeyError):
            engine.put([1], [tokens_of(4, 1)])
        after.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
        hook.remove()
        engine.destroy()
    assert found == ([1, 1] if deterministic else [3, 3])
    assert after == [3, 3]
