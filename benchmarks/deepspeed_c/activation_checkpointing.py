"""How much time and memory do recomputed layers take, beside torch's own checkpoint, and with their inputs in a file or
cut over ranks?

Twelve layers keep 96 MiB each, or an input of 16 MiB if they are recomputed. The contenders take turns in one process
with one step of forward and backward each. Peaks are live bytes (`deepspeed_c/plan/live_bytes.py`) of a separate step. Two
ranks compare inputs that are cut over the ranks with inputs that are not, and also measure the peak of resident memory
of one more step. The cost of the wrapper is measured by calls without a graph, which recompute nothing.
Run: python -m benchmarks.deepspeed_c.activation_checkpointing [--folder DIR]
or:  python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.activation_checkpointing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.config.checkpoint import ActivationCheckpointing, ActivationOffload
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.recompute.recomputer import Recomputer, tensor_parallel_ranks

LAYERS, WIDTH, ROWS = 12, 256, 16384  # an input of 16 MiB
MIB = 1 << 20
N_CALLS = 20_000


class Layer(nn.Module):
    """A layer that keeps its input, the normalised input, and two tensors of double width: together as much as six
    inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class World:
    """An ``mpu`` with all ranks tensor-parallel."""

    def get_tensor_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def make_step(call: Callable, rows: int, losses: list[float]) -> Callable[..., None]:
    """Return a step; its argument is called between forward and backward."""
    torch.manual_seed(1)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    x = torch.randn(rows, WIDTH)
    # The input is no leaf, like the output of an embedding. The graph would hold a leaf even if the first layer's input
    # were not kept.
    shift = nn.Parameter(torch.zeros(WIDTH))

    def step(between: Callable[[], None] = lambda: None) -> None:
        y = x + shift
        for layer in layers:
            y = call(layer, y)
        loss = y.square().mean()
        del y
        between()
        loss.backward()
        losses.append(loss.item() + sum(param.grad.abs().sum().item() for param in layers.parameters()))
        layers.zero_grad()
        shift.grad = None

    return step


def bytes_of(step: Callable[..., None]) -> tuple[int, int]:
    """Return the bytes of one step: (at the peak, between forward and backward)."""
    live, between = LiveBytes(), []
    with live, live.phase("step"):
        step(lambda: between.append(live.nbytes()))
    return live.peaks["step"], between[0]


def status_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":")) * 1024


def resident_of(step: Callable[..., None]) -> int:
    """Return the bytes of resident memory that a step adds at its peak, starting from a heap without free pages."""
    get_accelerator().empty_cache()
    before = status_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    step()
    return status_bytes("VmHWM") - before


def wrapper_us() -> float:
    """Return the microseconds that recomputation adds to a layer's call without a graph."""
    mine, layer, x = Recomputer(ActivationCheckpointing()), nn.Identity(), torch.zeros(1)
    found = []
    with torch.no_grad():
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(N_CALLS):
                mine.run(layer, (x,), {})
            middle = time.perf_counter()
            for _ in range(N_CALLS):
                layer(x)
            found.append((middle - begin - (time.perf_counter() - middle)) / N_CALLS * 1e6)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--folder", help="on the device to measure; default: the folder for temporary files")
    options = parser.parse_args()
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not is_alone:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain = Recomputer(ActivationCheckpointing())
        ways: dict[str, Callable] = {"recomputed": lambda layer, x: plain.run(layer, (x,), {})}
        if is_alone:
            away = Recomputer(ActivationCheckpointing(offload=ActivationOffload(device="nvme", nvme_path=folder)))
            ways["torch"] = lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            ways["nvme"] = lambda layer, x: away.run(layer, (x,), {})
        else:
            cut = Recomputer(ActivationCheckpointing(partition_activations=True), tensor_parallel_ranks(World()))
            ways["partitioned"] = lambda layer, x: cut.run(layer, (x,), {})
        losses: dict[str, list[float]] = {name: [] for name in ways}
        steps = {name: make_step(call, options.rows, losses[name]) for name, call in ways.items()}
        kept = make_step(lambda layer, x: layer(x), options.rows, losses.setdefault("kept", []))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(options.rounds + 1):
            for name in in_turn(list(ways), i):
                if not is_alone:
                    dist.barrier()
                begin = time.perf_counter()
                steps[name]()
                if i:
                    seconds[name].append(time.perf_counter() - begin)
        peaks, between = {}, {}
        for name, step in (*steps.items(), ("kept", kept)):
            peaks[name], between[name] = bytes_of(step)
        require(len({loss for each in losses.values() for loss in each}) == 1, f"all compute the same bits: {losses}")
        inputs = LAYERS * options.rows * WIDTH * 4
        spared = between["kept"] - between["recomputed"]
        require(spared > 4 * inputs, f"recomputed layers keep their inputs: {between}")
        if is_alone:
            require(away.stash.read_bytes > 0.7 * (options.rounds + 1) * inputs, "inputs have been in the file")
        row: dict[str, Any] = {"inputs_mib": inputs / MIB, "ranks": 1 if is_alone else dist.get_world_size()}
        row |= {f"peak_mib_{name}": round(peak / MIB, 1) for name, peak in peaks.items()}
        for name in ways:
            row[f"seconds_{name}"] = round(median_spread(seconds[name])[0], 4)
        if is_alone:
            row["peak_of_torch"] = round(peaks["recomputed"] / peaks["torch"], 4)
            row |= ratios("time_of_torch", seconds["recomputed"], seconds["torch"])
            row["nvme_inputs_less"] = round((peaks["recomputed"] - peaks["nvme"]) / inputs, 4)
            row |= ratios("nvme_time_of_recomputed", seconds["nvme"], seconds["recomputed"])
            row["wrapper_us"] = round(wrapper_us(), 3)
        else:
            for key, found in (("inputs", between), ("peak", peaks)):
                row[f"partitioned_{key}_less"] = round((found["recomputed"] - found["partitioned"]) / inputs, 4)
            resident = {name: resident_of(step) for name, step in steps.items()}
            row |= {f"resident_mib_{name}": round(found / MIB, 1) for name, found in resident.items()}
            row["partitioned_resident_less"] = round((resident["recomputed"] - resident["partitioned"]) / inputs, 4)
            row |= ratios("partitioned_time_of_recomputed", seconds["partitioned"], seconds["recomputed"])
        if is_alone or dist.get_rank() == 0:
            print(json.dumps({"benchmark": "activation_checkpointing", **row, "machine": machine()}))
    if not is_alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
