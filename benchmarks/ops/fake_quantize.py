"""How much longer than a copy of the weights does a fake quantization take, and how long does the formula in PyTorch
take?

fp32 weights [4096, 4096] in groups of 64, symmetric. "ours" is what a layer in training runs by default, with
DeepSpeed's levels: the same numbers as DeepSpeed 0.19.6's formula, which is one PyTorch operator after the other.
"compressed-tensors" has the other levels, which one fused pass finds and applies; each element may differ by one step.
The bound is a copy into a new tensor: it reads and writes the same bytes, 8 for each weight. Freed memory is kept by the
process, so that no contender pays for new pages.
Run: python -m benchmarks.ops.fake_quantize [--rows 4096] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from benchmarks.measure import bound, keep_freed_memory, machine, median_spread, ratios, require, time_alternately
from deepspeed_c.compression.levels import Levels, quantize_rows

GROUP = 64


def formula(x: torch.Tensor, bits: int) -> torch.Tensor:
    groups = x.reshape(-1, GROUP)
    n_levels = 2**bits
    scale = 2 * torch.max(groups.amin(1).abs(), groups.amax(1).abs()).unsqueeze(1) / n_levels
    codes = (groups / scale).round().clamp(-n_levels // 2, n_levels // 2 - 1)
    return (codes * scale).reshape(x.shape)


def steps_of(bits: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    def ours(x: torch.Tensor, levels: Levels) -> torch.Tensor:
        return quantize_rows(x.view(-1, GROUP), bits, levels=levels, is_symmetric=True).view(x.shape)

    return {
        "ours": lambda x: ours(x, "deepspeed"),
        "compressed-tensors": lambda x: ours(x, "compressed-tensors"),
        "copy": torch.clone,
        "formula": lambda x: formula(x, bits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    keep_freed_memory()
    x = torch.randn(args.rows, 4096, generator=torch.Generator().manual_seed(0))
    for bits in (8, 4):
        steps = steps_of(bits)
        step = x.view(-1, GROUP).abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        require(bool(torch.equal(steps["ours"](x), steps["formula"](x))), "our numbers are the formula's")
        worst = ((steps["compressed-tensors"](x) - x).view(-1, GROUP).abs() / step).max().item()
        require(worst < 1.01, f"the other levels are within a step of the weights: {worst}")
        times = time_alternately(steps, x, args.rounds, warmup=1)  # the first round gets the memory of the results
        for name in ("ours", "compressed-tensors", "formula"):
            line = {"benchmark": "fake_quantize", "contender": name, "bits": bits, "rows": args.rows}
            line |= {"ms": round(1e3 * median_spread(times[name])[0], 2), "threads": torch.get_num_threads()}
            line |= bound("ratio_to_bound", times[name], times["copy"])
            line |= ratios("ratio_to_formula", times[name], times["formula"])
            print(json.dumps({**line, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
