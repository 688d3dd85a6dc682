"""What does importing the package cost, against importing torch alone (and DeepSpeed)?

Each import runs in a fresh interpreter and is timed inside it, without the interpreter's own start; contenders alternate. ``import deepspeed_c`` loads
its parts when they are first used, so there is a second contender that loads all that training needs. What an import prints is
counted. DSC_PEER_PYTHON, the interpreter of an environment with DeepSpeed and the same torch, adds that, against the torch of its own environment.
Run: python -m benchmarks.deepspeed_c.import_time [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from benchmarks.measure import machine, median_spread

TIMEOUT_SECONDS = 120
TIMED = "import time; begin = time.perf_counter(); {}; print('\\n', time.perf_counter() - begin)"

# Name -> (statement, what its time is divided by).
OURS = {
    "torch": ("import torch", "torch"),
    "deepspeed_c": ("import deepspeed_c", "torch"),
    "deepspeed_c.initialize": ("import deepspeed_c; deepspeed_c.initialize", "torch"),
}
PEERS = {
    "torch of the peer": ("import torch", "torch of the peer"),
    "deepspeed": ("import deepspeed", "torch of the peer"),
}


def import_seconds(python: str, statement: str) -> tuple[float, int]:
    """(seconds, bytes that the import printed on either stream)"""
    done = subprocess.run(
        [python, "-c", TIMED.format(statement)], check=True, capture_output=True, timeout=TIMEOUT_SECONDS, text=True
    )
    printed, seconds = done.stdout.rsplit("\n ", 1)
    return float(seconds), len(printed) + len(done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time imports.")
    parser.add_argument("--rounds", type=int, default=7)
    n_rounds = parser.parse_args().rounds
    contenders = {name: (sys.executable, *row) for name, row in OURS.items()}
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        contenders |= {name: (peer, *row) for name, row in PEERS.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    printed: dict[str, int] = {}
    for round_ in range(n_rounds + 1):
        for name, (python, statement, _) in contenders.items():
            seconds, printed[name] = import_seconds(python, statement)
            if round_ > 0:  # the first fills the page cache
                times[name].append(seconds)
    for name, (_, _, base) in contenders.items():
        ratio, least, most = median_spread([a / b for a, b in zip(times[name], times[base], strict=True)])
        line = {
            "benchmark": "import_time",
            "contender": name,
            "seconds": round(median_spread(times[name])[0], 4),
            "ratio_to_torch": round(ratio, 3),
            "ratio_min": round(least, 3),
            "ratio_max": round(most, 3),
            "printed_bytes": printed[name],
            "rounds": n_rounds,
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
