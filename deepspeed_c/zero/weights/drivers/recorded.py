"""The recorded plan: units are gathered just before use and released just after, in the order of use of earlier passes.

A *pass* is one forward (training and evaluation have separate records) or one backward. The C core ``csrc/zero`` plans
and runs passes. Every rank issues all gathers of a plan in the plan's order, even for branches that its own control
flow does not take. So no rank waits for another one forever.

Several forwards may be in flight. The plan of a backward is made from the forwards that this backward goes through
(``forwards.py``), so other forwards that still wait for their backward do not change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from deepspeed_c import _C
from deepspeed_c.zero.weights.drivers.driver import Driver
from deepspeed_c.zero.weights.drivers.forwards import Forward, ForwardsInFlight, Route, reversed_steps
from deepspeed_c.zero.weights.drivers.pace import Pace, Progress
from deepspeed_c.zero.weights.drivers.run import PlanRun
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.gradients.reducer import GradientReducer
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["RecordedPlan"]

# Most backward plans that are kept. There is one plan for each sequence of forwards that a backward goes through.
MAX_BACKWARD_PLANS = 64


class _Mode:
    """The plan for one kind of pass, and the recorded order of units behind the plan."""

    def __init__(self, steps: list[int], plan: Any) -> None:
        self.steps, self.plan = steps, plan
        self.n_passes = 0


class _Pass:
    """A running forward or backward. ``forward``: set for a forward with gradients."""

    def __init__(self, mode: _Mode, forward: Forward | None = None) -> None:
        self.mode, self.forward = mode, forward


class _BackwardPass(_Pass):
    """``task``: autograd's number of the pass if it only reads weights; None if it adds to gradients."""

    def __init__(self, mode: _Mode, route: Route, task: int | None) -> None:
        super().__init__(mode)
        self.route, self.task = route, task
        self.progress = Progress(mode.steps)


def _forward_key(name: str, root: int) -> Any:
    return name if root == 0 else (name, root)


class RecordedPlan(Driver):
    """The driver at the bottom: it runs each pass along its recorded plan, and records what the pass has used.

    Hooks of the root modules (``hooks.py``) and the gradient reducer begin and end passes.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self._run = PlanRun(fetcher, step=self._step)
        self._modes: OrderedDict[Any, _Mode] = OrderedDict()
        self._pass: _Pass | None = None
        self._in_flight = ForwardsInFlight(fetcher.comm)
        self._forward_used: set[int] = set()
        self._pace: Pace | None = None
        self._held: dict[object, Sequence[GatherUnit]] = {}  # by the holds of modules in a backward
        self.rest()

    def connect(self, reducer: GradientReducer) -> None:
        """Connects the gradient reducer. From now on the progress of backward decides when ``reducer`` sends each
        bucket."""
        self._pace = Pace(self.fetcher.groups, reducer)
        self.fetcher.phase.train()

    def drop(self) -> None:
        self._pace = None
        self.rest()

    @property
    def has_learnt(self) -> bool:
        """Whether any plan has been compared with a pass. Before that all plans are guesses."""
        return any(mode.n_passes for mode in self._modes.values())

    def learn_anew(self) -> None:
        """Treats every plan as a guess again. The next pass of each kind is compared among the ranks like a first pass,
        and units that no rank has used are removed from the plan. Call it on all ranks alike; it may be called during a
        pass."""
        for mode in self._modes.values():
            mode.n_passes = 0

    def _mode_of(self, key: Any, first_steps: Callable[[], list[int]]) -> _Mode:
        mode = self._modes.get(key)
        if mode is None:
            steps = first_steps()
            mode = self._modes[key] = _Mode(steps, self._run.plan(steps))
        return mode

    def _first_forward(self, root: int, units: Callable[[], list[int]] | None) -> list[int]:
        """The expected order of units in a forward of a kind that has not run yet: the order of another kind of
        forward, or all units in order of registration."""
        for name in ("eval", "train"):
            if (mode := self._modes.get(_forward_key(name, root))) is not None:
                return list(mode.steps)
        return list(range(len(self.fetcher.groups))) if units is None else units()

    def _begin(self, beginning: _Pass, *, is_backward: bool, expects_grads: bool) -> None:
        self._pass, mode, fetcher = beginning, beginning.mode, self.fetcher
        fetcher.begin_pass(is_backward=is_backward, expects_grads=expects_grads)
        # A unit that is still gathered stays if the new pass begins with it.
        fetcher.let_all_go(keep=mode.steps[0] if mode.steps else -1)
        self._run.begin(mode.steps, mode.plan)

    def _end(self, may_drop: Callable[[], list[bool]], keep: int) -> tuple[list[int], list[bool]]:
        """Runs the rest of the plan and replaces the plan if the pass differed from it. Returns the record of the pass."""
        mode, fetcher = self._pass.mode, self.fetcher
        self._run.end(keep)
        steps, used = self._run.record
        mode.n_passes += 1
        is_new = self._run.n_unexpected > 0
        # The record of gathers is the same on all ranks, but the record of uses is not. The ranks exchange the record
        # of uses after passes 1, 2, 4, 8 and so on.
        if mode.n_passes & (mode.n_passes - 1) == 0 and steps:
            used = [n > 0 for n in fetcher.comm.sum_numbers([float(u) for u in used], label="order of use")]
            pruned = _C.trace_prune(steps, used, may_drop())
            is_new = is_new or pruned != list(mode.steps)
        else:
            pruned = steps
        if is_new:
            if self._adds_gradients and self._pace is not None:
                self._pace.forget()
            mode.steps = list(pruned)
            mode.plan = self._run.plan(mode.steps)
        fetcher.stats.count_pass(self._run.n_unexpected, is_replanned=is_new and mode.n_passes > 1)
        return steps, used

    def _drop_pass(self) -> None:
        if self._pass is not None:
            self._run.abort()
            self.rest()

    def abort(self) -> None:
        fetcher = self.fetcher
        with fetcher.lock:
            was_in_backward = fetcher.phase.is_in_backward
            self._let_held_go()
            self._drop_pass()
            self._in_flight.forget()
            fetcher.let_all_go()
            if was_in_backward:
                self._leave_backward()
            else:
                self.rest()

    def use(self, group: GatherUnit) -> None:
        self._run.apply(self._run.use(group))

    @property
    def live(self) -> list[int]:
        return self._run.live

    def rest(self) -> None:
        self._pass = None
        self.fetcher.end_pass()
        self._run.begin_empty()

    def begin_writes(self) -> None:
        """Nothing to do: gathered weights are let go when they have been written."""

    def end_writes(self) -> None:
        """Nothing to do."""

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        self._drop_pass()
        forward = Forward() if name == "train" else None
        with self.fetcher.lock:
            mode = self._mode_of(_forward_key(name, root), lambda: self._first_forward(root, units))
            self._begin(_Pass(mode, forward), is_backward=False, expects_grads=forward is not None)
        return forward

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        running, fetcher = self._pass, self.fetcher
        if running is None or fetcher.phase.is_in_backward:
            return
        with fetcher.lock:
            is_train, mode = running.forward is not None, running.mode
            # Backward begins with the last units of forward.
            keep = mode.steps[-1] if is_train and mode.steps else -1
            if keep >= 0 and fetcher.groups[keep].numel > min(fetcher.limits.max_reuse, fetcher.limits.max_live):
                keep = -1
            n = len(fetcher.groups)
            steps, used = self._end(lambda: [False] * n, keep)
            # Without a reducer no backward is announced, so there is no need to remember the forward.
            if is_train and self._pace is not None:
                self._in_flight.add(running.forward, steps, outputs)
                self._forward_used.update(u for u, is_used in zip(steps, used) if is_used)
            self.rest()

    @property
    def _adds_gradients(self) -> bool:
        return type(self._pass) is _BackwardPass and self._pass.task is None

    def _step(self) -> None:
        if self._adds_gradients and self._pace is not None:
            self._pace.step(self._pass.progress)

    def begin_backward(self, starts: Sequence[Any] | None = None) -> None:
        if self._adds_gradients:
            return
        with self.fetcher.lock:
            self._drop_pass()
            for group in self.fetcher.groups:
                group.expect_grads(True)
            self._begin_backward("backward", starts, None)

    def begin_reading(self) -> None:
        task = torch._C._current_graph_task_id()
        running = self._pass
        if running is not None and not (type(running) is _BackwardPass and running.task not in (None, task)):
            return
        with self.fetcher.lock:
            self._drop_pass()
            self._begin_backward("reading", None, task)
        Variable._execution_engine.queue_callback(lambda: self._end_reading(task))

    def _begin_backward(self, kind: str, starts: Sequence[Any] | None, task: int | None) -> None:
        route = self._in_flight.route(starts, within=torch._C._current_autograd_node())
        key = (kind, *route.key)
        mode = self._mode_of(key, lambda: list(reversed_steps(route)))
        old = [k for k in self._modes if k[0] in ("backward", "reading") and k != key]
        for k in old[: max(0, len(old) + 1 - MAX_BACKWARD_PLANS)]:
            del self._modes[k]
        self._begin(_BackwardPass(mode, route, task), is_backward=True, expects_grads=task is None)

    def begin_batch(self) -> None:
        """Called when ``BatchPlan`` begins to decide. Drops a pass that has not ended."""
        self._drop_pass()

    def turn(self, *, is_backward: bool) -> None:
        """Called within a batch when one of its backwards begins or has ended."""
        fetcher = self.fetcher
        with fetcher.lock:
            self._let_held_go()
            fetcher.phase.begin(is_backward=is_backward, expects_grads=is_backward)
            for group in fetcher.groups:
                group.expect_grads(is_backward)

    def end_backward(self) -> None:
        if type(self._pass) is _BackwardPass:
            with self.fetcher.lock:
                route = self._pass.route
                self._end_backward()
                self._in_flight.end(route)

    def _end_reading(self, task: int) -> None:
        if type(self._pass) is _BackwardPass and self._pass.task == task:
            with self.fetcher.lock:
                self._end_backward()
                self._in_flight.leave()

    def _end_backward(self) -> None:
        self._let_held_go()
        self.fetcher.phase.expect_no_more()
        used = self._forward_used
        self._end(lambda: [i in used for i in range(len(self.fetcher.groups))], -1)
        self._leave_backward()

    def drop_reading(self) -> None:
        """Called when autograd runs no pass. If a pass that only read weights is still open here, it has raised, and
        its state is dropped."""
        if type(self._pass) is _BackwardPass and not self._adds_gradients:
            self.fetcher.driver.abort()

    def _leave_backward(self) -> None:
        self.rest()
        for group in self.fetcher.groups:
            group.expect_grads(False)

    def hold_in_backward(
        self, groups: Sequence[GatherUnit], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Makes units available from the time when a backward reaches any of ``outputs`` until it has passed all of
        ``inputs``."""
        if not outputs:
            return
        fetcher, token = self.fetcher, object()

        def enter(*_: Any) -> None:
            with fetcher.lock:
                if fetcher.phase.is_in_backward and token not in self._held:
                    self._held[token] = groups
                    for group in reversed(groups):  # about the order of backward
                        fetcher.use(group)
                        fetcher.hold(group)

        def leave(*_: Any) -> None:
            for group in self._held.pop(token, ()):
                fetcher.unhold(group)

        torch.autograd.graph.register_multi_grad_hook(outputs, enter, mode="any")
        # This hook does not work for a leaf whose gradient ``autograd.grad`` returns. If a module has leaves as inputs,
        # its units are held until the pass ends.
        if inputs and all(t.grad_fn is not None for t in inputs):
            torch.autograd.graph.register_multi_grad_hook(inputs, leave, mode="all")

    def _let_held_go(self) -> None:
        while self._held:
            for group in self._held.popitem()[1]:
                self.fetcher.unhold(group)
