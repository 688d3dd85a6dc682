"""Runs a benchmark on ranks of several hosts, which are network namespaces of this machine with shaped links."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.measure import machine
from benchmarks.run import SKIPPED
from tests.hosts import Hosts, why_no_hosts
from tests.ranks import free_port

__all__ = ["run_on_hosts"]


def run_on_hosts(name: str, hosts: Sequence[int], rate: str, measure: Callable[[], Iterable[dict[str, Any]]]) -> int:
    """Start the calling script again, with its arguments, as one rank for each entry of ``hosts`` (numbers from 0),
    over links of ``rate`` (in tc's units). In a rank this function prints the rows of ``measure`` and exits. ``name``
    is the name of the benchmark and of its module. Returns the first exit code that is not 0, or SKIPPED with the
    reason on stderr.
    """
    if "RANK" in os.environ:
        _run_rank(name, len(set(hosts)), rate, measure)
    if why_no_hosts():
        print(why_no_hosts(), file=sys.stderr)
        return SKIPPED
    with Hosts(len(set(hosts)), rate=rate) as made:
        return _wait_for(made, hosts, f"benchmarks.deepspeed_c.{name}")


def _run_rank(name: str, n_hosts: int, rate: str, measure: Callable[[], Iterable[dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo", verbose=False)
    rows = list(measure())
    if dist.get_rank() == 0:
        shape = {"hosts": n_hosts, "ranks": dist.get_world_size(), "link": rate, "machine": machine()}
        for row in rows:
            print(json.dumps({"benchmark": name, **row, **shape}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _wait_for(hosts: Hosts, numbers: Sequence[int], module: str) -> int:
    """Run a module as one rank for each entry of ``numbers``, on the host with this number.

    Return the first exit code that is not 0.
    """
    port, started = str(free_port()), []
    try:
        for rank in range(len(numbers)):
            place = hosts.place(rank, numbers)
            env = {**place.environment, "RANK": str(rank), "WORLD_SIZE": str(len(numbers)), "MASTER_PORT": port}
            command = [sys.executable, "-m", module, *sys.argv[1:]]
            started.append(hosts[numbers[rank]].start(command, env={**env, "OMP_NUM_THREADS": "1"}))
        while all(process.poll() in (None, 0) for process in started):
            if all(process.poll() == 0 for process in started):
                return 0
            time.sleep(0.1)
        return next(process.returncode for process in started if process.poll())
    finally:
        for process in started:
            process.kill()
            process.wait()
