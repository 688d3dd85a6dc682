"""Schedules by name: their tables, gathers of weights in them, the choice of a schedule, and a simulated run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "Cost",
    "Outcome",
    "StageUnit",
    "Traits",
    "choose",
    "fitting",
    "make_table",
    "simulate",
    "traits_of",
    "with_gathers",
]


class Traits(NamedTuple):
    """Requirements and properties of a schedule (``dsc/pipe.h``)."""

    min_virtual: int
    max_virtual: int
    min_micro_batches_per_rank: int
    is_v: bool
    splits_backward: bool
    has_backward: bool


SCHEDULES: dict[str, Traits] = {name: Traits(*traits) for name, traits in _C.pipe_schedules().items()}
"""All schedules, by name."""


class Cost(NamedTuple):
    """Time and memory of one stage for one micro-batch."""

    forward_ns: int = 1_000_000
    input_ns: int = 1_000_000
    """Time of the part of the backward for gradients of inputs."""
    weight_ns: int = 1_000_000
    """Time of the part of the backward for gradients of weights."""
    kept_bytes: int = 1
    """Bytes held from the forward to the end of the backward, or to the end of its part for inputs."""
    weight_bytes: int = 0
    """Bytes held from the end of the part for inputs to the end of the part for weights."""


class StageUnit(NamedTuple):
    """Weights of a stage that are gathered together, if ranks keep only shards of them."""

    stage: int
    numel: int
    gather_ns: int = 0


class Outcome(NamedTuple):
    """The result of a simulated run."""

    makespan_ns: int
    spans: list[list[tuple[int, int]]]
    """(begin, end) in ns of each rank's actions."""
    busy_ns: list[int]
    peak_bytes: list[int]
    peak_live: list[int]
    """For each rank, the largest number of forwards whose backward had not ended."""
    peak_live_elements: list[int]
    """For each rank, the most elements of gathered units that were live together."""
    n_gathers: list[int]
    gathered_elements: list[int]
    """For each rank, the sum of all gathers."""
    link_ns: list[int]
    """For each rank, the time of its gathers."""

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that is idle, from 0 to 1."""
        total = self.makespan_ns * len(self.busy_ns)
        return 1 - sum(self.busy_ns) / total if total else 0.0


def traits_of(name: str, where: str) -> Traits:
    """The traits of a schedule. Raises ConfigError, with the nearest name, where there is no such schedule."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        fix = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no schedule {name!r}", where=where, fix=f"{fix}there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def make_table(name: str, n_ranks: int, n_virtual: int, n_micro_batches: int, where: str) -> _C.PipeTable:
    """The proved table of a schedule, with sends and receives. Raises ConfigError for a shape that the schedule does
    not support.
    """
    traits_of(name, where)
    try:
        table = _C.PipeTable(name, n_ranks, n_virtual, n_micro_batches)
    except ValueError as error:
        raise ConfigError(str(error), where=where, fix="change the shape, or take another schedule") from error
    table.verify()
    return table


def with_gathers(
    table: _C.PipeTable, units: Sequence[StageUnit], limit_elements: int | None, *, ahead: int = 1, where: str
) -> _C.PipeTable:
    """The proved table with gathers and releases of ``units``, which are in the order of stages and their forwards.

    limit_elements: the most elements of live units on a rank; None: no limit. A gather precedes its use by at most
    ``ahead`` computations. ``dsc_pipe_add_gathers`` in ``dsc/pipe.h`` explains where gathers stand.

    Raises ConfigError, with the stage and both numbers, if a computation needs more than the limit.
    """
    try:
        limit = -1 if limit_elements is None else limit_elements
        table = table.with_gathers([tuple(unit) for unit in units], limit, ahead)
    except ValueError as error:
        raise ConfigError(str(error), where=where, fix="raise the limit, or cut the model into more stages") from error
    table.verify()
    return table


def simulate(table: _C.PipeTable, costs: Sequence[Cost], transfer_ns: int = 0) -> Outcome:
    """Simulate a table. ``costs`` are by stage, and a message takes ``transfer_ns``."""
    makespan_ns, spans, usage = table.simulate([tuple(cost) for cost in costs], transfer_ns)
    return Outcome(makespan_ns, spans, *(list(numbers) for numbers in zip(*usage, strict=True)))


def choose(
    n_ranks: int,
    n_micro_batches: int,
    costs: Sequence[Cost],
    *,
    transfer_ns: int = 0,
    limit_bytes: int | None = None,
    is_v: bool | None = None,
    where: str = "pipeline.schedule",
) -> str:
    """Return the schedule with the least makespan. Candidates train ``len(costs)`` stages on ``n_ranks``, and hold at
    most ``limit_bytes`` of activations on each rank. is_v: whether stages lie on ranks as a V; None: either way.

    Raises ConfigError, with the least memory that any schedule needs, where no schedule fits.
    """
    n_virtual = len(costs) // n_ranks
    names = [
        name
        for name, traits in SCHEDULES.items()
        if traits.has_backward and traits.min_virtual <= n_virtual <= traits.max_virtual and is_v in (None, traits.is_v)
    ]
    candidates = [(name, n_ranks, n_virtual, n_micro_batches, [tuple(cost) for cost in costs]) for name in names]
    try:
        index, _ = _C.pipe_choose(candidates, transfer_ns, (1 << 62) if limit_bytes is None else limit_bytes)
    except (MemoryError, ValueError) as error:
        raise ConfigError(
            str(error), where=where, fix="raise activation_bytes_limit, or make the micro-batches smaller"
        ) from error
    return names[index]


def fitting(
    wanted: str, n_ranks: int, n_micro_batches: int, costs: Sequence[Cost], limit_bytes: int | None, *, is_v: bool
) -> str:
    """The schedule to run: ``wanted``, or for "auto" the one that ``choose`` returns.

    Raises ConfigError if it holds more than ``limit_bytes`` of activations on a rank. The error names the fastest
    schedule that fits, or the least that any schedule holds.
    """
    where = "pipeline.activation_bytes_limit"
    if wanted == "auto":
        return choose(n_ranks, n_micro_batches, costs, limit_bytes=limit_bytes, is_v=is_v, where=where)
    if limit_bytes is None:
        return wanted

    def peaks_of(name: str) -> list[int]:
        table = make_table(name, n_ranks, len(costs) // n_ranks, n_micro_batches, "pipeline.schedule")
        return simulate(table, costs).peak_bytes

    peaks = peaks_of(wanted)
    if max(peaks) <= limit_bytes:
        return wanted
    try:
        other = choose(n_ranks, n_micro_batches, costs, limit_bytes=limit_bytes, is_v=is_v, where=where)
        fix = f'write "schedule": "{other}", which holds {max(peaks_of(other))} bytes, or raise the limit'
    except ConfigError as error:
        fix = f"{error.fix}: {error.what}"
    raise ConfigError(
        f"is {limit_bytes}, and {wanted!r} holds {max(peaks)} bytes of activations on pipeline rank"
        f" {peaks.index(max(peaks))}",
        where=where,
        fix=fix,
    )
