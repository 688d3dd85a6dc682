"""Join mode: ranks run different numbers of forwards with weights that every rank has to take part in gathering.

The ranks proceed in *rounds* (``rounds.py``). In a round each rank announces one event: it has ended, it begins a
forward, or it wants a gather unit. A rank announces its end again and again, and serves the others meanwhile, until all
have ended.

The first forward runs *on demand*: each unit is announced before it is used. This shows all ranks an order of use. From
then on all ranks run through the plan of this order, with gathers ahead of their use. A forward that needs more than
the plan continues on demand, and the order is learnt anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from deepspeed_c.logging import log_dist
from deepspeed_c.zero.weights.drivers.driver import Driver
from deepspeed_c.zero.weights.drivers.forwards import Forward
from deepspeed_c.zero.weights.drivers.rounds import DONE, FORWARD, Round, Rounds
from deepspeed_c.zero.weights.drivers.run import PlanRun
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["JoinMode"]


class JoinMode(Driver):
    """Decides within ``running``, where all forwards are without a backward."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self.rounds = Rounds(fetcher.comm, len(fetcher.groups))
        self._run = PlanRun(fetcher, gather=self._gather)
        self._steps: list[int] = []
        self._plan = self._run.plan([])
        self._is_on_demand = True
        self._kept: list[GatherUnit] = []
        self._has_warned = False

    @property
    def is_running(self) -> bool:
        return self.under is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of join mode. Its end is collective: a rank that has finished takes part in the gathers of the other
        ranks until all have finished, also if it has raised. Does nothing within a pass, and within another one."""
        fetcher = self.fetcher
        if self.is_running or fetcher.phase.is_active or not fetcher.groups:
            yield
            return
        if fetcher.is_too_large and not self._has_warned:
            self._has_warned = True
            n = sum(group.numel for group in fetcher.groups)
            log_dist(
                f"generation gathers each unit for each token: {n} elements are more than stage3_max_live_parameters"
                f" ({fetcher.limits.max_live}); set it to {n} to gather them once",
                ranks=[0],
            )
        fetcher.drivers.put(self)
        try:
            self._begin_empty()
            try:
                yield
            except Exception:
                self._serve()
                raise
            self._serve()
        finally:
            if self.is_running:
                fetcher.drivers.take(self)
                fetcher.driver.rest()

    def _serve(self) -> None:
        while not (met := self._meet(DONE)).is_over:
            if met.runs_plan:
                with self.fetcher.lock:
                    self._begin()
                    self._end()

    def _meet(self, event: int, mine: GatherUnit | None = None) -> Round:
        """One round. Gathers the units that ranks have announced, and keeps ``mine`` of them."""
        met = self.rounds.meet(event)
        for group in map(self.fetcher.groups.__getitem__, met.wanted):
            was_gathered, was_leaving = group.buffer is not None, group.is_leaving
            self.fetcher.gather(group)
            if group is mine:
                continue
            group.wait()
            if was_leaving or not was_gathered:
                group.leave(expects_grads=False)
        return met

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        if name != "train" and all(group.pins for group in self.fetcher.groups):
            return None  # nothing has to be gathered
        with self.fetcher.lock:
            if self.fetcher.phase.is_active:
                self._run.abort()
                self.rest()
            # Along the plan of all ranks, or on demand while there is no plan.
            while not self._meet(FORWARD).runs_plan:
                if self.rounds.steps is None:
                    break
            self._begin()
        return None

    def _begin(self) -> None:
        steps, fetcher = self.rounds.steps, self.fetcher
        if self._steps != (steps or []):
            self._steps = list(steps or [])
            self._plan = self._run.plan(self._steps)
        fetcher.begin_pass(is_backward=False, expects_grads=False)
        fetcher.let_all_go()
        # Each rank may hold other units now, and all ranks have to gather the same ones.
        self._run.begin(self._steps, self._plan, live=[])
        self._is_on_demand = steps is None

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        if self.fetcher.phase.is_active:
            with self.fetcher.lock:
                self._end()

    def _end(self) -> None:
        """Ends a forward. A rank that has raised within it still takes part in the rest of the plan."""
        self._run.end()
        while self._kept:
            self.fetcher.unhold(self._kept.pop())
        self.fetcher.let_all_go()
        self.rest()

    def abort(self) -> None:
        if not self.fetcher.phase.is_active:
            self.under.abort()
            self._begin_empty()
            return
        with self.fetcher.lock:
            self._end()

    def rest(self) -> None:
        self.fetcher.end_pass()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._is_on_demand = True
        self._run.begin_empty()

    @property
    def live(self) -> list[int]:
        return self._run.live

    def use(self, group: GatherUnit) -> None:
        actions = self._run.use(group)
        is_off_plan = self._run.n_unexpected and not self._is_on_demand and group.source.is_collective
        if actions and is_off_plan:
            self._leave_plan(group)
        else:
            self._run.apply(actions)

    def _gather(self, group: GatherUnit) -> None:
        if self._is_on_demand and group.source.is_collective:
            self._meet(group.index, group)
        else:
            self._run.gather(group)

    def _leave_plan(self, group: GatherUnit) -> None:
        """Called when a forward uses a unit that the plan lacks. The rest of the plan is run for the other ranks, and
        this forward goes on on demand."""
        module_unit = self.fetcher.phase.used_last  # of the module that runs now
        if module_unit is not None and module_unit.is_ready:
            module_unit.hold()
            self._kept.append(module_unit)
        self._run.end()
        self._is_on_demand = True
        self._run.begin_empty()
        self._run.use(group)
        self._meet(self.rounds.missing(group.index), group)
