"""Events as JSON lines, for programs to read: one file for each run, one object for each step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Event, Monitor, by_step
from .files import append, mend_last_line, open_folder

__all__ = ["JsonLinesMonitor"]

RESERVED = ("step", "time", "config", "nonfinite")
"""Keys of a line that are not names of events. An event with such a name gets the prefix ``event/``."""


class JsonLinesMonitor(Monitor):
    """Appends to ``output_path/job_name/events.jsonl``.

    The line of a step is ``{"step": 4096, "time": 1753000000.25, "Train/Samples/train_loss": 2.5, ...}``, with ``time``
    in seconds since 1970, when it was written. JSON has no NaN and no infinity. Such a value is written as null, and
    the key ``nonfinite`` gives the value, as in ``{"nonfinite": {"Train/Samples/train_loss": "nan"}}``. Each start of a
    run writes a line ``{"time": ..., "config": {...}}`` first. Events of one step that come in several calls may take
    several lines.
    """

    key = "jsonl"
    on_failure = "free space in the folder of jsonl.output_path"

    def __init__(self, jsonl_config: Any) -> None:
        super().__init__(jsonl_config)
        self._path = None
        if self.is_writing:
            self._path = open_folder(jsonl_config, self.key) / "events.jsonl"
            mend_last_line(self._path)

    def write_events(self, event_list: Sequence[Event]) -> None:
        if self.is_writing:
            lines = [self._line(step, values) for step, values in by_step(event_list).items()]
            append(self._path, "".join(lines))

    def write_config(self, config: Mapping[str, Any]) -> None:
        if self.is_writing:
            # A default may be infinite, which JSON cannot represent.
            append(self._path, json.dumps({"time": _now(), "config": _finite(config)}, allow_nan=False) + "\n")

    @staticmethod
    def _line(step: int, values: Mapping[str, float]) -> str:
        line: dict[str, Any] = {"step": step, "time": _now()}
        nonfinite: dict[str, str] = {}
        for name, value in values.items():
            shown = f"event/{name}" if name in RESERVED else name
            if math.isfinite(value):
                line[shown] = value
            else:
                line[shown], nonfinite[shown] = None, repr(float(value))
        if nonfinite:
            line["nonfinite"] = nonfinite
        return json.dumps(line, allow_nan=False) + "\n"


def _now() -> float:
    return round(time.time(), 6)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
