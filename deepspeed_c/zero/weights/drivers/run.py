"""Runs plans of gathers: turns the decisions of the C core into gathers and releases of units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_c import _C
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["FetchLimits", "PlanRun"]

Actions = Sequence[tuple[int, int]]
"""What the C core has decided: (kind, unit)."""


class FetchLimits(NamedTuple):
    """Limits of the plan in elements, from the configuration keys ``stage3_max_live_parameters``,
    ``stage3_prefetch_bucket_size`` and ``stage3_max_reuse_distance``; and the number of units whose shards are read
    from a file ahead of their gathers."""

    max_live: int
    ahead: int
    max_reuse: int
    read_ahead: int = 0


class PlanRun:
    """One plan at a time, and how far its pass has come. Between passes the plan is empty, so a unit is gathered when
    it is used.

    gather: starts the gather of one unit in place of ``gather``. step: called when the pass has gone on to the next
    step of its plan.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        gather: Callable[[GatherUnit], None] | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._fetcher, self._gather, self._step = fetcher, gather or self.gather, step
        self._elems = [group.numel for group in fetcher.groups]
        self._run = _C.Fetch(self._elems)
        self._empty = self.plan([])
        self._steps: Sequence[int] = []
        self._position = 0  # step of the plan that was gathered last

    def plan(self, steps: Sequence[int], *, leaves_room: bool = False) -> Any:
        """The C core's plan for units in this order of use. leaves_room: the plan leaves room for one unit beside it,
        unless the limits let all units stay gathered."""
        limits = self._fetcher.limits
        room = max(self._elems, default=0) if leaves_room and not self.holds_all else 0
        return _C.FetchPlan(steps, self._elems, max(limits.max_live - room, 0), limits.ahead, limits.max_reuse)

    @property
    def holds_all(self) -> bool:
        """Whether the limits let all units stay gathered together."""
        limits = self._fetcher.limits
        return sum(self._elems) <= min(limits.max_live, limits.max_reuse)

    def begin(self, steps: Sequence[int], plan: Any, live: Sequence[int] | None = None) -> None:
        """Begins a pass along ``plan``, whose order is ``steps``. ``live``: the units that are gathered already, the
        same on all ranks; default: all that are gathered."""
        self._run.abort()
        self._run.begin(plan, self._fetcher.live() if live is None else live)
        self._steps, self._position = steps, 0

    def begin_empty(self) -> None:
        """Goes on without a plan."""
        self.begin([], self._empty)

    def use(self, group: GatherUnit) -> Actions:
        return self._run.use(group.index)

    def end(self, keep: int = -1) -> None:
        """Runs the rest of the plan. ``keep``: a unit that stays gathered."""
        self.apply(self._run.end(keep))

    def abort(self) -> None:
        self.apply(self._run.abort())

    @property
    def live(self) -> list[int]:
        return self._run.live

    @property
    def record(self) -> tuple[list[int], list[bool]]:
        """(units in the order in which the pass has gathered them, whether each was used)."""
        return self._run.record

    @property
    def n_unexpected(self) -> int:
        """The number of uses of the pass that its plan lacks."""
        return self._run.n_unexpected

    def apply(self, actions: Actions) -> None:
        groups = self._fetcher.groups
        for kind, index in actions:
            if kind == _C.Fetch.STEP:
                self._step()
            elif kind == _C.Fetch.GATHER:
                self._gather(groups[index])
                groups[index].stay()
            else:
                groups[index].leave(expects_grads=self._fetcher.phase.expects_grads)

    def gather(self, group: GatherUnit) -> None:
        self._read_ahead(group.index)
        self._fetcher.gather(group)
        if group.is_ready:  # it is held, and gathered again for the other ranks
            group.wait()

    def _read_ahead(self, index: int) -> None:
        """Starts to read the shards of the units that follow unit ``index`` in the plan."""
        n_ahead, steps = self._fetcher.limits.read_ahead, self._steps
        if not n_ahead or not steps:
            return
        self._position = next((i for i in range(self._position, len(steps)) if steps[i] == index), self._position)
        ahead: dict[int, None] = {}
        for follower in steps[self._position :]:
            if len(ahead) > n_ahead:
                break
            if self._fetcher.groups[follower].buffer is None:
                ahead[follower] = None
        for follower in ahead:
            self._fetcher.groups[follower].source.read_ahead()
