"""How much time and peak memory does attention with a rule for a mask take, beside torch's own with a dense mask?

Contenders take turns in one process, in an order that changes with the round, on the same operands, with the same
number of threads. Outputs are compared first. torch's mask is made outside of the timed part, because a model makes one
mask for all layers. The mask counts as memory. Peak memory is the growth of the process's resident set over a forward
and backward, plus the mask.
Run: python -m benchmarks.ops.attention [--tokens 2048] [--rounds 7] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from deepspeed_c import _C
from deepspeed_c.ops import nn

HEADS = 8
DIM = 64


def slopes() -> torch.Tensor:
    return 2.0 ** -torch.arange(1, HEADS + 1).float()


def rules_of(case: str, tokens: int) -> dict[str, Any]:
    ids = torch.arange(tokens)[None] // max(1, tokens // 8)
    return {
        "alibi": {"alibi_slopes": slopes()},
        "window": {"window": max(1, tokens // 8)},
        "packed": {"documents": ids},
    }[case]


def mask_of(case: str, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    position = torch.arange(tokens)
    distance = position[:, None] - position
    hidden = distance < 0
    if case == "window":
        hidden |= distance >= max(1, tokens // 8)
    if case == "packed":
        ids = position // max(1, tokens // 8)
        hidden |= ids[:, None] != ids
    scores = -slopes()[:, None, None] * distance if case == "alibi" else torch.zeros(1, tokens, tokens)
    return scores.masked_fill_(hidden, -torch.inf).to(dtype)[None]


def status_bytes(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(key))


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the largest growth of the resident set while ``step`` runs, after freed memory was returned to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status_bytes("VmRSS:")
    step()
    return status_bytes("VmHWM:") - before


def measure(case: str, dtype: torch.dtype, tokens: int, rounds: int) -> None:
    torch.manual_seed(0)
    operands = tuple(torch.randn(1, HEADS, tokens, DIM).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.randn(1, HEADS, tokens, DIM).to(dtype)
    rules = rules_of(case, tokens)
    mask = mask_of(case, tokens, dtype)

    def ours() -> torch.Tensor:
        return nn.attention(*operands, causal=True, **rules)

    def theirs(mask: torch.Tensor = mask) -> torch.Tensor:
        return F.scaled_dot_product_attention(*operands, attn_mask=mask)

    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    require(torch.allclose(ours(), theirs(), rtol=tolerance, atol=tolerance), f"{case}: torch's output")

    def step(function: Callable[[], torch.Tensor]) -> tuple[float, float]:
        begin = time.perf_counter()
        out = function()
        middle = time.perf_counter()
        torch.autograd.grad(out, operands, gradient)
        return middle - begin, time.perf_counter() - middle

    contenders = {"deepspeed_c": ours, "torch": theirs}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contenders}
    for round_ in range(rounds + 1):
        for name in in_turn(list(contenders), round_):
            for times, value in zip(seconds[name], step(contenders[name])):
                if round_ > 0:  # the first round warms up
                    times.append(value)
    mine, other = peak_bytes(lambda: step(ours)), mask.nbytes + peak_bytes(lambda: step(theirs))
    for i, phase in enumerate(("forward", "backward")):
        line = {
            "benchmark": "attention",
            "case": case,
            "phase": phase,
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": tokens,
            "threads": torch.get_num_threads(),
            "ms": round(median_spread(seconds["deepspeed_c"][i])[0] * 1e3, 2),
            **ratios("ratio_to_torch", seconds["deepspeed_c"][i], seconds["torch"][i]),
            "peak_mib": round(mine / 2**20, 1),
            "torch_peak_mib": round(other / 2**20, 1),
            "peak_over_torch": round(mine / max(1, other), 3),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    for n_threads in args.threads:
        torch.set_num_threads(n_threads)
        _C.pool_resize(n_threads)
        for dtype in (torch.float32, torch.bfloat16):
            for case in ("alibi", "window", "packed"):
                measure(case, dtype, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
