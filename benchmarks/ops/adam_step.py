"""How close is a bare AdamW step in fp32 to one pass over its memory, for one large tensor and for very many small ones?

Contenders take turns in one process, in an order that changes with the round: FusedAdam and
torch.optim.AdamW(fused=True), each over separate tensors. The bound is a C pass over the tensors of FusedAdam on the
package's threads. The pass moves the same 28 bytes a parameter: it reads parameter, gradient and two moments, and
writes all except the gradient.
Run: python -m benchmarks.ops.adam_step [--params 100e6] [--tensors 16384] [--elems 8192]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require
from benchmarks.stream import Part, bytes_of, stream_step
from deepspeed_c import _C
from deepspeed_c.ops.adam import FusedAdam

BYTES_PER_PARAM = 28
OPTIONS = {"lr": 1e-4, "weight_decay": 0.01}


def make_params(sizes: list[int]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.full((n,), 0.5)) for n in sizes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return params


def seconds_of(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(case: str, sizes: list[int], rounds: int) -> None:
    params = {name: make_params(sizes) for name in ("deepspeed_c", "torch fused")}
    ours = FusedAdam(params["deepspeed_c"], **OPTIONS)
    theirs = torch.optim.AdamW(params["torch fused"], fused=True, **OPTIONS)
    ours.step()  # makes the states
    theirs.step()
    parts = [
        Part(p.detach(), p.grad, ours.state[p]["exp_avg"], ours.state[p]["exp_avg_sq"], None)
        for p in ours.param_groups[0]["params"]
    ]
    n_params = sum(sizes)
    require(bytes_of(parts, with_norm=False) == BYTES_PER_PARAM * n_params, "the pass moves 28 bytes a parameter")
    contenders: dict[str, Callable[[], float]] = {
        "deepspeed_c": lambda: seconds_of(ours.step),
        "torch fused": lambda: seconds_of(theirs.step),
        "bound": lambda: stream_step(parts, with_norm=False)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name in in_turn(list(contenders), round_):
            elapsed = contenders[name]()
            if round_ > 0:  # the first round warms up
                seconds[name].append(elapsed)
    for i, (mine, other) in enumerate(zip(*params.values(), strict=True)):
        require(
            torch.allclose(mine, other, rtol=1e-5), f"tensor {i} is updated as torch does: {mine[0]} and {other[0]}"
        )
    for name in params:
        line = {
            "benchmark": "adam_step",
            "case": case,
            "contender": name,
            "tensors": len(sizes),
            "params": n_params,
            "ms": round(median_spread(seconds[name])[0] * 1e3, 2),
            "ns_per_param": round(median_spread(seconds[name])[0] / n_params * 1e9, 3),
            "bound_gbps": round(BYTES_PER_PARAM * n_params / median_spread(seconds["bound"])[0] / 1e9, 1),
            **bound("ratio_to_bound", seconds[name], seconds["bound"]),
            **ratios("ratio_to_torch", seconds[name], seconds["torch fused"]),
            "threads": _C.pool_n_threads() if name == "deepspeed_c" else torch.get_num_threads(),
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
