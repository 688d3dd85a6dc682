"""How much longer does training take with ``checkpoint.every`` = 60 s?

The 29M-parameter GPT of ``train_step`` in fp32 on 2 gloo ranks, stage 2: 350 MB of weights and moments. Two engines
live in the same processes and take turns: one saves by itself every ``--period`` seconds, the other never. A round is
the same number of steps of each, and the time of the first includes the wait for its last write. The cost of a save
is their difference by the number of saves. It does not depend on the period, as long as a write ends within the
period. So the period is short here, and the figure is 60 s over 60 s less the cost of a save. The bound of that cost
is a copy of the same number of bytes in memory, on both ranks at once.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.saves_by_time DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt, seeded
from benchmarks.measure import in_turn, machine, median_spread, require, require_equal

EVERY_SECONDS = 60.0  # of the figure in the documents
LR = 1e-6  # small, because steps repeat one batch
WARMUP = 2


def engine_of(checkpoint: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 2},
        "checkpoint": checkpoint,
    }
    return deepspeed_c.initialize(model=seeded(Gpt), config=config)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two saves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps of a round; default: two periods and a half")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp(dir=args.folder, prefix="saves_by_time_") if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = folders[0]
    # Each kept checkpoint is a save that is counted below.
    saving = {"auto_resume": folder, "every": args.period}
    engines = {"on": engine_of(saving), "off": engine_of({})}
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))
    last: dict[str, float] = {}

    def run(name: str, n_steps: int) -> float:
        engine = engines[name]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(n_steps):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        engine.wait_checkpoint()
        dist.barrier()
        last[name] = loss.item()
        return time.perf_counter() - begin

    def saves() -> set[str]:
        return {path.parent.name for path in Path(folder).glob("*/manifest.json")}

    for name in engines:
        run(name, WARMUP)
    sizes = [args.steps or max(round(2.5 * args.period / (run("off", 4) / 4)), 1)]
    dist.broadcast_object_list(sizes)
    n_steps = sizes[0]
    run("on", 4)
    n_bytes = sum(12 * p.numel() for p in engines["off"].module.parameters())
    source, target = (torch.ones(n_bytes // dist.get_world_size(), dtype=torch.uint8) for _ in range(2))

    found: dict[str, list[float]] = {"cost": [], "copy": [], "plain_step": []}
    counts = []
    for round_ in range(args.rounds):
        times = {}
        for name in in_turn(["on", "off"], round_):
            before = saves()
            times[name] = run(name, n_steps)
            n_saves = len(saves() - before)
            require((n_saves > 0) == (name == "on"), f"the engine that is {name} made {n_saves} saves in a round")
            if name == "on":
                counts.append(n_saves)
            dist.barrier()
        if rank == 0:  # the newest stays, for the program that would resume
            for tag in sorted(saves(), key=lambda tag: int(tag.removeprefix("global_step")))[:-1]:
                shutil.rmtree(os.path.join(folder, tag))
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        dist.barrier()
        found["copy"].append(time.perf_counter() - begin)
        found["cost"].append((times["on"] - times["off"]) / counts[-1])
        found["plain_step"].append(times["off"] / n_steps)
    require_equal("losses", last, 1e-6)
    saved = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    require(saved >= n_bytes, f"a checkpoint has the {n_bytes} bytes of weights and moments: {saved}")
    for engine in engines.values():
        engine.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
        cost, low, high = median_spread(found["cost"])
        copy = median_spread(found["copy"])[0]
        line = {
            "benchmark": "saves_by_time",
            "megabytes": round(n_bytes / 1e6),
            "period_s": args.period,
            "saves": sum(counts),
            "plain_step_s": round(median_spread(found["plain_step"])[0], 3),
            "cost_of_a_save_s": round(cost, 3),
            "copy_in_memory_s": round(copy, 3),
            "ratio_to_plain": round(EVERY_SECONDS / (EVERY_SECONDS - cost), 4),
            "ratio_to_plain_min": round(EVERY_SECONDS / (EVERY_SECONDS - low), 4),
            "ratio_to_plain_max": round(EVERY_SECONDS / (EVERY_SECONDS - high), 4),
            "bound_of_ratio": round(EVERY_SECONDS / (EVERY_SECONDS - copy), 4),
            "stage": 2,
            "ranks": dist.get_world_size(),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
