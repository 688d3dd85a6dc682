"""Log of communication: counts and speeds of calls (the ``comms_logger`` section).

Calls of ``deepspeed_c.comm`` are recorded by their wrapper; while the log is off this costs one test for each call. The
engine's own collectives are recorded by their entries in the ledger (``EngineCollectives``); while the log is off this
costs nothing.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.comm.groups import get_rank, get_world_size, is_initialized
from deepspeed_c.comm.ledger import LedgerEntry, ledger_of, ranks_in_words
from deepspeed_c.comm.observed import ObservedEntry, listen, stop_listening
from deepspeed_c.logging import log_dist

__all__ = [
    "CommsLogger",
    "EngineCollectives",
    "SharedCalls",
    "bandwidths_gbps",
    "convert_size",
    "shared_calls_of",
    "trim_mean",
]

# How many times an operation moves its message, as (n ranks) -> (factor of the algorithm's bandwidth, factor of the
# bus's bandwidth). The conventions are those of nccl-tests (PERFORMANCE.md) and of DeepSpeed, whose tables count the
# whole message of a gather.
_GATHERING = frozenset({"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"})
_REDUCING = frozenset({"all_reduce", "all_reduce_coalesced", "inference_all_reduce"})
_EXCHANGING = frozenset({"all_to_all", "all_to_all_single"})


def bandwidths_gbps(op: str, n_bytes: int, seconds: float, world_size: int) -> tuple[float, float]:
    """(bandwidth of the algorithm, bandwidth of the bus) in Gbit/s; 0 for an operation too short to measure."""
    if seconds <= 0:
        return 0.0, 0.0
    n = max(world_size, 1)  # 0 comes from torch's placeholder for a group of other ranks
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
    """Mean without the smallest and the largest values: the share ``trim`` (0 to 0.5) on each side. 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    k = min(round(len(ordered) * trim), (len(ordered) - 1) // 2)
    kept = ordered[k : len(ordered) - k]
    return sum(kept) / len(kept)


def convert_size(size_bytes: int) -> str:
    """A number of bytes as DeepSpeed's tables print it: ``"4.0 KB"``."""
    if size_bytes == 0:
        return "0B"
    power = min((size_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {_UNITS[power]}"


_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")


class SharedCalls(NamedTuple):
    """Calls of one operation that all ranks of a group make. A call has the same number (``LedgerEntry.seq``) on each
    of these ranks.
    """

    group: str
    op: str
    ranks: tuple[int, ...]


@dataclass
class _CallRecord:
    """All calls of one name with one message size."""

    op: str
    seconds: list[float] = field(default_factory=list)
    n_ranks: list[int] = field(default_factory=list)
    """Number of ranks in the group of each call."""
    places: list[tuple[SharedCalls, int]] = field(default_factory=list)
    """For each call that other ranks make too: the shared calls, and the number of this call among them."""
    paths: list[str] = field(default_factory=list)
    """Transports of the calls, without repetition; empty where the caller chose the transport in torch."""

    def speeds(self, n_bytes: int) -> list[tuple[float, float]]:
        return [bandwidths_gbps(self.op, n_bytes, s, n) for s, n in zip(self.seconds, self.n_ranks)]


class CommsLogger:
    """Collects one record for each call.

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
        self._shared: dict[SharedCalls, dict[int, float]] = {}

    @property
    def enabled(self) -> bool:
        """Whether calls are recorded."""
        return self._is_enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._is_enabled = bool(value)
        self.on_switch(self._is_enabled)

    def configure(self, comms_config: Any) -> None:
        """Takes the values of a ``DeepSpeedCommsConfig``; without the section the log is off."""
        section = comms_config.comms_logger if comms_config.comms_logger_enabled else None
        self.enabled = section is not None and section.enabled
        if self.enabled:
            self.verbose, self.debug = section.verbose, section.debug
            self.prof_ops, self.prof_all = list(section.prof_ops), section.prof_all

    def start_profiling_comms(self) -> None:
        """Records all operations from now on, while the log is enabled."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Records only operations of ``prof_ops`` and calls with ``prof=True`` from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Records the operations of these names from now on, while the log is enabled."""
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *_names(op_name_list)]))

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Takes the names out of ``prof_ops``; ``prof_all`` records them still."""
        stopped = set(_names(op_name_list))
        self.prof_ops = [name for name in self.prof_ops if name not in stopped]

    def wants(self, log_name: str, prof: bool) -> bool:
        """Whether a call is to be recorded."""
        return self.enabled and (prof or self.prof_all or log_name in self.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Records a call of ``raw_name`` by all ranks, which took ``latency`` ms, under ``record_name``."""
        self.record(raw_name, record_name, latency / 1e3, msg_size, _world_size())

    def record(
        self,
        op: str,
        log_name: str,
        seconds: float,
        n_bytes: int,
        n_ranks: int,
        path: str = "",
        shared: tuple[SharedCalls, int] | None = None,
    ) -> None:
        """Records one call of ``op`` among ``n_ranks`` ranks under ``log_name``.

        path: as in ``LedgerEntry``. shared: the calls that other ranks make too, and the number of this call among
        them. Without ``shared``, ``stragglers`` leaves the call out.
        """
        record = self._records.setdefault(log_name, {}).setdefault(n_bytes, _CallRecord(op))
        record.seconds.append(seconds)
        record.n_ranks.append(n_ranks)
        if shared is not None:
            calls, number = shared
            record.places.append(shared)
            self._shared.setdefault(calls, {})[number] = seconds
        if path and path not in record.paths:
            record.paths.append(path)
        if self.verbose:
            algorithm, bus = bandwidths_gbps(op, n_bytes, seconds, n_ranks)
            log_dist(
                f"comm {log_name}{f' over {path}' if path else ''}: {seconds * 1e3:.3f} ms, {convert_size(n_bytes)},"
                f" algorithm {algorithm:.2f} Gbit/s, bus {bus:.2f} Gbit/s",
                ranks=[0],
            )

    def reset_data(self) -> None:
        """Forgets all records."""
        self._records.clear()
        self._shared.clear()

    def has_data(self) -> bool:
        """Whether anything has been recorded."""
        return bool(self._records)

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """{name: {message bytes: [calls, [ms of each], [Gbit/s of the algorithm], [Gbit/s of the bus]]}}, a copy."""
        table: dict[str, dict[int, list[Any]]] = {}
        for name, sizes in list(self._records.items()):
            for n_bytes, record in list(sizes.items()):
                speeds = record.speeds(n_bytes)
                columns = [
                    [s * 1e3 for s in record.seconds[: len(speeds)]],
                    [a for a, _ in speeds],
                    [b for _, b in speeds],
                ]
                table.setdefault(name, {})[n_bytes] = [len(speeds), *columns]
        return table

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """``get_raw_data()``, by DeepSpeed's name."""
        return self.get_raw_data()

    def get_operation_names(self) -> list[str]:
        """The names of the recorded calls."""
        return list(self._records)

    def get_total_operations(self) -> int:
        """How many calls have been recorded."""
        return sum(len(record.seconds) for sizes in list(self._records.values()) for record in list(sizes.values()))

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """{message bytes: statistics} of one name; None where nothing is recorded under it."""
        return self.summary().get(operation_name)

    def summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """{name: {message bytes: statistics}}; means leave out the slowest and fastest tenth."""
        table: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in self.get_raw_data().items():
            table[name] = {}
            for n_bytes, (count, latencies, algorithm, bus) in sorted(sizes.items()):
                paths = self._records[name][n_bytes].paths
                table[name][n_bytes] = {
                    "count": count,
                    "total_latency_ms": sum(latencies),
                    "avg_latency_ms": trim_mean(latencies, 0.1),
                    "tput_avg_gbps": trim_mean(algorithm, 0.1),
                    "busbw_avg_gbps": trim_mean(bus, 0.1),
                    "msg_size_bytes": n_bytes,
                    "msg_size_str": convert_size(n_bytes),
                    **({"path": ", ".join(paths)} if paths else {}),
                }
        return table

    def stragglers(self, gather: Callable[[Any], list[Any]]) -> dict[str, dict[int, dict[str, Any]]]:
        """Splits the time of each call into two parts: the transfer, which is the time of the fastest (last to come)
        rank of the group, and this rank's wait for late ranks, which is the rest. ``gather`` collects every rank's
        object, by rank.

        Calls of different ranks are matched by their numbers in the ledger of their group. Where ranks have recorded
        different calls, the calls that all ranks have are compared, and ``"differs"`` of the row says how many calls
        each rank has. Messages through ``send`` and ``recv`` of ``deepspeed_c.comm`` are not compared (``"count"`` is
        0), because their two ranks do not number them.
        """
        everyone: list[dict[SharedCalls, dict[int, float]]]
        everyone = gather({calls: dict(times) for calls, times in list(self._shared.items())})
        difference = {
            calls: _difference([each.get(calls, {}) for each in everyone], calls.ranks) for calls in self._shared
        }
        table: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in list(self._records.items()):
            for n_bytes, record in sorted(sizes.items()):
                moved, waited = [], []
                differs = {calls: difference[calls] for calls, _ in record.places if difference[calls]}
                for calls, number in record.places:
                    times = [everyone[rank].get(calls, {}).get(number) for rank in calls.ranks]
                    if None not in times:
                        moved.append(min(times))
                        waited.append(self._shared[calls][number] - moved[-1])
                table.setdefault(name, {})[n_bytes] = {
                    "count": len(moved),
                    "total_comm_lat_ms": sum(moved) * 1e3,
                    "total_straggler_ms": sum(waited) * 1e3,
                    "avg_comm_lat_ms": trim_mean(moved, 0.1) * 1e3,
                    "avg_straggler_ms": trim_mean(waited, 0.1) * 1e3,
                    "msg_size_bytes": n_bytes,
                    "msg_size_str": convert_size(n_bytes),
                    **({"differs": "; ".join(dict.fromkeys(differs.values()))} if differs else {}),
                }
        return table

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Prints the recorded calls of this rank to standard output, and returns them if asked; see ``log_summary``.

        With ``show_straggler`` every rank calls it.
        """
        summary = self.summary()
        stragglers = self.stragglers(_gather_objects) if show_straggler else None
        if print_log:
            texts = [self.format("communication", summary)]
            if stragglers is not None:
                texts.append(self.format("communication, with what this rank waited for others", stragglers))
            sys.stdout.write("\n".join([*texts, ""]))
            sys.stdout.flush()
        if not return_dict:
            return None
        rank = get_rank() if is_initialized() else 0
        metadata = {"world_size": _world_size(), "rank": rank, "timestamp": datetime.datetime.now().isoformat()}
        return {"summary": summary, "straggler_analysis": stragglers, "metadata": metadata}

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


def _names(given: Iterable[str]) -> list[str]:
    """The names as a list. A single name counts as a list of one name, not as a list of letters."""
    return [given] if isinstance(given, str) else list(given)


def _difference(everyone: list[dict[int, float]], ranks: Sequence[int]) -> str:
    """``rank 0: 3 calls, ranks 1-3: 2``, where ``ranks`` have recorded different calls; otherwise ""."""
    if all(everyone[rank].keys() == everyone[ranks[0]].keys() for rank in ranks):
        return ""
    having: dict[int, list[int]] = {}
    for rank in ranks:
        having.setdefault(len(everyone[rank]), []).append(rank)
    first, *rest = (f"{ranks_in_words(those)}: {n_calls}" for n_calls, those in having.items())
    return ", ".join([f"{first} calls", *rest])


def _world_size() -> int:
    return get_world_size() if is_initialized() else 1


def _gather_objects(value: Any) -> list[Any]:
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * get_world_size()
    with ledger_of().enter("comm.log_summary", 0):
        dist.all_gather_object(values, value)
    return values


# Key of a row -> heading of its column. Headings are as in DeepSpeed's tables, which people read and scripts parse.
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
    "differs": "Ranks' calls differ",
}


# The ledger's operations of an engine -> (the name in the log, whether a message is one rank's piece of the counted
# size). Names and sizes are as for the functions of ``deepspeed_c.comm`` that do the same; there is no such function
# for a shift.
_ENGINE_OPS = {
    "all-gather": ("all_gather_into_tensor", True),
    "all-reduce": ("all_reduce", False),
    "all-to-all": ("all_to_all_single", False),
    "barrier": ("barrier", True),
    "broadcast": ("broadcast", False),
    "reduce-scatter": ("reduce_scatter_tensor", False),
    "shift": ("shift", False),
}
_MESSAGE = "message"


class EngineCollectives:
    """Records every collective of every engine in a log, while the log is on.

    A record's time runs from the start of a collective to the end of the wait for it. The log does not make the engine
    wait earlier for collectives that run beside the backward. So the recorded time is an upper bound, and the recorded
    bandwidth a lower bound.
    """

    def __init__(self, log: CommsLogger) -> None:
        self._log = log

    def switch(self, is_on: bool) -> None:
        (listen if is_on else stop_listening)(self)

    def begin(self, entry: LedgerEntry) -> None:
        """Does nothing: an entry has the time at which it was made."""

    def end(self, entry: LedgerEntry) -> None:
        """Does nothing: the log counts the whole time of a collective."""

    def finish(self, entry: ObservedEntry) -> None:
        log = self._log
        if entry.op == _MESSAGE:
            op, is_piece = "send" if entry.source == get_rank() else "recv", False
        elif entry.op in _ENGINE_OPS:
            op, is_piece = _ENGINE_OPS[entry.op]
        else:
            return  # recorded by the wrapper of deepspeed_c.comm
        if op == "all_gather_into_tensor" and entry.n_bytes == 0:
            op = "all_gather_object"
        if not log.wants(op, False):
            return
        if entry.device is not None and entry.device.type != "cpu":
            torch.accelerator.synchronize(entry.device)
        n_ranks = len(entry.ranks)
        n_bytes = entry.n_bytes // n_ranks if is_piece else entry.n_bytes
        at = ", ".join(part for part in (entry.phase, entry.label) if part)
        name = f"{op} | [Caller Func: engine{f' ({at})' if at else ''}]" if log.debug else op
        log.record(op, name, perf_counter() - entry.began, n_bytes, n_ranks, entry.path, shared_calls_of(entry))


def shared_calls_of(entry: LedgerEntry) -> tuple[SharedCalls, int] | None:
    """The calls that the ranks of the entry's group share, and the entry's number among them. None for a message,
    because only its two ranks know of it.
    """
    return (SharedCalls(entry.group, entry.op, entry.ranks), entry.seq) if entry.seq else None
