"""Count of applied optimizer steps, which schedules of compression start by."""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["AppliedSteps"]


class AppliedSteps:
    """Number of applied steps, shared by all compressed layers of a model.

    An engine's own count is followed while the engine lives, so that a loaded checkpoint or a skipped step needs no
    second count. Without an engine ``advance`` counts. A copy or pickle holds the number only.
    """

    def __init__(self, count: int = 0) -> None:
        self._own = count
        self._source: Callable[[], Callable[[], int] | None] = lambda: None

    @property
    def is_followed(self) -> bool:
        """Whether an engine counts."""
        return self._source() is not None

    @property
    def count(self) -> int:
        source = self._source()
        if source is not None:
            self._own = source()
        return self._own

    def follow(self, source: Callable[[], int]) -> None:
        """From now on the count is that of ``source``, a bound method whose object is not kept alive."""
        self._source = weakref.WeakMethod(source)

    def close(self) -> None:
        """Keeps the present count, and follows no engine."""
        self._own, self._source = self.count, lambda: None

    def advance(self) -> None:
        """Counts a step, unless an engine counts."""
        self._own += not self.is_followed

    def __reduce__(self):
        return AppliedSteps, (self.count,)
