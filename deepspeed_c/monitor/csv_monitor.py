"""Events as CSV: one file a name, one row an event."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_c import comm as dist
from deepspeed_c.logging import logger

from .base import Event, Monitor
from .files import append, mend_last_line, open_folder

# Monitor and dist are here because DeepSpeed's module has them, and programs import all names of a module.
__all__ = ["Monitor", "csvMonitor", "dist"]


class csvMonitor(Monitor):
    """Appends to ``output_path/job_name/NAME.csv``. NAME is the event's name with ``_`` for each ``/`` and blank. The
    header is ``step`` and the last part of the event's name.

    A file of an earlier run is continued, and keeps its header.
    """

    key = "csv_monitor"
    on_failure = "free space in the folder of csv_monitor.output_path"

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.log_dir = str(open_folder(csv_config, self.key)) if self.is_writing else None
        # File -> the name of its event, from the first write on.
        self._names: dict[str, str] = {}
        self._refused: set[str] = set()

    @property
    def filenames(self) -> list[str]:
        """Names of the files that this run has written to, without the suffix ".csv"."""
        return list(self._names)

    def write_events(self, event_list: Sequence[Event]) -> None:
        if not self.is_writing:
            return
        rows: dict[str, list[tuple[int, float]]] = {}
        for name, value, step in event_list:
            rows.setdefault(name, []).append((step, value))
        for name, values in rows.items():
            self._write(name, values)

    def _write(self, name: str, values: list[tuple[int, float]]) -> None:
        filename = name.replace("/", "_").replace(" ", "_")
        owner = self._names.get(filename)
        if owner not in (None, name):
            self._refuse(name, owner, filename)
            return
        path = Path(self.log_dir) / f"{filename}.csv"
        text = io.StringIO()
        writer = csv.writer(text)
        if owner is None and not mend_last_line(path):
            writer.writerow(("step", name.rpartition("/")[2]))
        writer.writerows(values)
        append(path, text.getvalue())
        self._names[filename] = name

    def _refuse(self, name: str, owner: str, filename: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            logger.warning(
                "csv_monitor: %s is not written: its file %s.csv is that of %s. Fix: give it another name",
                name,
                filename,
                owner,
            )
