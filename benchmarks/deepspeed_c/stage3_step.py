"""How long is a training step with sharded parameters on 2 gloo ranks, against FSDP2 (``fully_shard``) and DDP with torch's fused AdamW?

Three models in fp32: the 29M-parameter GPT of ``train_step``, a 67M-parameter MLP (16 layers of 2048 x 2048), and 200
small layers (64 x 64, activations between), whose step is mostly bookkeeping. FSDP2 also runs with our all-gather
(``set_custom_all_gather``), because gloo's all-gather takes about half of an FSDP2 step. This contender compares the
rest of the design. All parameters of the small layers lie below the default persistence threshold, so that nothing
would be sharded. Their "stage3" therefore sets the threshold to 0, and "stage3_persistent" has the default. All
contenders run in the same processes, in an order that changes with the round. Each round times one step of each
contender. All losses have to be the same at every step, and the weights of "stage3" have to be sharded, and gathered in
each step. CI prints the small layers with "--brief". "stage3_zero_copy" is "stage3" with ``comm.zero_copy_gather``, with which a gather sends nothing. "replica"
trains independently on each rank and sends nothing.
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

from benchmarks.deepspeed_c.train_step import (
    BATCH,
    LENGTH,
    VOCAB,
    Contender,
    Gpt,
    ddp,
    ours,
    plain,
    replica,
    require_same_losses,
    seeded,
)
from benchmarks.engines import n_gathers, require_gathers_copy, require_weights_sharded, sharded_elems
from benchmarks.measure import machine, median_spread, ratio_text, ratios, time_alternately
from deepspeed_c.comm.collectives import Collectives

WARMUP = 3


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
# Model -> additional keys of zero_optimization for its contender "stage3".
ZERO = {"small": {"stage3_param_persistence_threshold": 0}}
ZERO_COPY = {"local": "shm", "zero_copy_gather": True}
MOST = 0.9  # least share of sharded elements, below 1 because norms and biases may persist


class OurAllGather:
    """Replaces FSDP2's all-gather with ``Collectives.all_gather``.

    The input is already this rank's slice of the output.
    """

    def __init__(self) -> None:
        self._comm = Collectives()

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        mine = self._comm.own_slice(output_tensor)
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        self._comm.all_gather(output_tensor).wait()


def fsdp2(model, all_gather=None) -> Contender:
    blocks = getattr(model, "blocks", None) or model.layers
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    if all_gather is not None:
        for module in (*blocks, model):
            module.set_custom_all_gather(all_gather)
    return plain(model, model)


CONTENDERS = {
    "fsdp2": lambda model, zero: fsdp2(model),
    "fsdp2_our_all_gather": lambda model, zero: fsdp2(model, OurAllGather()),
    "ddp": lambda model, zero: ddp(model),
    "replica": lambda model, zero: replica(model),
    "stage1": lambda model, zero: ours(model, 1),
    "stage2": lambda model, zero: ours(model, 2),
    "stage3": lambda model, zero: ours(model, 3, **zero),
    "stage3_zero_copy": lambda model, zero: ours(model, 3, comm=ZERO_COPY, **zero),
    "stage3_persistent": lambda model, zero: ours(model, 3),
}
DEFAULT = {
    "gpt": ["fsdp2", "fsdp2_our_all_gather", "ddp", "replica", "stage3", "stage3_zero_copy"],
    "mlp": ["fsdp2", "fsdp2_our_all_gather", "ddp", "replica", "stage1", "stage2", "stage3", "stage3_zero_copy"],
    "small": ["fsdp2", "ddp", "replica", "stage3", "stage3_zero_copy", "stage3_persistent"],
}


class GatherCount:
    """Counts the gathers of a contender from its creation on; 0 for a peer."""

    def __init__(self, contender: Contender) -> None:
        self._contender, self._first = contender, self._now(contender)
        self._first_step = len(contender.losses)

    @staticmethod
    def _now(contender: Contender) -> int:
        return 0 if contender.engine is None else n_gathers(contender.engine)

    def per_step(self) -> float:
        n_steps = len(self._contender.losses) - self._first_step
        return (self._now(self._contender) - self._first) / n_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", help="contenders", choices=CONTENDERS)
    parser.add_argument("--brief", action="store_true", help="print one line for a reader; needs stage3, ddp, replica")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make, make_batch = MODELS[args.model]
    steps = {
        name: CONTENDERS[name](seeded(make), ZERO.get(args.model, {})) for name in args.only or DEFAULT[args.model]
    }
    batch = make_batch(torch.Generator().manual_seed(rank))
    gathers = {name: GatherCount(step) for name, step in steps.items()}
    times = time_alternately(steps, batch, args.rounds, warmup=WARMUP)
    require_same_losses({name: step for name, step in steps.items() if name != "replica"}, 1e-4)
    for name in {"stage3", "stage3_zero_copy"} & set(steps):
        require_weights_sharded(steps[name].engine, MOST, gathers[name].per_step())
        require_gathers_copy(steps[name].engine, name == "stage3")
    if rank == 0 and args.brief:
        print(
            f"stage 3, model {args.model}, {dist.get_world_size()} ranks: a step takes"
            f" {ratio_text(times['stage3'], times['ddp'])} of DDP's time, and"
            f" {ratio_text(times['stage3'], times['replica'])} of that of replicas that send nothing"
            f" (median and middle half of {args.rounds} rounds)",
            flush=True,
        )
    elif rank == 0:
        n = sum(p.numel() for p in make().parameters())
        for name, step in steps.items():
            line = {"benchmark": "stage3_step", "model": args.model, "contender": name, "params": n}
            if step.engine is not None:
                line |= {
                    "sharded": sharded_elems(step.engine)[0],
                    "gathers_per_step": round(gathers[name].per_step(), 1),
                }
            line["ms"] = round(median_spread(times[name])[0] * 1e3, 1)
            for peer in ("fsdp2", "fsdp2_our_all_gather", "ddp", "replica", "stage3"):
                if peer in times:
                    line |= ratios(f"ratio_to_{peer}", times[name], times[peer])
            line |= {"ranks": dist.get_world_size(), "threads": torch.get_num_threads(), "machine": machine()}
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
