"""What was communicated, how often and how fast (the ``comms_logger`` section). Off, it costs one test per call."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_c.logging import logger

__all__ = ["CommsLogger", "bandwidths_gbps", "trim_mean"]

# How many times its message an operation moves, as (n ranks) -> (factor of the algorithm's bandwidth, factor of the
# bus's). The conventions are those of nccl-tests (PERFORMANCE.md) and DeepSpeed, whose tables count a gathered message
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
class _Record:
    """All calls of one name with one message size."""

    op: str
    seconds: list[float] = field(default_factory=list)


class CommsLogger:
    """Collects a record a call; ``world_size`` is asked when a summary is made."""

    def __init__(self) -> None:
        self.enabled = False
        self.verbose = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.debug = False
        self._records: dict[str, dict[int, _Record]] = {}

    def wants(self, log_name: str, prof: bool) -> bool:
        """Whether a call is to be recorded."""
        return self.enabled and (prof or self.prof_all or log_name in self.prof_ops)

    def append(self, op: str, log_name: str, seconds: float, n_bytes: int, world_size: int) -> None:
        """Records one call of ``op`` under ``log_name``."""
        record = self._records.setdefault(log_name, {}).setdefault(n_bytes, _Record(op))
        record.seconds.append(seconds)
        if self.verbose:
            algorithm, bus = bandwidths_gbps(op, n_bytes, seconds, world_size)
            logger.info(
                "comm %s: %.3f ms, %s, algorithm %.2f Gbit/s, bus %.2f Gbit/s",
                log_name,
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
                }
        return table

    def stragglers(self, gather: Callable[[Any], list[Any]]) -> dict[str, dict[int, dict[str, Any]]]:
        """Splits latencies into what the fastest rank took and what this rank waited more. ``gather`` collects every
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
        """A table as text, a line for each name and size."""
        lines = [title]
        for name, sizes in table.items():
            for row in sizes.values():
                shown = ", ".join(
                    f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in row.items()
                    if not key.startswith("msg_size")
                )
                lines.append(f"  {name} {row['msg_size_str']}: {shown}")
        return "\n".join(lines)


def _size(n_bytes: int) -> str:
    size, unit = float(n_bytes), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
