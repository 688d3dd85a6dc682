"""The work of one rank of a calibration, which ``measure.py`` starts as a process:
``python -m deepspeed_c.calibration.rank FOLDER N_RANKS``."""

from __future__ import annotations

import itertools
import operator
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed_c.autotuning.planning import machine_memory
from deepspeed_c.autotuning.rates import current_device
from deepspeed_c.comm import destroy_process_group, init_distributed
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.engine.experiment import write_json
from deepspeed_c.env import read_env
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.plan.timed import TensorLike, TimedOperator, Unknown

__all__ = ["make_call"]

_START_LIMIT = timedelta(seconds=120)
# A measurement takes at least so long, and so many rounds.
_SECONDS = 0.03
_ROUNDS = 3
# A round is so long that the clock does not matter.
_ROUND_S = 0.002
_MAX_CALLS = 200
# In a step, other tensors pass through the caches between two calls. Calls take turns over copies of their tensors.
_CACHE_BYTES = 64 << 20
_MAX_COPIES = 8
_UPDATED = 1 << 22
# Adam reads a weight, a gradient and two moments, and writes all but the gradient: fp32.
_BYTES_OF_AN_UPDATE = 7 * 4
# Operators whose whole numbers are places in a table: name -> the number of places, from the described arguments.
_PLACES: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten.embedding.default": lambda args: args[0].shape[0],
    "aten.embedding_dense_backward.default": lambda args: args[2],
}


def make_call(timed: TimedOperator, device: torch.device) -> Callable[[], Any]:
    """Makes the tensors of a call. Numbers are normal, and whole numbers are 0: a place that every table has.

    Raises TypeError if an argument cannot be made.
    """
    n_places = _PLACES[timed.name](timed.args) if timed.name in _PLACES else 1
    func = operator.attrgetter(timed.name)(torch.ops)

    def made(value: Any) -> Any:
        if isinstance(value, Unknown):
            raise TypeError(f"a {value.type_name} cannot be made")
        if isinstance(value, torch.device):
            return device
        return _tensor(value, n_places, device) if isinstance(value, TensorLike) else value

    args, kwargs = tree_map(made, timed.args), tree_map(made, timed.kwargs)
    return lambda: func(*args, **kwargs)


def _tensor(like: TensorLike, n_places: int, device: torch.device) -> torch.Tensor:
    n_elems = sum((n - 1) * step for n, step in zip(like.shape, like.stride)) + 1 if 0 not in like.shape else 0
    if like.dtype.is_floating_point or like.dtype.is_complex:
        whole = torch.randn(n_elems, device=device).to(like.dtype)
    elif like.dtype == torch.bool:
        whole = torch.zeros(n_elems, dtype=torch.bool, device=device)
    else:
        whole = torch.randint(max(n_places, 1), (n_elems,), dtype=like.dtype, device=device)
    return whole.as_strided(like.shape, like.stride)


def _seconds_of(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """The median time of a call, of rounds of many calls. The calls take turns."""

    def timed(n_calls: int) -> float:
        begin = time.perf_counter()
        for call in itertools.islice(turns, n_calls):
            call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - begin) / n_calls

    turns = itertools.cycle(calls)
    timed(len(calls))  # the first call of each is longer
    n_calls = min(max(int(_ROUND_S / max(timed(1), 1e-9)), 1), _MAX_CALLS)
    rounds, end = [], time.perf_counter() + _SECONDS
    while len(rounds) < _ROUNDS or time.perf_counter() < end:
        rounds.append(timed(n_calls))
    return statistics.median(rounds)


def _operator_seconds(timed: TimedOperator, device: torch.device) -> float:
    n_bytes = sum(_n_bytes(each) for each in tree_leaves((timed.args, timed.kwargs)) if isinstance(each, TensorLike))
    n_copies = min(max(_CACHE_BYTES // max(n_bytes, 1), 1), _MAX_COPIES)
    return _seconds_of([make_call(timed, device) for _ in range(n_copies)], device)


def _n_bytes(like: TensorLike) -> int:
    return torch.Size(like.shape).numel() * like.dtype.itemsize


def _update_rate(device: torch.device) -> float:
    """Bytes that an update of Adam reads and writes in a second."""
    weight = torch.nn.Parameter(torch.randn(_UPDATED, device=device))
    weight.grad = torch.randn_like(weight)
    optimizer = FusedAdam([weight])
    return _UPDATED * _BYTES_OF_AN_UPDATE / _seconds_of([optimizer.step], device)


def _copy_rate(device: torch.device) -> float:
    """Bytes a second between host and device; 0 where they are the same memory."""
    if device.type == "cpu":
        return 0.0
    host = torch.ones(_CACHE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return _CACHE_BYTES / _seconds_of([lambda: there.copy_(host, non_blocking=True)], device)


def _rank_main(folder: str, n_ranks: int) -> None:
    device, rank = current_device(), read_env().rank
    init_distributed("gloo", init_method=f"file://{folder}/store", timeout=_START_LIMIT, verbose=False)
    comm = Collectives()
    memory = machine_memory(n_ranks)
    seconds: list[float | None] = []
    problems = {}
    # Sums that are repeated in place get very small, and some processors then take much longer.
    torch.set_flush_denormal(True)
    with torch.no_grad():
        for i, timed in enumerate(pickle.loads(Path(folder, "operators.pickle").read_bytes())):
            comm.barrier()  # all ranks run the same operator at a time, as in a step
            try:
                seconds.append(_operator_seconds(timed, device))
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
                seconds.append(None)
                problems[i] = f"{type(error).__name__}: {error}"
    comm.barrier()
    told = {
        "seconds": seconds,
        "problems": problems,
        "update_bytes_per_s": _update_rate(device),
        "copy_bytes_per_s": _copy_rate(device),
        "memory_bytes": memory.host if device.type == "cpu" else memory.device,
    }
    write_json(Path(folder, f"rank{rank}.json"), told)
    comm.barrier()
    destroy_process_group()


if __name__ == "__main__":
    _rank_main(sys.argv[1], int(sys.argv[2]))
