"""What every benchmark shares: the bandwidth bound of this minute, medians with their spread, and the machine's name."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

__all__ = ["machine", "median_spread", "time_alternately", "triad_gbps"]


@cache
def machine() -> str:
    """Processor, cores that this process may use, and memory, in one line."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB"


def median_spread(values: list[float]) -> tuple[float, float, float]:
    """(median, smallest, largest)"""
    return statistics.median(values), min(values), max(values)


def time_alternately(
    steps: dict[str, Callable[[Any], None]], batch: Any, rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds of each contender's step in each round, one step of each a round, between barriers of all ranks. The first ``warmup`` rounds do not count."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + warmup):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            dist.barrier()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def triad_gbps(n_elems: int = 1 << 25, repeats: int = 3) -> float:
    """Bandwidth of a = b + s * c over f32 in GB/s, best of ``repeats``, counting the three streams (12 bytes an element)."""
    import torch

    buffers = _triad_buffers(n_elems)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.add(buffers[1], buffers[2], alpha=1.5, out=buffers[0])
        best = min(best, time.perf_counter() - start)
    return 12 * n_elems / best / 1e9


@lru_cache(maxsize=2)
def _triad_buffers(n_elems: int):
    import torch

    return [torch.full((n_elems,), float(i)) for i in range(3)]
