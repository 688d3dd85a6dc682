"""How much memory do the model states of a rank take, at their peak, against the ZeRO paper's formula?

bf16 with fp32 Adam on N ranks: 16 bytes per parameter at stage 0, 4 + 12/N at stage 1, 2 + 14/N at stage 2 (arXiv
1910.02054, section 5). The model is a stack of linear layers (67M parameters). A batch of one has next to no
activations. The measure is the growth of the peak resident set from before the model is made until after three steps.
This growth consists of states, buffers and memory that the allocator keeps. Each stage runs in separate processes.
Run: python -m benchmarks.deepspeed_c.memory [--ranks 2] [--params 67e6]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from benchmarks.measure import machine, require

LAYERS = 64
FORMULA = {0: lambda n: 16.0, 1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n}


def status_bytes(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field + ":")) * 1024


def rank_main(stage: int, n_params: int) -> None:
    import torch
    import torch.distributed as dist

    import deepspeed_c
    from benchmarks.engines import require_states_sharded

    deepspeed_c.init_distributed()
    # This engine loads all lazy imports before the baseline is taken.
    warm = deepspeed_c.initialize(model=torch.nn.Linear(8, 8), config=config(stage))[0]
    warm.backward(warm(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    warm.step()
    warm.close()
    before = status_bytes("VmRSS")
    width = int((n_params / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    engine = deepspeed_c.initialize(model=model, config=config(stage))[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        require(engine.was_step_applied(), "the step was applied")
    require_states_sharded(engine, stage, dist.get_world_size())
    peak = status_bytes("VmHWM") - before
    n = LAYERS * width * width
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak / n)
    if dist.get_rank() == 0:
        bound = FORMULA[stage](dist.get_world_size())
        line = {"benchmark": "memory", "stage": stage, "ranks": dist.get_world_size(), "params": n}
        line |= {
            "bytes_per_param": round(max(peaks), 2),
            "formula": round(bound, 2),
            "ratio": round(max(peaks) / bound, 3),
        }
        print(json.dumps(line | {"machine": machine()}), flush=True)
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


def config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params", type=float, default=67e6)
    parser.add_argument("--stage", type=int, help="one stage (used for the ranks themselves)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args.stage, int(args.params))
        return
    for stage in FORMULA if args.stage is None else [args.stage]:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--standalone"]
            + ["-m", "benchmarks.deepspeed_c.memory", "--stage", str(stage), "--params", str(args.params)],
            check=True,
        )


if __name__ == "__main__":
    main()
