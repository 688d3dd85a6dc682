"""The ledger of a process group: the collectives that this rank has entered, in order, with the state of each.

All ranks of a group enter the same collectives in the same order, so entry number n of one rank must equal entry number
n of every other rank. ``watchdog.py`` compares entries when a rank waits for long; ``totals`` counts traffic.

[Note: devices] Waiting for a collective of an accelerator makes a stream wait and returns at once; a hang shows later,
wherever the rank next needs a result. So an event is recorded behind such a collective, and the rank counts as waiting
for the entry until the event has come.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import Self

from deepspeed_c.accelerator import has_streams
from deepspeed_c.comm.axes import PP
from deepspeed_c.comm.groups import get_all_ranks_from_group

__all__ = [
    "DONE",
    "ENTERED",
    "STARTING",
    "WAITING",
    "Ledger",
    "LedgerEntry",
    "Total",
    "all_ledgers",
    "describe",
    "group_in_words",
    "ledger_of",
    "ledger_of_pair",
    "ranks_in_words",
]

# The states of an entry, in their order. Starting a collective may itself block: NCCL connects the ranks at the first
# collective.
STARTING, ENTERED, WAITING, DONE = "starting", "entered", "waiting", "done"

# Ranges of ranks that a sentence names.
_MAX_NAMED = 16

# Entries kept. Ranks can be apart by as many collectives as are in flight at once: some tens.
_N_KEPT = 1024


class Total(NamedTuple):
    """Traffic of one operation since the ledger was made or reset."""

    count: int
    n_bytes: int
    """Payload: the whole buffer, as every rank has it after an all-gather or before a reduce-scatter.

    Pickled objects count as bytes, those of the longest for each rank.
    """
    wire_bytes: int
    """Bytes that a rank sends, averaged over the ranks, with the best known algorithm (a ring). Over N ranks this is
    n_bytes * (N-1)/N, and twice as much for an all-reduce, which is a reduce-scatter and an all-gather. A broadcast of
    B bytes arrives at N-1 ranks, so it counts as B * (N-1)/N for each rank. A message between two ranks is counted
    whole, by its sender.
    """


class LedgerEntry:
    """One collective that this rank has entered.

    The entry is also a context manager: inside it, the rank waits for the collective. Ranks must agree on ``op``,
    ``label`` and, except for a shift, ``n_bytes``.
    """

    __slots__ = ("_device", "_ledger", "label", "module", "n_bytes", "op", "path", "phase", "seq", "since", "state")

    def __init__(
        self,
        ledger: Ledger,
        seq: int,
        op: str,
        n_bytes: int,
        label: str,
        device: torch.device | None = None,
        path: str = "",
    ) -> None:
        self._ledger = ledger
        self._device = device
        self.seq = seq
        self.op = op
        self.n_bytes = n_bytes
        self.label = label
        self.path = path
        """Transport: "shm", "shm+gloo", or a backend of ``torch.distributed``; "" if the caller chose it in torch."""
        self.phase = ledger.phase
        self.module = ledger.module
        self.state = STARTING
        self.since = monotonic()

    @property
    def axes(self) -> str:
        """``Ledger.axes`` of the entry's group."""
        return self._ledger.axes

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the entry's group."""
        return self._ledger.ranks

    @property
    def group(self) -> str:
        """``Ledger.name`` of the entry's group."""
        return self._ledger.name

    @property
    def source(self) -> int | None:
        """``Ledger.source`` of the entry's group."""
        return self._ledger.source

    @property
    def device(self) -> torch.device | None:
        """The device of the data; None: the CPU."""
        return self._device

    def begin_wait(self) -> None:
        """From here on this rank waits for the collective. ``since`` becomes the time (``time.monotonic``) of this
        call.
        """
        self.since = monotonic()
        self.state = WAITING
        self._ledger.waiting[self] = None

    def started(self) -> None:
        """The collective is under way. This rank does something else until it waits for the collective."""
        self.state = ENTERED
        self._ledger.waiting.pop(self, None)

    def finish(self) -> None:
        """The call that waits for the collective has returned. The collective is over, or will be over when the stream
        gets there (see [Note: devices]).
        """
        if self._device is None or not has_streams(self._device):
            self.end()
        else:
            self._ledger.finish_on_device(self, self._device)

    def end(self) -> None:
        """The collective is over, with or without success."""
        self.state = DONE
        self._ledger.waiting.pop(self, None)

    def explain(self) -> str:
        """The reason why the collective may have failed, in words; "" if it is not known."""
        return self._ledger.explain()

    def under_way(self) -> list[LedgerEntry]:
        """Entries before this one on the same path that this rank has not waited for, oldest first.

        A path that is not a backend of torch runs its collectives one after the other, so an earlier failure may be the
        cause of this entry's.
        """
        return [
            entry
            for entry in self._ledger.recent(_N_KEPT)
            if entry.path == self.path and entry.state != DONE and entry.seq < self.seq
        ]

    def __enter__(self) -> Self:
        self.begin_wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.end()

    def __str__(self) -> str:
        what = describe(self.op, self.seq, self.label, self.phase, self.module, self.path)
        ledger = self._ledger
        return f"{what} {group_in_words(ledger.axes, ledger.ranks)}" if ledger.axes else what


def describe(op: str, seq: int, label: str, phase: str, module: str, path: str = "") -> str:
    """``all-gather #812 of layers.7.mlp.w1 (forward)``. Empty parts are left out, and so is a number below 1.

    The path is named unless it is a backend of ``torch.distributed``: ``(forward, shm)``.
    """
    number = f" #{seq}" if seq > 0 else ""
    of = f" of {label}" if label else ""
    at = ", ".join(part for part in (phase, module, "" if path in dist.Backend.backend_list else path) if part)
    return f"{op}{number}{of}{f' ({at})' if at else ''}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    more = f", ... ({len(ranks)} in all)" if len(shown) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown[:_MAX_NAMED])}{more}"


def group_in_words(axes: str, ranks: Sequence[int]) -> str:
    """``over dp_shard (ranks 0, 2)`` for a group that lies along axes of a mesh, and ``of the group of ranks 0, 2`` for
    any other group.
    """
    return f"over {axes} ({ranks_in_words(ranks)})" if axes else f"of the group of {ranks_in_words(ranks)}"


class Ledger:
    """The collectives of one process group, as this rank entered them. ``ledger_of`` gives a group's ledger.

    ``phase`` ("forward", "backward", "step" or "") and ``module`` (the path of the module at work, or "") are copied
    into every entry; the code that drives the step sets them. Entering takes about a microsecond and sends nothing. Any
    thread may enter.
    """

    entry_type: ClassVar[type[LedgerEntry]] = LedgerEntry
    """Class of the entries in all ledgers. It is replaced by another class while somebody listens (``observed.py``)."""

    @classmethod
    def make_entries(cls, kind: type[LedgerEntry]) -> None:
        """From now on entries of all ledgers are of class ``kind``."""
        cls.entry_type = kind

    def __init__(self, name: str, ranks: Sequence[int], source: int | None = None) -> None:
        """name: the group's name, the same on all its ranks. ranks: the global ranks of its members."""
        self.name = name
        self.source = source
        """The rank that sends, if this ledger is for the messages from one rank to another."""
        self.ranks = tuple(ranks)
        self.axes = ""
        """The axes of a mesh that the group lies along (``dp_shard``); "" where no mesh made the group."""
        self.phase = ""
        self.module = ""
        self.waiting: dict[LedgerEntry, None] = {}
        """Entries that some thread of this rank waits for now, oldest first."""
        self._watchman: Callable[[], str] | None = None
        self._whole: Ledger | None = None
        self._ring: list[LedgerEntry | None] = [None] * _N_KEPT
        self._numbers = itertools.count(1)  # next() is atomic, whichever threads call it
        self._last = 0
        self._totals: dict[str, list[int]] = {}
        self._carried: dict[str, int] = {}
        self._on_device: deque[tuple[LedgerEntry, torch.Event]] = deque()
        self._device_lock = threading.Lock()

    @property
    def last(self) -> int:
        """The number of the newest entry; 0 if there is none."""
        return self._last

    def make_part_of(self, whole: Ledger, axes: str) -> None:
        """Says that the group lies along ``axes`` of a mesh over the ranks of ``whole``.

        The watchdog of ``whole`` then explains failures in this group, too.

        Engines with different meshes may use one group of ranks. The ledger then keeps the names of both meshes' axes:
        ``dp_shard or dp_replicate``.
        """
        self._whole = whole
        if axes not in self.axes.split(" or "):
            self.axes = f"{self.axes} or {axes}" if self.axes else axes

    def explain_by(self, watchman: Callable[[], str] | None) -> None:
        """Lets ``watchman`` answer calls of ``explain``. None: the ledger of all ranks answers them."""
        self._watchman = watchman

    def explain(self) -> str:
        """The ranks that have ended, for the message of a collective that fails; "" if no watchdog runs."""
        if self._watchman is not None:
            return self._watchman()
        return "" if self._whole is None else self._whole.explain()

    def enter(
        self, op: str, n_bytes: int, label: str = "", device: torch.device | None = None, path: str = ""
    ) -> LedgerEntry:
        """Enters a collective that starts now.

        ``n_bytes`` is as in ``Total``. device: the device of the data, by default the CPU. path: as in ``LedgerEntry``.
        """
        seq = next(self._numbers)
        entry = self._ring[seq % _N_KEPT] = self.entry_type(self, seq, op, n_bytes, label, device, path)
        self._last = seq
        self._count(op, n_bytes)
        if path:
            self._carried[path] = self._carried.get(path, 0) + n_bytes
        return entry

    def enter_message(self, op: str, n_bytes: int, label: str = "", device: torch.device | None = None) -> LedgerEntry:
        """Enters a message between two ranks. It gets the number 0, since the other ranks do not know of it."""
        self._count(op, n_bytes)
        return self.entry_type(self, 0, op, n_bytes, label, device)

    def finish_on_device(self, entry: LedgerEntry, device: torch.device) -> None:
        """Ends ``entry`` when the current stream of ``device`` has finished the work given to it so far."""
        event = record_event(device)
        if event is None:
            entry.end()
            return
        self._on_device.append((entry, event))
        self._settle()

    def _settle(self) -> None:
        """Ends the entries of collectives that are over on the device."""
        with self._device_lock:
            while self._on_device and self._on_device[0][1].query():
                self._on_device.popleft()[0].end()

    def recent(self, n: int) -> list[LedgerEntry]:
        """The ``n`` newest entries that are kept, oldest first."""
        last = self._last
        kept = (self._ring[seq % _N_KEPT] for seq in range(max(1, last - min(n, _N_KEPT) + 1), last + 1))
        return [entry for entry in kept if entry is not None]

    def blocking(self) -> list[LedgerEntry]:
        """Entries whose end or start this rank waits for, oldest first."""
        if self._on_device:
            self._settle()
        starting = [entry for entry in self.recent(1) if entry.state == STARTING]
        return sorted([*list(self.waiting), *starting], key=lambda entry: entry.since)

    @property
    def totals(self) -> dict[str, Total]:
        """Traffic by operation, for all users of the group: engines, and the calls of ``deepspeed_c.comm``."""
        n = len(self.ranks)
        return {
            op: Total(count, n_bytes, _wire_bytes(op, n_bytes, n))
            for op, (count, n_bytes) in list(self._totals.items())
        }

    @property
    def carried(self) -> dict[str, int]:
        """Payload of the engines' collectives by path (``LedgerEntry.path``), in bytes as in ``Total``."""
        return dict(self._carried)

    def reset_totals(self) -> None:
        """Counts from zero again."""
        self._totals, self._carried = {}, {}

    def _count(self, op: str, n_bytes: int) -> None:
        total = self._totals.get(op)
        if total is None:
            total = self._totals.setdefault(op, [0, 0])
        total[0] += 1
        total[1] += n_bytes


_TWICE = frozenset({"all-reduce", "comm.all_reduce", "comm.all_reduce_coalesced", "comm.inference_all_reduce"})
_SENT = frozenset({"comm.send", "comm.isend", "shift"})
_RECEIVED = frozenset({"comm.recv", "comm.irecv"})


def _wire_bytes(op: str, n_bytes: int, n_ranks: int) -> int:
    if op in _SENT:
        return n_bytes
    if op in _RECEIVED:
        return 0
    return n_bytes * (2 if op in _TWICE else 1) * (n_ranks - 1) // n_ranks


def record_event(device: torch.device) -> torch.Event | None:
    """An event on the current stream of ``device``. None while a graph is captured: such events cannot be queried."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


# Each group has one ledger, however many engines use it: the engines take turns in an order that all ranks share. The
# ledger goes with the group.
_ledgers: weakref.WeakKeyDictionary[Any, Ledger] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def ledger_of(group: dist.ProcessGroup | None = None) -> Ledger:
    """The ledger of ``group``, by default of all ranks."""
    group = dist.group.WORLD if group is None else group
    ledger = _ledgers.get(group)
    if ledger is None:
        made = Ledger(group.group_name, get_all_ranks_from_group(group))
        with _lock:
            ledger = _ledgers.setdefault(group, made)
    return ledger


# Ledgers for two ranks of a group. A ledger numbers the messages of one tag from one rank to the other.
_pair_ledgers: weakref.WeakKeyDictionary[Any, dict[tuple[int, int, int], Ledger]] = weakref.WeakKeyDictionary()


def ledger_of_pair(whole: Ledger, group: dist.ProcessGroup | None, src: int, dst: int, tag: int) -> Ledger:
    """The ledger of the messages of ``tag`` from rank ``src`` to rank ``dst``, both global ranks, in ``group``, whose
    ledger is ``whole``.

    Only these messages start in one order on both ranks: how a rank mixes them with others depends on the order of
    arrival.
    """
    group = dist.group.WORLD if group is None else group
    pairs = _pair_ledgers.get(group, {})
    ledger = pairs.get((src, dst, tag))
    if ledger is None:
        made = Ledger(f"{whole.name} {src}-{dst} {tag}", sorted((src, dst)), source=src)
        made.make_part_of(whole, whole.axes or PP)
        with _lock:  # the watchdog reads them meanwhile
            ledger = _pair_ledgers.setdefault(group, {}).setdefault((src, dst, tag), made)
    return ledger


def all_ledgers() -> list[Ledger]:
    """The ledgers of all existing groups that have entries."""
    with _lock:
        return [*_ledgers.values(), *(ledger for pairs in _pair_ledgers.values() for ledger in pairs.values())]
