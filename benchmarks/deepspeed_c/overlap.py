"""How much of what stage 3 sends hides behind computation, over a link that takes from a quarter of the computation's time to four times as long?

Two hosts (network namespaces of this machine, links shaped by tc tbf) with a rank each. Layers compute by sleeping, as an accelerator does for the host, a third of their time in forward and two thirds in backward;
each is gathered in forward, gathered in backward, and its gradient is reduced. Communication is what the same collectives take one after the other with nothing beside them. The bound is the longer of computation
and communication, and the first gather and the last reduction, beside which there is nothing to do.
Run as root: python -m benchmarks.deepspeed_c.overlap [--ratios 0.25 0.5 1 2 4]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.hosts_step import wait_for
from benchmarks.engines import n_gathers, require_weights_sharded
from benchmarks.measure import bound, machine, median_spread, require
from benchmarks.run import SKIPPED
from deepspeed_c.comm.collectives import Collectives
from tests.hosts import Hosts, why_no_hosts

HOSTS = (0, 1)
RATE = "1gbit"
WARMUP = 2


class _Computes(torch.autograd.Function):
    """The same tensor, later: ``seconds`` in forward, twice as long in backward."""

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
    """Of a gather and of a reduction of one layer, one after the other, the median."""
    comm = Collectives()
    comm.use_shared_memory("auto")
    flat, out = torch.zeros(width * width), torch.zeros(width * width // comm.world_size)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(rounds, 3) * layers):
        for found, call in zip(times, (lambda: comm.all_gather(flat), lambda: comm.reduce_scatter(flat, out))):
            dist.barrier()
            begin = time.perf_counter()
            call().wait()
            found.append(time.perf_counter() - begin)
    return median_spread(times[0])[0], median_spread(times[1])[0]


def measure(width: int, layers: int, wanted: list[float], rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Layer(width) for _ in range(layers)])
    numel = width * width
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2 * numel,
            "stage3_max_live_parameters": 4 * numel,
            "reduce_bucket_size": numel,
        },
    }
    engine = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.randn(1, width, requires_grad=True)

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine(x).square().mean())
        engine.step()
        dist.barrier()
        return time.perf_counter() - begin

    gather, reduction = collectives_seconds(width, layers, rounds)
    communication = (2 * layers - 1) * gather + layers * reduction  # the last layer's weights are still there
    rows = []
    for ratio in wanted:
        computation = communication / ratio
        for layer in model:
            layer.seconds = computation / (3 * layers)
        first = n_gathers(engine)
        seconds = [step() for _ in range(rounds + WARMUP)][WARMUP:]
        require_weights_sharded(engine, 1.0, (n_gathers(engine) - first) / (rounds + WARMUP))
        least = max(computation, communication) + gather + reduction
        require(min(seconds) > 0.95 * least, f"nothing is faster than its bound: {min(seconds)} s and {least} s")
        rows.append(
            {
                "communication_over_computation": ratio,
                "ms": round(median_spread(seconds)[0] * 1e3, 1),
                "ms_computation": round(computation * 1e3, 1),
                "ms_communication": round(communication * 1e3, 1),
                "hidden": round((computation + communication - median_spread(seconds)[0]) / min(computation, communication), 3),
                **bound("ratio_to_bound", seconds, [least] * len(seconds)),
            }
        )
    return rows


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo", verbose=False)
    rows = measure(args.width, args.layers, args.ratios, args.rounds)
    if dist.get_rank() == 0:
        for row in rows:
            shape = {"layers": args.layers, "mib": 4 * args.width**2 / 2**20, "link": RATE, "machine": machine()}
            print(json.dumps({"benchmark": "overlap", **row, **shape}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
    if why_no_hosts():
        print(why_no_hosts(), file=sys.stderr)
        return SKIPPED
    with Hosts(2, rate=RATE) as hosts:
        return wait_for(hosts, HOSTS, "benchmarks.deepspeed_c.overlap")


if __name__ == "__main__":
    sys.exit(main())
