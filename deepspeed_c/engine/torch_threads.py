"""Sets the number of torch's threads while an engine with ``same_bits.threads`` is open.

The number decides in which order sums over threads are added, and so it is a part of a run's bits.
"""

from __future__ import annotations

import os
import threading

import torch

from deepspeed_c.errors import ConfigError

__all__ = ["TorchThreads"]


class _ThreadSwitch:
    """The number of torch's threads in this process, shared by all engines. The last one to close restores the number
    that the program had."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: set[TorchThreads] = set()
        self.before = self.held = 0

    def reset_in_child(self) -> None:
        """A forked child, such as a worker of a data loader, has no engine, and sets its own number."""
        self.lock = threading.Lock()
        self.holders.clear()


class TorchThreads:
    """Sets ``torch.set_num_threads(n_threads)`` until ``close``.

    Raises ConfigError if another engine of this process is open with another number: its bits would change.
    """

    def __init__(self, n_threads: int) -> None:
        with _switch.lock:
            if not _switch.holders:
                _switch.before, _switch.held = torch.get_num_threads(), n_threads
                torch.set_num_threads(n_threads)
            elif _switch.held != n_threads:
                raise ConfigError(
                    f"is {n_threads}, and {_switch.held} for another open engine of this process",
                    where="same_bits.threads",
                    fix=f"close that engine first, or set the key to {_switch.held}",
                )
            _switch.holders.add(self)

    def close(self) -> None:
        """Ends it. May be called twice."""
        with _switch.lock:
            if self not in _switch.holders:
                return
            _switch.holders.remove(self)
            if not _switch.holders:
                torch.set_num_threads(_switch.before)


_switch = _ThreadSwitch()
os.register_at_fork(after_in_child=_switch.reset_in_child)
