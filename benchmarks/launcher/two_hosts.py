"""How long does it take to launch 2 x 2 processes that do next to nothing on two hosts through pdsh, against torchrun started by hand on both?

Hosts are namespaces of this machine, with ssh servers, so all processes share its cores. The contenders alternate, in an
order that changes each round. Each launch is timed from its first process until the end of its last. Each rank leaves
an empty file to prove that it ran, on the host where it should.
Run as root: python -m benchmarks.launcher.two_hosts [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from benchmarks.run import SKIPPED
from tests.ssh_hosts import SshHosts, why_no_ssh

TIMEOUT_SECONDS = 300
SLOTS = [2, 2]
PORT = 29511
NOOP = """
import os, socket
name = "ran." + os.environ["RANK"] + "." + socket.gethostname()
open(os.path.join(os.path.dirname(__file__), name), "w").close()
"""


def by_pdsh(hosts: SshHosts, script: str) -> list[subprocess.Popen[str]]:
    """One command, on host 0."""
    return [hosts.launch(0, ["--hostfile", hosts.hostfile(SLOTS), script])]


def by_torchrun(hosts: SshHosts, script: str) -> list[subprocess.Popen[str]]:
    """The same command on each host, at the same time."""
    words = ["--nnodes", str(len(SLOTS)), "--nproc-per-node", str(SLOTS[0]), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", "noop", script]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [hosts.start(i, command, **pipes) for i in range(len(SLOTS))]


CONTENDERS: dict[str, Callable[[SshHosts, str], list[subprocess.Popen[str]]]] = {
    "deepspeed_c": by_pdsh,
    "torchrun": by_torchrun,
}


def seconds_of(name: str, hosts: SshHosts, script: str) -> float:
    """Return the wall time of one launch."""
    begin = time.perf_counter()
    started = CONTENDERS[name](hosts, script)
    outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in started]
    seconds = time.perf_counter() - begin
    require(all(process.returncode == 0 for process in started), f"{name} ends with exit code 0: {outputs}")
    ran = sorted(path.name for path in Path(script).parent.glob("ran.*"))
    require(ran == ["ran.0.host-0", "ran.1.host-0", "ran.2.host-1", "ran.3.host-1"], f"{name} runs all ranks: {ran}")
    for file in ran:
        (Path(script).parent / file).unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Time launches of a no-op on two hosts.")
    parser.add_argument("--rounds", type=int, default=7)
    n_rounds = parser.parse_args().rounds
    if why_no_ssh():
        print(why_no_ssh(), file=sys.stderr)
        return SKIPPED
    with SshHosts(len(SLOTS)) as hosts:
        script = hosts.folder / "noop.py"
        script.write_text(NOOP)
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for name in CONTENDERS:
            seconds_of(name, hosts, str(script))  # a warm-up: fills the page cache and compiles modules
        for round_ in range(n_rounds):
            for name in in_turn(list(CONTENDERS), round_):
                times[name].append(seconds_of(name, hosts, str(script)))
    for name, taken in times.items():
        seconds, least, most = median_spread(taken)
        line = {
            "benchmark": "launcher/two_hosts",
            "contender": name,
            "hosts": len(SLOTS),
            "processes": sum(SLOTS),
            "rounds": n_rounds,
            "seconds": round(seconds, 3),
            "seconds_min": round(least, 3),
            "seconds_max": round(most, 3),
            **ratios("ratio_to_torchrun", taken, times["torchrun"]),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
