"""Resident memory of a process: its size now, and its peak within a context."""

from __future__ import annotations

import threading
from collections.abc import Callable

from typing_extensions import Self

__all__ = ["Peak", "anonymous_bytes", "proportional_bytes"]


def _rollup(field: str) -> int:
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(f"{field}:"))


def anonymous_bytes() -> int:
    """Return the bytes of this process in memory that it does not share with files."""
    return _rollup("Anonymous")


def proportional_bytes() -> int:
    """Return the bytes of this process, with its part of pages that it shares with other processes (PSS)."""
    return _rollup("Pss")


class Peak:
    """The largest ``measure()`` within the context, looked at every 20 ms."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure

    def __enter__(self) -> Self:
        self.before = self.peak = self._measure()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.02):
            self.peak = max(self.peak, self._measure())

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def above(self) -> int:
        return self.peak - self.before
