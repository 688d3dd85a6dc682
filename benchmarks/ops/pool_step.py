"""Does an AdamW step over the package's thread pool stay fast where a launcher has set OMP_NUM_THREADS=1, and does it cost nothing on few elements?

Contenders take turns in one process. They are FusedAdam on the pool (whose size does not depend on torch's threads) and
on one thread, and torch.optim.AdamW, fused and foreach, with 1 torch thread, which launchers set, and with as many as
cores. All contenders update one fp32 tensor. Ratios compare times of the same round. Every second round begins after a
pause, so that the pool's threads sleep.
Run: python -m benchmarks.ops.pool_step [--params 100e6] [--rounds 11]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

from benchmarks.measure import in_turn, machine, median_spread, require
from deepspeed_c import _C
from deepspeed_c.ops.adam import FusedAdam

OPTIONS = {"lr": 1e-4, "weight_decay": 0.01}
FEW_ELEMS = (1_000, 66_000, 300_000, 4_000_000)
PAUSE_S = 0.002


def measure(n_params: int, rounds: int) -> None:
    n_cores = len(os.sched_getaffinity(0))
    param = torch.nn.Parameter(torch.full((n_params,), 0.5))
    param.grad = torch.full_like(param, 1e-3)
    ours = FusedAdam([param], **OPTIONS)
    theirs = {name: torch.optim.AdamW([param], **{name: True}, **OPTIONS) for name in ("fused", "foreach")}
    n_pool = _C.pool_n_threads()
    steps: dict[str, tuple[Callable[[], object], int, int]] = {  # step, torch's threads, the pool's
        "deepspeed_c": (ours.step, 1, n_pool),
        "deepspeed_c, 1 thread": (ours.step, 1, 1),
    }
    for name, optimizer in theirs.items():
        steps[f"torch {name}, OMP_NUM_THREADS=1"] = (optimizer.step, 1, n_pool)
        steps[f"torch {name}, all cores"] = (optimizer.step, n_cores, n_pool)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name in in_turn(list(steps), round_):
            step, n_torch, n_threads = steps[name]
            torch.set_num_threads(n_torch)
            if _C.pool_n_threads() != n_threads:
                _C.pool_resize(n_threads)
            time.sleep(PAUSE_S)  # the threads of the contender before, which spin for a while, sleep now
            step()  # untimed: makes states, starts threads, fills caches
            if round_ % 2:
                time.sleep(PAUSE_S)
            begin = time.perf_counter()
            step()
            elapsed = time.perf_counter() - begin
            if round_ > 0:
                seconds[name].append(elapsed)
    _C.pool_resize(n_pool)
    ours.step()
    n_workers = _C.pool_n_workers()
    require(
        n_params < FEW_ELEMS[-1] or n_workers == n_pool - 1,
        f"{n_params} elements are shared out: {n_workers} workers of {n_pool} threads",
    )
    for name, times in seconds.items():
        ratio, low, high = median_spread([t / pool for pool, t in zip(seconds["deepspeed_c"], times)])
        line = {
            "benchmark": "pool_step",
            "contender": name,
            "params": n_params,
            "us": round(median_spread(times)[0] * 1e6, 1),
            "us_min": round(min(times) * 1e6, 1),
            "ratio_to_pool": round(ratio, 2),
            "ratio_min": round(low, 2),
            "ratio_max": round(high, 2),
            "pool_threads": n_pool,
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=100e6, help="elements of the large tensor")
    parser.add_argument("--rounds", type=int, default=11, help="for the large tensor; small ones get 20 times as many")
    args = parser.parse_args()
    for n_params in FEW_ELEMS:
        measure(n_params, 20 * args.rounds)
    measure(int(args.params), args.rounds)


if __name__ == "__main__":
    main()
