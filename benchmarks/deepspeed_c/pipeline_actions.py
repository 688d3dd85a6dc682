"""How long does the runner of a pipeline take for an action, beyond the stages' own functions and autograd?

A stage multiplies 8 numbers with a weight. The time of a run of the runner (``pipe/runner.py``), less that of a plain
loop which calls the same functions and autograd on the same values, is divided by the number of a rank's actions. A
schedule that splits the backward is compared with a loop that calls autograd twice. On one rank there are two stages,
and values stay on the rank; on two ranks each has one, and sends and receives are actions. Runs and loops alternate. A
run of two ranks begins when the first one begins, and ends when the last one ends, so waits for messages count too.
Run: python -m benchmarks.deepspeed_c.pipeline_actions [--rounds 30] [--micro-batches 64]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.measure import machine, require
from benchmarks.served import ServedRanks, say
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.pipe.link import LocalLink, RemoteLink
from deepspeed_c.pipe.runner import Lent, Runner, Stage
from deepspeed_c.pipe.schedule import SCHEDULES, make_table

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 8
WARMUP = 5
# (ranks, schedule)
CASES = ((1, "interleaved"), (1, "zb_v"), (2, "1f1b"), (2, "zb_h1"))


class Case:
    """This rank's stages of one case."""

    def __init__(self, schedule: str, n: int, comm: Collectives) -> None:
        ranks, rank = comm.world_size, comm.rank
        n_stages = 2
        self.n, self.splits = n, SCHEDULES[schedule].splits_backward
        self.stages = [rank] if ranks == 2 else [0, 1]
        self.weights = {s: torch.nn.Parameter(torch.full((WIDTH,), 0.5)) for s in self.stages}
        self.inputs, self.labels = [torch.ones(1, WIDTH) for _ in range(n)], torch.zeros(1, WIDTH)
        local = {(a, b): LocalLink() for a, b in ((0, 1), (1, 0))}

        def link(a: int, b: int) -> Any:
            if not 0 <= min(a, b) <= max(a, b) < n_stages:
                return None
            return local[a, b] if ranks == 1 else RemoteLink(comm, a, b, a, torch.device("cpu"))

        self.runner = Runner(
            {
                s: Stage(self._run_of(s), link(s - 1, s), link(s, s - 1), link(s, s + 1), link(s + 1, s), self.splits)
                for s in self.stages
            }
        )
        self.actions = make_table(schedule, ranks, n_stages // ranks, n, "benchmark").actions(rank)
        nothing: AbstractContextManager[None] = nullcontext()
        self.lent = Lent(
            first_inputs=lambda k: self.inputs[k],
            result=lambda outputs, k: self.loss(outputs),
            scale=lambda loss: loss,
            backward=lambda: nothing,
            measure=lambda name: nothing,
        )

    def _run_of(self, s: int) -> Any:
        weight = self.weights[s]
        return lambda x: x * weight

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return (outputs - self.labels).square().mean()

    def by_runner(self) -> None:
        self.runner.run(self.actions, self.lent, has_backward=True)

    def by_loop(self) -> None:
        grad = torch.ones(1, WIDTH)
        one = torch.ones(())
        for k in range(self.n):
            flights = []
            x = self.inputs[k]
            for s in self.stages:
                if s > 0:
                    x = x.detach().requires_grad_()
                weight = self.weights[s]
                y = x * weight
                flights.append((x, y if s == 0 else self.loss(y), weight))
                x = y
            for x, y, weight in reversed(flights):
                given = one if y.ndim == 0 else grad
                if self.splits and x.requires_grad:
                    torch.autograd.grad([y], [x], [given], retain_graph=True)
                    torch.autograd.backward([y], [given], inputs=[weight])
                else:
                    torch.autograd.backward([y], [given])

    def gradients(self) -> list[float]:
        return [float(weight.grad.sum()) for weight in self.weights.values()]

    def forget(self) -> None:
        for weight in self.weights.values():
            weight.grad = None


def serve() -> None:
    """One rank. A question is a schedule and a number of micro-batches; the answer is when a run began and ended, the
    seconds of a loop, the number of actions, and the weights' gradients after the run."""
    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo")
    comm, cases = Collectives(), {}
    comm.use_shared_memory("auto")
    say({})
    for line in sys.stdin:
        schedule, n = json.loads(line)
        if (schedule, n) not in cases:
            cases[schedule, n] = Case(schedule, n, comm)
        case = cases[schedule, n]
        case.forget()
        dist.barrier()
        begin = time.monotonic()
        case.by_runner()
        end = time.monotonic()
        gradients = case.gradients()
        dist.barrier()
        case.forget()
        started = time.monotonic()
        case.by_loop()
        own = time.monotonic() - started
        say({"begin": begin, "end": end, "own": own, "actions": len(case.actions), "gradients": gradients})
    sys.stdout.flush()
    os._exit(0)


def measure(n_ranks: int, schedules: list[str], n: int, rounds: int) -> None:
    from tests.ranks import free_port

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = ServedRanks([sys.executable, str(Path(__file__).resolve()), "--serve"], environment, n_ranks, free_port())
    ranks.answers()
    # The model is y = x a b with a = b = 1/2: each weight's gradient is that of n means of (1/4)^2.
    expected = n * 2 * 0.25 * 0.5
    try:
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in schedules}
        for round_ in range(rounds + WARMUP):
            for name in schedules:
                answers = ranks.ask(json.dumps([name, n]))
                seconds = max(each["end"] for each in answers) - min(each["begin"] for each in answers)
                gradients = [value for each in answers for value in each["gradients"]]
                require(
                    all(abs(value - expected) < 1e-3 * expected for value in gradients),
                    f"{name} has the gradients {gradients}, not {expected}",
                )
                if round_ >= WARMUP:
                    own, n_actions = max((each["own"], each["actions"]) for each in answers)
                    found[name].append((seconds, own, n_actions))
        for name, times in found.items():
            each = sorted(1e6 * (seconds - own) / n_actions for seconds, own, n_actions in times)
            line = {"benchmark": "pipeline_actions", "schedule": name, "ranks": n_ranks, "micro_batches": n}
            line |= {"actions": times[0][2], "ms": round(1e3 * statistics.median(t for t, _, _ in times), 2)}
            line |= {"ms_own": round(1e3 * statistics.median(own for _, own, _ in times), 2)}
            line |= {"us_of_an_action": round(statistics.median(each), 1)}
            line |= {"us_of_an_action_min": round(each[0], 1), "us_of_an_action_max": round(each[-1], 1)}
            print(json.dumps({**line, "machine": machine()}), flush=True)
    finally:
        ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the runner's own time for an action.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    for n_ranks in (1, 2):
        names = [name for n, name in CASES if n == n_ranks]
        measure(n_ranks, names, options.micro_batches, options.rounds)


if __name__ == "__main__":
    main()
