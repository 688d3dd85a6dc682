"""Runs a benchmark on ranks of several hosts, which are network namespaces of this machine with shaped links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.measure import machine
from benchmarks.run import SKIPPED
from tests.ssh_hosts import SshHosts, why_no_ssh

__all__ = ["run_on_hosts"]

ROOT = Path(__file__).resolve().parents[1]


def run_on_hosts(name: str, hosts: Sequence[int], rate: str, measure: Callable[[], Iterable[dict[str, Any]]]) -> int:
    """Start the calling script again by the launcher, with its arguments, as one rank for each entry of ``hosts``
    (numbers that rise from 0), over links of ``rate`` (in tc's units). In a rank this function prints the rows of
    ``measure`` and exits. ``name`` is the name of the benchmark and of its module. Returns the exit code of the launch,
    or SKIPPED with the reason on stderr.
    """
    if "RANK" in os.environ:
        _run_rank(name, len(set(hosts)), rate, measure)
    if why_no_ssh():
        print(why_no_ssh(), file=sys.stderr)
        return SKIPPED
    slots = [hosts.count(i) for i in range(len(set(hosts)))]
    with SshHosts(len(slots), rate=rate) as made:
        return _launch(made, slots, f"benchmarks.deepspeed_c.{name}")


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


def _launch(hosts: SshHosts, slots: Sequence[int], module: str) -> int:
    """Run a module as ``slots[i]`` ranks of host ``i``, by deepspeed_c. Returns the exit code."""
    words = ["--hostfile", hosts.hostfile(slots), "--no_local_rank", "--module", module, *sys.argv[1:]]
    command = [sys.executable, "-m", "deepspeed_c", *words]
    env = {"OMP_NUM_THREADS": "1"}
    process = hosts.start(0, command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:  # pdsh begins each with its host
        print(line.partition(": ")[2], end="", flush=True)
    return process.wait()
