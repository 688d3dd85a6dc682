"""Bytes by kind over time, and the engine's buffer pools as books: which sizes they hold, and what they would allocate."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

__all__ = ["Book", "Buffer", "GatherBook", "Phase", "Pool", "ScratchBook", "StagingBook"]


class Phase(NamedTuple):
    """The moment of a phase at which most is held."""

    name: str
    nbytes: int  # on the device
    host_nbytes: int  # in host memory, of what is offloaded
    kinds: dict[str, int]  # bytes by kind at that moment, offloaded ones too; those with none left out
    nvme_nbytes: int = 0  # in files


class Book:
    """What is held now, by kind, and the peak of each phase."""

    def __init__(self, host_kinds: Collection[str] = (), nvme_kinds: Collection[str] = ()) -> None:
        self._host_kinds, self._nvme_kinds = host_kinds, nvme_kinds
        self._held: dict[str, int] = {}
        self.nbytes = self.host_nbytes = self.nvme_nbytes = 0
        self.phases: dict[str, Phase] = {}
        self._phase: str | None = None

    def begin(self, phase: str, extra: dict[str, int] | None = None) -> None:
        """Begins a phase anew; ``extra`` is held on top of everything while it lasts (activations)."""
        self.end()
        self._phase = phase
        self.phases.pop(phase, None)
        self._extra = dict(extra or {})
        for kind, nbytes in self._extra.items():
            self.take(kind, nbytes)
        self._note()

    def end(self) -> None:
        if self._phase is not None:
            for kind, nbytes in self._extra.items():
                self.free(kind, nbytes)
        self._phase = None

    def take(self, kind: str, nbytes: int, place: str | None = None) -> None:
        """``place``: "device", "host" or "nvme", for what does not lie where its kind does."""
        if nbytes == 0:
            return
        self._held[kind] = self._held.get(kind, 0) + nbytes
        self._count(kind, nbytes, place)
        self._note()

    def free(self, kind: str, nbytes: int, place: str | None = None) -> None:
        self._held[kind] = self._held.get(kind, 0) - nbytes
        if self._held[kind] < 0:
            raise RuntimeError(
                f"{kind}: {-self._held[kind]} bytes more freed than taken"
            )  # the planner itself is wrong
        self._count(kind, -nbytes, place)

    def _count(self, kind: str, nbytes: int, place: str | None) -> None:
        if place is None:
            place = "host" if kind in self._host_kinds else "nvme" if kind in self._nvme_kinds else "device"
        if place == "host":
            self.host_nbytes += nbytes
        elif place == "nvme":
            self.nvme_nbytes += nbytes
        else:
            self.nbytes += nbytes

    def _note(self) -> None:
        if self._phase is None:
            return
        before = self.phases.get(self._phase)
        if before is None or (self.nbytes, self.host_nbytes) > (before.nbytes, before.host_nbytes):
            kinds = {kind: nbytes for kind, nbytes in self._held.items() if nbytes}
            self.phases[self._phase] = Phase(self._phase, self.nbytes, self.host_nbytes, kinds, self.nvme_nbytes)


class Pool:
    """A pool of buffers: sizes that are free, and a kind under which all of them, free or not, are held."""

    def __init__(self, book: Book, kind: str) -> None:
        self._book, self._kind = book, kind

    def _allocate(self, nbytes: int) -> None:
        self._book.take(self._kind, nbytes)

    def _drop(self, nbytes: int) -> None:
        self._book.free(self._kind, nbytes)


class Buffer(NamedTuple):
    """A buffer of a pool."""

    itemsize: int
    numel: int
    key: int = -1  # what it last served

    @property
    def nbytes(self) -> int:
        return self.itemsize * self.numel


class StagingBook(Pool):
    """``zero.bucket.StagingPool``: a buffer that fits is used again, the bucket's own first; those that are too small are dropped."""

    def __init__(self, book: Book, kind: str) -> None:
        super().__init__(book, kind)
        self._free: list[Buffer] = []

    def take(self, key: int, numel: int, itemsize: int) -> Buffer:
        fitting = [b for b in self._free if b.itemsize == itemsize and b.numel >= numel]
        if fitting:
            best = next((b for b in fitting if b.key == key), fitting[-1])
            self._free.remove(best)
            return best._replace(key=key)
        for buffer in [b for b in self._free if b.itemsize == itemsize]:
            self._free.remove(buffer)
            self._drop(buffer.nbytes)
        self._allocate(itemsize * numel)
        return Buffer(itemsize, numel, key)

    def give(self, buffer: Buffer) -> None:
        self._free.append(buffer)


class GatherBook(Pool):
    """``zero.gather_unit.BufferPool``: the tightest fit on the host; nothing is kept where the device's own allocator does that."""

    def __init__(self, book: Book, kind: str, *, keeps: bool) -> None:
        super().__init__(book, kind)
        self._keeps = keeps
        self._free: list[Buffer] = []

    def take(self, numel: int, itemsize: int) -> Buffer:
        fitting = [b for b in self._free if b.itemsize == itemsize and b.numel >= numel]
        if fitting:
            best = min(fitting, key=lambda b: b.numel)
            self._free.remove(best)
            return best
        for buffer in self._free:
            self._drop(buffer.nbytes)
        self._free.clear()
        self._allocate(itemsize * numel)
        return Buffer(itemsize, numel)

    def give(self, buffer: Buffer) -> None:
        if self._keeps:
            self._free.append(buffer)
        else:
            self._drop(buffer.nbytes)


class ScratchBook(Pool):
    """``comm.collectives.Scratch``: bytes in whole granules; the largest free buffer makes room for one that is larger still."""

    GRANULE_BYTES = 4096

    def __init__(self, book: Book, kind: str) -> None:
        super().__init__(book, kind)
        self._free: list[int] = []

    def take(self, nbytes: int) -> int:
        fitting = [n for n in self._free if n >= nbytes]
        if fitting:
            best = min(fitting)
            self._free.remove(best)
            return best
        if self._free:
            largest = max(self._free)
            self._free.remove(largest)
            self._drop(largest)
        size = -(-max(nbytes, 1) // self.GRANULE_BYTES) * self.GRANULE_BYTES
        self._allocate(size)
        return size

    def give(self, buffer: int) -> None:
        self._free.append(buffer)
