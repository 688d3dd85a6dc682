"""Does a model train in half of the memory that its states take, and to the same losses, with masters and moments on NVMe?

Two runs make the same steps in separate processes. One has no memory limit. The other uses ``offload_optimizer`` on
NVMe in a memory cgroup whose limit is half of 18 bytes a parameter (bf16 weights, fp32 gradients, masters and moments).
The benchmark needs permission to make a cgroup.
Run: python -m benchmarks.deepspeed_c.memory_limit [DIR] [--params 200e6]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks.measure import machine, require

STATE_BYTES = 18
STEPS = 4


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[tuple[str, str]]:
    """Make a memory cgroup, of version 1 or 2.

    Yields the paths of (the file with its processes, the file with its peak in bytes).
    """
    is_v1 = os.path.isdir("/sys/fs/cgroup/memory")
    path = f"/sys/fs/cgroup/{'memory/' if is_v1 else ''}dsc_memory_limit_{os.getpid()}"
    os.mkdir(path)
    try:
        with open(os.path.join(path, "memory.limit_in_bytes" if is_v1 else "memory.max"), "w") as file:
            file.write(str(limit))
        peak = "memory.max_usage_in_bytes" if is_v1 else "memory.peak"
        yield os.path.join(path, "cgroup.procs"), os.path.join(path, peak)
    finally:
        os.rmdir(path)


def join_cgroup(procs: str) -> Callable[[], None] | None:
    """Return the function that a new process calls first to join the cgroup with this file of processes; None for ""."""

    def join() -> None:
        with open(procs, "w") as file:
            file.write(str(os.getpid()))

    return join if procs else None


def train(n_params: int, folder: str) -> None:
    """Train once, and print the losses and the peak of resident memory."""
    import torch

    import deepspeed_c

    width, layers = 2048, max(round(n_params / 2048**2), 1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[m for _ in range(layers) for m in (torch.nn.Linear(width, width, bias=False), torch.nn.Tanh())]
    )
    with torch.no_grad():  # so that activations keep their size through all layers
        for param in model.parameters():
            param.mul_(3**0.5)
    zero: dict = {"stage": 2}
    if folder:
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": folder,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    losses = []
    begin = time.perf_counter()
    for step in range(STEPS):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (engine(x).float() - 1).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    seconds = (time.perf_counter() - begin) / STEPS
    n = sum(p.numel() for p in model.parameters())
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    with open("/proc/self/io") as file:
        written = next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))
    engine.close()
    found = {"losses": losses, "params": n, "peak_bytes": peak, "written_bytes": written}
    print(json.dumps({**found, "seconds_per_step": round(seconds, 2)}))


def run(n_params: int, folder: str, procs: str = "") -> dict:
    command = [
        sys.executable,
        "-m",
        "benchmarks.deepspeed_c.memory_limit",
        folder,
        "--params",
        str(n_params),
        "--train",
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=join_cgroup(procs))
    if done.returncode:
        raise SystemExit(
            f"the run {'with' if procs else 'without'} a limit ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--train", action="store_true", help="one run, in this process")
    args = parser.parse_args()
    if args.train:
        train(int(args.params), args.folder)
        return
    free = run(int(args.params), "")
    limit = STATE_BYTES * free["params"] // 2
    with memory_cgroup(limit) as (procs, peak), tempfile.TemporaryDirectory(dir=args.folder) as folder:
        limited = run(int(args.params), folder, procs)
        with open(peak) as file:
            cgroup_peak = int(file.read())
    require(free["losses"] == limited["losses"], f"losses are the same: {free['losses']} and {limited['losses']}")
    require(cgroup_peak <= limit, f"the cgroup holds {limit} bytes: {cgroup_peak}")
    state_bytes = STATE_BYTES * free["params"]
    require(
        limited["written_bytes"] >= STEPS * 12 * free["params"],
        f"states are written in each step: {limited['written_bytes']} bytes",
    )
    line = {
        "benchmark": "memory_limit",
        "params": free["params"],
        "state_bytes": state_bytes,
        "limit_bytes": limit,
        "ratio_states_to_limit": round(state_bytes / limit, 3),
        "peak_bytes_without_limit": free["peak_bytes"],
        "peak_bytes_with_limit": limited["peak_bytes"],
        "cgroup_peak_bytes": cgroup_peak,
        "seconds_per_step_without_limit": free["seconds_per_step"],
        "seconds_per_step_with_limit": limited["seconds_per_step"],
        "losses_are_equal": free["losses"] == limited["losses"],
        "losses": limited["losses"],
        "machine": machine(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
