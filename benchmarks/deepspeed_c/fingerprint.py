"""How long does ``engine.fingerprint()`` take, against one read of the same bytes?

One rank holds 67M fp32 parameters in 16 square layers, alone or with the moments of AdamW. The contenders take turns in
one process: the fingerprint, and a C pass (``benchmarks/csrc/stream.c``) on as many threads that reads the same tensors
and adds up their words. The pass is the bound: a fingerprint depends on every bit, so it has to read every byte.
Each case must have another fingerprint when one bit is turned, and the first one when it is turned back.
The 67M parameters of a GPT, which lie in many small tensors as well, show what each tensor costs.
Run: python -m benchmarks.deepspeed_c.fingerprint
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed_c
from benchmarks.measure import bound, machine, median_spread, require, time_alternately
from benchmarks.stream import stream_read

WARMUP = 3


class Square(nn.Module):
    """Square layers without biases."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Blocks(nn.Module):
    """The weights of a GPT's blocks: norms, attention and feed-forward layers, with biases."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(3 * width, width),
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )
            for _ in range(n_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def measure(case: str, model: nn.Module, width: int, rounds: int, *, trains: bool) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2},
        **({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}} if trains else {}),
    }
    n_params, n_weights = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    tensors = [p.data for p in model.parameters()]
    if trains:
        engine.backward(engine(torch.randn(1, width)))
        engine.step()
        slots = [slot for unit in engine._optimizer.units for slot in unit.slots]
        tensors += [engine._optimizer.pieces.local(slot, key) for slot in slots for key in ("exp_avg", "exp_avg_sq")]
    listed = engine.tensor_fingerprints()
    require(len(listed) == len(tensors) == n_weights * (3 if trains else 1), "all tensors count, and no others")
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    require(n_bytes == n_params * (12 if trains else 4), "every byte is read once")
    first = engine.fingerprint()
    for tensor in (tensors[0], tensors[-1]):
        bits = tensor.view(-1).view(torch.int32)
        bits[-1] ^= 1
        require(engine.fingerprint() != first, "a turned bit gives another fingerprint")
        bits[-1] ^= 1
        require(engine.fingerprint() == first, "and the former bits the former one")
    seconds = time_alternately(
        {"fingerprint": lambda _: engine.fingerprint(), "read": lambda _: stream_read(tensors)}, None, rounds, WARMUP
    )
    engine.close()
    return {
        "case": case,
        "params_m": round(n_params / 1e6, 1),
        "tensors": len(tensors),
        "mb": round(n_bytes / 1e6, 1),
        "ms": round(median_spread(seconds["fingerprint"])[0] * 1e3, 2),
        "read_ms": round(median_spread(seconds["read"])[0] * 1e3, 2),
        **bound("ratio_to_read", seconds["fingerprint"], seconds["read"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    deepspeed_c.init_distributed("gloo", verbose=False)
    # Of a block of width w: 14 w^2 weights beside 13 w; at 2/5 of the width, as many parameters as the square layers.
    narrow = args.width * 2 // 5 // 16 * 16
    cases = (
        ("weights", Square(args.width, args.layers), args.width, False),
        ("weights and moments", Square(args.width, args.layers), args.width, True),
        ("weights and moments of a GPT", Blocks(narrow, max(args.layers * 7 // 16, 1)), narrow, True),
    )
    for case, model, width, trains in cases:
        row = measure(case, model, width, args.rounds, trains=trains)
        print(json.dumps({"benchmark": "fingerprint", **row, "machine": machine()}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
