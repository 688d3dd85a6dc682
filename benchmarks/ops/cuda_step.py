"""How close are the CUDA kernels to one pass over device memory, and how do they compare with torch's fused ones?

Contenders take turns in one process, in an order that changes with the round, timed by CUDA events. The bound is the
time of moving the bytes that a call must move, at the bandwidth of a device-to-device copy in the same run. Cases:
AdamW over one large tensor and over very many small ones, in fp32 and with bf16 gradients and copies; LAMB; the norm
with its finite check; the cast. Exit code 77 without a device.
Run: python -m benchmarks.ops.cuda_step [--params 100e6] [--tensors 16384] [--elems 8192]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.measure import NOISE, in_turn, median_spread
from deepspeed_c.ops import flat
from deepspeed_c.ops.optim import BIAS_CORRECTION

HYPER = (1, 1e-4, 0.9, 0.999, 1e-8, 0.01, 0.0, 0.0, 0.0, 0.01, 10.0, 1.0, BIAS_CORRECTION)
NO_DEVICE = 77


class Contender(NamedTuple):
    case: str
    name: str
    n_bytes: int  # bytes that one call has to move
    call: Callable[[], object]


def full(sizes: list[int], value: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.full((n,), value, dtype=dtype, device="cuda") for n in sizes]


def steps(case: str, sizes: list[int]) -> Iterator[Contender]:
    n = sum(sizes)
    params, m, v = full(sizes, 0.5), full(sizes, 0.0), full(sizes, 0.1)
    grads, half_grads, copies = full(sizes, 1e-3), full(sizes, 1e-3, torch.bfloat16), full(sizes, 0.0, torch.bfloat16)
    step = torch.ops.deepspeed_c.optim_step_
    # Parameter and two moments are read and written, the gradient is read, the copy is written.
    yield Contender(
        f"adamw fp32, {case}", "deepspeed_c", 28 * n, lambda: step("adamw", params, grads, m, v, [], *HYPER)
    )
    ours = f"adamw bf16 gradients and copies, {case}"
    yield Contender(ours, "deepspeed_c", 28 * n, lambda: step("adamw", params, half_grads, m, v, copies, *HYPER))
    # LAMB reads parameter and moments twice.
    yield Contender(f"lamb fp32, {case}", "deepspeed_c", 40 * n, lambda: step("lamb", params, grads, m, v, [], *HYPER))
    yield Contender(f"norm fp32, {case}", "deepspeed_c", 4 * n, lambda: flat.norm(grads))
    yield Contender(f"norm fp32, {case}", "torch", 4 * n, lambda: torch.nn.utils.get_total_norm(grads))
    yield Contender(f"scale fp32, {case}", "deepspeed_c", 8 * n, lambda: flat.scale_(grads, 1.0))
    yield Contender(f"scale fp32, {case}", "torch", 8 * n, lambda: torch._foreach_mul_(grads, 1.0))

    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    for p, grad in zip(theirs, grads):
        p.grad = grad
    fused = torch.optim.AdamW(theirs, lr=1e-4, weight_decay=0.01, fused=True)
    yield Contender(f"adamw fp32, {case}", "torch fused", 28 * n, fused.step)


def casts(n: int) -> Iterator[Contender]:
    wide, half = torch.ones(n, device="cuda"), torch.ones(n, device="cuda", dtype=torch.bfloat16)
    parts = [torch.ones(n // 8, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    into = torch.zeros(n // 8, device="cuda")
    yield Contender("cast fp32 to bf16", "deepspeed_c", 6 * n, lambda: flat.cast(wide, half))
    yield Contender("cast fp32 to bf16", "torch", 6 * n, lambda: half.copy_(wide))
    yield Contender("reduce 8 x bf16 to fp32", "deepspeed_c", 20 * (n // 8), lambda: flat.reduce_(parts, into))


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the milliseconds of one call, as the mean of ``repeats`` in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def measure(contenders: list[Contender], rounds: int, repeats: int) -> None:
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times: list[list[float]] = [[] for _ in contenders]
    copy_gbps: list[float] = []
    for round_ in range(rounds + 1):
        gbps = 8 * source.numel() / milliseconds(lambda: target.copy_(source), repeats) / 1e6
        for i in in_turn(range(len(contenders)), round_):
            elapsed = milliseconds(contenders[i].call, repeats)
            if round_ > 0:  # the first round warms up
                times[i].append(elapsed)
        if round_ > 0:
            copy_gbps.append(gbps)
    for own, contender in zip(times, contenders):
        shares = [contender.n_bytes / (gbps * 1e6) / ms for gbps, ms in zip(copy_gbps, own)]
        speed, low, high = median_spread(shares)
        line = {
            "benchmark": "cuda_step",
            "case": contender.case,
            "contender": contender.name,
            "ms": round(median_spread(own)[0], 4),
            "copy_gbps": round(median_spread(copy_gbps)[0], 1),
            "speed_over_bound": round(speed, 3),
            "speed_over_bound_min": round(low, 3),
            "speed_over_bound_max": round(high, 3),
            "machine": torch.cuda.get_device_name(),
        }
        if speed > 1 + NOISE:
            line["note"] = "below its bound: the bound is wrong"
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=100e6, help="elements of the one large tensor")
    parser.add_argument("--tensors", type=int, default=16_384)
    parser.add_argument("--elems", type=int, default=8_192, help="of each of the many tensors")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=10, help="calls in one measurement")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured", file=sys.stderr)
        return NO_DEVICE
    measure(list(steps("one tensor", [int(args.params)])), args.rounds, args.repeats)
    measure(list(steps("many tensors", [args.elems] * args.tensors)), args.rounds, args.repeats)
    measure(list(casts(int(args.params))), args.rounds, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
