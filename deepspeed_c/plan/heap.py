"""The C library's heap: how much memory a host process takes for tensors, beyond the tensors that are alive.

A host's tensors lie in blocks of ``malloc``. Freed blocks become holes, which the process keeps, and which only later
blocks use that fit. The rules here are those of glibc's main arena before version 2.38 (``malloc/malloc.c``), in which
torch takes tensors by ``posix_memalign``: holes by best fit, holes joined with their neighbours, the end of the heap
returned beyond a threshold, and large blocks in maps of their own until a first such block is freed.

Most holes are due to one rule. An aligned block needs 96 bytes more than its size, and the bytes that are left beside
it go to a cache for small objects. The objects that an operator makes with a tensor take them. When the tensor is
freed, such an object may live on; the hole is then too small for the next tensor of this size.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["HeapEvent", "heap_peak"]

_ALIGNMENT = 64  # of torch's tensors on the host
_MIN_CHUNK, _HEADER, _GRAIN = 32, 16, 16
_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD = 128 << 10, 32 << 20
_TOP_PAD, _PAGE = 128 << 10, 4096
_CACHE_SLOTS, _CACHE_MAX = 7, 1040
# The C++ objects of this many bytes that come and go with a tensor: shared counts, sizes and strides, autograd's nodes.
_SMALL_SIZES = (32, 48, 64, 80, 96)
_N_SMALL = 4
# Steps until the heap has grown to what it is in a long run.
_N_ROUNDS = 4


class HeapEvent(NamedTuple):
    """A tensor's storage is made, or freed."""

    storage: int  # a number that no other storage has
    nbytes: int  # 0: it is freed


def heap_peak(events: Sequence[HeapEvent]) -> int:
    """The most bytes of a heap that goes through the events of a step again and again. Every storage that the events
    make is freed in them."""
    heap = _Heap()
    for _ in range(_N_ROUNDS):
        where: dict[int, _Chunk] = {}
        for storage, nbytes in events:
            if nbytes:
                where[storage] = heap.take(nbytes)
            else:
                heap.free(where.pop(storage))
    return heap.peak


class _Chunk(NamedTuple):
    begin: int
    nbytes: int
    is_mapped: bool
    small: list[tuple[int, int]]  # the small objects that came with it: (begin, bytes)


class _Heap:
    """Addresses without memory. ``peak``: the most bytes of the heap and of maps together."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []  # (bytes, begin), sorted
        self._end_of: dict[int, int] = {}  # by the begin of a hole
        self._begin_of: dict[int, int] = {}  # by the end of a hole
        self._cached: dict[int, list[int]] = {}  # by size
        self._used_end = self._end = 0
        self._mapped_bytes = self.peak = 0
        self._mmap_threshold = self._trim_threshold = _MMAP_THRESHOLD
        self._n_small = 0

    def take(self, nbytes: int) -> _Chunk:
        """A block for a tensor."""
        size = -(-(nbytes + _HEADER) // _GRAIN) * _GRAIN
        wanted = size + _ALIGNMENT + _MIN_CHUNK
        found = self._find(wanted)
        if found is None:
            self._mapped_bytes += wanted
            begin, size, is_mapped = 0, wanted, True
        else:
            (begin, got), is_mapped = found, False
            before = -(begin + _HEADER) % _ALIGNMENT
            if 0 < before < _MIN_CHUNK:
                before += _ALIGNMENT
            if before:
                self._free_small(begin, before)
            begin, got = begin + before, got - before
            if got - size >= _MIN_CHUNK:
                self._free_small(begin + size, got - size)
            else:
                size = got
        small = [self._take_small() for _ in range(_N_SMALL)]
        self.peak = max(self.peak, self._end + self._mapped_bytes)
        return _Chunk(begin, size, is_mapped, small)

    def free(self, block: _Chunk) -> None:
        if block.is_mapped:
            self._mapped_bytes -= block.nbytes
            if self._mmap_threshold < block.nbytes <= _MAX_MMAP_THRESHOLD:
                self._mmap_threshold, self._trim_threshold = block.nbytes, 2 * block.nbytes
        else:
            self._join(block.begin, block.begin + block.nbytes)
        for begin, nbytes in block.small:
            self._free_small(begin, nbytes)

    def _find(self, wanted: int) -> tuple[int, int] | None:
        """(begin, bytes) of a piece of at least ``wanted`` bytes; None if it becomes a map of its own."""
        i = bisect.bisect_left(self._holes, (wanted, -1))
        if i < len(self._holes):
            size, begin = self._holes[i]
            self._remove(begin, begin + size)
            if size - wanted < _MIN_CHUNK:
                return begin, size
            self._add(begin + wanted, begin + size)
            return begin, wanted
        if self._end - self._used_end < wanted + _MIN_CHUNK:
            if wanted >= self._mmap_threshold:
                return None
            self._end = -(-(self._used_end + wanted + _TOP_PAD) // _PAGE) * _PAGE
        self._used_end += wanted
        return self._used_end - wanted, wanted

    def _take_small(self) -> tuple[int, int]:
        self._n_small += 1
        size = _SMALL_SIZES[self._n_small % len(_SMALL_SIZES)]
        cached = self._cached.get(size)
        return (cached.pop(), size) if cached else self._find(size)

    def _free_small(self, begin: int, nbytes: int) -> None:
        cached = self._cached.setdefault(nbytes, [])
        if nbytes <= _CACHE_MAX and len(cached) < _CACHE_SLOTS:
            cached.append(begin)
        else:
            self._join(begin, begin + nbytes)

    def _join(self, begin: int, end: int) -> None:
        """Makes a hole, one with its neighbours."""
        if begin in self._begin_of:
            before = self._begin_of[begin]
            self._remove(before, begin)
            begin = before
        if end in self._end_of:
            after = self._end_of[end]
            self._remove(end, after)
            end = after
        if end < self._used_end:
            self._add(begin, end)
            return
        self._used_end = begin
        if self._end - begin > self._trim_threshold:
            self._end = begin + _TOP_PAD

    def _add(self, begin: int, end: int) -> None:
        self._end_of[begin], self._begin_of[end] = end, begin
        bisect.insort(self._holes, (end - begin, begin))

    def _remove(self, begin: int, end: int) -> None:
        del self._end_of[begin], self._begin_of[end]
        self._holes.pop(bisect.bisect_left(self._holes, (end - begin, begin)))
