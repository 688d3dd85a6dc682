"""The interface of a monitor, a backend that writes events to a file or a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.comm import get_rank, is_initialized
from deepspeed_c.env import read_env
from deepspeed_c.observe.record import Event

__all__ = ["Event", "GlobalSamples", "Monitor", "Name", "Value", "by_step", "is_first_rank"]

# DeepSpeed's names for the parts of an event.
Name, Value, GlobalSamples = str, Any, int


class Monitor(ABC):
    """A backend. On rank 0, the constructor opens the file or service, and raises a typed error if that fails.

    ``MonitorMaster`` calls all other methods on its own thread, one at a time. A program may also use a monitor
    directly. The methods then write before they return.

    Args:
        monitor_config: the backend's section of the configuration.
    """

    key = ""
    """The section's key in a configuration."""
    on_failure = ""
    """Advice to a user when writing fails."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = bool(monitor_config.enabled)
        self.is_writing: bool = self.enabled and is_first_rank()

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events, whose values are plain numbers. May raise any exception: ``MonitorMaster`` logs it and
        continues."""

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration of the run, without secrets. Not required."""

    def flush(self) -> None:
        """Return when a kill of this process can no longer lose the events so far. Not required."""

    def close(self) -> None:
        """Write the rest and close. Not required."""


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the run."""
    return (get_rank() if is_initialized() else read_env().rank) == 0


def by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Names and values by step, in the order in which steps first occur. If a name occurs twice in a step, the last
    value counts."""
    found: dict[int, dict[str, float]] = {}
    for name, value, step in events:
        found.setdefault(step, {})[name] = value
    return found
