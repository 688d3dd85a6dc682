"""Books, which count planned bytes: the peak of each phase, and the bytes in the pools of the engine."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.buffers import BufferPool
from deepspeed_c.plan.book import Book


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


def test_a_pool_is_counted_under_its_kind():
    book = Book()
    book.begin("step")
    pool = BufferPool(count=book.counter("scratch"))
    lent = pool.take(10_000, torch.float32, torch.device("meta"))
    assert book.nbytes == pool.n_bytes == 40_960
    pool.give(lent)
    assert book.nbytes == 40_960
    pool.give(pool.take(20_000, torch.float32, torch.device("meta")))
    assert book.nbytes == 81_920
    pool.clear()
    assert (book.nbytes, book.phases["step"].kinds) == (0, {"scratch": 81_920})
