"""How close is engine.step() with masters and moments on NVMe to the disk, and with offload to the host to one pass over memory?

One rank (where stage 3 would shard nothing), bf16, AdamW with clipping, stage 2, each step after a real backward pass.
On NVMe a step reads and writes 12 bytes a parameter. Its peer is fio, which moves 24 bytes a parameter on the same
device in the same round (reads and writes in equal parts, O_DIRECT, 1 MiB blocks; the best of two engines, 1 to 4 jobs
and two depths), or a C pass over as many bytes of memory as the step moves, if that takes longer. The NVMe case runs in a separate process in a memory cgroup, so that no cache hides the disk.
The limit of the cgroup is half of the states' bytes (18 a parameter) and 1 GiB for the process itself. If no cgroup can
be made, the case runs without a limit, and the row has a note. "cpu" is compared like ``engine_step``, over 34 bytes a
parameter, because its gradients gather in fp32.
Run: python -m benchmarks.deepspeed_c.offload_step [DIR] [--params 500e6] [--only nvme]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import torch

from benchmarks.deepspeed_c.engine_step import backward, make_engine, step_and_bound, timed_step
from benchmarks.deepspeed_c.memory_limit import STATE_BYTES, join_cgroup, memory_cgroup
from benchmarks.engines import require_fused, step_parts
from benchmarks.fio import Disk
from benchmarks.measure import bound, machine, median_spread, ratios, require
from benchmarks.stream import Part, bytes_of, stream_step
from deepspeed_c import _C

MEMORY_BYTES = 34  # fp32 gradient read twice, masters and two moments both ways, the 16-bit weight
STORED_BYTES = 12  # masters and two moments
PROCESS_BYTES = 1 << 30  # Python, torch and the buffers of the bound's measurement
BOUND_ELEMS = 8 << 20  # length of the memory pass's arrays when the states are in a file


def make_offloaded(n_params: int, offload: dict):
    zero = {"stage": 2, "offload_optimizer": offload}
    return make_engine(n_params, zero, n_layers=32, aio={"queue_depth": 32})


def report(offload: str, n: int, times: list[float], **more) -> dict:
    return {
        "benchmark": "offload_step",
        "offload": offload,
        "stage": 2,
        "ranks": 1,
        "params": n,
        "seconds": round(median_spread(times)[0], 3),
        "ns_per_param": round(median_spread(times)[0] / n * 1e9, 3),
        **more,
        "threads": _C.pool_n_threads(),
        "machine": machine(),
    }


def on_host(n_params: int, rounds: int) -> dict:
    engine, n = make_offloaded(n_params, {"device": "cpu"})
    times, bounds = step_and_bound(engine, rounds)
    n_bytes = bytes_of(step_parts(engine), with_norm=True)
    require(round(n_bytes / n, 1) == MEMORY_BYTES, f"{MEMORY_BYTES} bytes a parameter: {n_bytes / n}")
    engine.close()
    seconds = round(median_spread(bounds)[0], 3)
    return report("cpu", n, times, bound_seconds=seconds, **bound("ratio_to_bound", times, bounds))


def moved_bytes() -> tuple[int, int]:
    """Return the bytes that this process has (read from devices, written to devices)."""
    with open("/proc/self/io") as file:
        found = dict(line.split(": ") for line in file.read().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def file_bytes(folder: str) -> int:
    """Return the bytes of the files that this process has open on the folder's device.

    States lie in files without a name.
    """
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if stat.S_ISREG(status.st_mode) and status.st_dev == os.stat(folder).st_dev:
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def on_nvme(n_params: int, rounds: int, folder: str) -> dict:
    swapped = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    engine, n = make_offloaded(n_params, swapped)
    require_fused(engine)
    losses = [backward(engine)]
    timed_step(engine)
    on_disk = file_bytes(folder)
    require(on_disk >= STORED_BYTES * n, f"{STORED_BYTES} bytes a parameter lie in files: {on_disk / n}")
    disk = Disk(os.path.join(folder, "fio"), "rw", 2 << 30)
    arrays = [torch.full((BOUND_ELEMS,), 0.5) for _ in range(4)]
    stand_in = [Part(*arrays, torch.zeros(BOUND_ELEMS, dtype=torch.bfloat16))]
    stream_step(stand_in, with_norm=True)
    times, peers, rates = [], [], []
    for _ in range(rounds):
        rate = disk.rate()
        memory = stream_step(stand_in, with_norm=True)[0] / BOUND_ELEMS * n
        losses.append(backward(engine))
        before = moved_bytes()
        times.append(timed_step(engine))
        read, written = (after - earlier for after, earlier in zip(moved_bytes(), before))
        require(
            min(read, written) >= 0.95 * STORED_BYTES * n,
            f"a step reads and writes the states: {read} and {written} bytes of {n} parameters",
        )
        peers.append(max(2 * STORED_BYTES * n / rate, memory))
        rates.append(rate / 1e9)
    require(losses[-1] < losses[0], f"losses fall: {losses}")
    engine.close()
    fio_seconds, disk_gb_per_s = round(median_spread(peers)[0], 3), round(median_spread(rates)[0], 2)
    peer = {"fio_seconds": fio_seconds, **ratios("ratio_to_fio", times, peers), "disk_gb_per_s": disk_gb_per_s}
    return report("nvme", n, times, **peer, fio=str(disk.best_setting))


def limited_on_nvme(n_params: int, rounds: int, parent: str) -> dict:
    """Run ``on_nvme`` in a process under a memory limit, if this machine allows one."""
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
    parser.add_argument("--host-params", type=float, default=67e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("cpu", "nvme"))
    parser.add_argument("--in-this-process", action="store_true", help="the part with NVMe, without a limit")
    args = parser.parse_args()
    if args.in_this_process:
        print(json.dumps(on_nvme(int(args.params), args.rounds, args.folder)))
        return
    if args.only != "nvme":
        print(json.dumps(on_host(int(args.host_params), args.rounds)), flush=True)
    if args.only != "cpu":
        print(json.dumps(limited_on_nvme(int(args.params), args.rounds, args.folder)), flush=True)


if __name__ == "__main__":
    main()
