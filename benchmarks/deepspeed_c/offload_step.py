"""How close is engine.step() with masters and moments on NVMe to the disk, and with offload to the host to one pass over memory?

One rank, bf16, AdamW with clipping, stages 2 and 3. On NVMe a step reads and writes 12 bytes a parameter; the bound is the longer of 24 bytes at what fio reaches on the same
device in the same round (reads and writes in equal parts, O_DIRECT, 1 MiB blocks, 32 deep; the better of libaio and io_uring) and the pass over memory that
``engine_step`` is compared with. It runs in a process of its own, in a memory cgroup whose limit is half of what the states take (18 bytes a parameter) and 1 GiB for the
process itself, so that no cache hides the disk; where no cgroup can be made, without a limit and with a note. "cpu" is compared with the pass over memory alone, over 34 bytes a parameter, because
gradients gather in fp32 there. Run: python -m benchmarks.deepspeed_c.offload_step [DIR] [--params 500e6] [--only nvme]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from benchmarks.deepspeed_c.engine_step import fill_gradients, make_engine
from benchmarks.deepspeed_c.memory_limit import STATE_BYTES, join_cgroup, memory_cgroup
from benchmarks.measure import machine, median_spread, triad_gbps

MEMORY_BYTES = 34  # fp32 gradient read twice, masters and two moments both ways, the 16-bit weight
DISK_BYTES = 24
PROCESS_BYTES = 1 << 30  # Python, torch and what the bound is measured with


def make_offloaded(n_params: int, stage: int, offload: dict):
    zero = {"stage": stage, "offload_optimizer": offload}
    return make_engine(n_params, zero, n_layers=32, aio={"queue_depth": 32})


def fio_mixed(folder: str, n_bytes: int) -> float:
    """Bytes a second of reads and writes together, the better of two engines."""
    best = 0.0
    for engine in ("libaio", "io_uring"):
        command = ["fio", "--name=bound", f"--directory={folder}", "--rw=rw", "--bs=1M", f"--size={n_bytes}", "--iodepth=32",
                   f"--ioengine={engine}", "--direct=1", "--output-format=json"]  # fmt: skip
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
        best = max(best, report["read"]["bw_bytes"] + report["write"]["bw_bytes"])
    return best


def timed_step(engine) -> float:
    fill_gradients(engine)
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def report(offload: str, stage: int, n: int, times: list[float], bounds: list[float], **more) -> dict:
    ratio, low, high = median_spread([t / b for t, b in zip(times, bounds)])
    return {
        "benchmark": "offload_step",
        "offload": offload,
        "stage": stage,
        "params": n,
        "seconds": round(median_spread(times)[0], 3),
        "ns_per_param": round(median_spread(times)[0] / n * 1e9, 3),
        "bound_seconds": round(median_spread(bounds)[0], 3),
        "ratio_to_bound": round(ratio, 3),
        "ratio_min": round(low, 3),
        "ratio_max": round(high, 3),
        **more,
        "machine": machine(),
    }


def on_host(stage: int, rounds: int) -> dict:
    engine, n = make_offloaded(int(67e6), stage, {"device": "cpu"})
    times, bounds = [], []
    for round_ in range(rounds + 2):
        bound = MEMORY_BYTES * n / (triad_gbps() * 1e9)
        elapsed = timed_step(engine)
        if round_ >= 2:
            times.append(elapsed)
            bounds.append(bound)
    engine.close()
    return report("cpu", stage, n, times, bounds)


def on_nvme(n_params: int, rounds: int, folder: str) -> dict:
    os.makedirs(os.path.join(folder, "fio"))
    swapped = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    engine, n = make_offloaded(n_params, 2, swapped)
    timed_step(engine)
    times, bounds, rates = [], [], []
    for _ in range(rounds):
        rate = fio_mixed(os.path.join(folder, "fio"), 2 << 30)
        memory = MEMORY_BYTES * n / (triad_gbps() * 1e9)
        times.append(timed_step(engine))
        bounds.append(max(DISK_BYTES * n / rate, memory))
        rates.append(rate / 1e9)
    engine.close()
    return report("nvme", 2, n, times, bounds, disk_gb_per_s=round(median_spread(rates)[0], 2))


def limited_on_nvme(n_params: int, rounds: int, parent: str) -> dict:
    """``on_nvme`` in a process under a memory limit, if this machine lets one be set."""
    folder = tempfile.mkdtemp(dir=parent, prefix="offload_step_")
    limit, procs, peak, note = STATE_BYTES * n_params // 2 + PROCESS_BYTES, "", "", ""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        try:
            procs, peak = stack.enter_context(memory_cgroup(limit))
        except OSError as error:
            note = f"without a memory limit: {error}"
            print(note, file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.deepspeed_c.offload_step", folder, "--in-this-process"]
        command += ["--params", str(n_params), "--rounds", str(rounds)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, preexec_fn=join_cgroup(procs))
        if done.returncode:
            raise SystemExit(f"the steps with states on NVMe ended with {done.returncode}")
        line = json.loads(done.stdout.splitlines()[-1])
        if note:
            return {**line, "note": note}
        with open(peak) as file:
            return {**line, "limit_bytes": limit, "cgroup_peak_bytes": int(file.read())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--params", type=float, default=500e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("cpu", "nvme"))
    parser.add_argument("--in-this-process", action="store_true", help="the part with NVMe, without a limit")
    args = parser.parse_args()
    if args.in_this_process:
        print(json.dumps(on_nvme(int(args.params), args.rounds, args.folder)))
        return
    if args.only != "nvme":
        for stage in (2, 3):
            print(json.dumps(on_host(stage, args.rounds)), flush=True)
    if args.only != "cpu":
        print(json.dumps(limited_on_nvme(int(args.params), args.rounds, args.folder)), flush=True)


if __name__ == "__main__":
    main()
