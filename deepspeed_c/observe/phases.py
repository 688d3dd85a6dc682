"""The time of each phase of an engine's steps (``wall_clock_breakdown``).

Each instant counts to the innermost open phase, or to "other" if no phase is open. So the phases of a step add up to
its wall-clock time. On the CPU, the host's clock is read at the begin and the end of a phase. On an accelerator, an
event is recorded on the current stream instead, and only reading the phases waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from threading import get_ident
from typing import Any

import torch

from deepspeed_c.comm.axes import PP, SP, TP
from deepspeed_c.comm.ledger import LedgerEntry

__all__ = ["TIMER_NAMES", "Phases"]

Clock = Callable[[], float]  # seconds from any beginning, never backwards

_OTHER = "other"

# DeepSpeed's name of a timer -> (its phase, a second phase whose time counts if the first does not exist).
_TIMERS: dict[str, tuple[str, str]] = {
    "fwd": ("forward", ""),
    "bwd": ("backward", ""),
    "bwd_inner": ("backward.inner", "backward"),
    "bwd_allreduce": ("backward.reduce", ""),
    "step": ("step", ""),
}

TIMER_NAMES = tuple(_TIMERS)
"""DeepSpeed's timers of a step. The names with the suffix ``_microstep`` are the timers of a micro-batch."""

# Number of cuts on a device that are kept for a report. The device has long passed the oldest of them.
_MOST_UNREAD = 256


# Axis along which a model is cut -> the part of a phase that counts the time of collectives along this axis.
_PARTS_OF_AXES = {TP: "tensor_parallel", SP: "sequence_parallel", PP: "messages"}
# Collective of data-parallel ranks -> the part of a phase that counts its time.
_PARTS_OF_OPS = {"reduce-scatter": "reduce", "all-reduce": "reduce", "all-gather": "gather", "broadcast": "gather"}


def _part_of(entry: LedgerEntry) -> str:
    return _PARTS_OF_AXES.get(entry.axes) or _PARTS_OF_OPS.get(entry.op, "wait")


class _Span:
    """A context whose time counts as one phase. Each phase has one object, which may be entered recursively."""

    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._phases.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._phases.leave(self._name)


class _ClockMarks:
    """Adds up seconds by name. Each mark on the host's clock ends one interval and begins the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: float | None = None
        self._sums: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Counts the time since the last mark to ``name``."""
        now = self._clock()
        if self._last is not None:
            self._sums[name] = self._sums.get(name, 0.0) + now - self._last
        self._last = now

    def cut(self) -> dict[str, float]:
        """Returns the sums since the last cut, and resets them."""
        sums, self._sums = self._sums, {}
        return sums

    @staticmethod
    def seconds(cut: dict[str, float]) -> dict[str, float]:
        return cut


class _EventMarks:
    """Like ``_ClockMarks``, by events on the current stream of ``device``. A cut is a list of (name, event);
    ``seconds`` reads the events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, torch.Event]] = []

    def mark(self, name: str) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def cut(self) -> list[tuple[str, torch.Event]]:
        marks, self._marks = self._marks, self._marks[-1:]
        return marks

    @staticmethod
    def seconds(cut: list[tuple[str, torch.Event]]) -> dict[str, float]:
        """Waits for the device."""
        sums: dict[str, float] = {}
        if cut:
            cut[-1][1].synchronize()
        for (_, begin), (name, end) in pairwise(cut):
            sums[name] = sums.get(name, 0.0) + begin.elapsed_time(end) * 1e-3
        return sums


class Phases:
    """The phases of one engine: "data", "forward", "backward", "step", in a pipeline "messages" between its stages, and
    parts of these such as "backward.reduce".

    A phase that is entered within other phases is a part of the outermost phase. The time of a phase outside of its
    parts is its part "inner".
    """

    open: Phases | None = None
    """The enabled object that has an open phase. Collectives count their time to this object."""

    def __init__(self, *, enabled: bool, device: torch.device, clock: Clock | None = None) -> None:
        self.is_enabled = enabled
        if clock is None and device.type == "cpu":
            clock = time.perf_counter
        self._marks: Any = _EventMarks(device) if clock is None else _ClockMarks(clock)
        self._nothing = nullcontext()
        self._spans: dict[str, _Span] = {}
        self._stack: list[str] = []
        self._outer: Phases | None = None  # the phases of an engine whose forward calls this engine
        self._thread = 0  # the thread of the open phase
        self._n_collectives = 0  # number of nested collectives that are open
        self._micro_cuts: list[Any] = []  # cuts of the current step
        self._last_cuts: list[Any] = []  # cuts of the last step
        self._unread: list[Any] = []  # cuts since the last report that have not been read
        self._read: dict[str, float] = {}  # sums of the cuts that have been read
        self._n_steps = 0  # steps since the last report

    def measure(self, name: str) -> AbstractContextManager[None]:
        """A context whose time counts as phase ``name``, or inside another phase as its part ``name``."""
        if not self.is_enabled:
            return self._nothing
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = _Span(self, name)
        return span

    def enter(self, name: str) -> None:
        """Begins a phase; ``leave`` ends it. For callers that cannot use ``measure``. They must check first that the
        phases are enabled."""
        stack = self._stack
        if not stack:
            self._outer, Phases.open = Phases.open, self
            self._thread, self._n_collectives = get_ident(), 0
        self._marks.mark(stack[-1] if stack else _OTHER)
        stack.append(f"{stack[0]}.{name}" if stack and name != stack[0] else name)

    def leave(self, name: str) -> None:
        """Ends the phase ``name``, and phases within it that an exception has left open."""
        stack = self._stack
        for i in reversed(range(len(stack))):
            if stack[i] in (name, f"{stack[0]}.{name}"):
                self._marks.mark(stack[-1])
                del stack[i:]
                break
        if not stack and Phases.open is self:
            Phases.open = self._outer

    def begin(self, entry: LedgerEntry) -> None:
        """Called when a collective begins (``comm/observed.py``). Inside a phase, the time of the collective counts as
        a part of the phase."""
        # Collectives of other threads (saving a checkpoint) do not count, except in autograd's device threads.
        if Phases.open is self and (get_ident() == self._thread or torch._C._current_graph_task_id() != -1):
            self._n_collectives += 1
            if self._n_collectives == 1:
                self.enter(_part_of(entry))

    def end(self, entry: LedgerEntry) -> None:
        if Phases.open is self and self._n_collectives:
            self._n_collectives -= 1
            if self._n_collectives == 0:
                self.leave(_part_of(entry))

    def finish(self, entry: LedgerEntry) -> None:
        """Does nothing, because ``end`` has been called."""

    def end_micro_step(self, *, is_step: bool) -> None:
        """Called at the end of a micro-batch, with ``is_step`` also at the end of a step."""
        if not self.is_enabled:
            return
        self._marks.mark(self._stack[-1] if self._stack else _OTHER)
        self._micro_cuts.append(self._marks.cut())
        if is_step:
            self._last_cuts, self._micro_cuts = self._micro_cuts, []
            self._unread += self._last_cuts
            self._n_steps += 1
            if len(self._unread) > _MOST_UNREAD:
                self._read_cuts()

    def _read_cuts(self) -> None:
        self._read = self._sum_up([self._read, *map(self._marks.seconds, self._unread)])
        self._unread = []

    @staticmethod
    def _sum_up(parts: list[dict[str, float]]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for part in parts:
            for name, seconds in part.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums

    def mean_ms(self, *, reset: bool = False) -> dict[str, float]:
        """{phase: mean ms a step} since the last reset. Waits for the device."""
        self._read_cuts()
        n_steps = max(1, self._n_steps)
        found = {name: seconds * 1e3 / n_steps for name, seconds in _with_wholes(self._read).items()}
        if reset:
            self._read, self._n_steps = {}, 0
        return found

    def last_step_ms(self) -> dict[str, float]:
        """{phase: ms} of the last step; empty before the first one.

        The result also has DeepSpeed's timers: ``fwd``, ``bwd``, ``bwd_inner``, ``bwd_allreduce`` and ``step``. The
        same names with the suffix ``_microstep`` are the timers of the last micro-batch. Waits for the device.
        """
        if not self._last_cuts:
            return {}
        micro = [self._marks.seconds(cut) for cut in self._last_cuts]
        step, last = _with_wholes(self._sum_up(micro)), _with_wholes(micro[-1])
        found = {name: seconds * 1e3 for name, seconds in step.items()}
        for timer, (name, phase) in _TIMERS.items():
            found[timer] = step.get(name, step.get(phase, 0.0)) * 1e3
            found[f"{timer}_microstep"] = last.get(name, last.get(phase, 0.0)) * 1e3
        return found


def _with_wholes(own: dict[str, float]) -> dict[str, float]:
    """{phase: seconds} from the seconds of each phase without its parts. The result for a phase includes its parts, and
    the phase's seconds without parts become its part "inner"."""
    wholes: dict[str, float] = {}
    for name, seconds in own.items():
        phase, _, part = name.partition(".")
        wholes[phase] = wholes.get(phase, 0.0) + seconds
        if part:
            wholes[name] = seconds
            wholes[f"{phase}.inner"] = own.get(phase, 0.0)
    return wholes
