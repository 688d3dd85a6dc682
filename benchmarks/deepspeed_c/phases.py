"""Do the phases of ``engine.get_wall_clock_timers()`` add up to the wall clock of the training loop around them?

The 29M-parameter GPT of ``train_step`` in fp32 with two micro-batches a step, stages 0 to 3 on 2 gloo ranks, and a
pipeline of two stages (linear layers). The ratio is the sum of all phases over a loop of steps, divided by the wall
clock of the loop, which is read outside of the engine. There is one ratio for each rank and round. Time in no named
phase counts as phase "other", which would make any sum right. The row therefore shows "other", and forward, backward
and step must be present. The loop includes the time in which the benchmark reads the timers.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.phases
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed_c
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt, seeded
from benchmarks.measure import machine, median_spread, require
from deepspeed_c.pipe import PipelineModule

PHASES = ("data", "forward", "messages", "backward", "step", "other")
MICRO_BATCHES, WARMUP = 2, 2
WIDTH, ROWS = 1024, 64


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-6},
        },  # a low rate: once the batch is learnt, gradients are denormal
        "zero_optimization": {"stage": stage},
        "wall_clock_breakdown": True,
    }


def gpt(stage: int) -> tuple[Any, Callable[[], None]]:
    engine = deepspeed_c.initialize(model=seeded(Gpt), config=config(stage))[0]
    data = torch.randint(0, VOCAB, (8 * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = itertools.chain.from_iterable(itertools.repeat(engine.deepspeed_io(list(data))))

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(next(batches)))
            engine.step()

    return engine, step


def pipeline(_: int) -> tuple[Any, Callable[[], None]]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = seeded(lambda: PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss))
    engine = deepspeed_c.initialize(model=model, config=config(0))[0]
    batches = itertools.repeat((torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)))
    return engine, lambda: engine.train_batch(batches)


CONTENDERS = {
    **{f"stage {stage}": (gpt, stage) for stage in range(4)},
    "pipeline of 2 stages": (pipeline, 0),
}


def measure(engine: Any, step: Callable[[], None], n_steps: int) -> dict[str, float]:
    """Return the sums of the phases over a loop of steps, and its wall clock as "wall"; seconds."""
    sums = dict.fromkeys(PHASES, 0.0)
    begin = time.perf_counter()
    for _ in range(n_steps):
        step()
        timers = engine.get_wall_clock_timers()
        for name in PHASES:
            sums[name] += timers.get(name, 0.0) / 1e3
    return {**sums, "wall": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for name, (make, stage) in CONTENDERS.items():
        engine, step = make(stage)
        for _ in range(WARMUP):
            step()
        mine = [measure(engine, step, args.steps) for _ in range(args.rounds)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        rounds = [each for rank in everyone for each in rank]
        for phase in ("forward", "backward", "step"):
            least = min(each[phase] for each in rounds)
            require(least > 0, f"{phase} of {name} takes time: {least}")
        ratios = [sum(each[phase] for phase in PHASES) / each["wall"] for each in rounds]
        ratio, low, high = median_spread(ratios)
        if dist.get_rank() == 0:
            line = {
                "benchmark": "phases",
                "contender": name,
                "ranks": dist.get_world_size(),
                "ms_per_step": round(1e3 * median_spread([each["wall"] / args.steps for each in rounds])[0], 1),
                "phases_over_wall": round(ratio, 4),
                "phases_over_wall_min": round(low, 4),
                "phases_over_wall_max": round(high, 4),
            }
            for phase in PHASES:
                line[f"{phase}_of_wall"] = round(median_spread([each[phase] / each["wall"] for each in rounds])[0], 4)
            print(json.dumps({**line, "machine": machine()}), flush=True)
        engine.close()
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
