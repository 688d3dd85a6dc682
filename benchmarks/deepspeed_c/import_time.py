"""How long does importing everything for training take, against importing torch alone (and DeepSpeed)?

Each import runs in a fresh interpreter and is timed inside it, without the interpreter's start. Contenders take turns
in an order that changes with the round. ``import deepspeed_c`` alone loads no part before its use. The timed part is
therefore the import and everything that ``initialize`` needs: the engine, the operators and torch have to be loaded
afterwards. The package has byte code on disk, like an installed package. Printed bytes are counted. DSC_PEER_PYTHON
names the interpreter of an environment with DeepSpeed and the same torch. It adds DeepSpeed as a contender, compared
with the torch of that environment.
Run: python -m benchmarks.deepspeed_c.import_time [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import NamedTuple

from benchmarks.measure import in_turn, machine, median_spread, ratios, require

TIMEOUT_SECONDS = 120
TIMED = """
import sys, time
begin = time.perf_counter()
{}
seconds = time.perf_counter() - begin
missing = {} - set(sys.modules)
print("\\n", seconds, sys.modules["torch"].__version__, *missing)
"""

# Name -> (statement, modules that it must load, contender whose time is the divisor of the ratio).
OURS = {
    "torch": ("import torch", {"torch"}, "torch"),
    "deepspeed_c": (
        "import deepspeed_c; deepspeed_c.initialize",
        {
            "torch",
            "deepspeed_c._C",
            "deepspeed_c.engine.engine",
            "deepspeed_c.zero.states.optimizer",
            "deepspeed_c.config.config",
        },
        "torch",
    ),
}
PEERS = {
    "torch of the peer": ("import torch", {"torch"}, "torch of the peer"),
    "deepspeed": ("import deepspeed", {"torch", "deepspeed.runtime.engine"}, "torch of the peer"),
}


class Import(NamedTuple):
    seconds: float
    torch: str  # version
    printed_bytes: int  # on either stream


def timed_import(python: str, statement: str, modules: set[str]) -> Import:
    program = TIMED.format(statement, modules)
    # This variable would let our package be compiled on each import, while torch has byte code from its installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [python, "-c", program], check=True, capture_output=True, timeout=TIMEOUT_SECONDS, text=True, env=environment
    )
    printed, found = done.stdout.rsplit("\n ", 1)
    seconds, version, *missing = found.split()
    require(not missing, f"{statement} has imported {missing}")
    return Import(float(seconds), version, len(printed) + len(done.stderr))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time imports.")
    parser.add_argument("--rounds", type=int, default=7)
    n_rounds = parser.parse_args().rounds
    contenders = {name: (sys.executable, *row) for name, row in OURS.items()}
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        contenders |= {name: (peer, *row) for name, row in PEERS.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    last: dict[str, Import] = {}
    for round_ in range(n_rounds + 1):
        for name in in_turn(list(contenders), round_):
            python, statement, modules, _ = contenders[name]
            last[name] = timed_import(python, statement, modules)
            if round_ > 0:  # the first fills the page cache
                times[name].append(last[name].seconds)
    versions = {name: found.torch for name, found in last.items()}
    require(len(set(versions.values())) == 1, f"both environments have one torch: {versions}")
    for name, (_, _, _, base) in contenders.items():
        line = {
            "benchmark": "import_time",
            "contender": name,
            "seconds": round(median_spread(times[name])[0], 4),
            **ratios("ratio_to_torch", times[name], times[base]),
            "printed_bytes": last[name].printed_bytes,
            "torch": last[name].torch,
            "rounds": n_rounds,
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
