"""The rounds of join mode (``join.py``): in each, every rank announces one event, and all ranks hear all of them.

A rank has ended, begins a forward, or wants a gather unit. The units that one rank wanted from the beginning to the end
of its forward are an order of use that all ranks know. From then on one round is enough for each forward.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed_c.comm.collectives import Collectives

__all__ = ["DONE", "FORWARD", "Round", "Rounds"]

DONE, FORWARD = -2, -1


class Round(NamedTuple):
    """The decision of a round, the same on all ranks."""

    wanted: list[int]
    """The gather units to gather now, in this order."""
    runs_plan: bool
    """Whether all ranks now run through the plan of ``Rounds.steps``."""
    is_over: bool
    """Whether all ranks have ended."""


class Rounds:
    """The rounds of one fetcher, and the order of use that they have shown. comm: the ranks. n_units: gather units."""

    def __init__(self, comm: Collectives, n_units: int) -> None:
        self._comm, self._n_units = comm, n_units
        self.steps: list[int] | None = None
        """Gather units in order of use; None while it is unknown."""
        self._recorded_rank: int | None = None
        self._trace: list[int] = []

    def missing(self, unit: int) -> int:
        """The event of a rank that wants a unit because the plan lacks it."""
        return self._n_units + unit

    def meet(self, event: int) -> Round:
        """Takes part in one round. ``event``: DONE, FORWARD, the number of a gather unit, or ``missing``. Collective.

        A rank that announced FORWARD runs through the plan if the round says so. Otherwise it runs on demand if
        ``steps`` is None now, and else it announces again, because a rank is on demand in its forward.
        """
        # A sum with one place for each rank: it takes half of the time of a gather.
        places = [0.0] * self._comm.world_size
        places[self._comm.rank] = float(event)
        events = [int(number) for number in self._comm.sum_numbers(places, label="join mode")]
        wants = [-1 if event < 0 else event % self._n_units for event in events]
        if max(events) >= self._n_units:
            self.steps = None
        self._record(events, wants)
        is_quiet = max(wants) < 0
        return Round(
            wanted=sorted({unit for unit in wants if unit >= 0}),
            runs_plan=is_quiet and self.steps is not None and FORWARD in events,
            is_over=is_quiet and FORWARD not in events,
        )

    def _record(self, events: list[int], wants: list[int]) -> None:
        """Follows the forward of one rank, from its announcement to that rank's next event without a unit."""
        if self._recorded_rank is not None:
            unit = wants[self._recorded_rank]
            if unit < 0:
                self.steps = self._trace or None
                self._recorded_rank = None
            elif self._trace[-1:] != [unit]:
                self._trace.append(unit)
        if self.steps is None and self._recorded_rank is None and FORWARD in events:
            self._recorded_rank, self._trace = events.index(FORWARD), []
