"""How long do collectives between the ranks of one host take through shared memory, and how long over gloo?

For each operation and size, three contenders take turns: gloo, shared memory with data in the arena (which the other
ranks read in place), and shared memory with data elsewhere (staged). A time is that of the slowest rank, from a barrier
to the end of the rank's call. The bound is the time of passes over the same number of bytes in a rank's own memory, on
all ranks at once.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.comm_ops
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require
from deepspeed_c import _C
from deepspeed_c.comm.transports.torch_backend import all_gather_single, reduce_scatter_single

KIB = (4, 64, 1024, 65536)


def connect() -> _C.ShmGroup:
    group = _C.ShmGroup(dist.get_rank(), dist.get_world_size(), 300.0)
    addresses: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(addresses, group.address)
    group.attach(addresses)
    dist.barrier()
    return group


def contenders(group: _C.ShmGroup, op: str, n: int) -> dict[str, tuple[torch.Tensor, Callable[[], object]]]:
    """Return each contender's tensor (n float32 elements) and its call, which blocks until the operation is done."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * (n // world), (rank + 1) * (n // world))
    block: _C.ShmBuffer = group.empty(4 * n)
    arena = torch.frombuffer(block, dtype=torch.float32)
    plain, theirs = torch.empty(n), torch.empty(n)
    require(group.owns(arena) and not group.owns(plain), "one tensor lies in the arena, the other does not")

    def shm(flat: torch.Tensor) -> _C.ShmWork:
        if op == "all_reduce":
            return group.all_reduce(flat)
        if op == "reduce_scatter":
            return group.reduce_scatter(flat, flat[mine], 1.0, False)
        return group.all_gather(flat)

    def gloo() -> None:
        if op == "all_reduce":
            dist.all_reduce(theirs)
        elif op == "reduce_scatter":
            reduce_scatter_single(theirs[mine], theirs)
        else:
            all_gather_single(theirs, theirs[mine])

    return {
        "gloo": (theirs, gloo),
        "arena": (arena, lambda: shm(arena).wait()),
        "staged": (plain, lambda: shm(plain).wait()),
    }


def bound_of(op: str, n: int, group: _C.ShmGroup, repeats: int) -> Callable[[], float]:
    """Return a call that times passes over a rank's own memory, which read and write as much as ``op`` must.

    In a reduction a rank reads one slice of each rank and writes one slice. In an all-reduce it writes all slices. In
    an all-gather a rank copies the slices of the other ranks.
    """
    world = dist.get_world_size()
    one, other = torch.ones(n // world), torch.ones(n // world)
    add, copy = partial(torch.add, one, other, out=one), partial(one.copy_, other)

    def measure() -> float:
        if op == "all_gather":
            return slowest(copy, group, repeats) * (world - 1)
        # ``add`` reads two slices and writes one.
        return slowest(add, group, repeats) * (2 * world if op == "all_reduce" else world + 1) / 3

    return measure


def slowest(call: Callable[[], object], group: _C.ShmGroup, repeats: int) -> float:
    """Return the seconds of one call on the slowest rank, averaged over many if one is too short for a clock."""
    group.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = torch.tensor([(time.perf_counter() - begin) / repeats], dtype=torch.float64)
    group.all_reduce(seconds, "max").wait()
    return seconds.item()


def check(calls: dict[str, tuple[torch.Tensor, Callable[[], object]]]) -> None:
    """Require that all contenders compute the same."""
    results = []
    for flat, call in calls.values():
        flat.copy_(torch.arange(flat.numel()).remainder_(1000).add_(dist.get_rank()))
        call()
        mine = flat.view(dist.get_world_size(), -1)[dist.get_rank()]
        results.append(mine.clone())
    require(all(torch.equal(one, results[0]) for one in results), "all contenders give the same")
    for flat, _ in calls.values():
        flat.zero_()  # sums of zeros stay zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kib", type=int, nargs="+", default=KIB)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    group = connect()
    for kib in args.kib:
        n = kib * 256 // world * world
        repeats = max(1, 256 // kib)
        for op in ("all_reduce", "reduce_scatter", "all_gather"):
            calls = contenders(group, op, n)
            check(calls)
            measure_bound = bound_of(op, n, group, repeats)
            times: dict[str, list[float]] = {name: [] for name in (*calls, "bound")}
            for round_ in range(args.rounds + 3):
                for name in in_turn(list(times), round_):
                    if name == "bound":
                        seconds = measure_bound()
                    else:
                        seconds = slowest(calls[name][1], group, repeats)
                    if round_ >= 3:
                        times[name].append(seconds)
            if dist.get_rank() == 0:
                for name in ("arena", "staged"):
                    row = {
                        "benchmark": "comm_ops",
                        "op": op,
                        "kib": kib,
                        "ranks": world,
                        "contender": name,
                        "us": round(median_spread(times[name])[0] * 1e6, 1),
                        "us_gloo": round(median_spread(times["gloo"])[0] * 1e6, 1),
                        **ratios("gloo_over_it", times["gloo"], times[name]),
                        # Tensors that fit a cache are not bound by memory.
                        **(bound("over_bound", times[name], times["bound"]) if kib >= 1 << 15 else {}),
                        "machine": machine(),
                    }
                    print(json.dumps(row), flush=True)
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
