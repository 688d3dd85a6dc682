"""Log of communication: counts and speeds of calls (the ``comms_logger`` section).

Calls of ``deepspeed_c.comm`` are recorded by their wrapper; while the log is off this costs one test per call. The
engine's own collectives are recorded by their entries in the ledger (``EngineCollectives``), and cost nothing while it
is off.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from deepspeed_c.comm.ledger import LedgerEntry
from deepspeed_c.comm.observed import ObservedEntry, listen, stop_listening
from deepspeed_c.logging import logger

__all__ = ["CommsLogger", "EngineCollectives", "bandwidths_gbps", "trim_mean"]

# How many times an operation moves its message, as (n ranks) -> (factor of the algorithm's bandwidth, factor of the
# bus's). The conventions come from nccl-tests (PERFORMANCE.md) and DeepSpeed, whose tables count a gathered message
# whole.
_GATHERING = frozenset({"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"})
_REDUCING = frozenset({"all_reduce", "all_reduce_coalesced", "inference_all_reduce"})
_EXCHANGING = frozenset({"all_to_all", "all_to_all_single"})


def bandwidths_gbps(op: str, n_bytes: int, seconds: float, world_size: int) -> tuple[float, float]:
    """(bandwidth of the algorithm, bandwidth of the bus) in Gbit/s; 0 for an operation that took no measurable time."""
    if seconds <= 0:
        return 0.0, 0.0
    n = world_size
    algorithm = bus = 1.0
    if op in _GATHERING:
        algorithm, bus = float(n), float(n - 1)
    elif op in _REDUCING:
        algorithm, bus = 2.0, 2.0 * (n - 1) / n
    elif op in _EXCHANGING:
        bus = (n - 1) / n
    gbit = n_bytes * 8 / seconds / 1e9
    return algorithm * gbit, bus * gbit


def trim_mean(values: Sequence[float], trim: float) -> float:
    """Mean without the ``trim`` (0 to 0.5) smallest and largest part of ``values``; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    k = min(round(len(ordered) * trim), (len(ordered) - 1) // 2)
    kept = ordered[k : len(ordered) - k]
    return sum(kept) / len(kept)


@dataclass
class _CallRecord:
    """All calls of one name with one message size."""

    op: str
    seconds: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Transports of the calls, each once; empty where the caller chose it in torch."""


class CommsLogger:
    """Collects one record for each call. ``world_size`` is called when a summary is made.

    ``on_switch`` is called with every value that ``enabled`` is set to.
    """

    on_switch: Callable[[bool], None] = staticmethod(lambda is_on: None)

    def __init__(self) -> None:
        self._is_enabled = False
        self.verbose = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.debug = False
        self._records: dict[str, dict[int, _CallRecord]] = {}

    @property
    def enabled(self) -> bool:
        """Whether calls are recorded."""
        return self._is_enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._is_enabled = bool(value)
        self.on_switch(self._is_enabled)

    def wants(self, log_name: str, prof: bool) -> bool:
        """Whether a call is to be recorded."""
        return self.enabled and (prof or self.prof_all or log_name in self.prof_ops)

    def append(self, op: str, log_name: str, seconds: float, n_bytes: int, world_size: int, path: str = "") -> None:
        """Records one call of ``op`` under ``log_name``. path: as in ``LedgerEntry``."""
        record = self._records.setdefault(log_name, {}).setdefault(n_bytes, _CallRecord(op))
        record.seconds.append(seconds)
        if path and path not in record.paths:
            record.paths.append(path)
        if self.verbose:
            algorithm, bus = bandwidths_gbps(op, n_bytes, seconds, world_size)
            logger.info(
                "comm %s%s: %.3f ms, %s, algorithm %.2f Gbit/s, bus %.2f Gbit/s",
                log_name,
                f" over {path}" if path else "",
                seconds * 1e3,
                _size(n_bytes),
                algorithm,
                bus,
            )

    def reset_data(self) -> None:
        """Forgets all records."""
        self._records.clear()

    def has_data(self) -> bool:
        return bool(self._records)

    def get_operation_names(self) -> list[str]:
        return list(self._records)

    def get_total_operations(self) -> int:
        return sum(len(record.seconds) for sizes in self._records.values() for record in sizes.values())

    def summary(self, world_size: int) -> dict[str, dict[int, dict[str, Any]]]:
        """{name: {message bytes: statistics}}; means leave out the slowest and fastest tenth."""
        table: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in self._records.items():
            table[name] = {}
            for n_bytes, record in sorted(sizes.items()):
                speeds = [bandwidths_gbps(record.op, n_bytes, s, world_size) for s in record.seconds]
                table[name][n_bytes] = {
                    "count": len(record.seconds),
                    "total_latency_ms": sum(record.seconds) * 1e3,
                    "avg_latency_ms": trim_mean(record.seconds, 0.1) * 1e3,
                    "tput_avg_gbps": trim_mean([a for a, _ in speeds], 0.1),
                    "busbw_avg_gbps": trim_mean([b for _, b in speeds], 0.1),
                    "msg_size_bytes": n_bytes,
                    "msg_size_str": _size(n_bytes),
                    **({"path": ", ".join(record.paths)} if record.paths else {}),
                }
        return table

    def stragglers(self, gather: Callable[[Any], list[Any]]) -> dict[str, dict[int, dict[str, Any]]]:
        """Splits latencies into the fastest rank's time and this rank's additional wait. ``gather`` collects every
        rank's object.

        Records that some rank does not have, or has fewer of, are compared as far as all ranks have them.
        """
        mine = {(name, n): record.seconds for name, sizes in self._records.items() for n, record in sizes.items()}
        everyone = gather(mine)
        table: dict[str, dict[int, dict[str, Any]]] = {}
        for (name, n_bytes), seconds in sorted(mine.items()):
            per_rank = [other.get((name, n_bytes), []) for other in everyone]
            common = min(map(len, per_rank))
            fastest = [min(rank[i] for rank in per_rank) for i in range(common)]
            waited = [own - fast for own, fast in zip(seconds, fastest)]
            table.setdefault(name, {})[n_bytes] = {
                "count": common,
                "total_comm_lat_ms": sum(fastest) * 1e3,
                "total_straggler_ms": sum(waited) * 1e3,
                "avg_comm_lat_ms": trim_mean(fastest, 0.1) * 1e3,
                "avg_straggler_ms": trim_mean(waited, 0.1) * 1e3,
                "msg_size_bytes": n_bytes,
                "msg_size_str": _size(n_bytes),
            }
        return table

    @staticmethod
    def metadata(world_size: int, rank: int) -> dict[str, Any]:
        return {"world_size": world_size, "rank": rank, "timestamp": datetime.datetime.now().isoformat()}

    @staticmethod
    def format(title: str, table: dict[str, dict[int, dict[str, Any]]]) -> str:
        """A table as text: a line for each name, and below it one for each message size, in columns of ``_WIDTH``."""
        keys = {key for sizes in table.values() for row in sizes.values() for key in row}
        columns = [key for key in _COLUMNS if key in keys]
        rows = [["Comm. Op", *(_COLUMNS[key] for key in columns)]]
        for name, sizes in table.items():
            rows.append([name])
            for row in sizes.values():
                values = [row.get(key, "") for key in columns]
                rows.append(["", *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)])
        return "\n".join([title, *("".join(f"{cell:<{_WIDTH}}" for cell in row).rstrip() for row in rows)])


# Key of a row -> heading of its column, as in DeepSpeed's tables, which people read and scripts parse.
_WIDTH = 20
_COLUMNS = {
    "msg_size_str": "Message Size",
    "count": "Count",
    "total_latency_ms": "Total Latency(ms)",
    "avg_latency_ms": "Avg Latency(ms)",
    "tput_avg_gbps": "tput_avg (Gbps)",
    "busbw_avg_gbps": "busbw_avg (Gbps)",
    "total_comm_lat_ms": "Total comm lat(ms)",
    "total_straggler_ms": "Total straggler(ms)",
    "avg_comm_lat_ms": "Avg comm lat(ms)",
    "avg_straggler_ms": "Avg straggler(ms)",
    "path": "Path",
}


# The ledger's operations of an engine -> the name in the log, and whether a message is one rank's piece of the counted
# size. Names and sizes are as for the functions of ``deepspeed_c.comm`` that do the same.
_ENGINE_OPS = {
    "all-gather": ("all_gather_into_tensor", True),
    "all-reduce": ("all_reduce", False),
    "barrier": ("barrier", True),
    "broadcast": ("broadcast", False),
    "reduce-scatter": ("reduce_scatter_tensor", False),
}


class EngineCollectives:
    """Records every collective of every engine in a log, while the log is on.

    A record's time runs from the start of a collective to the end of waiting for it. The log does not hurry collectives
    beside the backward pass, so its time is an upper bound, and its bandwidth a lower one.
    """

    def __init__(self, log: CommsLogger) -> None:
        self._log = log

    def switch(self, is_on: bool) -> None:
        (listen if is_on else stop_listening)(self)

    def begin(self, entry: LedgerEntry) -> None:
        """Nothing: entries know when they were made."""

    def end(self, entry: LedgerEntry) -> None:
        """Nothing: the log counts the whole time of a collective."""

    def finish(self, entry: ObservedEntry) -> None:
        log = self._log
        if entry.op not in _ENGINE_OPS:
            return  # recorded by the wrapper of deepspeed_c.comm
        op, is_piece = _ENGINE_OPS[entry.op]
        if not log.wants(op, False):
            return
        if entry.device is not None and entry.device.type != "cpu":
            torch.accelerator.synchronize(entry.device)
        n_ranks = len(entry.ranks)
        n_bytes = entry.n_bytes // n_ranks if is_piece else entry.n_bytes
        at = ", ".join(part for part in (entry.phase, entry.label) if part)
        name = f"{op} | [Caller Func: engine{f' ({at})' if at else ''}]" if log.debug else op
        log.append(op, name, perf_counter() - entry.began, n_bytes, n_ranks, entry.path)


def _size(n_bytes: int) -> str:
    size, unit = float(n_bytes), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
