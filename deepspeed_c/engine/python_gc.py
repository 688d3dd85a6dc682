"""Turns off automatic collections of Python's cycle collector while an engine with ``disable_python_gc`` is open.

Each rank would collect at a different time, and all other ranks would wait for it in the next collective.
"""

from __future__ import annotations

import gc
import os
import threading

__all__ = ["CollectorPause"]


class _CollectorSwitch:
    """The switch of the process's collector, shared by all engines. When the last pause ends, it turns the collector on
    again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pauses: set[CollectorPause] = set()
        self.was_on = False

    def reset_in_child(self) -> None:
        """A forked child, such as a worker of a data loader, has no engine to end the pause."""
        self.lock = threading.Lock()
        if self.pauses and self.was_on:
            gc.enable()
        self.pauses.clear()


class CollectorPause:
    """Collects once and turns automatic collections off, until ``close``. ``gc.collect()`` works meanwhile.

    A collector that the program had turned off before the first pause stays off after the last.
    """

    def __init__(self) -> None:
        with _switch.lock:
            if not _switch.pauses:
                _switch.was_on = gc.isenabled()
                if _switch.was_on:
                    gc.collect()
                    gc.disable()
            _switch.pauses.add(self)

    def close(self) -> None:
        """End the pause. May be called twice."""
        with _switch.lock:
            if self not in _switch.pauses:
                return
            _switch.pauses.remove(self)
            if not _switch.pauses and _switch.was_on:
                gc.enable()


_switch = _CollectorSwitch()
os.register_at_fork(after_in_child=_switch.reset_in_child)
