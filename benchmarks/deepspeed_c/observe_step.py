"""How much longer is a training step with every monitor, log and profile of the package on?

The 29M-parameter GPT of ``train_step`` in fp32 on 2 gloo ranks, stages 2 and 3. On: ``jsonl``, ``csv_monitor``,
``tensorboard``, ``prometheus``, ``comms_logger``, ``wall_clock_breakdown``, and ``flops_profiler`` with a step that
never comes. Each side has two processes, which live through the whole run, and the sides take turns. The sides do not
share processes, because listeners to the ledger's entries apply to a whole process and would make the plain engine
slower. The figure is the processor time of rank 0. It includes the thread that writes, and other programs add little to
it. There is no result unless each backend has all steps of the run.
Run: python -m benchmarks.deepspeed_c.observe_step [--rounds 15]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt, seeded
from benchmarks.measure import in_turn, machine, ratios, require, require_equal
from benchmarks.served import ServedRanks, say
from tests.ranks import free_port

RANKS, WARMUP = 2, 3
STEPS = 3  # in a round of a side
LR = 1e-6  # small: steps repeat one batch, and once it is learnt, its gradients are denormal and steps slow
LOSS = "Train/Samples/train_loss"
NEVER = 10**9
SIDES = ("on", "off")


def sections(folder: str, port: int) -> dict[str, Any]:
    to_folder = {"enabled": True, "output_path": folder, "job_name": "job"}
    return {
        "jsonl": to_folder,
        "csv_monitor": to_folder,
        "tensorboard": to_folder,
        "prometheus": {"enabled": True, "port": port, "job_name": "job"},
        "comms_logger": {"enabled": True},
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": NEVER},
    }


def serve(side: str, stage: int, folder: str, port: int) -> None:
    """Measure one rank of one side on request."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **(sections(folder, port) if side == "on" else {}),
    }
    engine = deepspeed_c.initialize(model=seeded(Gpt), config=config)[0]
    require(engine.monitor.enabled == (side == "on"), f"monitors are {side}")
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))

    def train() -> dict[str, float]:
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        dist.barrier()
        wall, processor = time.perf_counter() - begin, time.process_time() - used
        return {"loss": loss.item(), "wall": wall / STEPS, "processor": processor / STEPS}

    for _ in range(WARMUP):
        train()
    say({})
    for question in sys.stdin:
        say(train() if question == "\n" else proofs(engine, port))
    os._exit(0)


def proofs(engine: Any, port: int) -> dict[str, Any]:
    """Return the number of the engine's steps, and the counts of its monitors."""
    phases, log = engine.get_wall_clock_timers(), deepspeed_c.comm.comms_logger
    found = {"steps": engine.global_steps, "samples": engine.global_samples, "dropped": engine.monitor.n_dropped}
    found |= {"phases": phases, "calls": log.get_total_operations() if log.enabled else 0}
    engine.monitor.flush()
    if engine.monitor.is_writing:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            lines = page.read().decode().splitlines()
        line = next(line for line in lines if line.startswith("deepspeed_c_last_step{"))
        found["prometheus"] = float(line.split()[-1])
    engine.close()
    return found


def require_written(folder: Path, proof: dict[str, Any], rank: int) -> None:
    """Require that each backend has every step of a run, and that nothing was dropped."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # only this side needs it

    steps = proof["steps"]
    require(proof["phases"]["forward"] > 0 and proof["phases"]["step"] > 0, f"phases are timed: {proof['phases']}")
    require(proof["calls"] >= steps, f"the communication log has calls of {steps} steps: {proof['calls']}")
    if rank:
        return
    require(not proof["dropped"], f"no event was dropped: {proof['dropped']}")
    require(proof["prometheus"] == proof["samples"], f"Prometheus has the last of {proof['samples']} samples")
    expected = [proof["samples"] // steps * (step + 1) for step in range(steps)]
    lines = [json.loads(line) for line in (folder / "job" / "events.jsonl").read_text().splitlines()]
    scalars = EventAccumulator(str(folder / "job"), size_guidance={"scalars": 0})
    scalars.Reload()
    with open(folder / "job" / f"{LOSS.replace('/', '_')}.csv") as file:
        rows = list(csv.reader(file))[1:]
    written = {
        "jsonl": [line["step"] for line in lines if LOSS in line],
        "tensorboard": [event.step for event in scalars.Scalars(LOSS)],
        "csv_monitor": [int(step) for step, _ in rows],
    }
    for backend, found in written.items():
        require(found == expected, f"{backend} has the loss of each of {steps} steps: {found}")


def start(side: str, stage: int, folder: str) -> ServedRanks:
    command = [sys.executable, "-m", "benchmarks.deepspeed_c.observe_step", "--serve", side]
    command += ["--stages", str(stage), "--folder", folder, "--port", str(free_port())]
    return ServedRanks(command, {**os.environ, "OMP_NUM_THREADS": "1"}, RANKS, free_port())


def compare(stage: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    running: dict[str, ServedRanks] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for side in SIDES:
                running[side] = start(side, stage, folder)
                running[side].answers()
            for round_ in range(rounds):
                for side in in_turn(SIDES, round_):
                    found[side].append(running[side].ask()[0])
                require_equal("losses", {side: each[-1]["loss"] for side, each in found.items()}, 1e-6)
            proved = {side: running[side].ask("proofs") for side in SIDES}
        finally:
            for side in running.values():
                side.close()
        for rank, proof in enumerate(proved["on"]):
            require_written(Path(folder), proof, rank)
    for proof in proved["off"]:
        require(not proof["phases"] and not proof["calls"], f"the plain side observes nothing: {proof}")
    on, off = found["on"], found["off"]
    line: dict[str, Any] = {"benchmark": "observe_step", "stage": stage, "ranks": RANKS}
    for key in ("wall", "processor"):
        line |= ratios(f"{key}_to_plain", *([each[key] for each in side] for side in (on, off)))
        line[f"{key}_ms_plain"] = round(1e3 * statistics.median(each[key] for each in off), 1)
        added = statistics.median(a[key] - b[key] for a, b in zip(on, off, strict=True))
        line[f"{key}_ms_added"] = round(1e3 * added, 2)
    return {**line, "steps_written": proved["on"][0]["steps"], "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.stages[0], args.folder, args.port)
        return
    for stage in args.stages:
        print(json.dumps(compare(stage, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
