"""How fast does an engine with 2 GB of fp32 Adam states on 2 gloo ranks save and load, against fio and torch.distributed.checkpoint, and how long does an asynchronous save stop it?

All contenders run in turn in the same processes and folder, fsync included; each round times one of each. The bound of a save and a load is what fio reaches with as many
jobs, sequentially, O_DIRECT, 1 MiB blocks, 16 deep (the better of libaio and io_uring in that round). The bound of the stall is copying as many bytes in memory on all ranks at once.
``load_other_world`` loads the same states as one process would have saved them.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.checkpoint_io DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import deepspeed_c
from benchmarks.measure import machine, median_spread
from deepspeed_c.checkpoint.native import NativeSource
from deepspeed_c.checkpoint.save import write_native


class Mlp(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def fio(folder: str, direction: str, n_bytes: int, jobs: int) -> float:
    """Bytes a second of sequential O_DIRECT transfers, the better of two engines; files are left for reading."""
    best = 0.0
    for engine in ("libaio", "io_uring"):
        command = ["fio", "--name=bound", f"--directory={folder}", f"--rw={direction}", "--bs=1M", f"--size={n_bytes // jobs}", f"--numjobs={jobs}",
                   "--iodepth=16", f"--ioengine={engine}", "--direct=1", "--end_fsync=1", "--group_reporting", "--output-format=json"]  # fmt: skip
        if direction == "write":
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        best = max(best, report["jobs"][0][direction]["bw_bytes"])
    return best


def memcpy_seconds(n_bytes: int, rounds: int = 5) -> float:
    source, target = (torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folders = [tempfile.mkdtemp(dir=args.folder, prefix="checkpoint_io_") if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = folders[0]
    for name in ("fio", "ours", "async", "dcp"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)

    width = 2048
    layers = max(round(args.gigabytes * 1e9 / 12 / width**2), 1)
    torch.manual_seed(0)
    model = Mlp(width, layers)
    n = sum(p.numel() for p in model.parameters())
    engine = deepspeed_c.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": args.stage},
            "collective_timeout_s": 0,
        },
    )[0]
    engine.backward(engine(torch.randn(1, width)))
    engine.step()
    n_bytes = 12 * n
    mine = {f"rank{rank}.{i}": t for i, t in enumerate(_own_tensors(engine))}

    def timed(function) -> float:
        dist.barrier()
        begin = time.perf_counter()
        function()
        dist.barrier()
        return time.perf_counter() - begin

    def save_dcp() -> None:
        path = os.path.join(folder, "dcp")
        dcp.save(mine, storage_writer=dcp.FileSystemWriter(path, overwrite=True, sync_files=True))

    def bound(direction: str) -> float:
        rates = [fio(os.path.join(folder, "fio"), direction, n_bytes, world) if rank == 0 else 0.0]
        dist.broadcast_object_list(rates)
        return n_bytes / rates[0]

    stall: list[float] = []

    def save_async() -> None:
        begin = time.perf_counter()
        engine.save_checkpoint(os.path.join(folder, "async"), tag="a", is_async=True)
        stall.append(time.perf_counter() - begin)
        engine.wait_checkpoint()

    times: dict[str, list[float]] = {}
    steps = {
        "fio_write": lambda: bound("write"),
        "save": lambda: timed(lambda: engine.save_checkpoint(os.path.join(folder, "ours"), tag="a")),
        "dcp_save": lambda: timed(save_dcp),
        "save_async_whole": lambda: timed(save_async),
        "fio_read": lambda: bound("read"),
        "load": lambda: timed(lambda: engine.load_checkpoint(os.path.join(folder, "ours"), tag="a")),
        "load_other_world": lambda: timed(lambda: engine.load_checkpoint(os.path.join(folder, "ours"), tag="world1")),
    }
    engine.save_checkpoint(os.path.join(folder, "ours"), tag="a")
    if rank == 0:
        with NativeSource(os.path.join(folder, "ours", "a")) as source:
            write_native(source, os.path.join(folder, "ours"), "world1")
    for _ in range(args.rounds):
        for name, step in steps.items():
            times.setdefault(name, []).append(step())
    stalls: list[list[float]] = [[]] * world
    dist.all_gather_object(stalls, stall)
    engine.close()
    times["memcpy"] = [memcpy_seconds(n_bytes // world)] * args.rounds
    # The first round makes the snapshot's buffer.
    times["stall"] = [max(s[i] for s in stalls) for i in range(args.rounds)]
    if rank == 0:
        shutil.rmtree(folder)
        for name, peer, key in (
            ("save", "fio_write", "ratio_to_fio"),
            ("save", "dcp_save", "ratio_to_dcp"),
            ("load", "fio_read", "ratio_to_fio"),
            ("load_other_world", "load", "ratio_to_load"),
            ("stall", "memcpy", "ratio_to_memcpy"),
        ):
            skip = 1 if name == "stall" and args.rounds > 1 else 0
            # Of speeds for what is bound by the disk, of times for the others.
            ratios = [b / a if "fio" in key or "dcp" in key else a / b for a, b in zip(times[name][skip:], times[peer][skip:])]
            ratio, low, high = median_spread(ratios)
            line = {
                "benchmark": "checkpoint_io",
                "contender": name,
                "gigabytes": round(n_bytes / 1e9, 2),
                "seconds": round(median_spread(times[name][skip:])[0], 3),
                "gb_per_s": round(n_bytes / median_spread(times[name][skip:])[0] / 1e9, 2),
                "peer": peer,
                "peer_seconds": round(median_spread(times[peer][skip:])[0], 3),
                key: round(ratio, 3),
                f"{key}_min": round(low, 3),
                f"{key}_max": round(high, 3),
                "stage": args.stage,
                "ranks": world,
                "machine": machine(),
            }
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _own_tensors(engine) -> list[torch.Tensor]:
    """This rank's shard of weights and moments, as plain tensors."""
    tensors = []
    for unit in engine._layout.trained:
        tensors += unit.master
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value) and value.dim() > 0]
    return tensors


if __name__ == "__main__":
    main()
