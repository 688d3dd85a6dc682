"""The Python interface of ZeroLayout and the planners: the same numbers as brute force, and ValueError for bad
arguments.
"""

from __future__ import annotations

import random

import pytest

from deepspeed_c import _C


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("bucket_elems", [1, 64, 1000, 10**9])
@pytest.mark.parametrize("align_elems", [1, 32])
def test_fragments_tile_every_parameter(n_ranks, bucket_elems, align_elems):
    sizes = [random.Random(n_ranks).choice([0, 1, 5, 31, 32, 33, 700]) for _ in range(25)] + [0, 2000]
    layout = _C.ZeroLayout(sizes, n_ranks, bucket_elems, align_elems)
    assert layout.sizes == sizes and layout.n_ranks == n_ranks
    assert layout.n_buckets == len(layout.bucket_begin) == len(layout.slice_elems) == len(layout.shard_offset)
    assert layout.shard_elems == sum(layout.slice_elems)
    assert layout.shard_offset == [sum(layout.slice_elems[:b]) for b in range(layout.n_buckets)]
    assert layout.flat_elems == n_ranks * layout.shard_elems
    seen = {i: set() for i in range(len(sizes))}
    for rank in range(n_ranks):
        for param, begin, flat, shard, n in layout.fragments(rank):
            bucket = layout.bucket_of[param]
            assert n > 0 and flat == layout.offsets[param] + begin
            own = layout.bucket_begin[bucket] + rank * layout.slice_elems[bucket]
            assert own <= flat and flat + n <= own + layout.slice_elems[bucket]
            assert shard == layout.shard_offset[bucket] + flat - own
            new = set(range(begin, begin + n))
            assert not new & seen[param]
            seen[param] |= new
    assert {i: len(s) for i, s in seen.items()} == dict(enumerate(sizes))


def test_layout_of_nothing():
    layout = _C.ZeroLayout([], 2, 100, 1)
    assert (layout.n_buckets, layout.flat_elems, layout.shard_elems, layout.fragments(1)) == (0, 0, 0, [])
    layout = _C.ZeroLayout([0, 0], 2, 100, 1)
    assert (layout.n_buckets, layout.flat_elems, layout.fragments(0)) == (1, 0, [])


@pytest.mark.parametrize(
    "arguments", [([-1], 1, 1, 1), ([1], 0, 1, 1), ([1], 1, 0, 1), ([1], 1, 1, 3), ([2**62, 2**62], 2, 10, 1)], ids=str
)
def test_bad_layouts(arguments):
    with pytest.raises(ValueError, match="ZeroLayout"):
        _C.ZeroLayout(*arguments)


def test_bad_rank():
    with pytest.raises(ValueError, match="rank"):
        _C.ZeroLayout([5], 2, 10, 1).fragments(2)


@pytest.mark.parametrize("n_elems", [0, 1, 6, 7, 100])
@pytest.mark.parametrize("n_ranks", [1, 3, 8])
def test_even_split(n_elems, n_ranks):
    ranges = [_C.shard_range(n_elems, n_ranks, rank) for rank in range(n_ranks)]
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(n_elems))
    lengths = [end - begin for begin, end in ranges]
    assert max(lengths) - min(lengths) <= 1
    with pytest.raises(ValueError):
        _C.shard_range(n_elems, n_ranks, n_ranks)
