"""How much longer does a step take with ``same_bits``?

The 29M-parameter GPT of ``train_step`` in fp32 on gloo ranks, stages 1 to 3, with a global batch of two grains a rank. Two
engines of one stage live in the same processes and take turns: one with the mode, the other without, with the same
micro-batch and the same accumulation. With 3 ranks each of them has four grains. The losses and the gradient norms of
both engines must agree to rounding in each round, and ranks must agree on the fingerprint of the one with the mode.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.same_bits
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt, seeded
from benchmarks.measure import in_turn, machine, median_spread, require, require_equal

LR = 1e-6  # small, because steps repeat one batch
WARMUP = 2


def engine_of(stage: int, n_grains: int, *, is_same: bool) -> Any:
    config = {
        "train_batch_size": BATCH * n_grains,
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **({"same_bits": {"enabled": True, "threads": torch.get_num_threads()}} if is_same else {}),
    }
    return deepspeed_c.initialize(model=seeded(Gpt), config=config)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a round")
    parser.add_argument("--grains", type=int, default=2, help="grains of a rank in a step")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [
        torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(world * i + rank))
        for i in range(args.grains)
    ]
    for stage in args.stages:
        engines = {name: engine_of(stage, args.grains * world, is_same=name == "same") for name in ("same", "plain")}
        last: dict[str, tuple[float, float]] = {}

        def run(name: str, engines: dict[str, Any] = engines, last: dict[str, Any] = last) -> float:
            engine = engines[name]
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(args.steps):
                for tokens in batches:
                    loss = engine(tokens)
                    engine.backward(loss)
                    engine.step()
            dist.barrier()
            seconds = (time.perf_counter() - begin) / args.steps
            last[name] = loss.item(), engine.get_global_grad_norm()
            return seconds

        for _ in range(WARMUP):
            for name in engines:
                run(name)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for round_ in range(args.rounds):
            for name in in_turn(list(engines), round_):
                times[name].append(run(name))
            for i, what in enumerate(("losses", "norms")):
                require_equal(what, {name: last[name][i] for name in last}, 1e-4)
        prints = [0] * world
        dist.all_gather_object(prints, engines["same"].fingerprint())
        require(len(set(prints)) == 1, f"ranks agree on the fingerprint: {prints}")
        for engine in engines.values():
            engine.close()
        if rank == 0:
            ratio, low, high = median_spread([a / b for a, b in zip(times["same"], times["plain"], strict=True)])
            line = {
                "benchmark": "same_bits",
                "stage": stage,
                "ranks": world,
                "grains": args.grains * world,
                "plain_step_s": round(median_spread(times["plain"])[0], 3),
                "ratio_to_plain": round(ratio, 3),
                "ratio_to_plain_min": round(low, 3),
                "ratio_to_plain_max": round(high, 3),
                "machine": machine(),
            }
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
