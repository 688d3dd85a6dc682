"""How close is engine.step() with masters and moments on NVMe to the disk, and with offload to the host to one pass over memory?

One rank, bf16, AdamW with clipping, stages 2 and 3. On NVMe a step reads and writes 12 bytes a parameter; the bound is the longer of 24 bytes at what fio reaches on the same
device in the same round (reads and writes in equal parts, O_DIRECT, 1 MiB blocks, 32 deep; the better of libaio and io_uring) and the pass over memory that
``engine_step`` is compared with. "cpu" is compared with that pass alone, over 34 bytes a parameter, because gradients gather in fp32 there.
Run: python -m benchmarks.deepspeed_c.offload_step [DIR] [--params 500e6]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time

from benchmarks.deepspeed_c.engine_step import fill_gradients, make_engine
from benchmarks.measure import machine, median_spread, triad_gbps

MEMORY_BYTES = 34  # fp32 gradient read twice, masters and two moments both ways, the 16-bit weight
DISK_BYTES = 24


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


def report(offload: str, stage: int, n: int, times: list[float], bounds: list[float], **more) -> None:
    ratio, low, high = median_spread([t / b for t, b in zip(times, bounds)])
    line = {
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
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--params", type=float, default=500e6)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for stage in (2, 3):
        engine, n = make_offloaded(int(67e6), stage, {"device": "cpu"})
        times, bounds = [], []
        for round_ in range(args.rounds + 2):
            bound = MEMORY_BYTES * n / (triad_gbps() * 1e9)
            elapsed = timed_step(engine)
            if round_ >= 2:
                times.append(elapsed)
                bounds.append(bound)
        engine.close()
        report("cpu", stage, n, times, bounds)
    folder = tempfile.mkdtemp(dir=args.folder, prefix="offload_step_")
    os.makedirs(os.path.join(folder, "fio"))
    try:
        swapped = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
        engine, n = make_offloaded(int(args.params), 2, swapped)
        timed_step(engine)  # makes the moments
        times, bounds, rates = [], [], []
        for _ in range(args.rounds):
            rate = fio_mixed(os.path.join(folder, "fio"), 2 << 30)
            memory = MEMORY_BYTES * n / (triad_gbps() * 1e9)
            times.append(timed_step(engine))
            bounds.append(max(DISK_BYTES * n / rate, memory))
            rates.append(rate / 1e9)
        report("nvme", 2, n, times, bounds, disk_gb_per_s=round(median_spread(rates)[0], 2))
        engine.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
