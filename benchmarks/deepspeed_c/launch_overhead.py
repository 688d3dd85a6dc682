"""How many microseconds does the engine take for each gradient, bucket and gather unit, besides sending?

200 layers of 64 x 64 on 2 ranks, at stages 1, 2 and 3, and at stage 3 with ``comm.zero_copy_gather``. Each layer is a
separate bucket, and at stage 3 a separate gather unit. The calls behind the hooks of autograd and of modules are timed
one by one in real steps: handing over a gradient (in C), and the two calls of Python a bucket that follow from it:
opening the bucket at its first gradient, and launching it; starting a bucket's sum, waiting for a sum, starting a unit,
waiting for a unit and pointing parameters at it, and releasing a unit. The time of a call excludes timed calls within
it. Waits include time of the other rank; all other figures are this rank's own. Buckets hold 4160 elements, so that
copies take little time.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.launch_overhead
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.deepspeed_c.stage3_step import MODELS, ZERO_COPY
from benchmarks.deepspeed_c.train_step import ours, seeded
from benchmarks.engines import require_gathers_copy
from benchmarks.measure import machine, median_spread, require
from deepspeed_c.comm.work import Work
from deepspeed_c.zero.gradients.bucket import Bucket
from deepspeed_c.zero.gradients.intake import GradientIntake
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.weights.gather_unit import GatherUnit

LAYERS, ELEMS = 200, 64 * 64 + 64
WARMUP = 5
# Name of a figure -> the timed method. For gradients this is the hook that autograd calls.
GRADIENT = "gradient"
TIMED: dict[str, tuple[type, str]] = {
    "bucket_open": (GradientIntake, "_open"),
    "bucket_launch": (GradientReducer, "_start"),
    "bucket_start": (Bucket, "reduce"),
    "wait": (Work, "wait"),
    "unit_start": (GatherUnit, "start"),
    "unit_finish": (GatherUnit, "finish"),
    "unit_release": (GatherUnit, "let_go"),
}
CONTENDERS: dict[str, tuple[int, dict | None]] = {
    "stage1": (1, None),
    "stage2": (2, None),
    "stage3": (3, None),
    "stage3_zero_copy": (3, ZERO_COPY),
}


@contextmanager
def timed() -> Iterator[dict[str, list[float]]]:
    """Time each gradient hook and each call of the methods in ``TIMED``, without nested calls, by figure.

    Covers engines that are made within the context.
    """
    found: dict[str, list[float]] = {name: [] for name in (GRADIENT, *TIMED)}
    within = [0.0]  # for each running call, the seconds of calls within it

    def timing(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def method(*args: Any, **options: Any) -> Any:
            within.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                taken = time.perf_counter() - begin
                seconds.append(taken - within.pop())
                within[-1] += taken

        return method

    make_hook = GradientIntake._hook
    with ExitStack() as stack:
        hook = mock.patch.object(
            GradientIntake, "_hook", lambda self, slot: timing(make_hook(self, slot), found[GRADIENT])
        )
        stack.enter_context(hook)
        for name, (owner, method) in TIMED.items():
            stack.enter_context(mock.patch.object(owner, method, timing(getattr(owner, method), found[name])))
        yield found


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one contender."""
    stage, comm = CONTENDERS[name]
    zero = {"reduce_bucket_size": ELEMS, "stage3_param_persistence_threshold": 0}
    with timed() as found:  # before the engine hooks its methods to gradients
        step = ours(seeded(MODELS["small"][0]), stage, comm=comm, **zero)
        batch = MODELS["small"][1](torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(WARMUP):
            step(batch)
        for seconds in found.values():
            seconds.clear()
        steps = []
        for _ in range(rounds):
            dist.barrier()
            begin = time.perf_counter()
            step(batch)
            steps.append(time.perf_counter() - begin)
    require(len(found[GRADIENT]) == 2 * LAYERS * rounds, f"each gradient is handed over: {len(found['gradient'])}")
    require(len(found["bucket_start"]) >= LAYERS * rounds, f"each layer is a bucket: {len(found['bucket_start'])}")
    if stage == 3:
        require_gathers_copy(step.engine, comm is None)
        require(len(found["unit_start"]) >= LAYERS * rounds, f"each layer is gathered: {len(found['unit_start'])}")
    line: dict[str, Any] = {"benchmark": "launch_overhead", "contender": name, "layers": LAYERS}
    for figure, seconds in found.items():
        if seconds:
            line[f"us_{figure}"] = round(median_spread(seconds)[0] * 1e6, 2)
            line[f"n_{figure}"] = round(len(seconds) / rounds, 1)
    own = sum(sum(seconds) for figure, seconds in found.items() if figure != "wait")
    line |= {
        "own_ms_per_step": round(own / rounds * 1e3, 2),
        "ms_per_step": round(median_spread(steps)[0] * 1e3, 1),
        "ranks": dist.get_world_size(),
        "machine": machine(),
    }
    step.engine.close()
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for name in args.only:
        line = measure(name, args.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
