"""Runs the benchmarks one at a time, keeps their JSON lines in benchmarks/results, and has the documents written from them.

    python -m benchmarks.run              all of them
    python -m benchmarks.run NAME ...     some; the documents are written from the newest results of each
    python -m benchmarks.run --list

Times mean something only when nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
TWO_RANKS = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]


class Benchmark(NamedTuple):
    """One run of one script. Its standard output holds JSON objects, one a line."""

    name: str  # of its results file
    source: str  # whose first line, or first sentence, is the question that it answers
    command: list[str]


BENCHMARKS = [
    Benchmark("cores", "benchmarks/csrc/bench.c", ["make", "-s", "-C", "csrc", "bench"]),
    Benchmark(
        "engine_step", "benchmarks/deepspeed_c/engine_step.py", [PYTHON, "-m", "benchmarks.deepspeed_c.engine_step"]
    ),
    *(
        Benchmark(
            f"train_step_{dtype}",
            "benchmarks/deepspeed_c/train_step.py",
            [*TWO_RANKS, "benchmarks.deepspeed_c.train_step", "--dtype", dtype],
        )
        for dtype in ("fp32", "bf16")
    ),
    *(
        Benchmark(
            f"stage3_step_{model}",
            "benchmarks/deepspeed_c/stage3_step.py",
            [*TWO_RANKS, "benchmarks.deepspeed_c.stage3_step", "--model", model],
        )
        for model in ("gpt", "mlp", "small")
    ),
    Benchmark(
        "init_memory",
        "benchmarks/deepspeed_c/init_memory.py",
        [*TWO_RANKS[:-2], "4", "-m", "benchmarks.deepspeed_c.init_memory"],
    ),
    Benchmark(
        "ledger_cost",
        "benchmarks/deepspeed_c/ledger_cost.py",
        [*TWO_RANKS, "benchmarks.deepspeed_c.ledger_cost"],
    ),
    Benchmark("memory", "benchmarks/deepspeed_c/memory.py", [PYTHON, "-m", "benchmarks.deepspeed_c.memory"]),
    Benchmark(
        "memory_by_stage",
        "benchmarks/deepspeed_c/memory_by_stage.py",
        [PYTHON, "-m", "benchmarks.deepspeed_c.memory_by_stage"],
    ),
    Benchmark(
        "memory_limit",
        "benchmarks/deepspeed_c/memory_limit.py",
        [PYTHON, "-m", "benchmarks.deepspeed_c.memory_limit"],
    ),
    Benchmark(
        "offload_step",
        "benchmarks/deepspeed_c/offload_step.py",
        [PYTHON, "-m", "benchmarks.deepspeed_c.offload_step"],
    ),
    Benchmark("trainer_step", "benchmarks/hf/trainer_step.py", [PYTHON, "-m", "benchmarks.hf.trainer_step"]),
    Benchmark("adam_step", "benchmarks/ops/adam_step.py", [PYTHON, "-m", "benchmarks.ops.adam_step"]),
    Benchmark("pool_step", "benchmarks/ops/pool_step.py", [PYTHON, "-m", "benchmarks.ops.pool_step"]),
    Benchmark("aio", "benchmarks/ops/aio.py", [PYTHON, "-m", "benchmarks.ops.aio"]),
    Benchmark(
        "checkpoint_io",
        "benchmarks/deepspeed_c/checkpoint_io.py",
        [*TWO_RANKS, "benchmarks.deepspeed_c.checkpoint_io"],
    ),
    Benchmark(
        "import_time", "benchmarks/deepspeed_c/import_time.py", [PYTHON, "-m", "benchmarks.deepspeed_c.import_time"]
    ),
    Benchmark(
        "alias_start", "benchmarks/deepspeed_c/alias_start.py", [PYTHON, "-m", "benchmarks.deepspeed_c.alias_start"]
    ),
    Benchmark("launch", "benchmarks/launcher/noop.py", [PYTHON, "-m", "benchmarks.launcher.noop"]),
]


def run(benchmark: Benchmark) -> bool:
    """Runs one benchmark and stores its lines; False when it fails, and then the earlier results stay."""
    print(f"{benchmark.name}: {' '.join(benchmark.command)}", flush=True)
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(benchmark.command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stdout, end="")
    if done.returncode or not lines:
        print(f"{benchmark.name}: exit code {done.returncode}, {len(lines)} results", file=sys.stderr)
        return False
    for line in lines:
        json.loads(line)
    report.RESULTS.mkdir(exist_ok=True)
    (report.RESULTS / f"{benchmark.name}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{benchmark.name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Run benchmarks and write docs/performance.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if args.list:
        print("\n".join(known))
        return 0
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    failed = [name for name in args.names or known if not run(known[name])]
    report.write(BENCHMARKS)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
