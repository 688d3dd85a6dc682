"""Functions that benchmarks share: medians with their spread, contenders that take turns, a description of the machine,
and checks of the claims of a row.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "NOISE",
    "bound",
    "calls_of_a_round",
    "in_turn",
    "keep_freed_memory",
    "machine",
    "median_spread",
    "peer_extensions",
    "ratio_text",
    "ratios",
    "require",
    "require_equal",
    "result_of",
    "time_alternately",
]

# Relative error of a measured bound, from the clock, a busy core and a median of only a few rounds.
NOISE = 0.03


INSTRUCTION_SETS = {"scalar": "no vector instructions", "avx2": "AVX2", "avx512": "AVX-512"}
# Instructions for products of 16-bit elements. Processors with AVX-512 differ in them, and so do torch's times.
PRODUCTS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def instructions(isa: str, flags: Sequence[str]) -> str:
    """Return the name of the cores' instruction set, with the processor's instructions for 16-bit products."""
    products = [name for name in PRODUCTS if name in flags] if isa == "avx512" else []
    return INSTRUCTION_SETS.get(isa, isa) + (f" ({', '.join(products)})" if products else "")


@cache
def machine() -> str:
    """Return processor, instruction set, cores that this process may use, and memory, in one line."""
    # A process that times the import of the package asks for its machine at the end.
    from deepspeed_c import _C
    from deepspeed_c.env import read_env
    from deepspeed_c.processor import processor_name

    isa = read_env().cpu_isa or _C.cpu_isa()
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{processor_name()}, {instructions(isa, flags.split())}, {cores} cores, {gib:.0f} GiB"


def peer_extensions() -> str:
    """Return a folder for DeepSpeed's compiled extensions (TORCH_EXTENSIONS_DIR), kept between runs. In the user's
    folder, a lock that a killed process left would block for ever. In this folder the lock is deleted, which is safe
    because one benchmark runs at a time.
    """
    folder = Path(__file__).resolve().parents[1] / "out" / "peer_extensions"
    folder.mkdir(parents=True, exist_ok=True)
    for lock in folder.glob("*/lock"):
        lock.unlink()
    return str(folder)


def median_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, smallest, largest)."""
    return statistics.median(values), min(values), max(values)


def ratios(key: str, mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the median, smallest and largest ratio of mine to theirs over the rounds, as ``key``, ``key_min`` and
    ``key_max``.
    """
    found = median_spread([a / b for a, b in zip(mine, theirs, strict=True)])
    return dict(zip((key, f"{key}_min", f"{key}_max"), (round(value, 4) for value in found), strict=True))


def ratio_text(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median ratio of mine to theirs over the rounds, and the quartiles.

    On a machine with other work, single rounds differ by a factor of two. Quartiles do not.
    """
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, theirs, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def bound(key: str, mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return ``ratios`` of mine to a lower bound of mine.

    If the median is below 1 by more than noise, the row gets a note, because the bound is then wrong.
    """
    row: dict[str, Any] = ratios(key, mine, theirs)
    if row[key] < 1 - NOISE:
        row["note"] = "below its bound: the bound is wrong"
    return row


def keep_freed_memory() -> None:
    """Make the C library reuse the memory of freed results. Otherwise it returns large results to the system by an
    adaptive rule. Some rounds then include page faults, which take a third of the time of a fast operator, and other
    rounds do not.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # constants of malloc.h
    libc = ctypes.CDLL(None)
    require(
        bool(libc.mallopt(m_mmap_threshold, 1 << 30) and libc.mallopt(m_trim_threshold, (1 << 31) - 1)),
        "the C library can be told to reuse freed memory",
    )


def calls_of_a_round(step: Callable[[], Any], seconds: float) -> int:
    """Return the number of calls of ``step`` that take ``seconds`` together, at least one.

    The first call does not count, because it may include set-up.
    """
    step()
    start = time.perf_counter()
    step()
    return max(1, math.ceil(seconds / max(time.perf_counter() - start, 1e-9)))


def require(holds: bool, what: str) -> None:
    """End the benchmark without a result unless the row's claim ``holds``."""
    if not holds:
        raise SystemExit(f"nothing is measured, because this does not hold: {what}")


def results_of_example(command: Sequence[str], file: str) -> Any:
    """Runs an example with ``--out`` and a new folder; returns the JSON ``file`` that it has written there."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--out", folder], check=False, capture_output=True, text=True)
        require(done.returncode == 0, f"the example ends with exit code 0: {done.stderr[-2000:]}")
        return json.loads((Path(folder) / file).read_text())


def result_of(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Any:
    """Runs the ranks of one contender; returns the JSON behind "result " in the only such line that they print. Ends
    the benchmark if there is none."""
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=timeout_s)
    lines = [line.removeprefix("result ") for line in done.stdout.splitlines() if line.startswith("result ")]
    if len(lines) != 1:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}, no result\n{done.stderr[-4000:]}")
    return json.loads(lines[0])


def require_equal(what: str, values: dict[str, float], relative: float) -> None:
    """Require that all contenders have computed the same, within ``relative`` of the first."""
    first = next(iter(values.values()))
    bad = {name: value for name, value in values.items() if not abs(value - first) <= relative * abs(first)}
    require(not bad, f"{what} equal within {relative}: {values}")


def in_turn(names: Sequence[Any], round_: int) -> list[Any]:
    """Return the order of the contenders in a round. Over all rounds each contender is first equally often. Every second
    round runs backwards, so that no contender always comes after the same other one.
    """
    start = round_ % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if round_ // len(names) % 2 else order


def time_alternately(
    steps: dict[str, Callable[[Any], Any]], batch: Any, rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Return the seconds of each contender's step in each round. A round has one step of each contender, between
    barriers of all ranks (if there are ranks) and in an order that changes with the round. The first ``warmup`` rounds
    do not count.
    """
    import torch.distributed as dist

    barrier = dist.barrier if dist.is_initialized() else lambda: None
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + warmup):
        for name in in_turn(list(steps), i):
            barrier()
            start = time.perf_counter()
            steps[name](batch)
            barrier()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return times
