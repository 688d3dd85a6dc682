"""How much less do two hosts with two ranks each send, and how much faster are they, when ranks keep second shards (``zero_hpz_partition_size``), against ZeRO stage 3 alone?

Hosts are network namespaces of this machine on a switch. The rate of each host is shaped to 200 Mbit/s (tc tbf). Steps
of one model with and without the key take turns in the same processes; each unit is released after use. The kernel
counts the bytes on the device of host 0, headers included. The formula: a gather of all weights sends half of them from
each host, in the dtype of the weights. A sum of all gradients sends half of them in fp32. Stage 3 gathers each unit in
forward and in backward of each micro-batch. With second shards each unit is gathered over the link once a step. The
bound of the time is these bytes over the rate. Losses have to be the same to the bit.
With --one-host the same is timed on two ranks of one host, where no second shards are kept, and the live tensor bytes of
a rank are compared.
Run as root: python -m benchmarks.deepspeed_c.second_shards
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.hosts_step import WARMUP, Count
from benchmarks.engines import n_gathers, require_weights_sharded
from benchmarks.hosts import run_on_hosts
from benchmarks.measure import bound, machine, median_spread, ratios, require, time_alternately
from deepspeed_c.plan.live_bytes import LiveBytes

HOSTS = (0, 0, 1, 1)
RATE, BYTES_A_SECOND = "200mbit", 200e6 / 8
SECOND, STAGE_3 = "second shards", "stage 3"
SIZES = {SECOND: 2, STAGE_3: 1}
KEYS = {SECOND: "", STAGE_3: "_stage_3"}
CASES = (("fp32", 1), ("bf16", 1), ("bf16", 4))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = 4
# Limit on (bytes that a host sends, with acknowledgements and headers) / (bytes of the formula).
MOST_OVER_FORMULA = 1.1
# On one host.
ROWS_OF_ONE_HOST, STEPS_A_ROUND = 64, 20


class Trained:
    """Steps of one contender."""

    def __init__(self, name: str, dtype: str, micros: int, width: int, layers: int, rows: int) -> None:
        torch.manual_seed(0)
        self._model = torch.nn.Sequential()
        for _ in range(layers):
            self._model.extend([torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()])
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": micros,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "steps_per_print": 10**9,
            **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": SIZES[name],
                "stage3_param_persistence_threshold": 0,
                # Each unit is released after use.
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 2 * width * width,
                "stage3_max_live_parameters": 4 * width * width,
                "reduce_bucket_size": width * width,
            },
        }
        self.engine = deepspeed_c.initialize(
            model=self._model, model_parameters=self._model.parameters(), config=config
        )[0]
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._batches = [
            tuple(torch.randn(rows, width, generator=generator).to(DTYPES[dtype]) for _ in range(2))
            for _ in range(micros)
        ]
        for x, _ in self._batches:
            x.requires_grad_()  # the backward of the first layer needs its weight too
        self.losses: list[float] = []

    @property
    def units(self) -> list[int]:
        """The elements of each gather unit."""
        return [group.numel for group in self.engine._fetcher.groups]

    def step(self) -> None:
        for x, y in self._batches:
            loss = (self.engine(x) - y).float().square().mean()
            self.engine.backward(loss)
            self.engine.step()
            self.losses.append(loss.item())

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()


def bytes_of_formula(name: str, dtype: str, micros: int, numel: int) -> int:
    """Bytes of weights and gradients that leave a host in a step, for a model of ``numel`` elements."""
    gathered = numel if name == SECOND else micros * 2 * numel
    return (gathered * DTYPES[dtype].itemsize + micros * numel * torch.float32.itemsize) // len(set(HOSTS))


def measure(dtype: str, micros: int, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """The row of two hosts."""
    trained = {name: Trained(name, dtype, micros, width, layers, ROWS) for name in SIZES}
    units = trained[STAGE_3].units
    numel = sum(units)
    require(units == [width * width] * layers, f"each layer is a unit without padding: {units}")
    first = {name: n_gathers(each.engine) for name, each in trained.items()}
    count = Count({name: each.step for name, each in trained.items()}, rounds)
    require(trained[SECOND].losses == trained[STAGE_3].losses, "losses have the same bits")
    row: dict[str, Any] = {"dtype": dtype, "micro_batches": micros, "params": numel}
    for name, each in trained.items():
        n_steps = rounds + WARMUP
        gathers = (n_gathers(each.engine) - first[name]) / n_steps
        require_weights_sharded(each.engine, 1.0, gathers)
        wanted = 2 * micros * layers
        require(gathers == wanted, f"each unit is gathered twice in each micro-batch: {gathers} instead of {wanted}")
        require((each.engine._fetcher.groups[0].source.near is not None) == (name == SECOND), f"{name}: second shards")
        formula = bytes_of_formula(name, dtype, micros, numel)
        over = ratios("bytes_over_formula", count.n_bytes[name], [formula] * rounds)
        found = over["bytes_over_formula"]
        require(0.99 <= found <= MOST_OVER_FORMULA, f"{name} sends at most {MOST_OVER_FORMULA} of the formula: {found}")
        row |= {f"ms{KEYS[name]}": round(median_spread(count.seconds[name])[0] * 1e3, 1)}
        row |= {f"mb_sent{KEYS[name]}": round(median_spread(count.n_bytes[name])[0] / 1e6, 3)}
        row |= {f"mb_of_formula{KEYS[name]}": round(formula / 1e6, 3)}
        row |= bound(f"over_link{KEYS[name]}", count.seconds[name], [formula / BYTES_A_SECOND] * rounds)
        each.engine.close()
    row |= ratios("ratio_to_stage_3", count.seconds[SECOND], count.seconds[STAGE_3])
    row |= ratios("bytes_to_stage_3", count.n_bytes[SECOND], count.n_bytes[STAGE_3])
    return row


def peak_bytes(name: str, width: int, layers: int) -> int:
    """Live tensor bytes of this rank at the peak of a step."""
    with LiveBytes() as live:
        trained = Trained(name, "fp32", 1, width, layers, ROWS_OF_ONE_HOST)
        for _ in range(WARMUP):
            trained.step()
        with live.phase("step"):
            trained.step()
    trained.engine.close()
    return live.peaks["step"]


def measure_one_host(width: int, layers: int, rounds: int) -> dict[str, Any]:
    """The row of one host."""
    peaks = {}
    for name in (STAGE_3, SECOND):
        peaks[name] = peak_bytes(name, width, layers)
        gc.collect()
    trained = {name: Trained(name, "fp32", 1, width, layers, ROWS_OF_ONE_HOST) for name in SIZES}

    seconds = time_alternately({name: each.steps for name, each in trained.items()}, STEPS_A_ROUND, rounds, WARMUP)
    require(trained[SECOND].losses == trained[STAGE_3].losses, "losses have the same bits")
    numel = sum(trained[SECOND].units)
    return {
        "params": numel,
        "ms": round(median_spread(seconds[SECOND])[0] / STEPS_A_ROUND * 1e3, 2),
        "ms_stage_3": round(median_spread(seconds[STAGE_3])[0] / STEPS_A_ROUND * 1e3, 2),
        **ratios("ratio_to_stage_3", seconds[SECOND], seconds[STAGE_3]),
        "peak": peaks[SECOND],
        "peak_stage_3": peaks[STAGE_3],
        "bytes_more": peaks[SECOND] - peaks[STAGE_3],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--one-host", action="store_true")
    args = parser.parse_args()
    if not args.one_host:
        return run_on_hosts(
            "second_shards",
            HOSTS,
            RATE,
            lambda: [measure(*case, args.width, args.layers, args.rounds) for case in CASES],
        )
    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo", verbose=False)
    row = measure_one_host(args.width, args.layers, args.rounds)
    if dist.get_rank() == 0:
        shape = {"hosts": 1, "ranks": dist.get_world_size(), "machine": machine()}
        print(json.dumps({"benchmark": "second_shards_one_host", **row, **shape}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
