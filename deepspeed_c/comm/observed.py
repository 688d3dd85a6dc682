"""Ledger entries that report their times to the communication log, and to the phases of the engine that waits.

``Ledger.entry_type`` is ``ObservedEntry`` while anybody listens. Otherwise entries cost no more than without this
module.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

from deepspeed_c.comm.ledger import Ledger, LedgerEntry

__all__ = ["ObservedEntry", "Observer", "listen", "stop_listening"]


class Observer(Protocol):
    """Listens to the collectives of this process. Its methods are called on the threads that make the collectives."""

    def begin(self, entry: LedgerEntry) -> None:
        """The thread starts ``entry``, or begins to wait for it. From here on the thread does nothing else."""

    def end(self, entry: LedgerEntry) -> None:
        """The thread does something else again."""

    def finish(self, entry: LedgerEntry) -> None:
        """The call that waits for ``entry`` has returned, after the last ``end``."""


_observers: list[Any] = []


class ObservedEntry(LedgerEntry):
    """A ledger entry that tells all observers when the thread enters and leaves it."""

    __slots__ = ("_is_inside", "began")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.began = perf_counter()
        """Seconds of ``time.perf_counter``."""
        self._is_inside = False
        self._enter()

    def _enter(self) -> None:
        if not self._is_inside:
            self._is_inside = True
            for observer in _observers:
                observer.begin(self)

    def _leave(self) -> None:
        if self._is_inside:
            self._is_inside = False
            for observer in reversed(_observers):
                observer.end(self)

    def begin_wait(self) -> None:
        self._enter()
        super().begin_wait()

    def started(self) -> None:
        super().started()
        self._leave()

    def finish(self) -> None:
        self._leave()
        super().finish()
        for observer in _observers:
            observer.finish(self)

    def end(self) -> None:
        self._leave()  # needed where the collective has failed
        super().end()


def listen(observer: Observer) -> None:
    """From now on ``observer`` is called for all collectives that begin. Listening twice is listening once."""
    if observer not in _observers:
        _observers.append(observer)
    Ledger.make_entries(ObservedEntry)


def stop_listening(observer: Observer) -> None:
    """``observer`` is not called any more."""
    if observer in _observers:
        _observers.remove(observer)
    if not _observers:
        Ledger.make_entries(LedgerEntry)
