"""Events to Comet: to its service, or to an archive that ``comet upload`` sends later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.errors import ConfigError

from .base import Event, Monitor
from .packages import load_package

__all__ = ["CometMonitor", "EventsLogScheduler"]

MINIMUM = (3, 41, 0)
"""The first version of comet_ml that has ``start``."""


class CometMonitor(Monitor):
    """Logs metrics to one experiment, each name at most once in ``samples_log_interval`` steps of its events (the
    engine's events count samples).
    """

    key = "comet"
    on_failure = "look into the log of comet_ml, or set comet.online to false"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self._experiment: Any = None
        self._schedule = EventsLogScheduler(comet_config.samples_log_interval)
        if self.is_writing:
            self._open(load_package("comet_ml", key=self.key, minimum=MINIMUM), comet_config)

    def _open(self, comet_ml: Any, section: Any) -> None:
        try:
            self._experiment = comet_ml.start(
                api_key=section.api_key,
                workspace=section.workspace,
                project=section.project,
                experiment_key=section.experiment_key,
                mode=section.mode,
                online=section.online,
            )
        except (comet_ml.exceptions.CometException, OSError, ValueError) as error:
            raise ConfigError(
                f"Comet cannot start an experiment: {error}",
                where=self.key,
                fix='set COMET_API_KEY or comet.api_key, set "online": false, or set comet.enabled to false',
            ) from error
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)

    @property
    def experiment(self) -> Any:
        """Comet's object; None if this monitor writes nothing."""
        return self._experiment

    @property
    def samples_log_interval(self) -> int:
        """The least number of steps between two logged values of a name."""
        return self.monitor_config.samples_log_interval

    def write_events(self, event_list: Sequence[Event]) -> None:
        if self._experiment is None:
            return
        for name, value, step in event_list:
            if self._schedule.needs_logging(name, step):
                self._experiment.log_metric(name, value, step=step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        if self._experiment is not None:
            self._experiment.log_parameters(_leaves(config))

    def flush(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()

    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.end()


def _leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The keys that have a value, as dotted names. Comet would separate nested names by "|" and cut them after 100
    characters."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{above}{key}.")
        elif value is not None:
            found[f"{above}{key}"] = value
    return found


class EventsLogScheduler:
    """Chooses the events to log: the first event of a name, then each event at least ``samples_log_interval`` steps
    after the last logged event.
    """

    def __init__(self, samples_log_interval: int) -> None:
        self._samples_log_interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        """Whether to log the event. After True, the event counts as logged."""
        last = self._last.get(name)
        if last is not None and current_sample - last < self._samples_log_interval:
            return False
        self._last[name] = current_sample
        return True
