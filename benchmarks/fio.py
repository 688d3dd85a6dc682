"""Measure the rate of the disk with fio, on the same device and in the same minute as a contender. The best of several
engines, jobs and depths counts.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from typing import NamedTuple

from benchmarks.measure import require

__all__ = ["SETTINGS", "Disk", "Setting"]

TIMEOUT_SECONDS = 300


class Setting(NamedTuple):
    engine: str
    jobs: int
    depth: int  # of each job

    def __str__(self) -> str:
        return f"{self.engine}, {self.jobs} jobs, {self.depth} deep"


SETTINGS = [Setting(*row) for row in itertools.product(("libaio", "io_uring"), (1, 2, 4), (8, 32))]


class Disk:
    """Sequential O_DIRECT transfers of 1 MiB blocks in ``folder``.

    ``direction``: "read", "write", or "rw" for both in equal parts. With ``is_new`` each measurement writes new files
    and ends with fsync, like a save. Otherwise the files exist already.
    """

    def __init__(self, folder: str, direction: str, n_bytes: int, *, is_new: bool = False) -> None:
        os.makedirs(folder, exist_ok=True)
        self._folder, self._direction, self._n_bytes, self._is_new = folder, direction, n_bytes, is_new
        # Every setting is tried once. Each round then measures the three fastest settings.
        tried = {setting: self._rate(setting) for setting in SETTINGS}
        self._chosen = sorted(tried, key=tried.__getitem__, reverse=True)[:3]
        self.best_setting = self._chosen[0]

    def rate(self) -> float:
        """Measure the chosen settings now, and return the bytes a second of the fastest."""
        rates = {setting: self._rate(setting) for setting in self._chosen}
        self.best_setting = max(rates, key=rates.__getitem__)
        return rates[self.best_setting]

    def _rate(self, setting: Setting) -> float:
        if self._is_new and self._direction == "write":
            for name in os.listdir(self._folder):
                os.unlink(os.path.join(self._folder, name))
        each = self._n_bytes // setting.jobs // (2 << 20) * (2 << 20)
        command = ["fio", "--name=bound", f"--directory={self._folder}", f"--rw={self._direction}", "--bs=1M", f"--size={each}",
                   f"--numjobs={setting.jobs}", f"--iodepth={setting.depth}", f"--ioengine={setting.engine}", "--direct=1", "--group_reporting",
                   f"--end_fsync={int(self._is_new)}", "--output-format=json"]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        directions = ("read", "write") if self._direction == "rw" else (self._direction,)
        moved = sum(job[direction]["io_bytes"] for direction in directions)
        require(moved == each * setting.jobs, f"fio moved {each * setting.jobs} bytes: {moved}")
        return float(sum(job[direction]["bw_bytes"] for direction in directions))
