"""How much host memory does constructing a 1B-parameter model under ``zero.Init`` take on each of 4 processes, against its shard plus its largest tensor?

The model is a stack of 60 bias-free 4096 x 4096 layers in bf16 (1.007e9 parameters, 2.0 GB whole). Each process resets
its peak just before the context, and measures the rise of its peak resident memory until just after the context. The
bound is 2 bytes x parameters / ranks + the largest tensor.
Run: python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.deepspeed_c.init_memory
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn

import deepspeed_c
from benchmarks.measure import bound, machine, require


def status_bytes(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--width", type=int, default=4096)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    nn.Linear(8, 8)
    with deepspeed_c.zero.Init(dtype=torch.bfloat16):  # so that one-time costs are not counted
        Stack(1, 64)
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = status_bytes("VmRSS")
    with deepspeed_c.zero.Init(dtype=torch.bfloat16):
        model = Stack(args.layers, args.width)
    rise = status_bytes("VmHWM") - before
    n = sum(p.ds_numel for p in model.parameters())
    held = sum(p.ds_tensor.numel() for p in model.parameters())
    require(n / world <= held <= 1.01 * n / world, f"each rank holds one of {world} parts: {held} of {n} elements")
    largest = 2 * args.width**2
    shard = 2 * n // world
    rises: list[int] = [0] * world
    dist.all_gather_object(rises, rise)
    if rank == 0:
        line = {
            "benchmark": "init_memory",
            "params": n,
            "ranks": world,
            "peak_mb": [round(r / 1e6, 1) for r in rises],
            "shard_mb": round(shard / 1e6, 1),
            "largest_tensor_mb": round(largest / 1e6, 1),
            # The largest rise of a rank counts. The row also shows the smallest.
            **bound("ratio_to_bound", [max(rises)], [shard + largest]),
            "ratio_to_bound_min": round(min(rises) / (shard + largest), 4),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
