"""How long does a linear layer of 16-bit elements take, forward and backward, compared with the fp32 layer of torch?

A weight [1024, 1024] times rows of bf16 or fp16. "ours" is ``ops.nn.linear``, "torch" the layer in its dtype, "casts" the
fp32 layer between casts of all operands, and "fp32" the layer whose operands are fp32 from the beginning. All run on
AVX2 by default, in a process with torch's and our own choice of instructions limited to it (``--isa native`` lifts the
limit), because processors with AVX-512 or AMX have products of bf16 of their own. The bound is "fp32": the same products
without a cast.
Run: python -m benchmarks.ops.linear [--width 1024] [--rows 1 8 64 256] [--rounds 15] [--threads 1] [--isa avx2]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "DSC_CPU_ISA": "avx2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=["avx2", "native"], default="avx2")
    args = parser.parse_args()
    if args.isa == "avx2" and any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.environ.update(AVX2)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.ops.linear", *sys.argv[1:]])
    measure(args)


def measure(args: argparse.Namespace) -> None:
    import torch  # after the choice of instructions

    from benchmarks.measure import keep_freed_memory, machine, median_spread, ratios, require, time_alternately
    from deepspeed_c.ops import nn

    Step = Callable[[torch.Tensor], object]

    def trained(function: Callable[..., torch.Tensor], weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> Step:
        leaves = [weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()]
        return lambda _: torch.autograd.grad(function(leaves[1], leaves[0]), leaves, dy)

    def with_casts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)

    torch.set_num_threads(args.threads)
    os.environ["DSC_NUM_THREADS"] = str(args.threads)
    keep_freed_memory()
    linear = torch.nn.functional.linear
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(args.width, args.width, generator=generator)
        for n_rows in args.rows:
            x, dy = (torch.randn(n_rows, args.width, generator=generator) for _ in range(2))
            halves = [value.to(dtype) for value in (weight, x, dy)]
            wanted = [value.double() for value in trained(linear, *(half.double() for half in halves))(x)]
            for name, function in (("ours", nn.linear), ("casts", with_casts)):
                found = trained(function, *halves)(x)
                worst = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
                require(worst < 2 * torch.finfo(dtype).eps, f"{name} and products in fp64 agree: {worst}")
            forwards: dict[str, Step] = {
                "ours": lambda _, halves=halves: nn.linear(halves[1], halves[0]),
                "torch": lambda _, halves=halves: linear(halves[1], halves[0]),
                "casts": lambda _, halves=halves: with_casts(halves[1], halves[0]),
                "fp32": lambda _, x=x, weight=weight: linear(x, weight),
            }
            steps: dict[str, Step] = {
                "ours": trained(nn.linear, *halves),
                "torch": trained(linear, *halves),
                "casts": trained(with_casts, *halves),
                "fp32": trained(linear, weight, x, dy),
            }
            for what, contenders in (("forward", forwards), ("forward and backward", steps)):
                times = time_alternately(contenders, x, args.rounds, warmup=1)
                for name in ("ours", "torch", "casts"):
                    line = {"benchmark": "linear", "contender": name, "what": what, "dtype": str(dtype)[6:]}
                    line |= {"rows": n_rows, "width": args.width, "isa": args.isa}
                    line |= {"ms": round(1e3 * median_spread(times[name])[0], 3)}
                    line |= ratios("ratio_to_fp32", times[name], times["fp32"])
                    line |= ratios("ratio_to_torch", times[name], times["torch"])
                    print(json.dumps({**line, "threads": args.threads, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
