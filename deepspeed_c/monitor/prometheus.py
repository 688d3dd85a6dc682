"""Events as gauges that a Prometheus server scrapes over HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import logger

from .base import Event, Monitor
from .packages import load_package

__all__ = ["PrometheusMonitor", "gauge_name"]

PREFIX = "deepspeed_c_"
# Prefix of the engine's own events. Metric names leave it out, because they begin with the name of the package.
_GENERAL = "Train/Samples/"
# Part of a name -> its Prometheus base unit, and the factor to convert to this unit.
_UNITS = {
    "ms": ("seconds", 1e-3),
    "milliseconds": ("seconds", 1e-3),
    "us": ("seconds", 1e-6),
    "s": ("seconds", 1.0),
    "sec": ("seconds", 1.0),
    "mb": ("bytes", 1e6),
    "gb": ("bytes", 1e9),
    "mib": ("bytes", 2.0**20),
    "gib": ("bytes", 2.0**30),
}
# Suffixes that Prometheus reserves for other kinds of metrics.
_TAKEN = ("_total", "_count", "_sum", "_bucket", "_info", "_created")


class PrometheusMonitor(Monitor):
    """Serves the last value of each name at ``http://address:port/metrics``, with the label ``job_name``.

    ``Train/Samples/train_loss`` is ``deepspeed_c_train_loss``; a value whose name contains ``ms``, ``gb`` or a similar
    unit is converted to seconds or bytes. ``deepspeed_c_last_step`` is the step of the last event.
    """

    key = "prometheus"
    on_failure = "choose another name for the event"

    def __init__(self, prometheus_config: Any) -> None:
        super().__init__(prometheus_config)
        self.address, self.port = prometheus_config.address, prometheus_config.port
        self.job_name = prometheus_config.job_name
        self._server: Any = None
        self._gauges: dict[str, tuple[Any, float] | None] = {}
        self._owners: dict[str, str] = {}
        if self.is_writing:
            self._client = load_package("prometheus_client", key=self.key)
            # A separate registry, because other metrics of the program belong to other endpoints.
            self._registry = self._client.CollectorRegistry()
            self._last_step = self._gauge(PREFIX + "last_step", "Step of the last event.")
            self._serve()

    def _serve(self) -> None:
        try:
            self._server, self._thread = self._client.start_http_server(
                self.port, addr=self.address, registry=self._registry
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {self.address}:{self.port}: {error.strerror or error}",
                where=f"{self.key}.port",
                fix="choose a port that is free and an address of this host",
            ) from error

    def write_events(self, event_list: Sequence[Event]) -> None:
        if self._server is None:
            return
        for name, value, step in event_list:
            if name not in self._gauges:
                self._gauges[name] = self._add(name)
            entry = self._gauges[name]
            if entry is not None:
                gauge, scale = entry
                gauge.set(value * scale)
                self._last_step.set(step)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _add(self, name: str) -> tuple[Any, float] | None:
        shown, scale = gauge_name(name)
        owner = self._owners.setdefault(shown, name)
        if owner != name:
            logger.warning(
                "prometheus: %s is not served: its metric %s is that of %s. Fix: give it another name",
                name,
                shown,
                owner,
            )
            return None
        return self._gauge(shown, f"The event {name}."), scale

    def _gauge(self, name: str, text: str) -> Any:
        self._owners[name] = self._owners.get(name, "")
        gauge = self._client.Gauge(name, text, ["job_name"], registry=self._registry)
        return gauge.labels(job_name=self.job_name)


def gauge_name(name: str) -> tuple[str, float]:
    """(the metric's name for an event's name, the factor for its values).

    The name is converted to lower case with ``_`` between words, and units become base units. If the name would end
    with a suffix of another kind of metric, ``_value`` is appended.
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix(_GENERAL))
    words = [word for word in re.split(r"[^a-z0-9]+", snake.lower()) if word]
    scale = 1.0
    units = [i for i, word in enumerate(words) if word in _UNITS]
    if units:
        # Prometheus wants the unit at the end of the name.
        unit, scale = _UNITS[words.pop(units[-1])]
        words.append(unit)
    shown = PREFIX + ("_".join(words) or "event")
    return (f"{shown}_value" if shown.endswith(_TAKEN) else shown), scale
