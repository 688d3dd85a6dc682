"""How fast does an engine with 2 GB of fp32 Adam states on 2 gloo ranks save and load, against fio and torch.distributed.checkpoint, and how long does an asynchronous save stop it?

All contenders run in turn in the same processes and folder, fsync included. Each round times each contender once, and
every save makes new files. The bound of a save and of a load is fio's rate for the same number of bytes (sequential,
O_DIRECT, 1 MiB blocks): the best of two engines, 1 to 4 jobs and two depths in that round. The bound of the stall is
the time to copy the same number of bytes in memory on all ranks at once. ``load_other_world`` loads the same states
from a checkpoint of one process. At stage 2 a load ends with a gather of the weights, in which the disk has no part.
Run: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.checkpoint_io DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import deepspeed_c
from benchmarks.fio import Disk
from benchmarks.measure import in_turn, machine, median_spread, require
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.checkpoint.native.save import write_native


class Mlp(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 2])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for stage in args.stages:
        compare(args, stage)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def compare(args: argparse.Namespace, stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    folders = [tempfile.mkdtemp(dir=args.folder, prefix="checkpoint_io_") if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = folders[0]

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
            "zero_optimization": {"stage": stage},
            "collective_timeout_s": 0,
        },
    )[0]
    engine.backward(engine(torch.randn(1, width)))
    engine.step()
    n_bytes = 12 * n
    source, target = (torch.ones(n_bytes // world, dtype=torch.uint8) for _ in range(2))
    mine = {f"rank{rank}.{i}": t for i, t in enumerate(_own_tensors(engine))}

    def timed(function) -> float:
        dist.barrier()
        begin = time.perf_counter()
        function()
        dist.barrier()
        return time.perf_counter() - begin

    def clear(name: str) -> None:
        """Delete a save outside the timed part, because the file system takes long to delete gigabytes."""
        if rank == 0:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)

    def save_ours() -> float:
        clear("new")
        return timed(lambda: engine.save_checkpoint(os.path.join(folder, "new"), tag="a"))

    def save_dcp() -> None:
        path = os.path.join(folder, "dcp")
        dcp.save(mine, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def copy_in_memory() -> float:
        """Return the seconds of the slowest rank, as the stall does."""
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        times = [0.0] * world
        dist.all_gather_object(times, time.perf_counter() - begin)
        return max(times)

    disks: dict[str, Disk] = {}

    def bound(direction: str) -> float:
        if rank == 0 and direction not in disks:
            disks[direction] = Disk(
                os.path.join(folder, "fio", direction), direction, n_bytes, is_new=direction == "write"
            )
        rates = [disks[direction].rate() if rank == 0 else 0.0]
        dist.broadcast_object_list(rates)
        return n_bytes / rates[0]

    stall: list[float] = []

    def save_async() -> None:
        begin = time.perf_counter()
        engine.save_checkpoint(os.path.join(folder, "async"), tag="a", is_async=True)
        stall.append(time.perf_counter() - begin)
        engine.wait_checkpoint()

    def save_async_whole() -> float:
        clear("async")
        return timed(save_async)

    def save_dcp_whole() -> float:
        clear("dcp")
        return timed(save_dcp)

    times: dict[str, list[float]] = {}
    steps = {
        "fio_write": lambda: bound("write"),
        "save": save_ours,
        "dcp_save": save_dcp_whole,
        "save_async_whole": save_async_whole,
        "memcpy": copy_in_memory,
        "fio_read": lambda: bound("read"),
        "load": lambda: timed(lambda: engine.load_checkpoint(os.path.join(folder, "ours"), tag="a")),
        "load_other_world": lambda: timed(lambda: engine.load_checkpoint(os.path.join(folder, "ours"), tag="world1")),
    }
    engine.save_checkpoint(os.path.join(folder, "ours"), tag="a")
    if rank == 0:
        with NativeSource(os.path.join(folder, "ours", "a")) as saved:
            write_native(saved, os.path.join(folder, "ours"), "world1")
    before = [tensor.clone() for tensor in _own_tensors(engine)]
    for round_ in range(args.rounds):
        for name in in_turn(list(steps), round_):
            times.setdefault(name, []).append(steps[name]())
    saved_bytes = sum(file.stat().st_size for file in Path(folder, "new").rglob("*") if file.is_file())
    require(rank != 0 or saved_bytes >= n_bytes, f"{n_bytes} bytes are saved: {saved_bytes}")
    with torch.no_grad():
        for tensor in _own_tensors(engine):
            tensor.zero_()
    engine.load_checkpoint(os.path.join(folder, "ours"), tag="world1")
    same = all(torch.equal(a, b) for a, b in zip(before, _own_tensors(engine), strict=True))
    require(same, "what was loaded is what was saved")
    stalls: list[list[float]] = [[]] * world
    dist.all_gather_object(stalls, stall)
    engine.close()
    # The first round allocates the buffer of the snapshot, so it is skipped below.
    times["stall"] = [max(s[i] for s in stalls) for i in range(args.rounds)]
    dist.barrier()
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
            # These are ratios of speeds if the disk is the bound, and otherwise ratios of times.
            found = [
                b / a if "fio" in key or "dcp" in key else a / b for a, b in zip(times[name][skip:], times[peer][skip:])
            ]
            ratio, low, high = median_spread(found)
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
                "stage": stage,
                "ranks": world,
                "machine": machine(),
            }
            print(json.dumps(line), flush=True)


def _own_tensors(engine) -> list[torch.Tensor]:
    """Return this rank's shard of weights and moments, as plain tensors."""
    tensors = []
    for unit in engine._layout.trained:
        tensors += unit.master
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value) and value.dim() > 0]
    return tensors


if __name__ == "__main__":
    main()
