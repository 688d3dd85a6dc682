"""A batch of the ragged engine against plain torch, token by token."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.config.ragged import DSStateManagerConfig, KVCacheConfig
from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.inference.v2.batch import RaggedBatchWrapper, to_padded
from deepspeed_c.inference.v2.scheduling import SchedulingError, SchedulingResult
from deepspeed_c.inference.v2.state import DSStateManager, PlaceholderSequenceDescriptor
from deepspeed_c.ops.kv import BLOCK_TOKENS

transformers = pytest.importorskip("transformers")

LIMITS = DSStateManagerConfig(max_ragged_batch_size=90, max_ragged_sequence_count=5, max_tracked_sequences=8)
WORDS = 50


def filled(lengths: list[tuple[int, int]], seed: int = 0, **settings: int) -> tuple[RaggedBatchWrapper, torch.Tensor]:
    """(a batch of sequences of (tokens before, new ones), its tokens)."""
    batch, rng = RaggedBatchWrapper(LIMITS, **settings), random.Random(seed)
    tokens = [torch.tensor([rng.randrange(WORDS) for _ in range(n)], dtype=torch.int64) for _, n in lengths]
    for (seen, _), each in zip(lengths, tokens, strict=True):
        batch.insert_sequence(PlaceholderSequenceDescriptor(seen, kv_blocks_ptr=seen + 7), each, do_checks=False)
    return batch, torch.cat([*tokens, torch.empty(0, dtype=torch.int64)])


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_those_of_each_token(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [(rng.choice([0, 1, 15, 16, 17, 100]), rng.choice([1, 1, 2, 16, 37])) for _ in range(rng.randrange(6))]
    batch, tokens = filled(lengths, seed, n_words=WORDS)
    batch.finalize(padding=seed % 2 == 1)
    rows, positions, begins = [], [], []
    for row, (seen, n) in enumerate(lengths):
        begins.append(len(rows))
        rows += [row] * n
        positions += range(seen, seen + n)
    n_tokens = len(rows)
    n_all = n_tokens if seed % 2 == 0 else next(n for n in range(0, 1000, 64) if n >= n_tokens)
    pad = [-1] * (n_all - n_tokens)
    assert (batch.current_tokens, batch.current_sequences, batch.tensor_toks) == (n_tokens, len(lengths), n_all)
    assert batch.input_ids().tolist() == tokens.tolist() + pad and batch.input_ids().dtype == torch.int64
    assert batch.tokens_to_seq().tolist() == rows + pad and batch.tokens_to_seq().dtype == torch.int32
    assert batch.positions.tolist() == positions
    assert batch.last_tokens.tolist() == [begin + n - 1 for begin, (_, n) in zip(begins, lengths, strict=True)]
    assert batch.n_keys.tolist() == [seen + n for seen, n in lengths]
    assert batch.n_columns == max((-(-(seen + n) // BLOCK_TOKENS) for seen, n in lengths), default=0)
    expected = [[begin, n, seen, 0] for begin, (seen, n) in zip(begins, lengths, strict=True)]
    assert batch.inflight_seq_descriptors().tolist() == expected
    assert batch.batch_metadata_buffer().tolist() == [n_tokens, len(lengths)]
    assert batch.kv_ptrs().tolist() == [seen + 7 for seen, _ in lengths]
    assert batch.masks() is None


def test_a_batch_begins_anew() -> None:
    batch, tokens = filled([(0, 3), (5, 2)])
    batch.finalize()
    kept = batch.input_ids(), batch.positions
    batch.clear()
    assert (batch.current_tokens, batch.current_sequences) == (0, 0)
    batch.insert_sequence(PlaceholderSequenceDescriptor(9), torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32))
    batch.finalize()
    assert batch.input_ids().tolist() == [1, 2, 3, 4, 5] and batch.positions.tolist() == [9, 10, 11, 12, 13]
    assert kept[0].tolist() == tokens.tolist() and kept[1].tolist() == [0, 1, 2, 5, 6]


def test_a_wrong_batch_is_a_typed_error() -> None:
    batch, _ = filled([(0, 3)], n_words=WORDS)
    with pytest.raises(StateError, match="1 sequences"):
        batch.input_ids()
    known = PlaceholderSequenceDescriptor()
    for wrong in (torch.ones(1), torch.ones(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(ModelError, match="integers"):
            batch.insert_sequence(known, wrong)
    with pytest.raises(SchedulingError, match="91 tokens, and 90") as caught:
        batch.insert_sequence(known, torch.zeros(88, dtype=torch.int64))
    assert caught.value.result is SchedulingResult.BatchTokenLimitExceeded
    for _ in range(4):
        batch.insert_sequence(known, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(SchedulingError, match="6 sequences, and 5") as caught:
        batch.insert_sequence(known, torch.zeros(1, dtype=torch.int64))
    assert caught.value.result is SchedulingResult.BatchSequenceLimitExceeded
    batch.finalize()
    assert batch.current_tokens == 7
    batch.insert_sequence(known, torch.tensor([1, WORDS, -1]), do_checks=False)
    with pytest.raises(StateError):  # not those of the batch before
        batch.positions  # noqa: B018
    with pytest.raises(ModelError, match=f"token {WORDS} of 5 .* {WORDS}"):
        batch.finalize()


def test_the_core_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="2 numbers in n_seen and 1 in n_new"):
        _C.kv_batch_count([0, 1], [1], 10)
    with pytest.raises(ValueError, match="row 0 has -1 new tokens"):
        _C.kv_batch_count([0], [-1], 10)
    assert _C.kv_batch_count([15, 0], [2, 9], 10) == (0, 0) and _C.kv_batch_count([15, 0], [2, 17], 17) == (3, -1)
    for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match="2 int64 numbers"):
            _C.KvBatch([0], [2], wrong.numpy(), 5)
    with pytest.raises(ValueError, match="row 1"):
        _C.KvBatch([0, 1 << 40], [2, 1], torch.zeros(3, dtype=torch.int64).numpy(), 5)


def test_padding_is_to_multiples() -> None:
    for n in (*range(1, 700, 7), 64, 512, 513):
        step = 64 if n <= 512 else 128
        assert to_padded(n) == min(i for i in range(0, 2000, step) if i >= n), n


def test_a_sequence_shows_its_blocks() -> None:
    from deepspeed_c.kv.ragged import RaggedCache

    config = transformers.LlamaConfig(num_hidden_layers=1)
    cache = RaggedCache(config, 9)
    known = DSStateManager(LIMITS, cache)
    sequences = [known.get_or_create_sequence(uid) for uid in (3, 4)]
    batch = RaggedBatchWrapper(LIMITS)
    cached, tokens = [each.cached for each in sequences], [torch.zeros(n, dtype=torch.int64) for n in (33, 5)]
    with cache.step(cached, tokens):
        for sequence, each in zip(sequences, tokens, strict=True):
            batch.insert_sequence(sequence, each)
        batch.finalize()
        cache.grow(cached, batch)
    blocks = [each.all_block_ids().tolist() for each in sequences]
    assert [len(each) for each in blocks] == [3, 1] and len({b for each in blocks for b in each}) == 4, blocks
    assert list((ctypes.c_int32 * 3).from_address(sequences[0].kv_blocks_ptr)) == blocks[0]
    assert batch.kv_ptrs().tolist() == [each._blocks.data_ptr() for each in sequences]


def test_the_shape_of_a_cache_is_checked() -> None:
    config = KVCacheConfig(cache_shape=(40, 8, 128), cache_dtype="bf16", type="local")
    assert (config.block_size, config.cache_shape, config.cache_dtype) == (128, (40, 8, 128), torch.bfloat16)
    for wrong in ({"cache_shape": (1, 2)}, {"cache_shape": (1, 0, 2)}, {"block_size": 0, "cache_shape": (1, 1, 1)}, {}):
        with pytest.raises(ConfigError):
            KVCacheConfig(**wrong)
