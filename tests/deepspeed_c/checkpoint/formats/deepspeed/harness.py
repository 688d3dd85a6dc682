"""Starts peer.py on some ranks, by a Python that has DeepSpeed, and waits for its report. The live tests and
make_fixtures.py use it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.ranks import free_port
from tests.waits import ended

PEER = Path(__file__).with_name("peer.py")
PEER_MOE = Path(__file__).with_name("peer_moe.py")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATES = {"adamw": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}
STEPS, MORE_STEPS = 3, 2
# The parameter names of each optimizer group of the model in peer.py.
GROUP_NAMES = [["embed.weight", "up.weight", "down.weight"], ["gain", "up.bias", "norm.weight", "norm.bias"]]


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed for peer.py. ``zero``: more keys of the section on ZeRO."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **more.pop("zero", {})}, "steps_per_print": 1000000,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 5}},
    }  # fmt: skip
    if dtype == "bf16":
        made["bf16"] = {"enabled": True}
    if dtype == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    return {**made, **more}


def run_peer(python: str, spec: dict[str, Any], folder: Path, world_size: int, timeout: float = 120) -> dict[str, Any]:
    """Runs peer.py on ``world_size`` ranks and returns the report of rank 0."""
    return run_peers(python, [spec], folder, world_size, timeout)[0]


def run_peers(
    python: str, specs: list[dict[str, Any]], folder: Path, world_size: int, timeout: float = 120, script: Path = PEER
) -> list[dict[str, Any]]:
    """Run ``script`` on ``world_size`` ranks, one spec after the other, and return the reports of rank 0. Ranks that are
    still alive at the end are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    specs = [{"optimizer": "adamw", "report": str(folder / f"report_{i}.pt"), **spec} for i, spec in enumerate(specs)]
    path = folder / "specs.json"
    path.write_text(json.dumps([{"states": STATES.get(spec["optimizer"], STATES["adamw"]), **spec} for spec in specs]))
    ranks = []
    try:
        for rank in range(world_size):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                # DeepSpeed puts names of groups of experts into a set; all ranks must have it in the same order.
                "PYTHONHASHSEED": "0",
            }  # fmt: skip
            with open(folder / f"rank_{rank}.log", "w") as log:
                ranks.append(
                    subprocess.Popen(
                        [python, str(script), str(path)],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for process in ranks:
            process.wait(timeout)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ended(process)
    codes = [process.returncode for process in ranks]
    if any(codes):
        logs = "\n".join((folder / f"rank_{rank}.log").read_text()[-3000:] for rank in range(world_size))
        raise AssertionError(f"ranks ended with {codes}\n{logs}")
    return [torch.load(spec["report"], weights_only=True) for spec in specs]
