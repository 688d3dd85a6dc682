"""How much time does the name `deepspeed` take: the command in front of a process, the folder on its path, and the
check whether there is a DeepSpeed?

Processes are timed from the outside until they have ended. Contenders alternate, and the added time is the difference
between two processes of the same round. The check is that of transformers' ``is_deepspeed_available`` (spec and
metadata), made for the first time in a fresh interpreter. It is compared with the same check for torch, which is
installed.
Run: python -m benchmarks.deepspeed_c.alias_start [--rounds 21]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

from benchmarks.measure import in_turn, machine, median_spread, require
from deepspeed_c.compat.alias.install import environment

TIMEOUT_SECONDS = 120
QUESTION = """
import importlib.metadata, importlib.util, sys, time
importlib.metadata.metadata("pip")  # its own first use is nobody's
begin = time.perf_counter()
found = importlib.util.find_spec({name!r}) is not None and importlib.metadata.metadata({name!r}) is not None
print(time.perf_counter() - begin, {name!r} in sys.modules, found)
"""


def seconds_of(command: list[str], environ: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    return time.perf_counter() - begin


def asked(name: str, environ: dict[str, str]) -> float:
    """Return the seconds of the check for a package. The check must not import the package."""
    done = subprocess.run(
        [sys.executable, "-c", QUESTION.format(name=name)],
        env=environ,
        check=True,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        text=True,
    )
    seconds, imported, found = done.stdout.split()
    require(found == "True", f"{name} is found")
    require(imported == "False", f"asking for {name} does not import it")
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time what the alias adds.")
    parser.add_argument("--rounds", type=int, default=21)
    n_rounds = parser.parse_args().rounds
    plain = dict(os.environ)
    aliased = {**plain, **environment(plain)}
    true = shutil.which("true")
    python = [sys.executable, "-c", "pass"]
    timed = {
        "true": lambda: seconds_of([true], plain),
        "run true": lambda: seconds_of([sys.executable, "-m", "deepspeed_c", "run", true], plain),
        "python": lambda: seconds_of(python, plain),
        "python with the folder": lambda: seconds_of(python, aliased),
        "is there torch": lambda: asked("torch", plain),
        "is there torch, with the folder": lambda: asked("torch", aliased),
        "is there deepspeed, with the folder": lambda: asked("deepspeed", aliased),
    }
    times: dict[str, list[float]] = {name: [] for name in timed}
    for round_ in range(n_rounds + 1):
        for name in in_turn(list(timed), round_):
            seconds = timed[name]()
            if round_ > 0:  # the first fills the page cache
                times[name].append(seconds)
    rows = [
        ("deepspeed_c run", "run true", "true"),
        ("an interpreter's start with the folder", "python with the folder", "python"),
        ("asking for deepspeed instead of torch", "is there deepspeed, with the folder", "is there torch"),
        ("asking for torch with the folder", "is there torch, with the folder", "is there torch"),
    ]
    for what, name, base in rows:
        added, least, most = median_spread([1e3 * (a - b) for a, b in zip(times[name], times[base], strict=True)])
        line = {
            "benchmark": "alias_start",
            "what": what,
            "ms": round(1e3 * median_spread(times[name])[0], 3),
            "ms_without": round(1e3 * median_spread(times[base])[0], 3),
            "added_ms": round(added, 3),
            "added_ms_min": round(least, 3),
            "added_ms_max": round(most, 3),
            "rounds": n_rounds,
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
