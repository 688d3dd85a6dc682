"""How long is a batch of a pipeline at ZeRO stage 3, what does it send and hold, against the same at stage 2?

Two stages on two data-parallel ranks each: 4 processes of one thread. The GPT of ``pipeline_step``, 8 micro-batches,
fp32, AdamW, all weights sharded, and a limit that holds all units of a stage. All engines live in the same processes,
and their batches take turns; their losses have to be the same. "gloo" sends everything over the loopback
(``"local": "off"``), "shared" through shared memory, and "joint" has the weights in joint memory
(``zero_copy_gather``). Bytes are a rank's, by the ledger: stage 3 gathers each unit once a batch, in place of the
gather of updated weights at stage 2, so it sends S3 = S2 - U + G. The peaks are of stacks of equal matrices, whose limit
is half a stage. "peak" is live tensor bytes in an evaluation, over a shard of the stage's weights and one of its
gradients, and the limit. "peak, training" is the same in a training batch, whose plan adds the stage's whole sums of
gradients, a bucket of their reduction and the latest gradient. "peak, training, weights" is the memory of weights alone,
from the first training batch, over a shard of them and the limit. A gathered unit counts from the allocation of its
memory until nothing holds this memory. The makespan is of stages that sleep, as in ``pipeline_schedules``, so that 4
ranks need no more cores than there are; the simulator gets the times of the run's computations and of a gather.
Run: python -m benchmarks.deepspeed_c.pipeline_stage3 [--rounds 11] [--width 384]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import deepspeed_c
from benchmarks.deepspeed_c.pipeline_schedules import N_ALONE, TRAINING, VIRTUAL, Sleeper, time_runs
from benchmarks.deepspeed_c.pipeline_schedules import WIDTH as SLEEPING_WIDTH
from benchmarks.deepspeed_c.pipeline_schedules import engine_of as sleeping_engine
from benchmarks.deepspeed_c.pipeline_step import WORDS, layers_of, loss_of
from benchmarks.measure import in_turn, machine, median_spread, ratios, require, require_equal
from benchmarks.served import ServedRanks, say
from deepspeed_c import _C
from deepspeed_c.comm.ledger import all_ledgers
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.pipe.schedule import Cost, StageUnit, make_table, simulate, with_gathers
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.zero.weights.param import state_of

ROOT = Path(__file__).resolve().parents[2]
STAGES, DATA_RANKS = 2, 2
RANKS = STAGES * DATA_RANKS
ROWS, TOKENS, N = 2, 64, 8
GLOO, SHARED = {"local": "off"}, {"local": "shm"}
CONTENDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2, gloo": (2, GLOO),
    "stage 3, gloo": (3, GLOO),
    "stage 2, shared": (2, SHARED),
    "stage 3, shared": (3, SHARED),
    "stage 3, joint": (3, {**SHARED, "zero_copy_gather": True}),
}
STAGE_2_OF = {
    "stage 3, gloo": "stage 2, gloo",
    "stage 3, shared": "stage 2, shared",
    "stage 3, joint": "stage 2, shared",
}
# In their third batch the ranks compare nothing.
WARMUP = 2
LOSS_TOLERANCE = 1e-5

# The stacks of matrices of the peaks; their lines, and the schedules of each.
MATRICES, SIDE = 8, 512
PEAKS = {
    "evaluation": ("peak", ["1f1b"]),
    "training": ("peak, training", ["1f1b"]),
    "weights": ("peak, training, weights", TRAINING),
}

# A stage that sleeps about as long as one of the GPT computes. Its weight has 2 MiB.
SLEEP_S, N_ROWS = 0.04, 2**16


def micro_batches(number: int, data_rank: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(DATA_RANKS * number + data_rank)
    return iter([tuple(torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2)) for _ in range(N)])


def engine_of(layers: list[Any], loss: Any, stage: int, schedule: str = "1f1b", **more: Any) -> Any:
    shape = {"num_stages": STAGES, "virtual_stages": VIRTUAL[schedule], "partition_method": "uniform"}
    net = PipelineModule(layers, loss_fn=loss, schedule=schedule, **shape)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": N,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        **more,
        "zero_optimization": {"stage": stage, **zero, **more.get("zero_optimization", {})},
    }
    return deepspeed_c.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


class Trained:
    """The batches of one contender."""

    def __init__(self, name: str, width: int) -> None:
        stage, comm = CONTENDERS[name]
        self.engine = engine_of([make() for make in layers_of(width)], loss_of, stage, comm=comm)
        self._data_rank, self._n = self.engine.grid.get_data_parallel_rank(), 0
        for _ in range(WARMUP):
            self.batch()
        for ledger in all_ledgers():
            ledger.reset_totals()
        self.batch()
        totals: dict[str, dict[str, int]] = {"n_bytes": {}, "wire_bytes": {}}
        for ledger in all_ledgers():
            for op, total in ledger.totals.items():
                # Of other groups and operations are the numbers that ranks tell each other.
                if (ledger.axes, op) in (("dp_shard", "all-gather"), ("dp_shard", "reduce-scatter"), ("pp", "message")):
                    for kind, of_kind in totals.items():
                        of_kind[op] = of_kind.get(op, 0) + getattr(total, kind)
        units = [] if stage == 2 else [group.numel for group in self.engine._fetcher.groups]
        self.facts = {"sent": totals["wire_bytes"], "units": units, "gathers": self.n_gathers()}

    def n_gathers(self) -> int:
        fetcher = self.engine._fetcher
        return 0 if fetcher is None else fetcher.stats.n_gathers

    def batch(self) -> float:
        self._n += 1
        return float(self.engine.train_batch(micro_batches(self._n, self._data_rank)))

    def timed(self) -> dict[str, Any]:
        before = self.n_gathers()
        dist.barrier()
        begin, processor = time.perf_counter(), time.process_time()
        loss = self.batch()
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "processor": time.process_time() - processor,
            "loss": loss,
            "gathers": self.n_gathers() - before,
        }


def mean_square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


class GatheredBytes:
    """Live bytes of the memory that gathered weights are allocated in, and their peak: a buffer counts from its
    allocation until nothing holds its storage any more, so also while no unit is in it."""

    def __init__(self, fetcher: Any) -> None:
        pool = fetcher.means.pool
        require(pool.n_bytes == 0, f"nothing has been gathered before: {pool.n_bytes} bytes")
        self._allocate, self._buffers, self.peak = pool._allocate, [], 0
        pool._allocate = self._count

    def _count(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        buffer = self._allocate(n_bytes, device)
        self._buffers.append((StorageWeakRef(buffer.untyped_storage()), n_bytes))
        self.peak = max(self.peak, sum(size for storage, size in self._buffers if not storage.expired()))
        return buffer


def shard_bytes(fetcher: Any) -> int:
    """Bytes of the memory that this rank's shards of the weights lie in."""
    pieces = [state_of(slot.param).piece.untyped_storage() for group in fetcher.groups for slot in group.slots]
    return sum({storage.data_ptr(): storage.nbytes() for storage in pieces}.values())


def peak(what: str, schedule: str) -> dict[str, int]:
    """Bytes of this rank at their peak, and the plan.

    "evaluation": live tensor bytes of a batch, after others like it; planned are shards of weights and gradients, and
    the limit. "training": the same of a training batch, with the whole sums of gradients, one bucket of their reduction
    and the gradient that a backward has just made. "weights": the memory of weights alone in training batches, from the
    first one, over their shard and the limit.
    """
    unit, limit = SIDE * SIDE, MATRICES // 2
    zero = {"reduce_bucket_size": unit, "stage3_max_live_parameters": limit * unit}
    layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(STAGES * MATRICES)]
    batch = (torch.ones(ROWS, SIDE), torch.zeros(ROWS, SIDE))
    more = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_optimization": zero, "comm": GLOO}
    with LiveBytes() as live:
        engine = engine_of(layers, mean_square, 3, schedule, **more)
        layers.clear()
        gathered = GatheredBytes(engine._fetcher)
        run = engine.eval_batch if what == "evaluation" else engine.train_batch
        for _ in range(WARMUP):
            run(iter([batch] * N))
        with live.phase(what):
            run(iter([batch] * N))
        found = shard_bytes(engine._fetcher) + gathered.peak if what == "weights" else live.peaks[what]
    engine.close()
    shard = MATRICES // DATA_RANKS
    n_units = {"weights": shard, "evaluation": 2 * shard, "training": 2 * shard + MATRICES + 2}[what] + limit
    return {"peak": found, "planned": batch[0].element_size() * unit * n_units}


class Sleeping:
    """The runs of one schedule over stages that sleep."""

    def __init__(self, schedule: str) -> None:
        layer = functools.partial(Sleeper, SLEEP_S, N_ROWS)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        self.engine = sleeping_engine(schedule, N, STAGES, layer, zero_optimization=zero, comm=GLOO)
        time_runs(self.engine)
        self._times: dict[tuple[int, int], list[int]] = {}
        compute = self.engine._runner._compute
        for kind, function in compute.items():
            compute[kind] = functools.partial(self._timed, kind, function)
        for _ in range(WARMUP):
            self.run()

    def run(self) -> tuple[float, float]:
        batch = (torch.ones(1, SLEEPING_WIDTH), torch.zeros(1, SLEEPING_WIDTH))
        self.engine.train_batch(iter([batch] * N))
        return self.engine._told[-1]

    def _timed(self, kind: int, function: Callable[..., None], stage: int, *args: Any) -> None:
        begin = time.monotonic_ns()
        function(stage, *args)
        self._times.setdefault((kind, stage), []).append(time.monotonic_ns() - begin)

    def costs(self) -> dict[int, list[int]]:
        """Nanoseconds of this rank's stages in the last run: of a forward, and of the halves of a backward. Medians, so
        without the gathers for which the first micro-batch waits."""
        medians = {key: int(statistics.median(times)) for key, times in self._times.items()}
        costs = {}
        for stage in self.engine.module.stages:
            # A schedule may have whole backwards beside halves. Both take equally long.
            first = _C.PIPE_INPUT if (_C.PIPE_INPUT, stage) in medians else _C.PIPE_BACKWARD
            kinds = (_C.PIPE_FORWARD, first, _C.PIPE_WEIGHT)
            costs[stage] = [medians.get((kind, stage), 0) for kind in kinds]
        return costs

    def gather_ns(self) -> int:
        """Median nanoseconds of a gather of one unit."""
        fetcher, times = self.engine._fetcher, []
        for _ in range(N_ALONE):
            dist.barrier()
            begin = time.monotonic_ns()
            fetcher.pin(fetcher.groups)
            times.append((time.monotonic_ns() - begin) // len(fetcher.groups))
            fetcher.unpin(fetcher.groups)
        return int(statistics.median(times))

    def timed(self) -> dict[str, Any]:
        gather_ns = self.gather_ns()
        self._times.clear()
        begin, end = self.run()
        numel = self.engine._fetcher.groups[0].numel
        return {"begin": begin, "end": end, "costs": self.costs(), "numel": numel, "gather_ns": gather_ns}


def serve(width: int) -> None:
    """One rank. A question is ["batch", contender], ["peak", "what, schedule"] or ["sleep", schedule]."""
    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo")
    made: dict[tuple[str, str], Any] = {("batch", name): Trained(name, width) for name in CONTENDERS}
    say({name: trained.facts for (_, name), trained in made.items()})
    for line in sys.stdin:
        what, which = json.loads(line)
        if what == "peak":
            say(peak(*which.split(", ")))
            continue
        if (what, which) not in made:
            made[what, which] = Sleeping(which)
        say(made[what, which].timed())
    sys.stdout.flush()
    os._exit(0)


def batches(ranks: ServedRanks, about: list[dict[str, Any]], width: int, rounds: int) -> Iterator[dict[str, Any]]:
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "processor": []} for name in CONTENDERS}
    for round_ in range(rounds):
        losses: dict[str, float] = {}
        for name in in_turn(list(CONTENDERS), round_):
            answers = ranks.ask(json.dumps(["batch", name]))
            found[name]["seconds"].append(max(answer["seconds"] for answer in answers))
            found[name]["processor"].append(sum(answer["processor"] for answer in answers))
            losses[name] = answers[0]["loss"]
            for answer, facts in zip(answers, about, strict=True):
                n_units = len(facts[name]["units"])
                require(answer["gathers"] == n_units, f"{name} gathers each of {n_units} units once: {answer}")
        require_equal("losses", losses, LOSS_TOLERANCE)
    for name, times in found.items():
        line: dict[str, Any] = {"benchmark": "pipeline_stage3", "contender": name, "width": width, "micro_batches": N}
        line |= {"ranks": RANKS, "ms": round(1e3 * median_spread(times["seconds"])[0], 1)}
        line |= {"processor_ms": round(1e3 * median_spread(times["processor"])[0], 1)}
        # The rank that sends most.
        line["bytes_sent"] = max(sum(facts[name]["sent"].values()) for facts in about)
        if name in STAGE_2_OF:
            other = STAGE_2_OF[name]
            for key, kind in (("ratio_to_stage_2", "seconds"), ("processor_to_stage_2", "processor")):
                line |= ratios(key, times[kind], found[other][kind])
            # S3 - (S2 - U + G). A ring of two ranks sends half of each unit.
            line["bytes_beyond_formula"] = max(
                abs(beyond_formula(facts[name], facts[other], is_joint="joint" in name)) for facts in about
            )
            line["units"] = max(len(facts[name]["units"]) for facts in about)
        yield line


def beyond_formula(three: dict[str, Any], two: dict[str, Any], *, is_joint: bool) -> int:
    """Bytes that a rank sends at stage 3 beyond those of stage 2, without its gather of updates, and one gather."""
    size = torch.float32.itemsize
    one_gather = 0 if is_joint else sum(size * n // DATA_RANKS for n in three["units"])
    return sum(three["sent"].values()) - (sum(two["sent"].values()) - two["sent"]["all-gather"] + one_gather)


def simulated(schedule: str, answers: list[dict[str, Any]]) -> float:
    """Seconds by the simulator, with gathers, and the mean times of the data-parallel ranks of a stage."""
    n_stages = STAGES * VIRTUAL[schedule]
    gather_ns = int(statistics.median(answer["gather_ns"] for answer in answers))
    units = [StageUnit(s, answers[0]["numel"], gather_ns) for s in range(n_stages)]
    costs = []
    for s in range(n_stages):
        of_ranks = [answer["costs"][str(s)] for answer in answers if str(s) in answer["costs"]]
        costs.append(Cost(*(int(statistics.mean(times)) for times in zip(*of_ranks, strict=True))))
    table = make_table(schedule, STAGES, VIRTUAL[schedule], N, "benchmark")
    return simulate(with_gathers(table, units, None, where="benchmark"), costs).makespan_ns * 1e-9


def peaks(ranks: ServedRanks) -> Iterator[dict[str, Any]]:
    for what, (contender, schedules) in PEAKS.items():
        lines = []
        for schedule in schedules:
            answers = ranks.ask(json.dumps(["peak", f"{what}, {schedule}"]))
            line = {"benchmark": "pipeline_stage3", "contender": contender, "schedule": schedule, "ranks": RANKS}
            line |= {key: max(answer[key] for answer in answers) for key in ("peak", "planned")}
            lines.append({**line, "peak_to_plan": round(line["peak"] / line["planned"], 4)})
        yield from lines
        if len(lines) > 1:
            yield {**max(lines, key=lambda line: line["peak_to_plan"]), "schedule": "all"}


def makespans(ranks: ServedRanks, rounds: int) -> Iterator[dict[str, Any]]:
    found: dict[str, list[float]] = {name: [] for name in TRAINING}
    wanted: dict[str, list[float]] = {name: [] for name in TRAINING}
    for _ in range(rounds):
        for name, times in found.items():
            answers = ranks.ask(json.dumps(["sleep", name]))
            times.append(max(each["end"] for each in answers) - min(each["begin"] for each in answers))
            wanted[name].append(simulated(name, answers))
    lines = []
    for name, times in found.items():
        line: dict[str, Any] = {"benchmark": "pipeline_stage3", "contender": "makespan", "schedule": name}
        line |= {"ranks": RANKS, "micro_batches": N, "ms": round(1e3 * statistics.median(times), 1)}
        line |= {"ms_simulated": round(1e3 * statistics.median(wanted[name]), 1)}
        lines.append(line | ratios("ratio_to_simulated", times, wanted[name]))
    yield from lines
    worst = max(lines, key=lambda line: line["ratio_to_simulated"])
    yield {**worst, "schedule": "all"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pipelines at stage 3 with those at stage 2.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sleep-rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.width)
        return
    from tests.ranks import free_port

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--width", str(options.width)]
    ranks = ServedRanks(command, environment, RANKS, free_port())
    lines: list[dict[str, Any]] = []
    try:
        about = ranks.answers()
        lines += batches(ranks, about, options.width, options.rounds)
        lines += peaks(ranks)
        lines += makespans(ranks, options.sleep_rounds)
    finally:
        ranks.close()
    for line in lines:
        print(json.dumps({**line, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
