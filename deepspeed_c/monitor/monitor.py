"""``MonitorMaster``: passes events to all backends that a configuration enables."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config import Config
from deepspeed_c.errors import DeepSpeedCError, EventError

from .base import Event, Monitor, is_first_rank
from .comet import CometMonitor
from .csv_monitor import csvMonitor
from .jsonl import JsonLinesMonitor
from .prometheus import PrometheusMonitor
from .tensorboard import TensorBoardMonitor
from .wandb import WandbMonitor
from .writer import EventWriter

__all__ = ["MONITORS", "Event", "Monitor", "MonitorMaster"]

MONITORS: dict[str, type[Monitor]] = {
    each.key: each
    for each in (
        TensorBoardMonitor,
        WandbMonitor,
        CometMonitor,
        csvMonitor,
        JsonLinesMonitor,
        PrometheusMonitor,
    )
}
"""All backends by the key of their section. A new backend needs a line here and a section in config/monitor.py."""

_SECRET = re.compile(r"(?:^|_)(?:api_?key|token|password|secret)$", re.IGNORECASE)

# The values of the engine's own events have these types. A check against an abstract class takes several times as long.
_PLAIN = (float, int)


class MonitorMaster(Monitor):
    """The monitors that a configuration enables, on rank 0. On other ranks this object checks events and writes
    nothing.

    A separate thread writes the events (writer.py). The resolved configuration, without secrets, is written first.

    Args:
        monitor_config: a whole configuration, or an object with the monitors' sections as attributes.
        comm: the ranks that make this object together. An error of rank 0 is then raised on all ranks. Without
            ``comm``, only rank 0 raises.

    Raises:
        ConfigError: a folder is not writable, a port is in use, a service refuses the connection. MissingPackageError:
        a package that an enabled monitor needs cannot be imported.
    """

    def __init__(self, monitor_config: Any, *, comm: Collectives | None = None) -> None:
        sections = {key: getattr(monitor_config, key, None) for key in MONITORS}
        enabled = [key for key, section in sections.items() if section is not None and section.enabled]
        self.monitor_config = monitor_config
        self.enabled = bool(enabled)
        self.is_writing = self.enabled and is_first_rank()
        self.monitors: dict[str, Monitor] = {}
        self._writer: EventWriter | None = None
        error = self._open({key: sections[key] for key in enabled}) if self.is_writing else None
        if comm is not None and self.enabled:
            error = next((each for each in comm.gather_objects(error, label="monitors") if each is not None), None)
        if error is not None:
            self._close_all()
            raise error
        if self.monitors:
            known = monitor_config.resolved_dict() if isinstance(monitor_config, Config) else None
            self._writer = EventWriter(self.monitors, None if known is None else without_secrets(known))

    def write_events(self, event_list: Iterable[Sequence[Any]]) -> None:
        """Queue events (name, value, step), and return without waiting for any monitor.

        A value is a number or a tensor with one element. All tensors of a device are read with one transfer before this
        method returns, so they may change afterwards.

        Raises EventError for other arguments, on every rank that gets them.
        """
        if not self.enabled:
            return
        checked = [_checked(event) for event in event_list]
        if self._writer is not None and checked:
            self._writer.put(_read(checked))

    def flush(self) -> None:
        """Wait until all events so far are written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write the queued events and close all monitors. Later events are dropped."""
        if self._writer is not None:
            self._writer.close()

    @property
    def n_dropped(self) -> int:
        """Number of events that were dropped because the queue was full."""
        return 0 if self._writer is None else self._writer.n_dropped

    @property
    def tb_monitor(self) -> TensorBoardMonitor | None:
        """The monitor of TensorBoard; None if it is not enabled, and on ranks other than 0."""
        return self.monitors.get("tensorboard")

    @property
    def wandb_monitor(self) -> WandbMonitor | None:
        """The monitor of W&B; None if it is not enabled, and on ranks other than 0."""
        return self.monitors.get("wandb")

    @property
    def csv_monitor(self) -> csvMonitor | None:
        """The monitor of CSV files; None if it is not enabled, and on ranks other than 0."""
        return self.monitors.get("csv_monitor")

    @property
    def comet_monitor(self) -> CometMonitor | None:
        """The monitor of Comet; None if it is not enabled, and on ranks other than 0."""
        return self.monitors.get("comet")

    def _open(self, sections: Mapping[str, Any]) -> DeepSpeedCError | None:
        for key, section in sections.items():
            try:
                self.monitors[key] = MONITORS[key](section)
            except DeepSpeedCError as error:
                return error
        return None

    def _close_all(self) -> None:
        for monitor in self.monitors.values():
            monitor.close()
        self.monitors.clear()


def without_secrets(tree: Any) -> Any:
    """A copy of a configuration without keys that hold secrets, such as ``api_key``."""
    if isinstance(tree, Mapping):
        return {key: without_secrets(value) for key, value in tree.items() if not _SECRET.search(str(key))}
    return [without_secrets(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def _checked(event: Sequence[Any]) -> tuple[str, Any, int]:
    try:
        name, value, step = event
    except (TypeError, ValueError):
        raise _wrong(event, "is no (name, value, step)") from None
    if type(name) is str and name and type(value) in _PLAIN and type(step) is int:
        return name, value, step
    if not isinstance(name, str) or not name:
        raise _wrong(event, f"has the name {name!r}")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise _wrong(name, f"is a tensor of {tuple(value.shape)}, {value.dtype}")
    elif not isinstance(value, Real):
        raise _wrong(name, f"has the value {value!r}")
    try:
        return name, value, operator.index(step)
    except TypeError:
        raise _wrong(name, f"has the step {step!r}") from None


def _wrong(event: Any, what: str) -> EventError:
    return EventError(
        f"{event!r} {what}" if isinstance(event, str) else f"the event {event!r} {what}",
        where="write_events",
        fix="pass (name, number or tensor with one element, whole number of the step)",
    )


def _read(events: list[tuple[str, Any, int]]) -> list[Event]:
    """Events with plain numbers as values."""
    values: list[Any] = [None] * len(events)
    by_device: dict[torch.device, list[int]] = {}
    for i, (_, value, _) in enumerate(events):
        if type(value) in _PLAIN:
            values[i] = value
        elif not isinstance(value, torch.Tensor):
            values[i] = int(value) if isinstance(value, Integral) else float(value)
        elif value.device.type == "cpu":
            values[i] = value.item()
        else:
            by_device.setdefault(value.device, []).append(i)
    for places in by_device.values():  # one transfer a device, whatever the number of tensors
        numbers = torch.stack([events[i][1].detach().reshape(()).double() for i in places]).tolist()
        for i, number in zip(places, numbers, strict=True):
            values[i] = number
    return [Event(name, value, step) for (name, _, step), value in zip(events, values, strict=True)]
