"""Reductions in flight, from their start to the end of the wait for them."""

from __future__ import annotations

from collections import deque

from deepspeed_c.comm.work import Work
from deepspeed_c.errors import CommError
from deepspeed_c.logging import logger

# Most reductions in flight while backward goes on (overlap_comm): one is being sent, and one is queued behind it.
MAX_IN_FLIGHT = 2

__all__ = ["Flight"]


class Flight:
    """At most ``MAX_IN_FLIGHT`` reductions; none while backward goes on if they do not overlap with it.

    Each running reduction holds buffers, so an unbounded number would cost as much memory as stage 2 saves. If there is
    no room, the oldest is waited for before the next one starts. This happens at the same place of the same order on
    all ranks.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._depth = MAX_IN_FLIGHT if overlaps else 0
        self._works: deque[Work] = deque()

    def make_room(self) -> None:
        """Waits until another reduction may start."""
        while self._works and len(self._works) >= self._depth:
            self._works.popleft().wait()

    def add(self, work: Work) -> None:
        """``work`` has been started."""
        self._works.append(work)
        if self._depth == 0:
            self.wait()

    def wait(self) -> None:
        """Waits for the reductions that have been started."""
        while self._works:
            self._works.popleft().wait()

    def drop(self) -> None:
        """Waits for the reductions of a window that is dropped, and logs failures."""
        while self._works:
            try:
                self._works.popleft().wait()
            except CommError as error:
                logger.warning("a reduction of the dropped window failed: %s", error)

    def clear(self) -> None:
        """Forgets the reductions."""
        self._works.clear()
