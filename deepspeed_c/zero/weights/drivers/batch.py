"""The plan of a pipeline's batch: its many forwards and backwards are one pass, with one order of use.

A rank of a pipeline runs a table of computations: forwards, backwards and halves of backwards, of several micro-batches
that are in flight at once. As one pass, a unit stays gathered from its first use in the batch to its last one, as far
as ``FetchLimits`` allow. It is gathered once a batch then, and not once a micro-batch.

The order of use of a batch is made of the orders of its computations, which are recorded by kind and stage. In a batch
most units are used many times, so the plan is followed computation by computation: a use never runs ahead into a later
one. A use that the plan of its computation lacks needs nothing if the unit is still gathered. Otherwise the unit is
gathered for this use.

The ranks that gather a stage's weights from each other are in different pipelines, which run the same table. If a stage
of one pipeline fails, the ranks of this pipeline compute no more, but the others go on, and need the shards of the
stopped ranks. Such a rank goes through the rest of its table as if it computed: for each computation it
announces the units that the same computation has used before. In a batch with a computation that no rank has run before
there is nothing to announce, so in such a batch the ranks tell each other each use, and follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c import _C
from deepspeed_c.zero.weights.drivers.driver import Driver
from deepspeed_c.zero.weights.drivers.forwards import Forward
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from deepspeed_c.zero.weights.drivers.run import PlanRun
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["BatchPlan", "first_order"]

# Computations whose first guess at the order of units is the reverse of the forward's. The second half of a split
# backward goes through the layers in the order of the forward.
_REVERSED = (_C.PIPE_BACKWARD, _C.PIPE_INPUT)

Computation = tuple[int, int]
"""(kind of action, stage)"""
Orders = dict[Computation, list[int]]
"""Units in the order of use, without repetitions of neighbours."""
_NO_USE = -1
"""Told in place of a unit, by a rank that uses none until its computation ends."""


def first_order(kind: int, units: Sequence[int]) -> list[int]:
    """The order in which a computation is taken to use its units until its uses are known. ``units``: of its stage, in
    the order of layers."""
    return list(units)[:: -1 if kind in _REVERSED else 1]


class _Table:
    """The plan of batches with equal tables. ``orders``: the same on all ranks that gather from each other. guessed:
    the computations whose orders no rank has found."""

    def __init__(
        self, run: PlanRun, computations: Sequence[Computation], orders: Orders, guessed: set[Computation]
    ) -> None:
        self._run, self.computations, self.orders, self.guessed = run, list(computations), orders, guessed
        self.latest: Orders = {}
        """The units of this rank's last computation of each kind."""
        self.n_batches = 0
        self.steps: list[int] = []
        self._leaves_room = False
        self.plan = run.plan([])
        self.plan_anew()

    def learn(self, found: Sequence[Orders]) -> None:
        """Takes for each computation the longest of the orders that ranks have found, with the units that only others
        have used."""
        for computation in self.orders:
            orders = [of_rank[computation] for of_rank in found if computation in of_rank]
            if orders:
                self.guessed.discard(computation)
                longest = max(orders, key=len)
                others = dict.fromkeys(unit for order in orders for unit in order)
                self.orders[computation] = [*longest, *(unit for unit in others if unit not in longest)]

    def plan_anew(self) -> bool:
        """Makes the plan from ``orders``. Returns whether its order has changed."""
        steps: list[int] = []
        # For each computation the number of steps up to its end, and once more for uses behind the last one.
        self.ends: list[int] = []
        for computation in self.computations:
            for unit in self.orders[computation]:
                if steps[-1:] != [unit]:
                    steps.append(unit)
            self.ends.append(len(steps))
        if self.guessed and self._run.holds_all:
            # A guess may lack the last use of a unit: while there is room for all of them, they stay to the end.
            steps += [unit for unit in dict.fromkeys(steps) if steps[-1:] != [unit]]
        self.ends.append(len(steps))
        is_new = steps != self.steps
        # A use that a guess lacks is gathered beside the plan, within the limit too.
        leaves_room = bool(self.guessed)
        if is_new or leaves_room != self._leaves_room:
            self.steps, self.plan = steps, self._run.plan(steps, leaves_room=leaves_room)
            self._leaves_room = leaves_room
        return is_new


class BatchPlan(Driver):
    """Decides within ``running``."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self._recorded = fetcher.drivers.of(RecordedPlan)
        self._run = PlanRun(fetcher)
        self._tables: dict[Any, _Table] = {}
        self._table: _Table | None = None
        self._number = 0  # of the running computation in the batch
        self._at = 0  # the next step of the plan
        self._used: list[int] = []  # by the running computation, without repetitions of neighbours
        self._longest: Orders = {}  # of the computations of this batch
        self._extra: GatherUnit | None = None  # gathered without a plan, for one use
        self._n_unexpected, self._has_met_unplanned = 0, False
        self._tells, self._is_computing = False, False

    @contextmanager
    def running(
        self, key: Any, computations: Sequence[Computation], units: Mapping[int, Sequence[int]]
    ) -> Iterator[None]:
        """The context of one batch. Its end is collective over the ranks that gather from each other, unless an
        exception leaves it: then the links between ranks have failed.

        key: batches with equal keys have equal tables. computations: (kind, stage) of each, in order. units: of each
        stage, in the order of its layers.
        """
        fetcher = self.fetcher
        if not fetcher.groups:
            yield
            return
        if key not in self._tables:
            self._tables[key] = _Table(self._run, computations, *self._first_orders(computations, units))
        self._begin(self._tables[key])
        fetcher.drivers.put(self)
        try:
            yield
            self._end()
        except BaseException:
            self._run.abort()
            self._recorded.abort()
            raise
        finally:
            self._table = self._extra = None
            fetcher.drivers.take(self)
        self._recorded.rest()

    def _first_orders(
        self, computations: Sequence[Computation], units: Mapping[int, Sequence[int]]
    ) -> tuple[Orders, set[Computation]]:
        """Returns (the orders that another table has found, else guesses: the order of layers, or its reverse; the
        computations with guesses)."""
        orders: Orders = {}
        guessed: set[Computation] = set()
        for computation in dict.fromkeys(computations):
            for table in self._tables.values():
                if computation in table.orders and computation not in table.guessed:
                    orders[computation] = table.orders[computation]
                    break
            else:
                kind, stage = computation
                orders[computation] = first_order(kind, units[stage])
                guessed.add(computation)
        return orders, guessed

    def _begin(self, table: _Table) -> None:
        fetcher = self.fetcher
        with fetcher.lock:
            self._recorded.begin_batch()
            self._table, self._number, self._at, self._longest = table, 0, 0, {}
            self._n_unexpected, self._has_met_unplanned = 0, False
            self._tells = fetcher.is_collective and bool(table.guessed)
            fetcher.begin_pass(is_backward=False, expects_grads=False)
            # A unit that is still gathered stays if the batch begins with it.
            fetcher.let_all_go(keep=table.steps[0] if table.steps else -1)
            self._run.begin(table.steps, table.plan)

    def _end(self) -> None:
        """Runs the rest of the plan, and makes another one if the batch differed from it. Collective."""
        fetcher, table = self.fetcher, self._table
        with fetcher.lock:
            self._drop_extra()
            self._run.end()
            table.n_batches += 1
            n, found = table.n_batches, [self._longest]
            # Units gathered with other ranks and without a plan are the same on all of them, but records of use differ.
            # So the ranks agree on orders after such a batch, after one with guesses, and after batches 1, 2, 4, 8 and
            # so on.
            if fetcher.is_collective:
                is_due = self._has_met_unplanned or self._tells or n & (n - 1) == 0
                comm = fetcher.groups[0].unit.comm
                found = comm.gather_objects(self._longest, label="order of use") if is_due else []
            table.learn(found)
            is_new = table.plan_anew()
            fetcher.stats.count_pass(self._n_unexpected, is_replanned=is_new and n > 1)
            fetcher.end_pass()

    @contextmanager
    def computing(self, kind: int, stage: int, *, saves: bool) -> Iterator[None]:
        """The context of one computation. saves: whether a backward will go through it."""
        key, table = (kind, stage), self._table
        self._used, self._is_computing = [], table is not None
        try:
            if saves and kind == _C.PIPE_FORWARD:
                with self.fetcher.saved.hooks_of(None, lambda _: None):
                    yield
            else:
                yield
        except Exception:
            if table is not None:
                self._leave(self._expected(key)[len(self._used) :])
            raise
        if table is None:  # no stage of this rank has sharded weights
            return
        table.latest[key] = self._used
        if len(self._used) >= len(self._longest.get(key, ())):
            self._longest[key] = self._used
        self._leave()

    def skip(self, kind: int, stage: int) -> None:
        """Takes part in the gathers of a computation that this rank does not do."""
        if self._table is not None:
            self._used = []
            self._leave(self._expected((kind, stage)))

    def _expected(self, key: Computation) -> list[int]:
        """The units that a computation on other ranks uses."""
        return self._table.latest.get(key, self._table.orders[key])

    def _leave(self, announced: Sequence[int] = ()) -> None:
        """The running computation has ended: passes the steps of its plan that this rank has not used. announced: units
        that other ranks still use in it."""
        self._is_computing = False
        if self._tells:
            self._follow_until(_NO_USE)
        else:
            for unit in announced:
                self.fetcher.use(self.fetcher.groups[unit])
        with self.fetcher.lock:
            self._pass_to(self._table.ends[self._number])
            self._number += 1

    def _follow_until(self, unit: int) -> None:
        """Tells a use of ``unit`` to the other ranks, and follows theirs until they all take this one. A rank that
        computes no more follows to the end of the computation."""
        fetcher = self.fetcher
        comm = fetcher.groups[0].unit.comm
        # The highest is taken first: ranks that differ take each other's uses one after another.
        while (told := max(comm.gather_numbers(unit, label="use of weights"))) != unit:
            with fetcher.lock:
                group = fetcher.groups[told]
                self._come_to(group)
                if not group.is_ready:
                    group.finish()

    def _pass_to(self, end: int) -> None:
        while self._at < end:
            self._drop_extra()
            self._run.apply(self._run.use(self.fetcher.groups[self._table.steps[self._at]]))
            self._at += 1

    def _drop_extra(self) -> None:
        extra, self._extra = self._extra, None
        if extra is not None and extra.index not in self._run.live:
            extra.leave(expects_grads=self.fetcher.phase.expects_grads)

    def use(self, group: GatherUnit) -> None:
        if self._used[-1:] != [group.index]:
            self._used.append(group.index)
            if self._tells and self._is_computing:
                self._follow_until(group.index)
        self._come_to(group)

    def _come_to(self, group: GatherUnit) -> None:
        """Passes the steps up to a use in the plan of the running computation."""
        unit, table = group.index, self._table
        steps, at = table.steps, self._at
        if at > 0 and steps[at - 1] == unit:
            return
        try:
            place = steps.index(unit, at, table.ends[self._number])
        except ValueError:
            self._use_unexpected(group)
        else:
            self._pass_to(place + 1)

    def _use_unexpected(self, group: GatherUnit) -> None:
        if group is self._extra or group.index in self._run.live:
            return
        self._drop_extra()
        self._run.gather(group)
        group.stay()
        self._extra = group
        self._n_unexpected += 1
        self._has_met_unplanned |= group.source.is_collective

    @property
    def live(self) -> list[int]:
        return self._run.live if self._extra is None else [*self._run.live, self._extra.index]

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        """A forward of the module within a layer is a part of the batch."""
        return None

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def begin_backward(self, starts: Sequence[Any] | None = None) -> None:
        self._recorded.turn(is_backward=True)

    def end_backward(self) -> None:
        self._recorded.turn(is_backward=False)

    def begin_reading(self) -> None:
        pass

    def abort(self) -> None:
        """Ends a backward that has raised. The plan of the batch goes on, because other ranks follow it."""
        self._recorded.turn(is_backward=False)
