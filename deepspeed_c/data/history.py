"""The samples that each step of a run has read, in a few numbers: the places where reading began, or did not go on as
before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_c import _C
from deepspeed_c.data.sampler import DeepSpeedDataSampler
from deepspeed_c.data.unbroken import UnbrokenOrder, place_after
from deepspeed_c.errors import CheckpointError, StateError

__all__ = ["MOST_ENTRIES", "SampleHistory", "StepSamples"]

MOST_ENTRIES = 4096
"""Entries that are kept. A run that reads evenly adds one at its start and at each resume on other ranks."""


class StepSamples(NamedTuple):
    """The samples of one step."""

    step: int
    """Number of the step, from 1."""
    runs: tuple[tuple[int, int, int], ...]
    """Micro-batches that follow one another: epoch, position of the first one's first sample, number of micro-batches.
    A position counts the samples of all ranks, in the epoch, or in the whole run with ``data_sampling``."""
    reading: Mapping[str, Any]
    """``DeepSpeedDataLoader.reading``."""
    samples: tuple[tuple[tuple[int, ...], ...], ...] | None
    """Indices in the data set, by rank and micro-batch. None if the program has its own order."""


class SampleHistory:
    """Notes what a loader gives for each step of an engine.

    An entry has the first step that it is about, and what that step read. The next steps, up to that of the next entry,
    have read the same number of micro-batches each, one after the other, from there on.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._last_step = 0
        self._expected: list[list[int]] | None = None  # runs of the next step, if reading goes on as before

    def note(
        self, step: int, runs: list[list[int]], reading: Mapping[str, Any], place: Mapping[str, Any] | None
    ) -> None:
        """Notes a step that has ended. runs: as in ``StepSamples``. place: the state of the loader's sampler at the
        beginning of the step, if it has one."""
        goes_on = step == self._last_step + 1 and runs == self._expected and reading == self._entries[-1]["reading"]
        if not goes_on:
            self._entries.append({"step": step, "runs": runs, "reading": dict(reading), "place": place})
            del self._entries[:-MOST_ENTRIES]
        self._last_step = step
        self._expected = _following(runs, reading, 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts."""
        return {"last_step": self._last_step, "entries": list(self._entries)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind a ``state_dict`` that ``check`` has accepted."""
        self._last_step, self._entries = state["last_step"], list(state["entries"])
        self._expected = None
        if self._entries:
            entry = self._entries[-1]
            self._expected = _following(entry["runs"], entry["reading"], self._last_step - entry["step"] + 1)

    @staticmethod
    def check(state: Any, where: str) -> None:
        """Raises CheckpointError unless ``state`` is a ``state_dict``."""
        if not (
            isinstance(state, Mapping)
            and type(state.get("last_step")) is int
            and isinstance(state.get("entries"), list)
            and all(_is_entry(entry) for entry in state["entries"])
        ):
            raise CheckpointError("its history of samples is none", where=where, fix="load another tag")

    def steps(self) -> tuple[int, int]:
        """The first and the last step that can be asked for; (1, 0) if there is none."""
        return (self._entries[0]["step"], self._last_step) if self._entries else (1, 0)

    def entries(self) -> list[StepSamples]:
        """The first step of each entry, without its samples."""
        return [StepSamples(entry["step"], _tuples(entry["runs"]), entry["reading"], None) for entry in self._entries]

    def samples(self, step: int) -> StepSamples:
        """The samples of a step. With a curriculum the sampler reads its metrics again, and repeats the draws since the
        entry's first step.

        Raises StateError for a step that is not in the history.
        """
        first, last = self.steps()
        if not first <= step <= last:
            have = f"has steps {first} to {last}" if last else "has no step"
            raise StateError(
                f"the history of samples {have}, and step {step} is asked for",
                where="deepspeed_c data",
                fix="ask for a step that is there, or read a later checkpoint of the run",
            )
        entry = max((e for e in self._entries if e["step"] <= step), key=lambda e: e["step"])
        reading, n = entry["reading"], step - entry["step"]
        runs = _following(entry["runs"], reading, n) if n else entry["runs"]
        samples = None
        if reading["kind"] == "order":
            samples = tuple(_by_order(runs, reading, rank) for rank in range(reading["n_ranks"]))
        elif reading["kind"] == "steps":
            samples = _by_sampler(entry, n)
        return StepSamples(step, _tuples(runs), reading, samples)


def _following(runs: Sequence[Sequence[int]], reading: Mapping[str, Any], n_steps: int) -> list[list[int]]:
    """The runs of the step that comes ``n_steps`` after the one with ``runs``."""
    count = sum(n for _, _, n in runs)
    if not count:
        return []
    epoch, begin, n = runs[-1]
    position = begin + n * _round(reading)
    to_pass = (n_steps - 1) * count
    if reading["kind"] != "order":
        return [[epoch, position + to_pass * _round(reading), count]]
    found: list[list[int]] = []
    if reading.get("is_unbroken"):
        position += to_pass * _round(reading)
        while count:
            epoch, position = place_after(epoch, position, reading["n_samples"])
            taken = min(count, _n_rounds(position, reading))
            found.append([epoch, position, taken])
            position += taken * _round(reading)
            count -= taken
        return found
    epoch, position = _passed(epoch, position, to_pass, reading)
    while count:
        taken = min(count, _n_rounds(position, reading))
        if taken:
            found.append([epoch, position, taken])
        count -= taken
        epoch, position = epoch + 1, 0
    return found


def _passed(epoch: int, position: int, n: int, reading: Mapping[str, Any]) -> tuple[int, int]:
    """The place ``n`` micro-batches further on."""
    left = _n_rounds(position, reading)
    if n <= left:
        return epoch, position + n * _round(reading)
    epochs, rest = divmod(n - left, _n_rounds(0, reading))
    return epoch + 1 + epochs, rest * _round(reading)


def _round(reading: Mapping[str, Any]) -> int:
    return reading["micro_batch"] * reading["n_ranks"]


def _n_rounds(position: int, reading: Mapping[str, Any]) -> int:
    """Micro-batches of a rank from a position to the end of the epoch."""
    full, rest = divmod(max(0, reading["n_samples"] - position), _round(reading))
    return full + (rest > 0 and not reading["drop_last"])


def _by_order(runs: Sequence[Sequence[int]], reading: Mapping[str, Any], rank: int) -> tuple[tuple[int, ...], ...]:
    batch = reading["micro_batch"]
    run = batch if reading.get("whole_batches") else 1
    share = {"n_ranks": reading["n_ranks"], "rank": rank, "batch": batch, "run": run, "seed": reading["seed"]}
    order: UnbrokenOrder | _C.SampleOrder
    if reading.get("is_unbroken"):
        order = UnbrokenOrder(reading["n_samples"], **share)
    else:
        order = _C.SampleOrder(reading["n_samples"], drop_last=reading["drop_last"], **share)
    found = []
    for epoch, begin, count in runs:
        position = begin
        for _ in range(count):
            samples, position = order.round(epoch, position)
            found.append(tuple(samples))
    return tuple(found)


def _by_sampler(entry: Mapping[str, Any], n: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The samples of the step that comes n after the entry's first one."""
    reading, count = entry["reading"], sum(n for _, _, n in entry["runs"])
    samplers = [
        DeepSpeedDataSampler(
            reading["efficiency"],
            reading["n_samples"],
            reading["micro_batch"],
            rank,
            reading["n_ranks"],
            None,
            reading["accumulation_steps"],
            rank,
            drop_last=reading["drop_last"],
            whole_batches=reading.get("whole_batches", False),
        )
        for rank in range(reading["n_ranks"])
    ]
    place = samplers[0].place_of(entry["place"])
    rounds = samplers[0].rounds(place)
    for _ in range(n * count):
        _, place = next(rounds)
    return tuple(
        tuple(tuple(samples) for (samples, _), _ in zip(sampler.rounds(place), range(count))) for sampler in samplers
    )


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("step")) is int
        and isinstance(entry.get("place"), (dict, type(None)))
        and isinstance(entry.get("runs"), list)
        and all(
            isinstance(run, list) and [type(n) for n in run] == [int] * 3 and min(run) >= 0 for run in entry["runs"]
        )
        and _is_reading(entry.get("reading"))
        # Something was read, so an epoch is not empty.
        and (not entry["runs"] or entry["reading"]["kind"] != "order" or _n_rounds(0, entry["reading"]) > 0)
    )


def _is_reading(reading: Any) -> bool:
    return (
        isinstance(reading, dict)
        and reading.get("kind") in ("order", "steps", "own")
        and all(type(reading.get(key)) is int and reading[key] >= 1 for key in ("micro_batch", "n_ranks"))
        and type(reading.get("drop_last")) is bool
        and all(type(reading.get(key, False)) is bool for key in ("is_unbroken", "whole_batches"))
        and (reading["kind"] == "own" or type(reading.get("n_samples")) is int)
        and type(reading.get("seed")) in (int, type(None))
    )


def _tuples(runs: Sequence[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((epoch, position, n) for epoch, position, n in runs)
