"""The pool of buffers never lends the same bytes twice, and has no more buffers than were in use at once. A buffer that
a holder keeps is not lent again."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from deepspeed_c.buffers import GRANULE_BYTES, BufferPool

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (0, 1, 2, 31, 1023, 1024, 1025, 4099, 10_007)


def test_what_fits_is_used_again_and_what_is_too_small_is_replaced():
    pool = BufferPool()
    small = pool.take(10, torch.float32, CPU)
    assert small.shape == (10,) and small.dtype == torch.float32
    address = small.data_ptr()
    pool.give(small)
    again = pool.take(20, torch.bfloat16, CPU)
    assert again.data_ptr() == address, "a buffer that fits was not used again"
    pool.give(again)
    assert pool.n_bytes == GRANULE_BYTES
    large = pool.take(100_000, torch.float32, CPU)
    assert pool.n_bytes == -(-400_000 // GRANULE_BYTES) * GRANULE_BYTES and pool.n_free == 0
    other = pool.take(1, torch.float16, CPU)
    assert other.data_ptr() != large.data_ptr()
    pool.give(large)
    pool.give(other)
    tight = pool.take(2, torch.float16, CPU)
    assert tight.data_ptr() == other.data_ptr(), "a larger buffer was lent than was asked for"
    assert pool.take(0, torch.float32, CPU).numel() == 0
    pool.clear()
    assert pool.n_free == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_not_a_number(dtype):
    assert BufferPool(poison=True).take(33, dtype, CPU).isnan().all()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_lent_once_and_counted(seed, waits):
    rng = random.Random(seed)
    counted = 0

    def count(n_bytes: int) -> None:
        nonlocal counted
        counted += n_bytes

    pool, twin, lent, most = BufferPool(waits=waits, count=count), BufferPool(), [], 0
    for step in range(500):
        if lent and (len(lent) == 4 or rng.random() < 0.5):
            tensor, value, other = lent.pop(rng.randrange(len(lent)))
            assert (tensor == value).all(), f"step {step}: somebody wrote to a lent buffer"
            pool.give(tensor)
            twin.give(other)
            del tensor
        else:
            numel, dtype = rng.choice(SIZES), rng.choice(DTYPES)
            tensor = pool.take(numel, dtype, CPU).fill_(step)
            assert tensor.shape == (numel,) and tensor.dtype == dtype
            lent.append((tensor, step % 3000 if dtype == torch.float64 else torch.tensor(step, dtype=dtype), None))
            # A pool on the meta device, without memory, makes the same buffers.
            lent[-1] = (*lent[-1][:2], twin.take(numel, dtype, META))
            del tensor
        most = max(most, len(lent))
        alive = sum(tensor.untyped_storage().nbytes() for tensor, *_ in lent)
        assert counted == pool.n_bytes >= alive
        assert pool.n_bytes == twin.n_bytes
        assert pool.n_free + len(lent) <= most, "more is kept than was lent at once"


def test_what_somebody_keeps_is_left_to_him():
    pool = BufferPool(waits=True)
    with torch.no_grad():
        lent = pool.take(100, torch.float32, CPU)
        kept = lent.fill_(7.0)[10:20].view(2, 5)
        pool.give(lent)
        del lent
        again = pool.take(100, torch.float32, CPU).fill_(1.0)
    assert kept.tolist() == [[7.0] * 5] * 2, "a kept view was overwritten"
    assert pool.n_bytes == again.untyped_storage().nbytes() == GRANULE_BYTES
    address = again.data_ptr()
    pool.give(again)
    del again
    assert pool.take(50, torch.float64, CPU).data_ptr() == address


def test_a_pool_that_keeps_nothing_frees_at_once():
    pool = BufferPool(keeps=lambda device: False)
    lent = pool.take(100, torch.float32, CPU)
    gone = weakref.ref(lent)
    pool.give(lent)
    del lent
    gc.collect()
    assert gone() is None and (pool.n_bytes, pool.n_free) == (0, 0)


def test_what_is_given_back_in_inference_mode_can_be_trained_with():
    pool = BufferPool()
    with torch.inference_mode():
        pool.give(pool.take(4, torch.float32, CPU))
    lent = pool.take(4, torch.float32, CPU).fill_(2.0)
    x = torch.ones(4, requires_grad=True)
    (x * lent).sum().backward()
    assert x.grad.tolist() == [2.0] * 4


def test_a_loan_of_another_dtype_in_inference_mode_leaves_an_ordinary_buffer():
    pool = BufferPool()
    pool.give(pool.take(1031, torch.float32, CPU))
    with torch.inference_mode():
        inside = pool.take(1031, torch.bfloat16, CPU).fill_(3.0)
        assert not inside.is_inference()
        pool.give(inside)
    lent = pool.take(1031, torch.bfloat16, CPU)
    assert lent.data_ptr() == inside.data_ptr() and not lent.is_inference() and lent.eq(3.0).all()
    lent.mul_(2.0)
    x = torch.ones(1031, dtype=torch.bfloat16, requires_grad=True)
    (x * lent).sum().backward()
    assert x.grad.eq(6.0).all()


class _Owner:
    def __init__(self, *lengths):
        self.lengths, self.n_made = lengths, 0

    def make(self, flat):
        self.n_made += 1
        return list(flat[: sum(self.lengths)].split(self.lengths))


def test_views_are_made_anew_only_for_other_bytes_or_another_owner():
    pool, first, second = BufferPool(waits=True), _Owner(3, 5), _Owner(7)
    for _ in range(3):
        lent = pool.take(8, torch.float32, CPU)
        lent.copy_(torch.arange(8.0))
        views = pool.views(lent, first, first.make)
        assert [view.tolist() for view in views] == [[0, 1, 2], [3, 4, 5, 6, 7]]
        assert views[1].data_ptr() == lent.data_ptr() + 12
        pool.give(lent)
        del lent
    assert first.n_made == 1 and pool.n_bytes == GRANULE_BYTES, "kept views counted as views that outlive their loan"
    lent = pool.take(8, torch.float32, CPU)
    assert [view.numel() for view in pool.views(lent, second, second.make)] == [7]
    pool.give(lent)
    del lent
    # A new owner may have the address of one that is gone.
    del first
    third = _Owner(2, 2)
    large, small = pool.take(100_000, torch.float32, CPU), pool.take(8, torch.float32, CPU)
    for lent in (large, small, large):
        assert [view.data_ptr() - lent.data_ptr() for view in pool.views(lent, third, third.make)] == [0, 8]
    assert third.n_made == 2


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_buffer_with_kept_views_is_still_given_up_to_a_holder_and_freed(is_inference):
    pool, owner = BufferPool(waits=True), _Owner(4, 4)
    with torch.inference_mode(is_inference):
        lent = pool.take(8, torch.float32, CPU)
        views = pool.views(lent, owner, owner.make)
    assert not any(view.is_inference() for view in views)
    address, holder = lent.data_ptr(), torch.empty(0)
    holder.data = views[0]
    del views
    pool.give(lent)
    other = pool.take(8, torch.float32, CPU)
    assert other.data_ptr() != address, "memory was lent while a tensor pointed into it"
    pool.views(other, owner, owner.make)
    storage = weakref.ref(other.untyped_storage())
    whole = weakref.ref(other.__dict__["_dsc_whole"])
    pool.give(other)
    del other
    gc.disable()
    try:
        pool.clear()
        assert whole() is None and storage() is None, "views kept their buffer alive"
    finally:
        gc.enable()
