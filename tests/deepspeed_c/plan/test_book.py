"""Books: peaks by phase, and pools that keep the sizes that the engine's own pools keep, whatever is asked of them."""

from __future__ import annotations

import random

import pytest
import torch

from deepspeed_c.comm.collectives import Scratch
from deepspeed_c.plan.book import Book, GatherBook, ScratchBook, StagingBook
from deepspeed_c.zero.bucket import StagingPool
from deepspeed_c.zero.gather_unit import BufferPool

CPU = torch.device("cpu")
SIZES = (1, 2, 31, 32, 33, 4095, 4096, 4097, 10_007)
DTYPES = (torch.float32, torch.bfloat16)


def test_peaks_are_of_a_phase_and_host_bytes_are_apart():
    book = Book(frozenset({"state"}))
    book.begin("a")
    book.take("weights", 10)
    book.take("state", 100)
    book.take("scratch", 5)
    book.free("scratch", 5)
    book.begin("b", {"activations": 3})
    book.free("weights", 10)
    book.end()
    a, b = book.phases["a"], book.phases["b"]
    assert (a.nbytes, a.host_nbytes) == (15, 100)
    assert a.kinds == {"weights": 10, "state": 100, "scratch": 5}
    assert (b.nbytes, b.kinds["activations"]) == (13, 3)
    assert (book.nbytes, book.host_nbytes) == (0, 100)


def test_more_freed_than_taken_is_seen():
    book = Book()
    book.take("weights", 10)
    with pytest.raises(RuntimeError, match="1 bytes more freed than taken"):
        book.free("weights", 11)


def test_a_phase_that_comes_again_begins_anew():
    book = Book()
    for nbytes in (7, 3):
        book.begin("forward")
        book.take("x", nbytes)
        book.free("x", nbytes)
    assert book.phases["forward"].nbytes == 3


def random_requests(seed: int, n_alive: int = 3):
    """(is_take, index): at most ``n_alive`` buffers are out at a time; in the end all are back."""
    rng = random.Random(seed)
    out = 0
    for _ in range(200):
        if out and (out == n_alive or rng.random() < 0.5):
            out -= 1
            yield False, rng.randrange(out + 1)
        else:
            out += 1
            yield True, rng.randrange(1 << 30)
    for i in reversed(range(out)):
        yield False, i


@pytest.mark.parametrize("seed", range(20))
def test_staging_is_kept_as_the_engine_keeps_it(seed):
    book, pool = Book(), StagingPool()
    mine, out = StagingBook(book, "staging"), []
    for is_take, choice in random_requests(seed):
        if is_take:
            key, numel, dtype = choice % 7, SIZES[choice % len(SIZES)], DTYPES[choice % 2]
            out.append((mine.take(key, numel, dtype.itemsize), key, pool.take(key, numel, dtype, CPU)))
        else:
            buffer, key, tensor = out.pop(choice)
            mine.give(buffer)
            pool.give(key, tensor)
        held = [b for _, b in pool._free] + [t for _, _, t in out]
        assert book.nbytes == sum(t.untyped_storage().nbytes() for t in held)


@pytest.mark.parametrize("seed", range(20))
def test_scratch_is_kept_as_the_engine_keeps_it(seed):
    book, pool = Book(), Scratch()
    mine, out = ScratchBook(book, "scratch"), []
    for is_take, choice in random_requests(seed):
        if is_take:
            numel, dtype = SIZES[choice % len(SIZES)], DTYPES[choice % 2]
            out.append((mine.take(numel * dtype.itemsize), pool.take(numel, dtype, CPU)))
        else:
            buffer, tensor = out.pop(choice)
            mine.give(buffer)
            pool.give(tensor)
        assert book.nbytes == pool.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_gathered_buffers_are_kept_as_the_engine_keeps_them(seed):
    book, pool = Book(), BufferPool()
    mine, out = GatherBook(book, "gathered", keeps=True), []
    for is_take, choice in random_requests(seed):
        if is_take:
            numel, dtype = SIZES[choice % len(SIZES)], DTYPES[choice % 2]
            tensor = pool.take(numel, dtype, CPU)
            out.append((mine.take(numel, dtype.itemsize), tensor))
            del tensor
        else:
            buffer, tensor = out.pop(choice)
            mine.give(buffer)
            pool.give(tensor)
            del tensor
        held = pool._free + [t for _, t in out]
        assert book.nbytes == sum(t.untyped_storage().nbytes() for t in held)


def test_a_device_keeps_no_gathered_buffers():
    book = Book()
    pool = GatherBook(book, "gathered", keeps=False)
    pool.give(pool.take(1000, 2))
    assert book.nbytes == 0
