"""Do pipelines take the time that the simulator says, for every schedule, and is their order the simulator's?

Stages sleep: 5 ms in the forward, 5 ms for the gradient of their input and 5 ms for that of their weight. So 2, 4 or 8
ranks need no more cores than there are. A stage takes longer than it sleeps: a process wakes late, and then calls
functions and autograd that are in no cache any more. So all ranks measure at the same time before each schedule how
long a stage takes by itself, without a pipeline, and the simulator is given these times: of the forward, of each half
of the backward, and of the same with the loss. All time above the simulated is the runner's, the engine's and the
messages'. A run begins when the first rank begins, and ends when the last one ends, without the update of weights.
Run: python -m benchmarks.deepspeed_c.pipeline_schedules [--rounds 3] [--ranks 2 4 8] [--micro-batches 8 32]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.measure import machine, ratios, require
from benchmarks.served import ServedRanks, say
from deepspeed_c.pipe import LayerSpec, PipelineModule
from deepspeed_c.pipe.schedule import SCHEDULES, Cost, make_table, simulate

ROOT = Path(__file__).resolve().parents[2]
SLEEP_S = 5e-3
WIDTH = 8
N_ALONE = 5
# Stages of a rank: two where the schedule can use them.
VIRTUAL = {name: 2 if traits.max_virtual > 1 else 1 for name, traits in SCHEDULES.items()}
TRAINING = [name for name, traits in SCHEDULES.items() if traits.has_backward]


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in the backward, and in the forward if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, sleeps: bool) -> torch.Tensor:
        ctx.seconds = seconds
        if sleeps:
            time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class Sleeper(torch.nn.Module):
    """A stage. Gradients of its input and of its weight take equally long. ``n_rows`` of its weight are used as their
    mean.
    """

    def __init__(self, seconds: float = SLEEP_S, n_rows: int = 1) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = torch.nn.Parameter(torch.ones(n_rows, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.seconds, True) * Sleep.apply(self.weight, self.seconds, False).mean(0)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def alone(*, is_last: bool) -> list[int]:
    """Median nanoseconds of a stage's forward, the gradient of its input, and that of its weight."""
    layer, x, labels = Sleeper(), torch.ones(1, WIDTH, requires_grad=True), torch.zeros(1, WIDTH)
    times = []
    for _ in range(N_ALONE):
        marks = [time.monotonic_ns()]
        outputs = loss_of(layer(x), labels) if is_last else layer(x)
        marks.append(time.monotonic_ns())
        grads = [torch.ones_like(outputs)]
        torch.autograd.grad([outputs], [x], grads, retain_graph=True)
        marks.append(time.monotonic_ns())
        torch.autograd.backward([outputs], grads, inputs=[layer.weight])
        marks.append(time.monotonic_ns())
        times.append([end - begin for begin, end in itertools.pairwise(marks)])
    return [int(statistics.median(each)) for each in zip(*times, strict=True)]


def engine_of(schedule: str, n: int, ranks: int, layer: Callable[[], Sleeper] = Sleeper, **sections: Any) -> Any:
    """An engine of ``ranks`` ranks a pipeline. sections: of its configuration."""
    virtual = VIRTUAL[schedule]
    net = PipelineModule(
        [LayerSpec(layer) for _ in range(ranks * virtual)],
        num_stages=ranks,
        loss_fn=loss_of,
        partition_method="uniform",
        schedule=schedule,
        virtual_stages=virtual,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": n,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "steps_per_print": 10**9,
        **sections,
    }
    return deepspeed_c.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


def time_runs(engine: Any) -> None:
    """Has the engine note in ``_told`` when each run of its table begins and ends. All ranks begin together."""
    run, told = engine._runner.run, engine.__dict__.setdefault("_told", [])

    def timed(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        begin = time.monotonic()
        try:
            return run(*args, **kwargs)
        finally:
            told.append((begin, time.monotonic()))

    engine._runner.run = timed


def serve() -> None:
    """One rank. A question is a schedule and a number of micro-batches; the answer is when a run began and ended, and
    the times of a stage by itself, without and with the loss.
    """
    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo")
    engines: dict[tuple[str, int], Any] = {}
    say({})
    for line in sys.stdin:
        schedule, n = json.loads(line)
        if (schedule, n) not in engines:
            engines[schedule, n] = engine_of(schedule, n, dist.get_world_size())
            time_runs(engines[schedule, n])
        engine = engines[schedule, n]
        dist.barrier()
        costs = [alone(is_last=is_last) for is_last in (False, True)]
        batch = (torch.ones(1, WIDTH), torch.zeros(1, WIDTH))
        engine.train_batch(iter([batch] * n))
        begin, end = engine._told[-1]
        say({"begin": begin, "end": end, "costs": costs})
    sys.stdout.flush()
    os._exit(0)


def simulated(schedule: str, n_ranks: int, n: int, stage: Cost, last: Cost) -> float:
    """Seconds by the simulator. The last stage computes the loss."""
    virtual = VIRTUAL[schedule]
    table = make_table(schedule, n_ranks, virtual, n, "benchmark")
    return simulate(table, [*[stage] * (n_ranks * virtual - 1), last]).makespan_ns * 1e-9


def median_cost(answers: list[dict[str, Any]], which: int) -> Cost:
    """The median over the ranks of the times without (0) or with (1) the loss."""
    return Cost(*(int(statistics.median(each["costs"][which][i] for each in answers)) for i in range(3)))


def measure(n_ranks: int, numbers: list[int], rounds: int) -> None:
    from tests.ranks import free_port

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = ServedRanks([sys.executable, str(Path(__file__).resolve()), "--serve"], environment, n_ranks, free_port())
    ranks.answers()
    try:
        for n in numbers:
            names = [name for name in TRAINING if n >= SCHEDULES[name].min_micro_batches_per_rank * n_ranks]
            wanted: dict[str, list[float]] = {name: [] for name in names}
            found: dict[str, list[float]] = {name: [] for name in names}
            for round_ in range(rounds + 1):
                for name in names:
                    answers = ranks.ask(json.dumps([name, n]))
                    seconds = max(each["end"] for each in answers) - min(each["begin"] for each in answers)
                    if round_:
                        costs = (median_cost(answers, which) for which in (0, 1))
                        wanted[name].append(simulated(name, n_ranks, n, *costs))
                        found[name].append(seconds)
            medians, expected = (
                {name: statistics.median(times) for name, times in each.items()} for each in (found, wanted)
            )
            # Pairs of schedules whose simulated times, for stages that together take equally long, differ by more than
            # 5 %, and whose measured times are in the other order.
            swapped = [
                (a, b)
                for a in names
                for b in names
                if expected[a] / VIRTUAL[a] * 1.05 < expected[b] / VIRTUAL[b]
                and medians[a] / VIRTUAL[a] > medians[b] / VIRTUAL[b]
            ]
            for name in names:
                sleeps = Cost(*[int(SLEEP_S * 1e9)] * 3)
                least = simulated(name, n_ranks, n, sleeps, sleeps)
                require(
                    medians[name] > 0.99 * least, f"{name} takes no less than is slept: {medians[name]} s, {least} s"
                )
                line = {"benchmark": "pipeline_schedules", "schedule": name, "ranks": n_ranks, "micro_batches": n}
                line |= {"ms": round(1e3 * medians[name], 1), "ms_simulated": round(1e3 * expected[name], 1)}
                line |= ratios("ratio_to_simulated", found[name], wanted[name])
                print(json.dumps({**line, "machine": machine()}), flush=True)
            worst = max(
                statistics.median(a / b for a, b in zip(found[name], wanted[name], strict=True)) for name in names
            )
            line = {"benchmark": "pipeline_schedules", "schedule": "all", "ranks": n_ranks, "micro_batches": n}
            line |= {"ratio_to_simulated": round(worst, 4), "n_swapped": len(swapped)}
            print(json.dumps({**line, "machine": machine()}), flush=True)
    finally:
        ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pipelines of sleeping stages with the simulator.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    for n_ranks in options.ranks:
        measure(n_ranks, options.micro_batches, options.rounds)


if __name__ == "__main__":
    main()
