"""How much time and memory does cross-entropy take on logits cut over 2 ranks by vocabulary, against gathering the
logits?

2,048 tokens x a vocabulary of 32,768 in fp32, forward and backward, one thread a rank. "gathered" gathers whole logits
on both ranks with the same collectives, and computes the loss with torch. Memory is the peak of live bytes, including
the rank's own logits. Losses and gradients have to be the same.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.ops.vocab_cross_entropy
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import machine, median_spread, ratios, require, require_equal, time_alternately
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.inject.loss import vocab_parallel_cross_entropy
from deepspeed_c.inject.ranks import TensorRanks
from deepspeed_c.plan.live_bytes import LiveBytes

WARMUP = 2


class Loss:
    """Forward and backward of one contender on fresh logits; the values of its last run."""

    def __init__(self, ranks: TensorRanks, sizes: list[int], *, is_cut: bool) -> None:
        self._ranks, self._sizes, self._is_cut = ranks, sizes, is_cut
        self.loss = 0.0
        self.grad: torch.Tensor | None = None

    def __call__(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Like the output of a head: nothing else holds these logits, so the gradient may overwrite them.
        leaf = batch[0].detach().requires_grad_()
        logits, targets = leaf * 1.0, batch[1]
        if self._is_cut:
            losses = vocab_parallel_cross_entropy(logits, targets, self._sizes, self._ranks)
        else:
            whole = self._ranks.gather(logits, self._sizes, "logits")
            losses = torch.nn.functional.cross_entropy(whole, targets, reduction="none")
        loss = losses.mean()
        loss.backward()
        self.loss, self.grad = loss.item(), leaf.grad


def peak_bytes(step: Any, batch: Any) -> int:
    step.grad = None
    with LiveBytes() as live, live.phase("step"):
        step(batch)
    return live.peaks["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--words", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Collectives()
    comm.use_shared_memory("auto")
    ranks, world = TensorRanks(comm), dist.get_world_size()
    require(args.words % world == 0, f"{args.words} words are a multiple of {world} ranks")
    sizes = [args.words // world] * world
    targets = torch.randint(args.words, (args.tokens,), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(args.tokens, sizes[0], generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    batch = logits, targets
    steps = {"cut": Loss(ranks, sizes, is_cut=True), "gathered": Loss(ranks, sizes, is_cut=False)}
    times = time_alternately(steps, batch, args.rounds, WARMUP)
    require_equal("losses", {name: step.loss for name, step in steps.items()}, 1e-5)
    difference = (steps["cut"].grad - steps["gathered"].grad).abs().max().item()
    largest = steps["gathered"].grad.abs().max().item()
    require(difference < 1e-4 * largest, f"gradients are the same: {difference} of {largest}")
    peaks = {name: peak_bytes(step, batch) for name, step in steps.items()}
    if dist.get_rank() == 0:
        for name in steps:
            line = {"benchmark": "vocab_cross_entropy", "contender": name, "tokens": args.tokens, "words": args.words}
            line |= {"ms": round(1e3 * median_spread(times[name])[0], 1), "peak_mib": round(peaks[name] / 2**20, 1)}
            line |= ratios("ratio_to_gathered", times[name], times["gathered"])
            line |= {"peak_to_gathered": round(peaks[name] / peaks["gathered"], 4)}
            print(json.dumps({**line, "ranks": world, "machine": machine()}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
