"""How long is a training step of a 29M-parameter GPT on 2 gloo ranks, against DDP with torch's fused AdamW?

The contenders are ours (stages 0, 1, 2), DDP (``gradient_as_bucket_view``, so that it copies no gradient), and replicas
that train independently on each rank and send nothing. They run in the same processes, in an order that changes with
the round, in fp32 or bf16, with the same clipping. Each round times one step of each contender. Losses have to be the
same at every step. In bf16 this holds only among our stages, because ours keeps fp32 masters and DDP does not.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.train_step [--dtype bf16]
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import machine, median_spread, ratios, require, require_equal, time_alternately

VOCAB, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 8192, 512, 8, 8, 128, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        # The standard deviation of GPT-2. With torch's standard deviation of 1 the tied head gives logits of hundreds.
        # One batch is then learnt in seven steps, after which the gradients are denormal numbers. Denormal numbers take
        # the processor many times as long.
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), tokens[:, 1:].reshape(-1))


class Contender:
    """A training step, and its losses so far."""

    def __init__(self, forward, update, engine=None) -> None:
        self._forward, self._update, self.engine = forward, update, engine
        self.losses: list[torch.Tensor] = []

    def __call__(self, batch) -> None:
        loss = self._forward(batch)
        self.losses.append(loss.detach())
        self._update(loss)


def plain(call, model) -> Contender:
    """Return a contender in plain torch; ``call`` is the model or a wrapper around it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(loss) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(call, update)


def replica(model) -> Contender:
    """Return a contender that trains independently on each rank and sends nothing. Its losses are not compared."""
    return plain(model, model)


def ddp(model) -> Contender:
    return plain(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), model)


def ours(
    model,
    stage: int,
    dtype: torch.dtype = torch.float32,
    *,
    comm: dict | None = None,
    compile: dict | None = None,
    **zero,
) -> Contender:
    # Imported here, because the environment of a peer, which uses the model of this file, has neither.
    import deepspeed_c
    from benchmarks.engines import require_fused

    config = {
        "comm": comm or {},
        "compile": compile or {},
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True, **zero},
    }
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    require_fused(engine)

    def update(loss) -> None:
        engine.backward(loss)
        engine.step()

    return Contender(engine, update, engine)


def require_same_losses(contenders: dict[str, Contender], relative: float) -> None:
    """Require equal losses of all contenders at every step, and that they fall."""
    losses = {name: torch.stack(contender.losses).tolist() for name, contender in contenders.items()}
    for step in range(min(map(len, losses.values()))):
        require_equal(f"losses of step {step}", {name: found[step] for name, found in losses.items()}, relative)
    for name, found in losses.items():
        require(found[-1] < found[0], f"the loss of {name} falls: {found}")


def seeded(make):
    torch.manual_seed(0)
    return make()


def main() -> None:
    from benchmarks.engines import require_states_sharded

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="one contender, e.g. stage2, to profile")
    args = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    contenders = {"ddp": lambda: ddp(seeded(Gpt).to(dtype)), "replica": lambda: replica(seeded(Gpt).to(dtype))}
    contenders |= {f"stage{s}": (lambda s=s: ours(seeded(Gpt), s, dtype)) for s in (0, 1, 2)}
    if args.only:
        contenders = {args.only: contenders[args.only]}
    steps = {name: make() for name, make in contenders.items()}
    n = sum(p.numel() for p in Gpt().parameters())
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))
    times = time_alternately(steps, tokens, args.rounds, warmup=2)
    # In bf16 DDP loses updates that are smaller than the last bit of a weight, so its losses differ.
    same = {
        name: step
        for name, step in steps.items()
        if name != "replica" and (args.dtype == "fp32" or step.engine is not None)
    }
    require_same_losses(same, 1e-4)
    for name, step in steps.items():
        if step.engine is not None:
            require_states_sharded(step.engine, int(name[-1]), dist.get_world_size())
    if rank == 0:
        for name in steps:
            line = {
                "benchmark": "train_step",
                "contender": name,
                "dtype": args.dtype,
                "params": n,
                "ranks": dist.get_world_size(),
            }
            line["ms"] = round(median_spread(times[name])[0] * 1e3, 1)
            for peer in ("ddp", "replica"):
                if peer in times:
                    line |= ratios(f"ratio_to_{peer}", times[name], times[peer])
            line |= {"threads": torch.get_num_threads(), "machine": machine()}
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
