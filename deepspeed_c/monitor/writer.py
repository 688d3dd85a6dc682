"""The thread that writes events, so that training does not wait for monitors."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.background import BackgroundThread
from deepspeed_c.logging import logger

from .base import Event, Monitor

__all__ = ["CLOSE_SECONDS", "QUEUE_EVENTS", "EventWriter"]

QUEUE_EVENTS = 10_000  # about 1 MB: the events of some hundred steps, for times when a disk or a server is slow
CLOSE_SECONDS = 60.0  # W&B and Comet send their buffered events when they close


class EventWriter:
    """Writes events to monitors on one daemon thread.

    The queue is bounded. If it is full, new events are dropped and counted. The first dropped event causes a warning,
    and ``close`` reports the number. If a monitor raises an exception, the first exception causes a warning, and later
    events are tried again. ``close`` reports how many events each monitor lost. Queued events are written by ``close``,
    which also runs at exit.

    Args:
        monitors: open monitors by key.
        config: the resolved configuration of the run, which is written first, or None.
        capacity: the largest number of queued events.
    """

    def __init__(
        self, monitors: Mapping[str, Monitor], config: Mapping[str, Any] | None = None, capacity: int = QUEUE_EVENTS
    ) -> None:
        self.n_dropped = 0
        self.n_failed: Counter[str] = Counter()
        self._monitors, self._config, self._capacity = dict(monitors), config, capacity
        self._queue: deque[Sequence[Event]] = deque()
        self._n_waiting = 0
        self._is_busy = True
        self._is_closing = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = BackgroundThread(self._run, name="deepspeed_c-monitor", end=self.close, limit_s=0.0)
        self._thread.start()
        # At exit, this runs before the exit functions of the monitors' packages, because they were registered earlier.
        atexit.register(self.close)

    def put(self, events: Sequence[Event]) -> None:
        """Queue events and return at once."""
        if os.getpid() != self._pid:
            return  # a forked process has no such thread, and the files belong to its parent
        with self._changed:
            room = 0 if self._is_closing else self._capacity - self._n_waiting
            taken, lost = events[:room], events[room:]
            is_first = bool(lost) and self.n_dropped == 0
            self.n_dropped += len(lost)
            if taken:
                self._queue.append(taken)
                self._n_waiting += len(taken)
                self._changed.notify_all()
        if is_first:
            logger.warning(
                "monitors: %s; events are dropped from step %d on, until there is room. Fix: disable the monitor"
                " that is slow, or write less often",
                "they are closed" if self._is_closing else f"{self._capacity} events wait to be written",
                lost[0][2],
            )

    def flush(self, timeout_s: float = CLOSE_SECONDS) -> bool:
        """Wait until all events so far are written, for at most ``timeout_s``. Return whether they are written."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout_s)

    def close(self, timeout_s: float = CLOSE_SECONDS) -> None:
        """Write the queued events, close the monitors and report lost events. Wait for at most ``timeout_s``."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            was_closing, self._is_closing = self._is_closing, True
            self._changed.notify_all()
        if was_closing:
            return
        atexit.unregister(self.close)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "monitors: %d events are not written %g s after the end of training, and are lost",
                *self._late(timeout_s),
            )
        if self.n_dropped:
            logger.warning("monitors: %d events were dropped, as too many were waiting", self.n_dropped)
        for key, n in self.n_failed.items():
            logger.warning("%s: %d events could not be written", key, n)

    def _late(self, timeout_s: float) -> tuple[int, float]:
        with self._changed:
            return self._n_waiting, timeout_s

    def _run(self) -> None:
        if self._config is not None:
            for key, monitor in self._monitors.items():
                self._try(key, monitor.write_config, self._config)
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    break
                events = [event for each in self._queue for event in each]
                self._queue.clear()
                self._is_busy = True
            for key, monitor in self._monitors.items():
                self._try(key, monitor.write_events, events, n_events=len(events))
                self._try(key, monitor.flush)
            with self._changed:
                self._n_waiting -= len(events)
        for key, monitor in self._monitors.items():
            self._try(key, monitor.close)

    def _try(self, key: str, call: Any, *args: Any, n_events: int = 0) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  a backend may raise anything, and training outlives all of it
            is_first = key not in self.n_failed
            self.n_failed[key] += n_events
            if is_first:
                logger.warning(
                    "%s: %s failed: %s: %s. Training goes on, and later failures are only counted. Fix: %s, or set"
                    " %s.enabled to false",
                    key,
                    call.__name__,
                    type(error).__name__,
                    error,
                    self._monitors[key].on_failure or "see the error",
                    key,
                    exc_info=True,
                )
