"""Finds the fastest settings of a device. All candidates are timed, then the faster half again, and so on until the
time is used up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.io.bench import DIRECTIONS, Settings, ours
from deepspeed_c.io.scratch import ScratchFile, scratch
from deepspeed_c.ops.aio import PinnedPool, backends

__all__ = ["Tuned", "candidates", "choose", "search", "tune"]

PILOT_BYTES = 16 << 20
MIN_BYTES, MAX_BYTES = 4 << 20, 256 << 20
# Share of the budget for the first round, which times all candidates.
FIRST_ROUND = 0.4
N_FINALISTS = 3
N_SAMPLES = 7
# Smaller relative differences are noise. Among candidates within this tolerance of the fastest, the candidate with the
# least memory wins.
TOLERANCE = 0.03

Times = dict[Settings, list[float]]


class Tuned(NamedTuple):
    """The chosen settings, and their measurements."""

    settings: Settings
    rates: dict[str, float]  # bytes a second, by direction
    n_bytes: int  # bytes of one transfer
    n_measured: int
    n_candidates: int
    note: str  # the note of the ScratchFile

    def as_config(self) -> dict[str, Any]:
        """The section "aio" of a configuration."""
        found = self.settings
        usable = [backend.name for backend in backends() if backend.is_usable]
        return {
            "block_size": found.block_size,
            "queue_depth": found.queue_depth,
            "intra_op_parallelism": found.intra_op_parallelism,
            "single_submit": False,
            "overlap_events": True,
            # Name the backend only if it is not the default, because the configuration may be used on a machine without
            # this backend.
            "backend": "auto" if found.backend == usable[0] else found.backend,
        }


def candidates(names: Sequence[str]) -> list[Settings]:
    """The settings to try with the backends ``names``. Settings that are likelier to win come first."""
    blocks = (1 << 20, 1 << 18, 1 << 22)
    kernel = [
        Settings(name, block, depth)
        for depth in (32, 8, 128)
        for block in blocks
        for name in names
        if name in ("uring", "libaio")
    ]
    threads = [Settings("threads", block, 32, n) for n in (1, 2, 4) for block in blocks if "threads" in names]
    rest = [Settings("sync", block, 1) for block in blocks if "sync" in names]
    return kernel + threads + rest


def tune(folder: str, budget_s: float) -> Tuned:
    """Times writes and reads of locked memory in ``folder`` for about ``budget_s`` seconds.

    Raises AioError as `scratch` does.
    """
    deadline = time.monotonic() + budget_s
    all_of_them = candidates([backend.name for backend in backends() if backend.is_usable])
    with scratch(folder, PILOT_BYTES) as file:
        pilot = sum(_Sampler(file)(all_of_them[0]).values())
    affordable = PILOT_BYTES / pilot * budget_s * FIRST_ROUND / len(all_of_them)
    n_bytes = max(MIN_BYTES, min(MAX_BYTES, int(affordable) >> 20 << 20))
    split: dict[Settings, list[dict[str, float]]] = {}
    with scratch(folder, n_bytes) as file:
        seconds = _Sampler(file)

        def sample(settings: Settings) -> float:
            found = seconds(settings)
            split.setdefault(settings, []).append(found)
            return sum(found.values())

        best = choose(search(all_of_them, sample, lambda: time.monotonic() >= deadline))
    rates = {d: n_bytes / statistics.median(found[d] for found in split[best]) for d in DIRECTIONS}
    return Tuned(best, rates, n_bytes, len(split), len(all_of_them), file.note)


def search(all_of_them: Sequence[Settings], sample: Callable[[Settings], float], is_over: Callable[[], bool]) -> Times:
    """The times of each candidate, measured by ``sample``. Faster candidates are measured more often.

    Continues until ``is_over`` returns True (asked before each sample but the first), or until the best candidates have
    enough samples.
    """
    times: Times = {}
    left = list(all_of_them)
    while True:
        for settings in left:
            if times and is_over():
                return times
            times.setdefault(settings, []).append(sample(settings))
        if len(left) > N_FINALISTS:
            left = sorted(left, key=lambda settings: min(times[settings]))[: max(len(left) // 2, N_FINALISTS)]
        elif min(len(times[settings]) for settings in left) >= N_SAMPLES:
            return times


def choose(times: Times) -> Settings:
    """The settings with the least memory among all candidates that are as fast as the fastest.

    Disturbances only add time, so the shortest time of a candidate counts.
    """
    fastest = min(min(found) for found in times.values())
    near = [settings for settings, found in times.items() if min(found) <= fastest * (1 + TOLERANCE)]
    return min(near, key=lambda settings: (settings.intra_op_parallelism, settings.block_size * settings.queue_depth))


class _Sampler:
    """Times one write and one read of a file with any settings."""

    def __init__(self, file: ScratchFile) -> None:
        self._file = file
        pool = PinnedPool(file.n_bytes + _C.aio_alignment())
        self._tensor = pool.new_tensor(file.n_bytes, torch.uint8).random_()
        self(Settings())  # writes the file for the first time

    def __call__(self, settings: Settings) -> dict[str, float]:
        """The seconds of each direction."""
        handle = settings.handle()
        transfer = ours(self._file, self._tensor, handle)
        found = {direction: transfer(direction) for direction in DIRECTIONS}
        handle.close()
        return found
