"""How close is engine.step() (norm, unscale, clip, overflow check, AdamW, bf16 copy) to one pass over its memory?

bf16, stages 1 and 2, 67M parameters. On one rank the bound is a C pass over the same tensors, on the same number of
threads. The pass moves the same 30 bytes a parameter: it reads the gradient once for the norm and once for the update,
reads and writes the master and two moments, and writes the bf16 weight. Step and pass take turns, and each follows a
real backward pass, so that the caches are in the state that a training step leaves. On two ranks the timed part hands
all gradients to their hooks, which reduce them, and calls engine.step(), which gathers. No computation runs at the same
time to hide the collectives. The timed part is compared with its parts one after the other: the bare collectives, then
the C pass over the rank's shard.
Run: python -m benchmarks.deepspeed_c.engine_step [--params 67e6]
or:  python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.engine_step [--params 67e6]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.engines import require_fused, require_states_sharded, step_parts
from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require
from benchmarks.stream import bytes_of, stream_step
from deepspeed_c import _C

BYTES_PER_PARAM = 30
ROWS = 8  # of a batch
WARMUP = 2


def make_engine(n_params: int, zero: dict, n_layers: int = 8, **more):
    """Return an engine of about ``n_params`` parameters, and their exact number."""
    width = int((n_params / n_layers) ** 0.5)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(n_layers)])
    with torch.no_grad():  # so that activations keep their size through all layers
        for param in model.parameters():
            param.mul_(3**0.5)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        **more,
    }
    return deepspeed_c.initialize(model=model, config=config)[0], n_layers * width * width


def backward(engine) -> float:
    """Run a real forward and backward pass, over the same rows each time, and return the loss."""
    width = engine.module[0].in_features
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = (engine(x).float() - 1).square().mean()
    engine.backward(loss)
    return loss.item()


def timed_step(engine) -> float:
    begin = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - begin
    require(engine.was_step_applied(), "the step was applied")
    return seconds


def timed_bound(engine) -> float:
    """Time the C pass over the tensors of the next step, then run the step untimed. Return the seconds of the pass."""
    seconds, sumsq = stream_step(step_parts(engine), with_norm=True)
    engine.step()
    norm = engine.get_global_grad_norm()
    # The pass has read this step's gradients.
    require(
        norm > 0 and math.isclose(math.sqrt(sumsq), norm, rel_tol=1e-2), f"norms agree: {math.sqrt(sumsq)} and {norm}"
    )
    return seconds


def step_and_bound(engine, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps and of the C pass, each after its own backward pass."""
    require_fused(engine)
    found: dict[Callable, list[float]] = {timed_step: [], timed_bound: []}
    losses = []
    for round_ in range(rounds + WARMUP):
        for timed in in_turn(list(found), round_):
            losses.append(backward(engine))
            seconds = timed(engine)
            if round_ >= WARMUP:
                found[timed].append(seconds)
    require(losses[-1] < losses[0], f"losses fall: {losses[0]} to {losses[-1]}")
    return found[timed_step], found[timed_bound]


def one_rank(n_params: int, stage: int, rounds: int) -> None:
    engine, n = make_engine(n_params, {"stage": stage})
    steps, bounds = step_and_bound(engine, rounds)
    n_bytes = bytes_of(step_parts(engine), with_norm=True)
    require(round(n_bytes / n, 1) == BYTES_PER_PARAM, f"{BYTES_PER_PARAM} bytes a parameter: {n_bytes / n}")
    line = {"benchmark": "engine_step", "ranks": 1, "stage": stage, "params": n, "bytes_per_param": BYTES_PER_PARAM}
    line |= {
        "ns_per_param": round(median_spread(steps)[0] / n * 1e9, 3),
        "bound_gbps": round(n_bytes / median_spread(bounds)[0] / 1e9, 1),
        **bound("ratio_to_bound", steps, bounds),
        "threads": _C.pool_n_threads(),
        "machine": machine(),
    }
    print(json.dumps(line), flush=True)
    engine.close()


def hand_over(engine, gradients: list[torch.Tensor]) -> None:
    """Hand gradients to their hooks in the order of a backward pass, without the computation."""
    reducer = engine._optimizer.reducer
    reducer.begin_backward(is_boundary=True, factor=1.0)
    for slot, gradient in zip(reversed(reducer.slots), gradients, strict=True):
        slot.param.grad = gradient
        reducer.intake._hook(slot)(slot.param)
    reducer.end_backward()


def reduced_step(engine, gradients: list[torch.Tensor]) -> None:
    hand_over(engine, gradients)
    engine.step()


def make_parts_of_it(engine) -> Callable[[], None]:
    """Return a call that runs the collectives of a step, in separate buffers, and then the C pass."""
    optimizer = engine._optimizer
    comm, pairs, weights = optimizer.comm, [], []
    for unit in optimizer.units:
        for bucket in range(unit.n_buckets):
            n = unit.slice_elems[bucket] * comm.world_size
            pairs.append(
                (torch.zeros(n, dtype=unit.comm_dtype), torch.zeros_like(optimizer.reducer.sums.results[unit][bucket]))
            )
            weights.append(torch.zeros(n, dtype=unit.dtype))
    parts = step_parts(engine)

    def exchange() -> None:
        for flat, out in pairs:
            comm.reduce_scatter(flat, out[: flat.numel() // comm.world_size]).wait()
        for work in [comm.all_gather(flat) for flat in weights]:
            work.wait()
        stream_step(parts, with_norm=True)

    return exchange


def two_ranks(n_params: int, stage: int, rounds: int) -> None:
    engine, n = make_engine(n_params, {"stage": stage})
    rank, world = dist.get_rank(), dist.get_world_size()
    require_fused(engine)
    backward(engine)
    engine.step()
    require_states_sharded(engine, stage, world)
    parts_of_it = make_parts_of_it(engine)
    gradients = [torch.empty_like(slot.param) for slot in reversed(engine._optimizer.reducer.slots)]
    sent = []

    def timed(function: Callable[[], None]) -> float:
        for gradient in gradients:  # evicts the other contender's data from the caches, as a backward pass does
            gradient.fill_((rank + 1) * 1e-3)
        first = _sent_bytes(engine)
        dist.barrier()
        begin = time.perf_counter()
        function()
        dist.barrier()
        seconds = time.perf_counter() - begin
        sent.append(_sent_bytes(engine) - first)
        return seconds

    contenders = {"step": lambda: reduced_step(engine, gradients), "parts": parts_of_it}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + WARMUP):
        for name in in_turn(list(contenders), round_):
            seconds = timed(contenders[name])
            if name == "step":
                # The norm of the mean of the ranks' gradients shows that the gradients were reduced.
                expected = 1e-3 * (world + 1) / 2 * math.sqrt(n)
                norm = engine.get_global_grad_norm()
                require(math.isclose(norm, expected, rel_tol=1e-2), f"the norm is that of the mean: {norm}, {expected}")
                require(engine.was_step_applied(), "the step was applied")
            if round_ >= WARMUP:
                found[name].append(seconds)
    require(max(sent) < 1.05 * min(sent) and min(sent) > 0, f"both contenders send the same: {sorted(set(sent))} bytes")
    if rank == 0:
        line = {"benchmark": "engine_step", "ranks": world, "stage": stage, "params": n}
        line |= {
            "ns_per_param": round(median_spread(found["step"])[0] / n * 1e9, 3),
            "ms": round(median_spread(found["step"])[0] * 1e3, 1),
            "sent_mb": round(sent[-1] / 1e6, 1),
            **ratios("ratio_to_parts", found["step"], found["parts"]),
            "threads": _C.pool_n_threads(),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)
    engine.close()


def _sent_bytes(engine) -> int:
    return sum(total.wire_bytes for total in engine._optimizer.comm.ledger.totals.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=67e6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    if "RANK" not in os.environ:
        for stage in args.stages:
            one_rank(int(args.params), stage, args.rounds)
        return
    dist.init_process_group("gloo")
    for stage in args.stages:
        two_ranks(int(args.params), stage, args.rounds)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
