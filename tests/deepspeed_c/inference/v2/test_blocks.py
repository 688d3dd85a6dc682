"""Blocks by number: each is taken once and given back once, and a cache has two halves."""

from __future__ import annotations

import random

import pytest
import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.inference.v2.blocks import BlockedAllocator, split_kv


def test_blocks_are_taken_once() -> None:
    """Against a set of numbers."""
    rng = random.Random(3)
    for n_blocks in (1, 2, 13):
        allocator, taken = BlockedAllocator(n_blocks), set[int]()
        for _ in range(200):
            n = rng.randrange(n_blocks + 2)
            if rng.random() < 0.5:
                if n > n_blocks - len(taken):
                    with pytest.raises(ModelError, match=f"{n} blocks"):
                        allocator.allocate(n)
                else:
                    found = allocator.allocate(n)
                    assert found.dtype == torch.int32 and found.shape == (n,)
                    assert not taken & set(found.tolist()) and set(found.tolist()) <= set(range(n_blocks))
                    taken |= set(found.tolist())
            elif taken:
                some = rng.sample(sorted(taken), rng.randrange(len(taken)) + 1)
                bad = rng.choice([-1, n_blocks, some[0]])
                with pytest.raises(ModelError, match=f"block {bad} "):
                    allocator.free([*some, bad])
                allocator.free(rng.choice([some, torch.tensor(some), iter(some)]) if len(some) > 1 else some[0])
                taken -= set(some)
            assert allocator.free_blocks == n_blocks - len(taken)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockedAllocator(0)


def test_a_cache_is_split() -> None:
    cache = torch.arange(2.0 * 3 * 2 * 4 * 5).view(2, 3, 2, 4, 5)
    keys, values = split_kv(cache)
    assert torch.equal(keys, cache[:, :, 0]) and torch.equal(values, cache[:, :, 1])
    assert keys.data_ptr() == cache.data_ptr()
    for wrong in (cache[0], cache[:, :, :1]):
        with pytest.raises(ValueError, match="is expected"):
            split_kv(wrong)
