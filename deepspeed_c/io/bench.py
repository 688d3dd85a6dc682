"""Measures the speed of a device with this package's I/O engine and with fio. Each round writes and reads the same file
with both.

The file has been written once before the first timed transfer, like a swap file. Nothing is synced: a transfer ends
when the device reports its end.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.io.scratch import ScratchFile
from deepspeed_c.ops.aio import aio_handle

__all__ = [
    "DIRECTIONS",
    "FIO_ENGINES",
    "FioError",
    "MeasuredRates",
    "Settings",
    "compare",
    "find_fio",
    "fio",
    "ours",
    "summary",
]

DIRECTIONS = ("write", "read")
FIO_ENGINES = ("libaio", "io_uring")
FIO_SECONDS = 600

# A function that transfers the whole file in one direction and returns the seconds.
Contender = Callable[[str], float]


class Settings(NamedTuple):
    """The settings of a handle, under the names of their configuration keys."""

    backend: str = "auto"
    block_size: int = 1 << 20  # bytes
    queue_depth: int = 32
    intra_op_parallelism: int = 1

    def handle(self) -> aio_handle:
        return aio_handle(
            self.block_size, self.queue_depth, False, True, self.intra_op_parallelism, backend=self.backend
        )


class FioError(Exception):
    """fio cannot measure this; the text is fio's reason."""


class MeasuredRates(NamedTuple):
    """Bytes a second of every contender, by direction, round by round."""

    rounds: dict[str, dict[str, list[float]]]
    absent: dict[str, str]  # contenders that could not take part, and why

    def best_fio(self, direction: str) -> list[float] | None:
        """The rate of the fastest fio in each round; None without fio. This is the bound for the comparison."""
        found = [rates[direction] for name, rates in self.rounds.items() if name.startswith("fio ")]
        return [max(rates) for rates in zip(*found, strict=True)] if found else None


def ours(file: ScratchFile, tensor: torch.Tensor, handle: aio_handle) -> Contender:
    """Transfers ``tensor``, which is as long as the file, in one request."""

    def transfer(direction: str) -> float:
        move = handle.sync_pwrite if direction == "write" else handle.sync_pread
        begin = time.perf_counter()
        move(tensor, file.path)
        return time.perf_counter() - begin

    return transfer


def find_fio() -> str | None:
    return shutil.which("fio")


def fio(program: str, engine: str, file: ScratchFile, settings: Settings) -> Contender:
    """Sequential O_DIRECT transfers by one job of fio. The time is measured by fio, without the start of fio.

    The returned function may raise FioError.
    """

    def transfer(direction: str) -> float:
        command = [program, "--name=bound", f"--filename={file.path}", f"--rw={direction}", f"--size={file.n_bytes}",
                   f"--bs={settings.block_size}", f"--iodepth={settings.queue_depth}", f"--ioengine={engine}",
                   "--direct=1", "--thread=1", "--output-format=json"]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FioError(str(error)) from error
        if done.returncode:
            lines = [*done.stderr.splitlines(), *done.stdout.splitlines(), f"exit code {done.returncode}"]
            raise FioError(next(line.strip() for line in lines if line.strip()))
        # Lines of text may stand before the report.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        if job["io_bytes"] != file.n_bytes:
            raise FioError(f"it moved {job['io_bytes']} of {file.n_bytes} bytes")
        return job["io_bytes"] / job["bw_bytes"] if job["bw_bytes"] else 1e-3  # shorter than a tick of fio's clock

    return transfer


def compare(contenders: dict[str, Contender], n_bytes: int, rounds: int) -> MeasuredRates:
    """Times ``rounds`` rounds after one warm-up round. A contender with fio that fails in the warm-up is left out."""
    absent: dict[str, str] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    for name, transfer in contenders.items():
        try:
            for direction in DIRECTIONS:
                transfer(direction)
        except FioError as error:
            absent[name] = str(error)
        else:
            rates[name] = {direction: [] for direction in DIRECTIONS}
    for _ in range(rounds):
        for direction in DIRECTIONS:
            for name, found in rates.items():
                found[direction].append(n_bytes / contenders[name](direction))
    return MeasuredRates(rates, absent)


def summary(rates: MeasuredRates) -> list[dict[str, Any]]:
    """One row for each contender and direction: GB/s (1e9 bytes), and the ratio to the best fio of the same round, both
    as median with spread.
    """
    return [
        {
            "contender": name,
            "direction": direction,
            **_spread("gb_per_s", [rate / 1e9 for rate in found[direction]]),
            **_spread("ratio_to_fio", _ratios(found[direction], rates.best_fio(direction))),
        }
        for name, found in rates.rounds.items()
        for direction in DIRECTIONS
    ]


def _ratios(ours: Sequence[float], bounds: Sequence[float] | None) -> list[float]:
    return [a / b for a, b in zip(ours, bounds, strict=True)] if bounds else []


def _spread(key: str, values: list[float]) -> dict[str, float | None]:
    if not values:
        return {key: None, f"{key}_min": None, f"{key}_max": None}
    return {
        key: round(statistics.median(values), 4),
        f"{key}_min": round(min(values), 4),
        f"{key}_max": round(max(values), 4),
    }
