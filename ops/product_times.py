"""How long products of 16-bit elements take on this machine, in torch and in the core of ``deepspeed_c.ops.products``.

The three products of a layer's training step are timed: its output and the gradients of its input and its weight.
Times are kept in a file of the user's cache folder, so that a machine measures once for each version of torch, and all
runs on it decide alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_c import _C
from deepspeed_c._version import __version__
from deepspeed_c.env import read_env
from deepspeed_c.processor import processor_name

__all__ = ["ProductTimes", "keep_times", "product_times"]

_N_ROWS, _WIDTH = 64, 512
_N_ROUNDS = 3
_SLOW = 1.5


class ProductTimes(NamedTuple):
    """Seconds of three products, 64 rows with a weight [512, 512]."""

    torch_s: float
    ours_s: float

    @property
    def is_torch_slow(self) -> bool:
        """Whether torch takes longer by half, or more."""
        return self.torch_s >= _SLOW * self.ours_s

    def __str__(self) -> str:
        whose = "deepspeed_c" if self.is_torch_slow else "torch"
        return f"by {whose}: {1e3 * self.torch_s:.2f} ms in torch, {1e3 * self.ours_s:.2f} ms in deepspeed_c"


def product_times(dtype: torch.dtype) -> ProductTimes:
    """The times of ``dtype``, bfloat16 or float16, from the file, or measured now and kept."""
    key = _key(dtype)
    kept = _read(_file()).get(key)
    if kept is not None:
        return ProductTimes(*kept)
    times = _measure(dtype)
    keep_times(dtype, times)
    return times


def keep_times(dtype: torch.dtype, times: ProductTimes) -> None:
    """Writes times into the file, as if they had been measured here. A folder that can't be written keeps nothing."""
    path = _file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_read(path), _key(dtype): list(times)}, indent=1)
        # Ranks may write at the same time: each file is whole.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)


def _file() -> Path:
    return Path(read_env().cache_home or Path.home() / ".cache") / "deepspeed_c" / "product_times.json"


def _read(path: Path) -> dict[str, list[float]]:
    """The file's times. An unreadable file has none, and other entries are left out: they are measured again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if _are_times(value)}


def _are_times(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is float and each > 0 for each in value)


def _key(dtype: torch.dtype) -> str:
    """Everything that the times depend on."""
    capability = torch.backends.cpu.get_cpu_capability()
    versions = f"torch {torch.__version__}, deepspeed_c {__version__}"
    return f"{str(dtype)[6:]}, {processor_name()}, {versions}, {capability}, {_C.cpu_isa()}, {read_env().onednn_isa}"


def _measure(dtype: torch.dtype) -> ProductTimes:
    rows = torch.ones(_N_ROWS, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)

    def times(mm: Callable[[Tensor, Tensor], Tensor]) -> float:
        return _best_seconds(lambda: (mm(rows, weight.t()), mm(rows, weight), mm(rows.t(), rows)))

    # The kernel of torch itself, also while `widen_products` puts another before it.
    own, cpu = torch.ops.aten.mm.default, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    ours = torch.ops.deepspeed_c.nn_product.default
    return ProductTimes(times(lambda a, b: own.redispatch(cpu, a, b)), times(lambda a, b: ours(a, b, None)))


def _best_seconds(run: Callable[[], object]) -> float:
    """The shortest of a few calls: others may use the machine too."""
    seconds = []
    for _ in range(_N_ROUNDS + 1):  # the first call wakes threads
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
