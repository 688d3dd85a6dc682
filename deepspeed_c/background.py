"""Threads beside the main one. They end before the interpreter does.

[Note: the end of a thread] A call of C++ code (a store, gloo, an operator) waits for Python's lock before it returns.
Where the interpreter has begun to end, Python before 3.14 ends the waiting thread inside C++ instead, and the process
aborts with SIGABRT ("terminate called without an active exception"), although its work was done. So each thread has a
way to be told of the end, and the interpreter waits for it, up to a limit. A call that takes longer than the limit (the
other end of a connection is dead) does not come back at all, or long after the process has gone.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final

__all__ = ["BackgroundThread"]


@final
class BackgroundThread(threading.Thread):
    """A thread that is told to end when the interpreter ends, and is waited for."""

    def __init__(
        self, run: Callable[..., object], *args: Any, name: str, end: Callable[[], object], limit_s: float
    ) -> None:
        """run: the work, called with ``args``. end: makes ``run`` return soon; it may be called more than once, and
        should not keep an object alive that would otherwise end the thread when it is freed. limit_s: the longest time
        that the interpreter waits for ``run`` to return after ``end``.
        """
        super().__init__(target=run, args=args, name=name, daemon=True)
        self.end, self.limit_s = end, limit_s

    def start(self) -> None:
        _started.add(self)
        super().start()


_started: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends the threads together, so that their limits do not add up. A forked child has none of its parent's."""
    threads = [thread for thread in _started if thread.is_alive()]
    for thread in threads:
        thread.end()
    begin = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, begin + thread.limit_s - time.monotonic()))
