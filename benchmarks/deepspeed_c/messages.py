"""How long do messages between two ranks of one host take through shared memory, and how long over gloo?

One message goes back and forth between the ranks by ``Collectives.message``. Half the time of the way there and back is
the time of one way. The data lies in the arena, where the receiver reads it in place, or in ordinary memory, from which
the sender copies it first. gloo's own ``isend`` and ``irecv`` take turns with them. The bound is a copy of the bytes in
a rank's own memory.

Two programs then run with ``comm.local`` "auto" and with "off" in turn: a batch of a pipeline of two stages (the example
GPT) and attention around a ring of two ranks, forward and backward. How much of their time messages can take is shown,
too: for the pipeline by the time of its messages alone over gloo, for the ring by the time of ranks that send nothing.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.messages
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.ring_attention import Mute
from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require, time_alternately
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.ledger import all_ledgers
from deepspeed_c.comm.transports.shared_memory import SharedMemory
from deepspeed_c.pipe import PipelineModule, TiedLayerSpec
from deepspeed_c.sequence import SequenceCut, ring_attention
from examples.gpt import GPT, cross_entropy, embed, scores

KIB = (4, 1024)
LABEL = "output of stage 0, micro-batch 0"
CPU = torch.device("cpu")
WARMUP = 3
MICRO_BATCHES, ROWS = 4, 8
HEADS, HEAD_WIDTH = 8, 64


def carried() -> dict[str, int]:
    """Return the bytes that each path has carried so far, over all ledgers of this rank."""
    sums: dict[str, int] = {}
    for ledger in all_ledgers():
        for path, n_bytes in ledger.carried.items():
            sums[path] = sums.get(path, 0) + n_bytes
    return sums


def require_path(before: dict[str, int], path: str, n_bytes: int, what: str) -> None:
    """Require that since ``before`` the path has carried at least these bytes of messages, and its rival none."""
    grown = {name: n - before.get(name, 0) for name, n in carried().items()}
    rival = "gloo" if path == "shm" else "shm"
    require(grown.get(path, 0) >= n_bytes and not grown.get(rival), f"{what} goes through {path}: {grown}")


def by_message(comm: Collectives, tensor: torch.Tensor) -> Callable[[bool], None]:
    """Return a call that sends ``tensor`` to the other rank (True), or receives one of its size."""
    received, me, other = torch.empty_like(tensor), comm.rank, 1 - comm.rank

    def call(sends: bool) -> None:
        if sends:
            comm.message(tensor, me, other, label=LABEL).wait()
        else:
            comm.message(received, other, me, label=LABEL).wait()

    return call


def by_gloo(tensor: torch.Tensor) -> Callable[[bool], None]:
    """Return the same call over gloo, with nothing of ours around it."""
    received, other = torch.empty_like(tensor), 1 - dist.get_rank()

    def call(sends: bool) -> None:
        if sends:
            dist.isend(tensor, other).wait()
        else:
            dist.irecv(received, other).wait()

    return call


def one_way(call: Callable[[bool], None], repeats: int) -> float:
    """Return the seconds of one message, as rank 0 measures them."""
    is_first = dist.get_rank() == 0
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call(is_first)
        call(not is_first)
    return (time.perf_counter() - begin) / repeats / 2


def copy_seconds(n_bytes: int, repeats: int) -> float:
    """Return the seconds of a copy on rank 0, while the other rank waits."""
    source, target = torch.ones(n_bytes, dtype=torch.uint8), torch.ones(n_bytes, dtype=torch.uint8)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats if dist.get_rank() == 0 else 0):
        target.copy_(source)
    seconds = (time.perf_counter() - begin) / repeats
    dist.barrier()
    return seconds


def measure_message(comm: Collectives, kib: int, rounds: int) -> list[dict[str, Any]]:
    n_bytes = kib << 10
    ordinary, arena = torch.zeros(n_bytes, dtype=torch.uint8), comm.allocate(n_bytes, CPU).zero_()
    memory = comm.transport_of(ordinary)
    require(
        isinstance(memory, SharedMemory) and memory.owns(arena) and not memory.owns(ordinary),
        "one tensor lies in the arena, the other does not",
    )
    calls = {"arena": by_message(comm, arena), "ordinary": by_message(comm, ordinary), "gloo": by_gloo(ordinary)}
    repeats = max(10, 4096 // kib)
    times: dict[str, list[float]] = {name: [] for name in (*calls, "copy")}
    for round_ in range(rounds + WARMUP):
        for name in in_turn(list(times), round_):
            before = carried()
            seconds = copy_seconds(n_bytes, repeats) if name == "copy" else one_way(calls[name], repeats)
            if name in ("arena", "ordinary"):
                require_path(before, "shm", 2 * repeats * n_bytes, f"a message of {kib} KiB from {name} memory")
            if round_ >= WARMUP:
                times[name].append(seconds)
    rows = []
    for name in ("arena", "ordinary"):
        us, low, high = (value * 1e6 for value in median_spread(times[name]))
        rows.append(
            {
                "contender": name,
                "kib": kib,
                "us": round(us, 2),
                "us_min": round(low, 2),
                "us_max": round(high, 2),
                "us_gloo": round(median_spread(times["gloo"])[0] * 1e6, 1),
                "us_copy": round(median_spread(times["copy"])[0] * 1e6, 2),
                "gb_per_s_of_copy": round(n_bytes / median_spread(times["copy"])[0] / 1e9, 1),
                **ratios("ratio_to_gloo", times[name], times["gloo"]),
                **bound("ratio_to_copy", times[name], times["copy"]),
            }
        )
    return rows


def pipeline(way: str, layers: int, width: int, context: int) -> deepspeed_c.PipelineEngine:
    torch.manual_seed(0)
    model = GPT(layers, width, width // HEAD_WIDTH, context)
    first, last = (TiedLayerSpec("embedding", lambda: model.embedding, forward_fn=of) for of in (embed, scores))
    module = PipelineModule([first, *model.blocks, model.norm, last], num_stages=2, loss_fn=cross_entropy)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "comm": {"local": way},
    }
    return deepspeed_c.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def measure_pipeline(rounds: int, layers: int, width: int, context: int) -> list[dict[str, Any]]:
    tokens = torch.randint(0, 256, (ROWS, context + 1), generator=torch.Generator().manual_seed(0))
    n_bytes = ROWS * context * width * 4
    engines = {way: pipeline(way, layers, width, context) for way in ("auto", "off")}
    losses: dict[str, list[float]] = {way: [] for way in engines}

    def step_of(way: str) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            losses[way].append(engines[way].train_batch(itertools.repeat(batch)).item())

        return step

    batch = (tokens[:, :-1], tokens[:, 1:])
    for way, path in (("auto", "shm"), ("off", "gloo")):
        before = carried()
        step_of(way)(batch)
        require_path(before, path, MICRO_BATCHES * n_bytes, f"the pipeline with {way}")
    times = time_alternately({way: step_of(way) for way in engines}, batch, rounds, WARMUP)
    require(losses["auto"] == losses["off"], "both ways give the same losses")
    for engine in engines.values():
        engine.close()
    call = by_gloo(torch.zeros(n_bytes, dtype=torch.uint8))
    alone = [2 * MICRO_BATCHES * one_way(call, 1) for _ in range(rounds)]
    return [
        {
            "contender": "pipeline of the example GPT",
            "layers": layers,
            "width": width,
            "mib_of_a_message": round(n_bytes / 2**20, 2),
            "ms": round(median_spread(times["auto"])[0] * 1e3, 1),
            "ms_gloo": round(median_spread(times["off"])[0] * 1e3, 1),
            "ms_of_messages_gloo": round(median_spread(alone)[0] * 1e3, 1),
            **ratios("ratio_to_gloo", times["auto"], times["off"]),
        }
    ]


def measure_ring(rounds: int, tokens: int) -> list[dict[str, Any]]:
    shared, plain, mute = Collectives(), Collectives(), Mute()
    shared.use_shared_memory("shm")
    cut = SequenceCut(tokens, 2)
    shape = 1, HEADS, cut.tokens[shared.rank], HEAD_WIDTH
    torch.manual_seed(shared.rank)
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    grad = torch.randn(shape)
    last: dict[str, tuple[torch.Tensor, ...]] = {}

    def step_of(name: str, comm: Collectives) -> Callable[[Any], None]:
        def step(_: Any) -> None:
            out = ring_attention(q, k, v, comm, cut)
            last[name] = (out, *torch.autograd.grad(out, (q, k, v), grad))

        return step

    ranks = {"shm": shared, "gloo": plain, "mute": mute}
    steps = {name: step_of(name, comm) for name, comm in ranks.items()}
    for path in ("shm", "gloo"):
        before = carried()
        steps[path](None)
        require_path(before, path, 2 * k.numel() * k.element_size(), f"the ring over {path}")
    times = time_alternately(steps, None, rounds, WARMUP)
    same = all(torch.equal(a, b) for a, b in zip(last["shm"], last["gloo"], strict=True))
    require(same, "both ways give the same results and gradients")
    return [
        {
            "contender": "attention around a ring",
            "tokens": tokens,
            "mib_of_a_message": round(2 * k.numel() * k.element_size() / 2**20, 2),
            "ms": round(median_spread(times["shm"])[0] * 1e3, 2),
            "ms_gloo": round(median_spread(times["gloo"])[0] * 1e3, 2),
            "ms_alone": round(median_spread(times["mute"])[0] * 1e3, 2),
            **ratios("ratio_to_gloo", times["shm"], times["gloo"]),
            **ratios("ratio_to_alone", times["shm"], times["mute"]),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--kib", type=int, nargs="+", default=KIB)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Collectives()
    comm.use_shared_memory("shm")
    parts = [lambda kib=kib: measure_message(comm, kib, args.rounds) for kib in args.kib]
    parts.append(lambda: measure_pipeline(args.rounds, args.layers, args.width, args.context))
    parts += [lambda tokens=tokens: measure_ring(args.rounds, tokens) for tokens in args.tokens]
    for part in parts:
        for row in part():
            if dist.get_rank() == 0:
                print(json.dumps({"benchmark": "messages", **row, "ranks": 2, "machine": machine()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
