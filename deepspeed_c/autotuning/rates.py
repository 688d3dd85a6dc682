"""The rates of this machine, measured in a process of its own:
``python -m deepspeed_c.autotuning.rates FILE N_LOCAL``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed_c.autotuning.bound import MachineRates
from deepspeed_c.engine.experiment import write_json

__all__ = ["best_seconds", "current_device", "measure_rates"]

# A short measurement may miss the best shape, and ends before a processor is warm.
_FLOPS_MARGIN = 1.25
# A copy reads what it overwrites too, on some processors. A pass that only reads does not.
_BYTES_MARGIN = 1.5
# Four cores of today's processors share no more.
_CACHE_OF_FOUR_CORES = 64 << 20
# Others may use the machine too: the shortest of many calls is the rate without them.
_SECONDS = 0.25


def measure_rates(n_local: int, folder: Path) -> MachineRates:
    """The rates of one of ``n_local`` ranks of this host, with margins. All 0 if they cannot be measured."""
    path = folder / "rates.json"
    path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rates.log", "wb") as log:
        command = [sys.executable, "-m", "deepspeed_c.autotuning.rates", str(path), str(n_local)]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    try:
        return MachineRates(**json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return MachineRates()


def main(path: str, n_local: int) -> None:
    """Measures the rates, and writes them to the file ``path``."""
    device = current_device()
    write_json(path, (_rates_of_host(n_local) if device.type == "cpu" else _rates_of_device(device))._asdict())


def current_device() -> torch.device:
    """The device that ranks of this machine train on."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def _rates_of_host(n_local: int) -> MachineRates:
    """All processors work at once, however many threads a rank has: the ranks of the host share their rate."""
    n_cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(n_cpus)
    cpu = torch.device("cpu")
    flops = max(_product_rate(cpu, dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (256, 768))
    cached = _CACHE_OF_FOUR_CORES * -(-n_cpus // 4)
    memory = _copy_rate(cpu, cpu, 128 << 20) * 2
    return MachineRates(_FLOPS_MARGIN * flops / n_local, _BYTES_MARGIN * memory / n_local, cached=cached / n_local)


def _rates_of_device(device: torch.device) -> MachineRates:
    torch.set_float32_matmul_precision("high")  # the script may allow it
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    flops = max(_product_rate(device, dtype, size) for dtype in dtypes for size in (4096, 8192))
    n_bytes = 512 << 20
    memory = 2 * _copy_rate(device, device, n_bytes)
    host = torch.device("cpu")
    link = max(_copy_rate(host, device, n_bytes), _copy_rate(device, host, n_bytes))
    peer = 0.0
    if torch.accelerator.device_count() > 1:
        peer = _copy_rate(torch.device(device.type, 0), torch.device(device.type, 1), n_bytes)
    cached = float(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) if device.type == "cuda" else 0.0
    rates = (_BYTES_MARGIN * each for each in (memory, link, peer))
    return MachineRates(_FLOPS_MARGIN * flops, *rates, cached=cached)


def _product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), device)


def _copy_rate(source: torch.device, to: torch.device, n_bytes: int) -> float:
    """Bytes copied in a second."""

    def made(device: torch.device) -> torch.Tensor:
        is_pinned = device.type == "cpu" and source != to
        return torch.ones(n_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)

    a, b = made(source), made(to)
    return n_bytes / best_seconds(lambda: b.copy_(a, non_blocking=True), to if to.type != "cpu" else source)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time of several calls, with the work that they start on the device."""
    best, end, n = float("inf"), time.perf_counter() + _SECONDS, 0
    while n < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best, n = min(best, time.perf_counter() - begin), n + 1
    return best


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
