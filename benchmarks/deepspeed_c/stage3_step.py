"""How long is a training step with sharded parameters on 2 gloo ranks, against FSDP2 (``fully_shard``) and DDP with torch's fused AdamW?

Three models in fp32: the 29M-parameter GPT of ``train_step``, a 67M-parameter MLP (16 layers of 2048 x 2048), and 200 small layers (64 x 64, activations between),
where what a step costs is its bookkeeping. All contenders run alternately in the same processes; each round times one step of each.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.stage3_step --model gpt|mlp|small
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import deepspeed_c
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt
from benchmarks.measure import machine, median_spread, time_alternately


class Mlp(nn.Module):
    def __init__(self, width: int, layers: int, activation: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.activation = activation

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.activation else layer(x)
        return x.square().mean()


MODELS = {
    "gpt": (Gpt, lambda g: torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g)),
    "mlp": (lambda: Mlp(2048, 16, False), lambda g: torch.randn(8, 2048, generator=g)),
    "small": (lambda: Mlp(64, 200, True), lambda g: torch.randn(8, 64, generator=g)),
}


def make_ddp(make):
    torch.manual_seed(0)
    model = make()
    return _plain_step(nn.parallel.DistributedDataParallel(model), model)


def make_fsdp2(make):
    torch.manual_seed(0)
    model = make()
    blocks = getattr(model, "blocks", None) or model.layers
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return _plain_step(model, model)


def _plain_step(call, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch):
        call(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_ours(make, stage: int, **zero):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True, **zero},
    }
    engine = deepspeed_c.initialize(model=make(), config=config)[0]

    def step(batch):
        engine.backward(engine(batch))
        engine.step()

    return step


CONTENDERS = {
    "fsdp2": make_fsdp2,
    "ddp": make_ddp,
    "stage2": lambda make: make_ours(make, 2),
    "stage3": lambda make: make_ours(make, 3),
    "stage3_all_sharded": lambda make: make_ours(make, 3, stage3_param_persistence_threshold=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=["fsdp2", "ddp", "stage3"], help="contenders", choices=CONTENDERS)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make, make_batch = MODELS[args.model]
    steps = {name: CONTENDERS[name](make) for name in args.only}
    batch = make_batch(torch.Generator().manual_seed(rank))
    times = time_alternately(steps, batch, args.rounds, warmup=3)
    if rank == 0:
        n = sum(p.numel() for p in make().parameters())
        for name in steps:
            line = {"benchmark": "stage3_step", "model": args.model, "contender": name, "params": n}
            line["ms"] = round(median_spread(times[name])[0] * 1e3, 1)
            for peer in ("fsdp2", "ddp"):
                if peer in times:
                    ratio, low, high = median_spread([a / b for a, b in zip(times[name], times[peer])])
                    line |= {
                        f"ratio_to_{peer}": round(ratio, 3),
                        f"ratio_to_{peer}_min": round(low, 3),
                        f"ratio_to_{peer}_max": round(high, 3),
                    }
            line |= {"ranks": dist.get_world_size(), "threads": torch.get_num_threads(), "machine": machine()}
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
