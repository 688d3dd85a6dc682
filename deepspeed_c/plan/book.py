"""Bytes by kind over time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

__all__ = ["Book", "Phase"]


class Phase(NamedTuple):
    """The peak of a phase."""

    name: str
    nbytes: int  # bytes on the device
    host_nbytes: int  # bytes of offloaded tensors in host memory
    kinds: dict[str, int]  # bytes by kind at the peak, with offloaded bytes, without kinds of 0 bytes
    nvme_nbytes: int = 0  # bytes in files


class Book:
    """Keeps the current bytes by kind, and the peak of each phase."""

    def __init__(self, host_kinds: Collection[str] = (), nvme_kinds: Collection[str] = ()) -> None:
        self._host_kinds, self._nvme_kinds = host_kinds, nvme_kinds
        self._held: dict[str, int] = {}
        self.nbytes = self.host_nbytes = self.nvme_nbytes = 0
        self.phases: dict[str, Phase] = {}
        self._phase: str | None = None

    def counter(self, kind: str) -> Callable[[int], None]:
        """Returns a function that counts the bytes of a ``BufferPool``, in use or free, under a kind."""
        return lambda n_bytes: self.take(kind, n_bytes) if n_bytes >= 0 else self.free(kind, -n_bytes)

    def begin(self, phase: str, extra: dict[str, int] | None = None) -> None:
        """Begins a phase. ``extra`` (activations) is added to all other bytes during the phase."""
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
        """``place``: "device", "host" or "nvme", for bytes that lie in another place than their kind."""
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
            )  # an error of the planner itself
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
