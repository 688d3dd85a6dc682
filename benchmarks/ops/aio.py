"""Does our handle read and write 1 GiB from ordinary unaligned tensors at fio's speed, and how much faster than DeepSpeed's?

All contenders take turns to transfer the same file, which has been written before: fio, our ``aio_handle``, and
DeepSpeed's handle in a separate process if DSC_PEER_PYTHON names a Python with DeepSpeed. The bound is the best of two
engines, 1 or 2 jobs and two depths of fio in each round (sequential, O_DIRECT). Both handles transfer from memory at an
odd address ("ordinary"), and from memory that their ``new_cpu_locked_tensor`` made ("locked"). All contenders have the
same block size, and both handles have the same depth. Nothing is synced. Our handle has to read back the bytes that it
wrote. Ratios to DeepSpeed compare the same kind of tensor.
Run: python -m benchmarks.ops.aio [DIR] [--size 1GiB] [--rounds 7]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch

from benchmarks.fio import Setting
from benchmarks.measure import machine, median_spread, peer_extensions, require
from deepspeed_c.io.bench import DIRECTIONS, FIO_ENGINES, FIO_SECONDS, FioError, Settings, compare, find_fio, ours
from deepspeed_c.io.scratch import scratch
from deepspeed_c.quantity import parse_bytes

KINDS = ("ordinary", "locked")

# Reads "DIRECTION KIND PATH" and answers with seconds, line by line. Its building of the operator may write to standard output.
PEER = """
import os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
block, depth, n = map(int, sys.argv[1:])
handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
tensors = {"ordinary": torch.ones(n + 1, dtype=torch.uint8)[1:], "locked": handle.new_cpu_locked_tensor(n, torch.empty(0, dtype=torch.uint8))}
tensors["locked"].fill_(1)
print("ready", file=out, flush=True)
for line in sys.stdin:
    direction, kind, path = line.split()
    move = handle.sync_pwrite if direction == "write" else handle.sync_pread
    begin = time.perf_counter()
    n_done = move(tensors[kind], path, 0)
    seconds = time.perf_counter() - begin
    print(seconds if n_done == 1 else f"returned {n_done}", file=out, flush=True)
"""


FIO_SETTINGS = [Setting(*row) for row in itertools.product(FIO_ENGINES, (1, 2), (8, 32))]


def fio(program: str, setting: Setting, path: str, n_bytes: int, block: int) -> Callable[[str], float]:
    """Sequential O_DIRECT transfers of the file, in which each job has a separate part.

    The time is measured by fio, without its start.
    """

    def transfer(direction: str) -> float:
        each = n_bytes // setting.jobs
        command = [program, "--name=bound", f"--filename={path}", f"--rw={direction}", f"--size={each}", f"--offset_increment={each}", f"--bs={block}",
                   f"--numjobs={setting.jobs}", f"--iodepth={setting.depth}", f"--ioengine={setting.engine}", "--direct=1", "--thread=1",
                   "--group_reporting", "--output-format=json"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_SECONDS, check=False)
        if done.returncode:
            raise FioError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        require(job["io_bytes"] == n_bytes, f"fio moved {n_bytes} bytes: {job['io_bytes']}")
        return job["io_bytes"] / job["bw_bytes"]

    return transfer


class Peer:
    """DeepSpeed's handle in a separate process, which is idle while other contenders are timed."""

    def __init__(self, python: str, settings: Settings, n_bytes: int) -> None:
        folder = os.path.dirname(python)
        self._process = subprocess.Popen(
            [python, "-c", PEER, str(settings.block_size), str(settings.queue_depth), str(n_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # DeepSpeed builds its operator with the tools of its environment.
            env={
                **os.environ,
                "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": "",
                "TORCH_EXTENSIONS_DIR": peer_extensions(),
            },
        )
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{python}: DeepSpeed's aio_handle cannot be had (exit code {self._process.wait()})")

    def contender(self, kind: str, path: str) -> Callable[[str], float]:
        def transfer(direction: str) -> float:
            print(direction, kind, path, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            try:
                return float(answer)
            except ValueError:
                raise SystemExit(f"DeepSpeed's {direction} from {kind} memory: {answer.strip() or 'it died'}") from None

        return transfer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    n_bytes = parse_bytes(args.size, "--size")
    settings = Settings("auto", args.block, args.depth)
    handle = settings.handle()
    tensors = {
        "ordinary": torch.ones(n_bytes + 1, dtype=torch.uint8)[1:],
        "locked": handle.new_cpu_locked_tensor(n_bytes, torch.empty(0, dtype=torch.uint8)).fill_(1),
    }
    python = os.environ.get("DSC_PEER_PYTHON")
    peer = Peer(python, settings, n_bytes) if python else None
    with scratch(args.folder, n_bytes) as file:
        if file.note:
            print(f"{args.folder}: {file.note}", file=sys.stderr)
        contenders = {f"deepspeed_c, {kind}": ours(file, tensors[kind], handle) for kind in KINDS}
        if peer:
            contenders |= {f"DeepSpeed, {kind}": peer.contender(kind, file.path) for kind in KINDS}
        if program := find_fio():
            contenders |= {
                f"fio {setting}": fio(program, setting, file.path, n_bytes, args.block) for setting in FIO_SETTINGS
            }
        rates = compare(contenders, n_bytes, args.rounds)
        for kind, tensor in tensors.items():
            tensor.random_(256)
            handle.sync_pwrite(tensor, file.path)
            written = tensor.clone()
            handle.sync_pread(tensor.zero_(), file.path)
            require(torch.equal(tensor, written), f"what was read into {kind} memory is what was written")
    if peer:
        peer.close()
    for name, reason in rates.absent.items():
        print(f"{name}: {reason}", file=sys.stderr)
    for name, found in rates.rounds.items():
        for direction in DIRECTIONS:
            median, low, high = median_spread([rate / 1e9 for rate in found[direction]])
            line = {
                "benchmark": "aio",
                "contender": name,
                "direction": direction,
                "mib": n_bytes >> 20,
                "gb_per_s": round(median, 3),
                "gb_per_s_min": round(low, 3),
                "gb_per_s_max": round(high, 3),
            }
            program, _, kind = name.partition(", ")
            theirs = rates.rounds.get(f"DeepSpeed, {kind}") if program == "deepspeed_c" else None
            bounds = {"ratio_to_fio": rates.best_fio(direction), "ratio_to_deepspeed": theirs and theirs[direction]}
            for key, bound in bounds.items():
                if bound:
                    ratio, low, high = median_spread([a / b for a, b in zip(found[direction], bound, strict=True)])
                    line |= {key: round(ratio, 3), f"{key}_min": round(low, 3), f"{key}_max": round(high, 3)}
            if program in ("deepspeed_c", "DeepSpeed"):
                line["depth"] = args.depth
            if program == "deepspeed_c":
                line["backend"] = handle.backend
            line |= {"block": args.block, "machine": machine()}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
