"""How large a part of a training step do the collective ledger and its watchdog take?

A difference of two step times would not show 1 %, because steps vary by more. Instead the time of one entry (entered,
waited for, done) is measured alone. It is multiplied by the number of entries in a step of the 29M-parameter GPT, and
in a step of 200 layers of 64 x 64, whose steps are short. The watchdog looks at the store every 5 s, so it is charged
with the time of one look divided by 5 s. Two gloo ranks, fp32.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.ledger_cost
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.stage3_step import MODELS, MOST
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt
from benchmarks.engines import n_gathers, require_weights_sharded
from benchmarks.measure import machine, median_spread, require
from deepspeed_c.comm.ledger import ENTERED, Ledger, ledger_of
from deepspeed_c.comm.watchdog import _POLL_S, _own_store

N_ENTRIES = 20_000
N_LOOKS = 200


def entry_seconds() -> float:
    """Return the seconds of one entry, made like ``Collectives`` and ``Work`` make entries."""
    ledger = Ledger("benchmark", range(2))
    ledger.phase = "forward"
    begin = time.perf_counter()
    for _ in range(N_ENTRIES):
        entry = ledger.enter("all-gather", 1 << 20, "layers.7.mlp.w1 (+3 more)")
        entry.state = ENTERED
        entry.begin_wait()
        entry.end()
    return (time.perf_counter() - begin) / N_ENTRIES


def look_seconds() -> float:
    """Return the seconds of one look for an alarm."""
    store = _own_store()
    begin = time.perf_counter()
    for i in range(N_LOOKS):
        store.check([f"benchmark/{i}"])
    return (time.perf_counter() - begin) / N_LOOKS


def make_step(model: torch.nn.Module, stage: int, batch: torch.Tensor):
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        # Small parameters are sharded too, so that at stage 3 they are gathered.
        "zero_optimization": {"stage": stage, "overlap_comm": True, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed_c.initialize(model=model, config=config)[0]

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    return engine, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    contenders = {
        "29M GPT": (Gpt, torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)),
        "200 layers of 64 x 64": (MODELS["small"][0], torch.randn(BATCH, 64, generator=generator)),
    }
    look = median_spread([look_seconds() for _ in range(args.rounds)])[0]
    for name, (make, batch) in contenders.items():
        for stage in args.stages:
            engine, step = make_step(make(), stage, batch)
            for _ in range(3):
                step()
            seconds, entries, shares = [], [], []
            first, n_steps = ledger_of().last, 0
            for _ in range(args.rounds):
                begin = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - begin)
                n_steps += 1
                entries.append(entry_seconds())
            per_step = (ledger_of().last - first) / n_steps
            shares = [per_step * entry / s + look / _POLL_S for entry, s in zip(entries, seconds)]
            if stage == 3:
                require_weights_sharded(engine, MOST, n_gathers(engine))
            require(per_step >= 2, f"a step makes entries: {per_step}")
            share, low, high = median_spread(shares)
            if rank == 0:
                line = {
                    "benchmark": "ledger_cost",
                    "contender": name,
                    "stage": stage,
                    "ranks": dist.get_world_size(),
                    "ns_per_entry": round(median_spread(entries)[0] * 1e9),
                    "entries_per_step": round(per_step, 1),
                    "ms_per_step": round(median_spread(seconds)[0] * 1e3, 1),
                    "us_per_look": round(look * 1e6, 1),
                    "share_of_step": round(share, 6),
                    "share_of_step_min": round(low, 6),
                    "share_of_step_max": round(high, 6),
                    "machine": machine(),
                }
                print(json.dumps(line), flush=True)
            engine.close()
            dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
