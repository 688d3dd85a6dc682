"""How long does it take to launch 2 processes that do next to nothing, against torch.distributed.run (and DeepSpeed)?

The contenders alternate, in an order that changes each round. Each launch is timed from the outside until its process
has ended. Each rank leaves an empty file to prove that it ran. Ratios compare two launches of the same round.
DSC_PEER_PYTHON names the interpreter of an environment with DeepSpeed and adds DeepSpeed as a contender.
Run: python -m benchmarks.launcher.noop [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import in_turn, machine, median_spread, ratios, require

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
TIMEOUT_SECONDS = 300
NOOP = """
import os
open(os.path.join(os.path.dirname(__file__), "ran." + os.environ["RANK"]), "w").close()
"""


def contenders(script: str) -> dict[str, list[str]]:
    """Name -> command."""
    commands = {
        "deepspeed_c": [sys.executable, "-m", "deepspeed_c", "--num_procs", str(WORLD), script],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), script],
    }
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        commands["deepspeed"] = [peer, "-m", "deepspeed.launcher.runner", "--num_gpus", str(WORLD), script]
    return commands


def seconds_of(command: list[str], folder: str) -> float:
    """Return the wall time of one launch of the script in ``folder``. DS_ACCELERATOR lets DeepSpeed start without a
    device; the others do not read it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    begin = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    seconds = time.perf_counter() - begin
    for rank in range(WORLD):
        mark = Path(folder, f"ran.{rank}")
        require(mark.exists(), f"{' '.join(command)} has run rank {rank}")
        mark.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time launches of a no-op.")
    parser.add_argument("--rounds", type=int, default=5)
    n_rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "noop.py")
        Path(script).write_text(NOOP)
        commands = contenders(script)
        for command in commands.values():
            seconds_of(command, folder)  # a warm-up: fills the page cache and compiles modules
        times: dict[str, list[float]] = {name: [] for name in commands}
        for round_ in range(n_rounds):
            for name in in_turn(list(commands), round_):
                times[name].append(seconds_of(commands[name], folder))
    for name, taken in times.items():
        seconds, least, most = median_spread(taken)
        line = {
            "benchmark": "launcher/noop",
            "contender": name,
            "processes": WORLD,
            "rounds": n_rounds,
            "seconds": round(seconds, 3),
            "seconds_min": round(least, 3),
            "seconds_max": round(most, 3),
            **ratios("ratio_to_torchrun", taken, times["torchrun"]),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
