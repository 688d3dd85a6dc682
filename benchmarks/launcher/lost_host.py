"""How long after the loss of one of three hosts do the others make their next new step?

Hosts are namespaces of this machine, with ssh servers, one rank each, so all ranks share its cores. A small model trains
with ``checkpoint.auto_resume`` and a save each half second. The link of one host goes down, and its processes are
killed. The time ends with the first step that the run had not made before. Contenders: an elastic launch with its
defaults, one with ``--heartbeat 1``, and torchrun by hand on all hosts (``--nnodes 2:3``), which runs the same script. The
bound is a fresh launch of the two hosts that are left, until it has resumed and made a step.
Run as root: python -m benchmarks.launcher.lost_host [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from benchmarks.run import SKIPPED
from tests.deepspeed_c.launcher import elastic_steps
from tests.ssh_hosts import SshHosts, why_no_ssh

LIMIT_SECONDS = 200
N_STEPS = 100_000
PORT = 29512
LOST = 1


def elastic(*words: str) -> Callable[[SshHosts, list[int], str], list[subprocess.Popen[bytes]]]:
    def start(hosts: SshHosts, numbers: list[int], folder: str) -> list[subprocess.Popen[bytes]]:
        file = hosts.hostfile({hosts[i].name: 1 for i in numbers})
        words_ = ["--hostfile", file, "--elastic_training", *words, "--no_local_rank", elastic_steps.__file__]
        command = [sys.executable, "-m", "deepspeed_c", *words_, folder, str(N_STEPS), "2"]
        return [hosts.start(0, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]

    return start


def by_torchrun(hosts: SshHosts, numbers: list[int], folder: str) -> list[subprocess.Popen[bytes]]:
    words = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "10", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", Path(folder).name]
    command = [sys.executable, "-m", "torch.distributed.run", *words, elastic_steps.__file__]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return [hosts.start(i, [*command, folder, str(N_STEPS), "2"], **pipes) for i in numbers]


CONTENDERS = {"defaults": elastic(), "--heartbeat 1": elastic("--heartbeat", "1"), "torchrun": by_torchrun}


def step_of(folder: str) -> int:
    """The last step that a rank has noted."""
    lines = [path.read_text().splitlines() for path in Path(folder).glob("round*-rank*")]
    return max((json.loads(each[-1])[0] for each in lines if each and each[-1].endswith("]")), default=0)


def wait_for(folder: str, step: int, what: str) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while step_of(folder) < step:
        require(time.monotonic() < end, f"{what} makes step {step} within {LIMIT_SECONDS} s")
        time.sleep(0.02)


def end_all(hosts: SshHosts, started: list[subprocess.Popen[bytes]]) -> None:
    for text in ("deepspeed_c --hostfile", "torch.distributed.run", "pdsh -S", "launcher.agent", "elastic_steps.py"):
        for i in range(len(hosts)):
            hosts.signal(i, text, signal.SIGKILL)
    for process in started:
        process.wait(LIMIT_SECONDS)


def seconds_of(name: str, hosts: SshHosts) -> tuple[float, float]:
    """(from the loss of a host to the next new step, from a fresh launch of the others to its first step)"""
    with tempfile.TemporaryDirectory() as folder:
        started = CONTENDERS[name](hosts, [0, 1, 2], folder)
        wait_for(folder, 20, name)
        hosts[LOST].unplug()  # first, so that nobody hears of the end of its processes
        for text in ("elastic_steps.py", "launcher.agent", "torch.distributed.run"):
            hosts.signal(LOST, text, signal.SIGKILL)
        begin, last = time.perf_counter(), step_of(folder)
        wait_for(folder, last + 1, name)
        seconds = time.perf_counter() - begin
        end_all(hosts, started)
        hosts[LOST].plug()
        saved = Path(folder) / "saved"
        with tempfile.TemporaryDirectory() as fresh:
            shutil.copytree(saved, Path(fresh) / "saved", ignore_dangling_symlinks=True)
            begin = time.perf_counter()
            started = elastic()(hosts, [0, 2], fresh)
            wait_for(fresh, 1, "a fresh launch")
            bound = time.perf_counter() - begin
            end_all(hosts, started)
    return seconds, bound


def main() -> int:
    parser = argparse.ArgumentParser(description="Time how a run goes on after the loss of a host.")
    parser.add_argument("--rounds", type=int, default=2)
    n_rounds = parser.parse_args().rounds
    if why_no_ssh():
        print(why_no_ssh(), file=sys.stderr)
        return SKIPPED
    taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    bounds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with SshHosts(3) as hosts:
        for round_ in range(n_rounds):
            for name in in_turn(list(CONTENDERS), round_):
                seconds, bound = seconds_of(name, hosts)
                taken[name].append(seconds)
                bounds[name].append(bound)
    for name in CONTENDERS:
        seconds, least, most = median_spread(taken[name])
        line = {
            "benchmark": "launcher/lost_host",
            "contender": name,
            "hosts": 3,
            "rounds": n_rounds,
            "seconds": round(seconds, 2),
            "seconds_min": round(least, 2),
            "seconds_max": round(most, 2),
            **ratios("ratio_to_fresh_launch", taken[name], bounds[name]),
            **ratios("ratio_to_torchrun", taken[name], taken["torchrun"]),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
