"""Measures this machine for the planner: the operators of a model as they are called, products, memory, updates,
collectives and files, with as many ranks at work as there will be. ``rank.py`` has the work of a rank."""

from __future__ import annotations

import json
import pickle
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.autotuning.experiment import Launch, last_lines, run_experiment
from deepspeed_c.autotuning.rates import current_device
from deepspeed_c.autotuning.space import Candidate
from deepspeed_c.bench.comm import BenchedCall, CommBench, run, run_ranks
from deepspeed_c.errors import ConfigError
from deepspeed_c.io.bench import DIRECTIONS, Settings, compare, ours
from deepspeed_c.io.scratch import scratch
from deepspeed_c.launcher.cores import threads_per_rank
from deepspeed_c.logging import logger
from deepspeed_c.plan.machine import FLOW, PULL, File, LinkLevel, Machine
from deepspeed_c.plan.timed import TimedOperator, timed_operator_of

__all__ = ["calibrate", "fit_link", "measure_steps"]

_OPS = ["all_reduce", "reduce_scatter", "all_gather"]
_SIZES = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
_ROUNDS = 3
_FILE_BYTES = 1 << 26
_SMALL_FILE_BYTES = 1 << 12
# Steps before the measured ones: memory is allocated, and the order of modules is learnt.
_WARM_UP_STEPS = 3
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Edges of square products. Some processors take long for products of 16 bits, so these have few sizes.
_EDGES = (16, 32, 64, 128, 256, 512, 1024)
_EDGES_OF_DEVICE = (*_EDGES, 2048, 4096, 8192)
_N_LARGE = 2
_LARGE_OF_HOST = (256, 512)
_MEMORY_BYTES = 1 << 26
_MEMORY_BYTES_OF_DEVICE = 1 << 29


def calibrate(n_ranks: int, operators: Sequence[TimedOperator], folder: Path) -> Machine:
    """Measures this machine with ``n_ranks`` ranks on it. folder: for files of the measurement, on the disk that is
    measured.

    An operator that cannot run alone is named in a warning, and has no measured time. Raises ConfigError for no ranks
    and for several ranks on accelerators, CommError if a rank fails, AioError if ``folder`` has no room.
    """
    device = current_device()
    if n_ranks < 1 or (n_ranks > 1 and device.type != "cpu"):
        raise ConfigError(
            f"{n_ranks} ranks on {device.type} cannot be measured",
            where="calibrate",
            fix="measure one rank of an accelerator, and take links from a shipped machine; on the CPU, at least one",
        )
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    products, others = _products(device), _others(device)
    wanted = [*products.values(), *others, *operators]
    with tempfile.TemporaryDirectory(prefix="dsc_calibrate_", dir=folder) as inner:
        Path(inner, "operators.pickle").write_bytes(pickle.dumps(wanted))
        words, n_threads = (inner, str(n_ranks)), threads_per_rank(n_ranks)
        run_ranks(n_ranks, "deepspeed_c.calibration.rank", words, "calibrate", n_threads)
        told = [json.loads(Path(inner, f"rank{rank}.json").read_text()) for rank in range(n_ranks)]
        file = _file(inner)
    for i, problem in told[0]["problems"].items():
        logger.warning("not measured: %s: %s", wanted[int(i)].signature, problem)
    seconds = [None if None in each else statistics.mean(each) for each in zip(*(rank["seconds"] for rank in told))]
    at = dict(zip(products, seconds))
    copy, start = seconds[len(products) : len(products) + len(others)]
    if copy is None or start is None or None in [at[name, edge] for name, edge in at if name == "fp32"]:
        raise ConfigError("products of fp32 and copies cannot run", where="calibrate", fix="see the warnings above")
    flops = {
        name: max(2 * edge**3 / taken for (each, edge), taken in at.items() if each == name and taken is not None)
        for name in _DTYPES
        if any(each == name and taken is not None for (each, _), taken in at.items())
    }
    curve = tuple(
        (2.0 * edge**3, min(2 * edge**3 / max(taken - start, taken / 100) / flops["fp32"], 1.0))
        for (name, edge), taken in at.items()
        if name == "fp32"
    )
    found = zip(operators, seconds[len(products) + len(others) :])
    first = told[0]
    return Machine(
        name="calibrated",
        source=f"measured on {date.today().isoformat()} with {n_ranks} ranks of {n_threads} threads",
        device=device.type,
        flops=flops,
        product_curve=curve,
        memory_bytes_per_s=2 * _memory_bytes(device) / copy,
        memory_bytes=first["memory_bytes"],
        operator_ns=round(start * 1e9),
        update_bytes_per_s=statistics.mean(rank["update_bytes_per_s"] for rank in told),
        links=_links(n_ranks) if n_ranks > 1 else (),
        copy_bytes_per_s=first["copy_bytes_per_s"],
        file=file,
        operators={each.signature: round(taken * 1e9) for each, taken in found if taken is not None},
        sources={},
    )


def _products(device: torch.device) -> dict[tuple[str, int], TimedOperator]:
    """Square products by (name of the dtype, edge)."""
    is_host = device.type == "cpu"
    edges = _EDGES if is_host else _EDGES_OF_DEVICE
    large = _LARGE_OF_HOST if is_host else edges[-_N_LARGE:]
    return {
        (name, edge): timed_operator_of(torch.ops.aten.mm.default, [_meta((edge, edge), dtype)] * 2)
        for name, dtype in _DTYPES.items()
        for edge in (edges if name == "fp32" else large)
    }


def _others(device: torch.device) -> tuple[TimedOperator, TimedOperator]:
    """A copy of much memory, and an operator that does next to nothing."""
    aten, much, one = torch.ops.aten, _meta((_memory_bytes(device),), torch.uint8), _meta((1,), torch.float32)
    return timed_operator_of(aten.copy_.default, (much, much)), timed_operator_of(aten.add.Tensor, (one, one))


def _memory_bytes(device: torch.device) -> int:
    return _MEMORY_BYTES if device.type == "cpu" else _MEMORY_BYTES_OF_DEVICE


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _links(n_ranks: int) -> tuple[LinkLevel, ...]:
    """The link between ranks of this host: their shared memory, or the loopback where they can share none."""
    rows, _ = run(CommBench(n_ranks, _OPS, _SIZES, "fp32", ["shm"], _ROUNDS))
    name, mode = "shared memory", PULL
    if not rows:
        rows, _ = run(CommBench(n_ranks, _OPS, _SIZES, "fp32", ["gloo"], _ROUNDS))
        name, mode = "loopback", FLOW
    latency_ns, bytes_per_s = fit_link(rows, n_ranks, mode)
    return (LinkLevel(name, n_ranks, bytes_per_s, latency_ns, 0, mode),)


def fit_link(rows: Sequence[BenchedCall], n_ranks: int, mode: str) -> tuple[int, int]:
    """Fits (latency in ns, bytes a second) of a link's formula to the measured times, by least squares of the relative
    errors. The formula: a rank moves a share (n - 1) / n of the buffer, in an all-reduce twice. With PULL
    a collective has the latency once, with FLOW once in each of its n - 1 steps.

    rows: collectives of several sizes among ``n_ranks`` (at least 2).
    """
    sum_uu = sum_uv = sum_vv = sum_u = sum_v = 0.0
    for row in rows:
        n_times = 2 if row.op == "all_reduce" else 1
        u = (n_times * (n_ranks - 1) if mode == FLOW else 1) / row.seconds
        v = n_times * row.n_bytes * (n_ranks - 1) / n_ranks / row.seconds
        sum_uu, sum_uv, sum_vv, sum_u, sum_v = sum_uu + u * u, sum_uv + u * v, sum_vv + v * v, sum_u + u, sum_v + v
    determinant = sum_uu * sum_vv - sum_uv**2
    latency, per_byte = -1.0, -1.0
    if determinant > 1e-12 * sum_uu * sum_vv:
        latency = (sum_u * sum_vv - sum_v * sum_uv) / determinant
        per_byte = (sum_v * sum_uu - sum_u * sum_uv) / determinant
    if latency < 0 or per_byte <= 0:  # no latency is to be seen, or all sizes are alike
        latency, per_byte = 0.0, sum_v / sum_vv
    return round(latency * 1e9), max(round(1 / per_byte), 1)


def _file(folder: str) -> File:
    """The rates of the disk, by this package's I/O engine."""
    rates = []
    for n_bytes in (_FILE_BYTES, _SMALL_FILE_BYTES):
        with scratch(folder, n_bytes) as file:
            tensor = torch.ones(n_bytes, dtype=torch.uint8)
            found = compare({"ours": ours(file, tensor, Settings().handle())}, n_bytes, _ROUNDS)
        rates.append({direction: statistics.median(found.rounds["ours"][direction]) for direction in DIRECTIONS})
    large, small = rates
    return File(round(large["read"]), round(large["write"]), round(_SMALL_FILE_BYTES / small["read"] * 1e9))


def measure_steps(
    script: str, arguments: Sequence[str], config: Mapping[str, Any], n_ranks: int, n_steps: int = 10
) -> float:
    """Seconds of a step of a script on ``n_ranks`` ranks of this host, the mean of ``n_steps`` after some others. It
    runs as an experiment of the tuner, with ``config`` in place of the file that its arguments name.

    Raises ConfigError if the arguments name no file, or the script fails or takes fewer steps.
    """
    section = {"enabled": True, "start_profile_step": _WARM_UP_STEPS, "end_profile_step": _WARM_UP_STEPS + n_steps - 1}
    candidate = Candidate("measured", {**config, "autotuning": section}, {}, "")
    launch = Launch(("--num_procs", str(n_ranks)), script, tuple(arguments), n_ranks, n_ranks)
    with tempfile.TemporaryDirectory(prefix="dsc_steps_") as folder:
        result = run_experiment(candidate, launch, Path(folder), {})
        seconds = result.value("latency")
        if seconds is None:
            tail = "\n".join(last_lines(Path(folder, "stderr.log"), 10))
            raise ConfigError(
                f"its steps cannot be measured: {result.problem}\n{tail}",
                where=script,
                fix=f"let it take at least {_WARM_UP_STEPS + n_steps} steps with the configuration file of its arguments",
            )
    return seconds
