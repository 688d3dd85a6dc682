"""How long is a training step of a compiled engine on 2 gloo ranks, against the same engine without a compiler, FSDP2
with compiled blocks, and a compiled model in DDP?

Two models in fp32: the 29M-parameter GPT of ``train_step``, of which a compiler can improve little on a processor, and
blocks of narrow SwiGLU layers, whose time is in small operators that a compiler puts together. Inductor compiles all
of them. All contenders run in the same processes, in an order that changes with the round. Each round times one step of
each contender. The losses of all have to be the same at every step. The engines' graphs have to gather and reduce by
themselves, and nothing may be compiled while times are taken. "better" is the better of an engine without a compiler
and of the peer that is compiled: FSDP2 at stage 3, DDP at stages 1 and 2.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.compiled_step [--model swiglu]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from benchmarks.deepspeed_c.stage3_step import GatherCount
from benchmarks.deepspeed_c.train_step import (
    BATCH,
    LENGTH,
    VOCAB,
    Contender,
    Gpt,
    ours,
    plain,
    require_same_losses,
    seeded,
)
from benchmarks.engines import require_weights_sharded
from benchmarks.measure import machine, median_spread, ratios, require, time_alternately

WARMUP = 6
SWIGLU_WIDTH, SWIGLU_LAYERS, SWIGLU_ROWS = 64, 12, 4096


class Swiglu(nn.Module):
    """Blocks [*, w] -> [*, w] of a norm and a gated layer that is twice as wide as ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SwigluModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Swiglu(SWIGLU_WIDTH) for _ in range(SWIGLU_LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x - 1).square().mean()


MODELS = {
    "gpt": (Gpt, lambda g: torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g)),
    "swiglu": (SwigluModel, lambda g: torch.randn(SWIGLU_ROWS, SWIGLU_WIDTH, generator=g)),
}
ZERO = {"gpt": {}, "swiglu": {"stage3_param_persistence_threshold": 0}}


def fsdp2_compiled(model) -> Contender:
    for block in model.blocks:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    return plain(model, model)


def ddp_compiled(model) -> Contender:
    model.compile()
    return plain(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), model)


def engine(model, stage: int, is_compiled: bool, zero: dict) -> Contender:
    contender = ours(model, stage, compile={"deepcompile": is_compiled}, **zero)
    if is_compiled:
        contender.engine.compile()
    return contender


CONTENDERS = {
    "fsdp2_compiled": lambda model, zero: fsdp2_compiled(model),
    "ddp_compiled": lambda model, zero: ddp_compiled(model),
}
for stage in (2, 3):
    CONTENDERS[f"stage{stage}"] = lambda model, zero, stage=stage: engine(model, stage, False, zero)
    CONTENDERS[f"stage{stage}_compiled"] = lambda model, zero, stage=stage: engine(model, stage, True, zero)
PEERS = {"stage2_compiled": ("stage2", "ddp_compiled"), "stage3_compiled": ("stage3", "fsdp2_compiled")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", help="contenders", choices=CONTENDERS)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make, make_batch = MODELS[args.model]
    steps = {name: CONTENDERS[name](seeded(make), ZERO[args.model]) for name in args.only or CONTENDERS}
    batch = make_batch(torch.Generator().manual_seed(rank))
    for _ in range(WARMUP):
        for step in steps.values():
            step(batch)
    compiled = {name: step.engine for name, step in steps.items() if name in PEERS}
    frames = {name: each._compiled.backend.n_frames for name, each in compiled.items()}
    n_before = {name: each.get_compile_time() for name, each in compiled.items()}
    gathers = {name: GatherCount(step) for name, step in steps.items()}
    times = time_alternately(steps, batch, args.rounds, warmup=0)
    for name, each in compiled.items():
        require(frames[name] == 1, f"the whole model is one graph: {frames[name]}")
        require(each.get_compile_time() == n_before[name], "nothing is compiled while times are taken")
    require_same_losses(steps, 1e-4)
    if "stage3_compiled" in steps:
        require_weights_sharded(steps["stage3_compiled"].engine, 0.9, gathers["stage3_compiled"].per_step())
    if rank == 0:
        n = sum(p.numel() for p in make().parameters())
        for name in steps:
            line = {"benchmark": "compiled_step", "model": args.model, "contender": name, "params": n}
            line["ms"] = round(median_spread(times[name])[0] * 1e3, 1)
            peers = [peer for peer in PEERS.get(name, ()) if peer in times]
            for peer in peers:
                key = "uncompiled" if steps[peer].engine is not None else peer
                line |= ratios(f"ratio_to_{key}", times[name], times[peer])
            if peers:
                better = min(peers, key=lambda peer: statistics.median(times[peer]))
                line |= ratios("ratio_to_better", times[name], times[better])
            line |= {"ranks": dist.get_world_size(), "threads": torch.get_num_threads(), "machine": machine()}
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
