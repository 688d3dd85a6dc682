"""How close is a bare AdamW step in fp32 to one pass over its memory, for one large tensor and for very many small ones?

Contenders take turns in one process: FusedAdam, torch.optim.AdamW(fused=True), and DeepSpeedCPUAdam of an installed DeepSpeed. The bound is 28 bytes per
parameter (read parameter, gradient and two moments; write all but the gradient) at the bandwidth of a pass of the same kind measured in the same run: the
triad a = b + s * c over f32. Run: python -m benchmarks.ops.adam_step [--params 100e6] [--tensors 16384] [--elems 8192]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable

import torch

from benchmarks.measure import machine, median_spread, triad_gbps
from deepspeed_c.ops.adam import FusedAdam

BYTES_PER_PARAM = 28
OPTIONS = {"lr": 1e-4, "weight_decay": 0.01}

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def contenders() -> dict[str, Maker]:
    makers: dict[str, Maker] = {
        "deepspeed_c": lambda params: FusedAdam(params, **OPTIONS),
        "torch fused": lambda params: torch.optim.AdamW(params, fused=True, **OPTIONS),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        makers["DeepSpeed"] = lambda params: DeepSpeedCPUAdam(params, **OPTIONS)
    return makers


def measure(case: str, sizes: list[int], rounds: int) -> None:
    params = [torch.nn.Parameter(torch.full((n,), 0.5)) for n in sizes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizers = {name: make(params) for name, make in contenders().items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    bandwidths: list[float] = []
    n_params = sum(sizes)
    for round_ in range(rounds + 1):
        gbps = triad_gbps()
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            elapsed = time.perf_counter() - begin
            if round_ > 0:  # the first round makes the states
                seconds[name].append(elapsed)
        if round_ > 0:
            bandwidths.append(gbps)
    bounds = [BYTES_PER_PARAM * n_params / (gbps * 1e9) for gbps in bandwidths]
    for name, times in seconds.items():
        speed, low, high = median_spread([bound / t for bound, t in zip(bounds, times)])
        against_torch, _, _ = median_spread([theirs / t for theirs, t in zip(seconds["torch fused"], times)])
        line = {
            "benchmark": "adam_step",
            "case": case,
            "contender": name,
            "tensors": len(sizes),
            "params": n_params,
            "ms": round(median_spread(times)[0] * 1e3, 2),
            "ns_per_param": round(median_spread(times)[0] / n_params * 1e9, 3),
            "triad_gbps": round(median_spread(bandwidths)[0], 1),
            "speed_over_bound": round(speed, 3),
            "speed_over_bound_min": round(low, 3),
            "speed_over_bound_max": round(high, 3),
            "speed_over_torch": round(against_torch, 3),
            "threads": torch.get_num_threads(),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=100e6, help="elements of the one large tensor")
    parser.add_argument("--tensors", type=int, default=16_384)
    parser.add_argument("--elems", type=int, default=8_192, help="of each of the many tensors")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    measure("one tensor", [int(args.params)], args.rounds)
    measure("many tensors", [args.elems] * args.tensors, args.rounds)


if __name__ == "__main__":
    main()
