"""How close is engine.step() (norm, unscale, clip, overflow check, AdamW, bf16 copy) to one pass over its memory?

One rank, bf16, stages 1 and 2, 67M parameters. The bound is 30 bytes per parameter (read the gradient once for the norm, once for the update;
read and write master and two moments; write the bf16 weight) at the bandwidth of a pass of the same kind measured in the same run:
the triad a = b + s * c over f32, whose three streams move 12 bytes an element. Run: python benchmarks/deepspeed_c/engine_step.py [--params 67e6]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import deepspeed_c
from benchmarks.measure import machine, median_spread, triad_gbps

BYTES_PER_PARAM = 30


def make_engine(n_params: int, zero: dict, n_layers: int = 8, **more):
    """An engine of about ``n_params`` parameters, and how many they are."""
    width = int((n_params / n_layers) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(n_layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        **more,
    }
    return deepspeed_c.initialize(model=model, config=config)[0], n_layers * width * width


def fill_gradients(engine) -> None:
    """Gradients as a backward pass leaves them, without its cost."""
    reducer = engine.optimizer.reducer
    reducer.begin_backward(is_boundary=True, factor=1.0)
    for slot in reducer.slots:
        slot.param.grad = torch.full_like(slot.param, 1e-3)
        reducer._on_grad(slot, slot.param)
    reducer.end_backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=67e6)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    engines = {stage: make_engine(int(args.params), {"stage": stage}) for stage in (1, 2)}
    times: dict[int, list[float]] = {stage: [] for stage in engines}
    bounds: list[float] = []
    for round_ in range(args.rounds + 2):
        gbps = triad_gbps()
        for stage, (engine, n) in engines.items():
            fill_gradients(engine)
            start = time.perf_counter()
            engine.step()
            elapsed = time.perf_counter() - start
            if round_ >= 2:
                times[stage].append(elapsed)
        if round_ >= 2:
            bounds.append(gbps)
    for stage, (engine, n) in engines.items():
        bound_s = [BYTES_PER_PARAM * n / (g * 1e9) for g in bounds]
        ratio, low, high = median_spread([t / b for t, b in zip(times[stage], bound_s)])
        print(
            json.dumps(
                {
                    "benchmark": "engine_step",
                    "stage": stage,
                    "params": n,
                    "ns_per_param": round(median_spread(times[stage])[0] / n * 1e9, 3),
                    "triad_gbps": round(median_spread(bounds)[0], 1),
                    "ratio_to_bound": round(ratio, 3),
                    "ratio_min": round(low, 3),
                    "ratio_max": round(high, 3),
                    "threads": torch.get_num_threads(),
                    "machine": machine(),
                }
            )
        )


if __name__ == "__main__":
    main()
