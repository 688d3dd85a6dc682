"""How much less do two hosts with two ranks each send, and how much faster are they, when a tensor leaves a host once (shared memory inside, gloo between), against gloo alone?

Hosts are network namespaces of this machine on a switch. The rate of each host is shaped to 1 Gbit/s (tc tbf). First
fp32 collectives take turns. Then steps of a model at ZeRO stage 3, which gathers all weights twice, take turns with
``"comm": {"local": "auto"}`` and ``"off"`` in the same processes. The kernel counts the bytes on the device of host 0,
headers included. The least possible for a reduce-scatter or an all-gather is half of the tensor. The least for a step
is half of the bytes that it gathers and reduces: three times the weights, less the second gather of the last layer.
Losses have to be the same.
Run as root: python -m benchmarks.deepspeed_c.hosts_step
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.engines import n_gathers, require_weights_sharded, sharded_elems
from benchmarks.hosts import run_on_hosts
from benchmarks.measure import in_turn, median_spread, ratios, require, require_equal
from deepspeed_c.comm.collectives import Collectives
from tests.hosts import DEVICE

HOSTS = (0, 0, 1, 1)
CONTENDERS = {"shm+gloo": "auto", "gloo": "off"}
RATE = "1gbit"
WARMUP = 2
# Limit on (bytes that a host sends, with acknowledgements and headers) / (least possible bytes).
MOST_OVER_LEAST = 1.1


def n_bytes_sent() -> int:
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if f"{DEVICE}:" in line)
    return int(line.split(":")[1].split()[8])


class Count:
    """The seconds and the bytes sent by this host, for each round of each contender."""

    def __init__(self, calls: dict[str, Callable[[], Any]], rounds: int) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in calls}
        self.n_bytes: dict[str, list[float]] = {name: [] for name in calls}
        for round_ in range(rounds + WARMUP):
            for name in in_turn(list(calls), round_):
                dist.barrier()
                before = n_bytes_sent()
                dist.barrier()  # no rank begins before all have read their counters
                begin = time.perf_counter()
                calls[name]()
                dist.barrier()
                if round_ >= WARMUP:
                    self.seconds[name].append(time.perf_counter() - begin)
                    self.n_bytes[name].append(n_bytes_sent() - before)

    def row(self, least: int) -> dict[str, Any]:
        mine, flat = CONTENDERS
        row: dict[str, Any] = {
            "ms": round(median_spread(self.seconds[mine])[0] * 1e3, 1),
            "ms_gloo": round(median_spread(self.seconds[flat])[0] * 1e3, 1),
            **ratios("ratio_to_gloo", self.seconds[mine], self.seconds[flat]),
            "mb_sent": round(median_spread(self.n_bytes[mine])[0] / 1e6, 2),
            "mb_sent_gloo": round(median_spread(self.n_bytes[flat])[0] / 1e6, 2),
            "mb_least": round(least / 1e6, 2),
            **ratios("bytes_over_least", self.n_bytes[mine], [least] * len(self.n_bytes[mine])),
        }
        over = row["bytes_over_least"]
        require(0.99 <= over <= MOST_OVER_LEAST, f"a host sends at most {MOST_OVER_LEAST} of the least: {over}")
        return row


def measure_ops(mib: int, rounds: int) -> list[dict[str, Any]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    comms = {}
    for name, wish in CONTENDERS.items():
        comms[name] = Collectives()
        comms[name].use_shared_memory(wish)
    n = mib << 18
    rows = []
    for op, parts in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        calls: dict[str, Callable[[], Any]] = {}
        for name, comm in comms.items():
            flat = comm.allocate(4 * n, torch.device("cpu")).view(torch.float32).fill_(rank + 1.0)
            require(comm.transport_of(flat).name == name, f"CPU tensors take {name}: {comm.transport_of(flat).name}")
            out = torch.zeros(n // world)
            call = {
                "reduce_scatter": lambda c=comm, f=flat, o=out: c.reduce_scatter(f, o).wait(),
                "all_gather": lambda c=comm, f=flat: c.all_gather(f).wait(),
                "all_reduce": lambda c=comm, f=flat: c.all_reduce(f, scale=1 / world).wait(),
            }[op]
            call()
            if op == "reduce_scatter":
                require(out.unique().tolist() == [world * (world + 1) / 2], f"the sum over {name} is right")
            elif op == "all_gather":
                require(flat.view(world, -1)[:, 0].tolist() == [r + 1.0 for r in range(world)], f"{name} gathers")
            else:
                require(flat.unique().tolist() == [(world + 1) / 2], f"the mean over {name} is right")
            calls[name] = call
        count = Count(calls, rounds)
        rows.append({"op": op, "mib": mib, **count.row(parts * 4 * n // 2)})
    return rows


def engine_of(wish: str, width: int, layers: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    for _ in range(layers):
        model.extend([torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "comm": {"local": wish},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            # Each layer is released after use: weights are gathered in forward and again in backward.
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 4 * width * width,
            "stage3_max_live_parameters": 6 * width * width,
            "reduce_bucket_size": width * width,
        },
    }
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def measure_step(width: int, layers: int, rounds: int) -> dict[str, Any]:
    engines = {name: engine_of(wish, width, layers) for name, wish in CONTENDERS.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = (torch.randn(4, width, generator=generator) for _ in range(2))
    losses: dict[str, list[float]] = {name: [] for name in engines}

    def step(name: str) -> None:
        engine = engines[name]
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses[name].append(loss.item())

    ledger = next(iter(engines.values())).optimizer.comm.ledger
    ledger.reset_totals()
    first = {name: n_gathers(engine) for name, engine in engines.items()}
    count = Count({name: lambda name=name: step(name) for name in engines}, rounds)
    n_steps = rounds + WARMUP
    for i in range(n_steps):
        require_equal(f"losses of step {i}", {name: found[i] for name, found in losses.items()}, 1e-5)
    numel = layers * width * width
    for name, engine in engines.items():
        require_weights_sharded(engine, 1.0, (n_gathers(engine) - first[name]) / n_steps)
        carried = ledger.carried[name] / n_steps
        # A step sends all weights in forward, all gradients, and the weights in backward except the last layer's, which
        # are still gathered.
        least = 4 * (3 * numel - width * width)
        require(
            least <= carried <= 1.02 * 3 * 4 * numel,
            f"{name} carries weights twice and gradients: {carried} bytes a step",
        )
    row = {"op": "stage 3 step", "params": numel, "sharded": sharded_elems(engines["gloo"])[0]}
    return {**row, **count.row(least // 2)}


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [row for mib in args.mib for row in measure_ops(mib, args.rounds)]
    return [*rows, measure_step(args.width, args.layers, args.rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    return run_on_hosts("hosts_step", HOSTS, RATE, lambda: rows_of(args))


if __name__ == "__main__":
    sys.exit(main())
