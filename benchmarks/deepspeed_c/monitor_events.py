"""How long does a training thread wait while the events of one step go to CSV files and TensorBoard, against real DeepSpeed?

Both sides call ``MonitorMaster.write_events`` with the same sections and the same 15 events a step. Each side has one
process, which lives through the whole run, and the sides take turns. "call" is the time until ``write_events`` returns.
Ours hands events to a thread. The row therefore also has the processor time of the whole process until everything is
written, in which work of the thread shows. Between two steps, outside of "call", ours waits until its thread is idle,
because a training step would give it this time. There is no result unless both sides have written each value of each
step. DSC_PEER_PYTHON names the interpreter of an environment with DeepSpeed, the same torch and tensorboard.
Run: python -m benchmarks.deepspeed_c.monitor_events [--rounds 11]
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77
STEPS = 20  # in a round of a side
WARMUP = 1
NAMES = (
    *("train_loss", "lr", "loss_scale", "grad_norm", "skipped_steps", "tokens", "samples_per_sec"),
    *("elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_backward_inner"),
    *("elapsed_time_ms_backward_allreduce", "elapsed_time_ms_step", "elapsed_time_ms_data"),
    *("elapsed_time_ms_other", "host_memory_bytes"),
)


def value_of(i: int, step: int) -> float:
    return i + step / 1024


def serve(is_ours: bool, folder: str) -> None:
    """Measure one side on request. The peer's environment runs this function too."""
    if is_ours:
        import deepspeed_c

        deepspeed_c.install_as_deepspeed()
    import deepspeed
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    deepspeed.init_distributed("gloo")
    section = {"enabled": True, "output_path": folder, "job_name": "job"}
    master = MonitorMaster(get_monitor_config({"csv_monitor": section, "tensorboard": section}))
    # DeepSpeed's monitor has neither function: it has written everything when the call returns.
    flush = master.flush if is_ours else lambda: None
    n_steps = 0

    def write() -> dict[str, float]:
        nonlocal n_steps
        calls, used = 0.0, time.process_time()
        for _ in range(STEPS):
            n_steps += 1
            events = [(f"Train/Samples/{name}", value_of(i, n_steps), n_steps) for i, name in enumerate(NAMES)]
            begin = time.perf_counter()
            master.write_events(events)
            calls += time.perf_counter() - begin
            flush()
        return {"call": calls / STEPS, "processor": (time.process_time() - used) / STEPS, "steps": n_steps}

    for _ in range(WARMUP):
        write()
    print("answer " + json.dumps({"class": MonitorMaster.__module__, "package": deepspeed.__version__}), flush=True)
    for _ in sys.stdin:
        print("answer " + json.dumps(write()), flush=True)
    sys.stdout.flush()
    master.tb_monitor.get_summary_writer().close()
    os._exit(0)


def start(python: str, is_ours: bool, folder: str) -> Any:
    from benchmarks.measure import peer_extensions
    from benchmarks.served import Served
    from tests.ranks import free_port

    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": peer_extensions()}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if is_ours:
        environment["PYTHONPATH"] = str(ROOT)
    else:  # ninja is found beside its interpreter
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    side = "ours" if is_ours else "theirs"
    return Served([python, str(Path(__file__).resolve()), "--serve", side, "--folder", folder], environment)


def require_written(side: str, folder: str, n_steps: int) -> None:
    """Require that a side's files hold each value of each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from benchmarks.measure import require

    scalars = EventAccumulator(str(Path(folder) / "job"), size_guidance={"scalars": 0})
    scalars.Reload()
    for i, name in enumerate(NAMES):
        expected = [(step, value_of(i, step)) for step in range(1, n_steps + 1)]
        with open(Path(folder) / "job" / f"Train_Samples_{name}.csv") as file:
            rows = [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]
        events = [(event.step, event.value) for event in scalars.Scalars(f"Train/Samples/{name}")]
        require(rows == expected, f"{side} has {n_steps} rows of {name} in its CSV file: {len(rows)}")
        require(events == expected, f"{side} has {n_steps} values of {name} in TensorBoard: {len(events)}")


def compare(peer: str, rounds: int) -> dict[str, Any]:
    from benchmarks.measure import in_turn, machine, ratios, require

    sides = {"ours": (sys.executable, True), "theirs": (peer, False)}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    running, about = {}, {}
    with tempfile.TemporaryDirectory() as parent:
        folders = {side: str(Path(parent) / side) for side in sides}
        try:
            for side, (python, is_ours) in sides.items():
                running[side] = start(python, is_ours, folders[side])
                about[side] = running[side].answer()
                own = "deepspeed_c" if is_ours else "deepspeed"
                require(about[side]["class"].split(".")[0] == own, f"{side} is {own}'s: {about[side]}")
            for round_ in range(rounds):
                for side in in_turn(list(sides), round_):
                    running[side].ask()
                    found[side].append(running[side].answer())
        finally:
            for each in running.values():
                each.close()
        for side, each in found.items():
            require_written(side, folders[side], each[-1]["steps"])
    line: dict[str, Any] = {"benchmark": "monitor_events", "events": len(NAMES)}
    for key in ("call", "processor"):
        line |= ratios(f"{key}_to_deepspeed", *([each[key] for each in side] for side in found.values()))
        for side, each in found.items():
            line[f"{side}_{key}_us"] = round(1e6 * statistics.median(one[key] for one in each), 1)
    return {**line, "deepspeed": about["theirs"]["package"], "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the events of a step on the training thread.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--serve", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve == "ours", options.folder)
        return
    peer = os.environ.get("DSC_PEER_PYTHON")
    if not peer:
        print("DSC_PEER_PYTHON names no environment with DeepSpeed and tensorboard", file=sys.stderr)
        sys.exit(SKIPPED)
    print(json.dumps(compare(peer, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
