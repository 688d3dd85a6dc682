"""How much longer does a training step take while the FLOPs profiler counts it?

A step is forward, backward and optimizer, of the 29M-parameter GPT in fp32 and of 200 layers of 64 x 64, whose steps
are short and have many operators. Steps with and without the profiler alternate on one engine. "bare_mode" is a step
under a dispatch mode that only passes each operator on, which is the bound of any counter that sees all operators. The
count must equal the formula for matrix products. The profiler prints no report.
Run: python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.deepspeed_c.flops_step
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed_c
from benchmarks.deepspeed_c.stage3_step import MODELS
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt
from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from deepspeed_c.profile.flops import FlopsProfiler

LR = 1e-6  # small: steps repeat one batch, and once it is learnt, its gradients are denormal and steps slow


class Bare(TorchDispatchMode):
    """Passes each operator on and does nothing else. No counter of operators is faster."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def seconds_of_bare(engine, batch: torch.Tensor) -> float:
    begin = time.perf_counter()
    with Bare():
        engine.backward(engine(batch))
    engine.step()
    return time.perf_counter() - begin


def seconds_of(engine, batch: torch.Tensor, profiler: FlopsProfiler | None = None) -> float:
    """Return the seconds of one step.

    A profiler counts forward and backward, like the one that section ``flops_profiler`` turns on.
    """
    begin = time.perf_counter()
    if profiler is not None:
        profiler.start_profile()
    engine.backward(engine(batch))
    if profiler is not None:
        profiler.stop_profile()
    engine.step()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    contenders = {
        "29M GPT": (Gpt, torch.randint(0, VOCAB, (BATCH, LENGTH))),
        "200 layers of 64 x 64": (MODELS["small"][0], torch.randn(BATCH, 64)),
    }
    for name, (make, batch) in contenders.items():
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": {"stage": 1},
        }
        engine = deepspeed_c.initialize(model=make(), config=config)[0]
        profiler = FlopsProfiler(engine.module)
        for counted in (None, profiler, None):
            seconds_of(engine, batch, counted)
        forward, backward = profiler.get_total_macs(), profiler.get_backward().macs
        require(0 < forward < backward <= 3 * forward, f"forward and backward are counted: {forward}, {backward}")
        if name != "29M GPT":
            require(forward % (64 * 64 * BATCH) == 0, f"products of 64 x 64 layers: {forward}")
        for _ in range(3):
            seconds_of_bare(engine, batch)
        times: dict[str, list[float]] = {kind: [] for kind in ("plain", "profiled", "bare")}
        for round_ in range(args.rounds):
            for kind in in_turn(list(times), round_):
                if kind == "bare":
                    times[kind].append(seconds_of_bare(engine, batch))
                else:
                    times[kind].append(seconds_of(engine, batch, profiler if kind == "profiled" else None))
        line = {
            "benchmark": "flops_step",
            "contender": name,
            "gmacs_forward": round(forward / 1e9, 3),
            "ms_per_step": round(median_spread(times["plain"])[0] * 1e3, 1),
            **ratios("profiled_over_plain", times["profiled"], times["plain"]),
            **ratios("bare_mode_over_plain", times["bare"], times["plain"]),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)
        profiler.end_profile()
        engine.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
