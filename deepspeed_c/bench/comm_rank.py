"""The work of one rank of ``deepspeed_c bench comm``, which ``comm.py`` starts as a process."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from deepspeed_c.bench.comm import BenchedCall, CommBench
from deepspeed_c.comm import destroy_process_group, init_distributed
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.log import bandwidths_gbps
from deepspeed_c.config.keys import DTYPE_NAMES
from deepspeed_c.env import read_env
from deepspeed_c.errors import CommError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A round of one contender lasts about so long: enough calls for the clock, and no more.
_ROUND_S = 0.02
_MAX_CALLS = 500
_START_LIMIT = timedelta(seconds=120)


class _Way(NamedTuple):
    comm: Collectives
    allocate: Callable[[int, torch.device], torch.Tensor]


def _measure(bench: CommBench) -> tuple[list[BenchedCall], dict[str, str]]:
    """One rank's part; all ranks return the same."""
    ways, absent = _ways(bench.contenders)
    rows: list[BenchedCall] = []
    for op in bench.ops:
        for n_bytes in bench.sizes:
            calls = {name: _call(op, way, n_bytes, _DTYPES[DTYPE_NAMES[bench.dtype]]) for name, way in ways.items()}
            plain = Collectives()
            n_calls = {name: _n_calls(plain, call) for name, call in calls.items()}
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(bench.rounds):
                for name, call in calls.items():
                    seconds[name].append(_timed(plain, call, n_calls[name]))
            rows += [_row(op, name, n_bytes, bench.n_ranks, times) for name, times in seconds.items()]
    return rows, absent


def _ways(contenders: Sequence[str]) -> tuple[dict[str, _Way], dict[str, str]]:
    plain, local = Collectives(), Collectives()
    ways, absent = {}, {}
    reason = ""
    try:
        local.use_shared_memory("off" if set(contenders) <= {"gloo"} else "shm")
    except CommError as error:
        reason = error.what
    for name in contenders:
        comm = plain if name == "gloo" else local
        if reason and comm is local:
            absent[name] = reason
        else:
            ways[name] = _Way(comm, comm.allocate if name == "shm" else plain.allocate)
    return ways, absent


def _call(op: str, way: _Way, n_bytes: int, dtype: torch.dtype) -> Callable[[], None]:
    comm, device = way.comm, torch.device("cpu")
    n = comm.world_size
    # Whole slices: at least one element a rank.
    numel = max(n_bytes // dtype.itemsize // n, 1) * n
    flat = way.allocate(numel * dtype.itemsize, device).view(dtype).fill_(0.0)
    if op == "all_reduce":
        return lambda: comm.all_reduce(flat).wait()
    if op == "reduce_scatter":
        out = torch.zeros(numel // n, dtype=dtype)
        return lambda: comm.reduce_scatter(flat, out).wait()
    if op == "all_gather":
        return lambda: comm.all_gather(flat).wait()
    return lambda: comm.broadcast(flat, 0)


def _timed(comm: Collectives, call: Callable[[], None], n_calls: int) -> float:
    """Seconds a call, on the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(n_calls):
        call()
    return max(comm.gather_numbers((time.perf_counter() - begin) / n_calls))


def _n_calls(comm: Collectives, call: Callable[[], None]) -> int:
    call()
    return min(max(int(_ROUND_S / max(_timed(comm, call, 2), 1e-9)), 1), _MAX_CALLS)


def _row(op: str, name: str, n_bytes: int, n_ranks: int, times: Sequence[float]) -> BenchedCall:
    median = statistics.median(times)
    is_piece = op in ("all_gather", "reduce_scatter")
    speeds = bandwidths_gbps(op, n_bytes // n_ranks if is_piece else n_bytes, median, n_ranks)
    if op == "all_reduce":
        # A message counts twice there, for it is sent twice; here an algorithm's bandwidth is bytes over time.
        speeds = (speeds[0] / 2, speeds[1])
    return BenchedCall(op, name, n_bytes, median, min(times), max(times), speeds[0] / 8, speeds[1] / 8)


def _rank_main(folder: str, told: str) -> None:
    bench = msgspec.json.decode(told, type=CommBench)
    torch.set_num_threads(1)
    init_distributed("gloo", init_method=f"file://{folder}/store", timeout=_START_LIMIT, verbose=False)
    rows, absent = _measure(bench)
    if read_env().rank == 0:
        result = {"rows": msgspec.to_builtins(rows), "absent": absent}
        Path(folder, "result").write_text(json.dumps(result))
    Collectives().barrier()
    destroy_process_group()


if __name__ == "__main__":
    _rank_main(sys.argv[1], sys.argv[2])
