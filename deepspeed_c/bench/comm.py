"""How fast ranks of this host exchange data: the engine's collectives over shared memory and over gloo, in turn.

A rank is a process of its own. All contenders of a size are timed round by round, so that other work of the machine
slows all of them alike. The slowest rank gives the time of a call. ``comm_rank.py`` has the work of a rank: this file
needs no torch, so that the help of the command is there at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deepspeed_c.errors import CommError

__all__ = ["CONTENDERS", "OPS", "BenchedCall", "CommBench", "run", "run_ranks"]

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
CONTENDERS = {
    "shm": "buffers in the shared memory, as the engine's are",
    "shm, copied": "buffers elsewhere",
    "gloo": "torch.distributed over the loopback",
}
# Time for the other ranks to end after a rank has failed.
_GRACE_S = 10


class CommBench(msgspec.Struct, frozen=True):
    """The measurements that were asked for."""

    n_ranks: int
    ops: list[str]
    sizes: list[int]
    """Bytes of the whole buffer: the output of an all-gather, the input of a reduce-scatter."""
    dtype: str
    contenders: list[str]
    rounds: int


class BenchedCall(msgspec.Struct, frozen=True):
    """One operation at one size by one contender."""

    op: str
    contender: str
    n_bytes: int
    seconds: float
    """Median of the rounds."""
    seconds_min: float
    seconds_max: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


def run(bench: CommBench) -> tuple[list[BenchedCall], dict[str, str]]:
    """Starts the ranks and waits for them. Returns (results, {contender that could not take part: reason}).

    Raises CommError where a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="dsc_bench_") as folder:
        told = msgspec.json.encode(bench).decode()
        run_ranks(bench.n_ranks, "deepspeed_c.bench.comm_rank", (folder, told), "deepspeed_c bench comm")
        found = json.loads(Path(folder, "result").read_text())
    return [msgspec.convert(row, BenchedCall) for row in found["rows"]], found["absent"]


def run_ranks(n_ranks: int, module: str, words: Sequence[str], where: str, n_threads: int = 1) -> None:
    """Runs a module as the ranks of this host, each with ``words``, and waits until all have ended.

    n_threads: of torch, in each rank. Raises CommError, with the place ``where``, if a rank fails.
    """
    ranks = [_start(rank, n_ranks, module, words, n_threads) for rank in range(n_ranks)]
    try:
        _wait(ranks, where)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _start(rank: int, n_ranks: int, module: str, words: Sequence[str], n_threads: int) -> subprocess.Popen:
    env = {
        # Ranks of one host meet over its loopback, not over its other addresses.
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": str(n_threads),
    }
    return subprocess.Popen([sys.executable, "-m", module, *words], env=env)


def _wait(ranks: Sequence[subprocess.Popen], where: str) -> None:
    """Until all have ended; a failure of one is a failure of all, soon."""
    until = float("inf")
    # A list, so that poll is called for every rank.
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < until:
        if until == float("inf") and any(codes):
            until = time.monotonic() + _GRACE_S
        time.sleep(0.02)
    failed = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
    if failed:
        raise CommError(
            f"rank {failed[0]} ended with exit code {ranks[failed[0]].returncode}",
            where=where,
            fix="its output above says why",
        )
