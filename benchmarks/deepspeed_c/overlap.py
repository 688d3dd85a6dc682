"""How much of stage 3's communication hides behind computation, over a link that takes from a quarter of the
computation's time to four times as long?

Two hosts (network namespaces of this machine, links shaped by tc tbf) have one rank each. Layers sleep instead of
computing, because an accelerator leaves the host idle in the same way. A layer sleeps a third of its time in forward
and two thirds in backward. Each layer is gathered in forward and again in backward, and its gradient is reduced.
Communication is the time of a single gather of as many bytes, with nothing else at the same time: several gathers, one
after the other or all at once, leave the link idle now and then. Computation is the time of a step of the same model in
plain torch on both ranks, which sends nothing. The bound is the longer of both, plus the first gather and the last
reduction, which nothing can hide. The goal allows the longer one to take 5 % more.
Run as root: python -m benchmarks.deepspeed_c.overlap [--ratios 0.25 0.5 1 2 4]
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.engines import n_gathers, require_weights_sharded
from benchmarks.hosts import run_on_hosts
from benchmarks.measure import bound, median_spread, ratios, require
from deepspeed_c.comm.collectives import Collectives

HOSTS = (0, 1)
RATE = "1gbit"
WARMUP = 2
# Goal: the longer of computation and communication may take at most this factor of its own length.
MOST = 1.05
LR = 1e-4


class _Computes(torch.autograd.Function):
    """An identity that sleeps: ``seconds`` in forward, twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.layer.seconds)
        return dy, None


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width, bias=False)
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(_Computes.apply(x, self)))


def collectives_seconds(width: int, layers: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds that the link takes for a layer's weights, and for all that a step sends."""
    comm = Collectives()
    comm.use_shared_memory("auto")
    # Each layer is gathered twice but for the last, which stays gathered from forward to backward, and reduced once. A
    # reduction sends as much as a gather.
    n_sent = 3 * layers - 1
    everything = torch.zeros(n_sent * width * width)
    seconds = []
    for _ in range(max(rounds, 3)):
        dist.barrier()
        begin = time.perf_counter()
        comm.all_gather(everything).wait()
        seconds.append(time.perf_counter() - begin)
    communication = median_spread(seconds)[0]
    return communication / n_sent, communication


def measure(width: int, layers: int, wanted: list[float], rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Layer(width) for _ in range(layers)])
    numel = width * width
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": numel,  # keeps the last layer gathered from forward to backward
            "stage3_prefetch_bucket_size": 2 * numel,
            "stage3_max_live_parameters": 4 * numel,
            "reduce_bucket_size": numel,
        },
    }
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    engine = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.randn(1, width, requires_grad=True)

    def engine_step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    def plain_step() -> None:
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(step: Callable[[], None]) -> list[float]:
        seconds = []
        for _ in range(rounds + WARMUP):
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        return seconds[WARMUP:]

    one, communication = collectives_seconds(width, layers, rounds)
    rows = []
    for ratio in wanted:
        for layer in (*model, *plain):
            layer.seconds = communication / ratio / (3 * layers)
        computation = median_spread(timed(plain_step))[0]
        first = n_gathers(engine)
        seconds = timed(engine_step)
        n_a_step = (n_gathers(engine) - first) / (rounds + WARMUP)
        require_weights_sharded(engine, 1.0, n_a_step)
        require(n_a_step < 2 * layers, f"the last layer's weights are gathered once: {n_a_step} gathers a step")
        least = max(computation, communication) + 2 * one
        require(min(seconds) > 0.95 * least, f"nothing is faster than its bound: {min(seconds)} s and {least} s")
        rows.append(
            {
                "communication_over_computation": ratio,
                "ms": round(median_spread(seconds)[0] * 1e3, 1),
                "ms_computation": round(computation * 1e3, 1),
                "ms_communication": round(communication * 1e3, 1),
                "hidden": round(
                    (computation + communication - median_spread(seconds)[0]) / min(computation, communication), 3
                ),
                **bound("ratio_to_bound", seconds, [least] * len(seconds)),
                **ratios(
                    "ratio_to_goal", seconds, [least + (MOST - 1) * max(computation, communication)] * len(seconds)
                ),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    shape = {"layers": args.layers, "mib": 4 * args.width**2 / 2**20}
    return run_on_hosts(
        "overlap",
        HOSTS,
        RATE,
        lambda: [{**row, **shape} for row in measure(args.width, args.layers, args.ratios, args.rounds)],
    )


if __name__ == "__main__":
    sys.exit(main())
