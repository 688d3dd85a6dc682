"""Does a search find a configuration within 5 % of the best of the whole grid with a third of its experiments, and does
nothing run out of memory?

The example GPT on 2 ranks in a memory cgroup of 4 GiB: stages, bf16 or fp32, and micro-batches of which the largest do
not fit. The grid runs every candidate that is planned to fit. ``model_based`` may run a third as many; what it chose is
judged by what the grid measured for it. The cost of an experiment is its time over that of the script by itself, which
makes as many steps with the same configuration; they take turns. ``planned_over_peak`` is the plan of a candidate over
what its rank took, of all experiments of the grid. The benchmark needs permission to make a cgroup,
and the extra [tuning].
Run: python -m benchmarks.deepspeed_c.tuning [--micro-batches 1 4 16 2048] [--stages 0 2 3] [--rounds 3] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_c.memory_limit import join_cgroup, memory_cgroup
from benchmarks.measure import machine, ratios, require

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 4 << 30
RANKS = 2
FIRST, LAST = 2, 4  # steps that are timed
STAGE, DTYPE = "zero_optimization.stage", "bf16.enabled"


def config_of(stages: Sequence[int], sizes: Sequence[int], dtypes: Sequence[bool], **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": list(sizes),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": list(dtypes)},
        "zero_optimization": {"stage": list(stages)},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 30}},
        "autotuning": {
            "enabled": True,
            "start_profile_step": FIRST,
            "end_profile_step": LAST,
            "tuner_num_trials": 1000,
            "tuner_early_stopping": 0,
            **section,
        },
    }


def command(config: Path, *options: str) -> list[str]:
    script = [str(ROOT / "examples" / "train_gpt.py"), "--deepspeed", "--deepspeed_config", str(config)]
    words = [sys.executable, "-m", "deepspeed_c", "--num_procs", str(RANKS), *options, *script]
    return [*words, "--steps", str(LAST + 1)]


def run(words: Sequence[str], folder: Path, procs: str) -> float:
    """Seconds of a command that succeeds, in the cgroup."""
    begin = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=env, preexec_fn=join_cgroup(procs), check=False, capture_output=True, text=True
    )
    require(done.returncode == 0, f"the command succeeds: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return time.monotonic() - begin


def search(folder: Path, config: dict[str, Any], procs: str) -> dict[str, Any]:
    """The records of a search, with the seconds that it took."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(config))
    seconds = run(command(folder / "ds.json", "--autotuning", "tune"), folder, procs)
    return {**json.loads((folder / "autotuning_results" / "records.json").read_text()), "search_seconds": seconds}


def status_of(record: dict[str, Any], status: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in record["experiments"] if row["status"] == status}


def is_killed(row: dict[str, Any]) -> bool:
    return bool(re.search(r"out of memory|exit code (-9|137)", row["problem"]))


def costs(folder: Path, grid: dict[str, Any], rounds: int, procs: str) -> tuple[list[float], list[float]]:
    """Seconds of a search with one candidate, and of its script by itself."""
    row = status_of(grid, "ran")[grid["best"]]
    chosen = row["choices"]
    stages, sizes = [chosen[STAGE]], [chosen["train_micro_batch_size_per_gpu"]]
    experiments, scripts = [], []
    for i in range(rounds):
        config = config_of(stages, sizes, [chosen[DTYPE]])
        record = search(folder / f"one{i}", config, procs)
        experiments.append(status_of(record, "ran")[grid["best"]]["seconds"])
        optimal = folder / f"one{i}" / "autotuning_results" / "ds_config_optimal.json"
        scripts.append(run(command(optimal), folder, procs))
    return experiments, scripts


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, memory_cgroup(LIMIT) as (procs, _):
        folder = Path(made)
        dtypes = (True, False)
        grid = search(folder / "grid", config_of(args.stages, args.micro_batches, dtypes), procs)
        if args.keep is not None:
            shutil.copytree(folder / "grid" / "autotuning_results", args.keep)
        ran, left_out = status_of(grid, "ran"), status_of(grid, "left out")
        require(bool(left_out), f"some candidates do not fit: {sorted(ran)}")
        n = max(len(ran) // 3, 1)
        config = config_of(args.stages, args.micro_batches, dtypes, tuner_type="model_based", tuner_num_trials=n)
        found = search(folder / "model", config, procs)
        require(len(status_of(found, "ran")) <= n, f"a third are run: {len(status_of(found, 'ran'))} of {len(ran)}")
        failed = [row for record in (grid, found) for row in status_of(record, "failed").values()]
        planned = [row["plan"]["host"] / row["metrics"]["peak_host_bytes"] for row in ran.values()]
        experiments, scripts = costs(folder, grid, args.rounds, procs)
    return {
        "benchmark": "tuning",
        "candidates": len(grid["experiments"]),
        "left_out": len(left_out),
        "experiments_grid": len(ran),
        "experiments_model": len(status_of(found, "ran")),
        "failed": len(failed),
        "killed": sum(map(is_killed, failed)),
        "best_grid": grid["best"],
        "best_model": found["best"],
        "chosen_over_best": round(ran[found["best"]]["value"] / ran[grid["best"]]["value"], 4),
        "s_grid": round(grid["search_seconds"]),
        "s_model": round(found["search_seconds"]),
        "planned_over_peak": round(statistics.median(planned), 3),
        "planned_over_peak_min": round(min(planned), 3),
        "planned_over_peak_max": round(max(planned), 3),
        **ratios("experiment_over_script", experiments, scripts),
        "limit_gib": LIMIT >> 30,
        "ranks": RANKS,
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16, 2048])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", metavar="DIR", help="copy the results of the grid into this new folder")
    print(json.dumps(measure(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
