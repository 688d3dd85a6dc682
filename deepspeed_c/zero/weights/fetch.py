"""Gathers sharded parameters just before use and releases them just after, by a plan made from the recorded order of
use.

Parameters are gathered by *gather units*. A gather unit is one bucket of a sharded unit, so small neighbours share one
collective and one call of Python. A *pass* is one forward (training and evaluation have separate records) or one
backward. The C core ``csrc/zero`` plans and runs passes. Every rank issues all gathers of a plan in the plan's order,
even for branches that its own control flow does not take. So no rank waits for another one forever.

Autograd saves a reference to a gathered parameter and not its data (``saved.py``). When a backward needs the parameter,
it is gathered again. So no graph points to released memory, and a model may use its weights in any way.

Several forwards may be in flight. The plan of a backward is made from the forwards that this backward goes through
(``forwards.py``), so other forwards that still wait for their backward do not change it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import Variable

from deepspeed_c import _C
from deepspeed_c.accelerator import has_streams
from deepspeed_c.buffers import Allocate, BufferPool
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.joint_memory import JointMemory
from deepspeed_c.errors import StateError
from deepspeed_c.logging import log_dist, logger
from deepspeed_c.saved_tensors import SavedTensors
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.fingerprint import fingerprint_of
from deepspeed_c.zero.weights.forwards import Forward, ForwardsInFlight, Route, reversed_steps
from deepspeed_c.zero.weights.gather_unit import GatherUnit, PlacedShard, Places, WholeShard
from deepspeed_c.zero.weights.join import DONE, FORWARD, Join, Round
from deepspeed_c.zero.weights.param import (
    StandaloneShard,
    make_sharded,
    point_at_nothing,
    state_of,
    take_over,
)
from deepspeed_c.zero.weights.saved import WeightPacker

if TYPE_CHECKING:
    from deepspeed_c.zero.gradients.reducer import GradientReducer
    from deepspeed_c.zero.weights.hooks import ModuleHooks

__all__ = ["FetchLimits", "FetchStats", "Fetcher", "keeps_gathered"]

# Number of gather units that backward passes after a bucket before the bucket's gradients are sent. By then the
# gradients of the bucket's own parameters have arrived on every rank.
PACE_STEPS = 2
# Most backward plans that are kept. There is one plan for each sequence of forwards that a backward goes through.
MAX_BACKWARD_PLANS = 64


def keeps_gathered(device_type: str) -> bool:
    """Whether the pool keeps buffers that are not in use. An accelerator's allocator caches freed memory itself. The C
    library's allocator returns large pieces to the system, which has to clear them before they are used again."""
    return device_type == "cpu"


def _gather_pool(allocate: Allocate) -> BufferPool:
    return BufferPool(keeps=lambda device: keeps_gathered(device.type), waits=True, allocate=allocate)


class FetchLimits(NamedTuple):
    """Limits of the plan in elements, from the configuration keys ``stage3_max_live_parameters``,
    ``stage3_prefetch_bucket_size`` and ``stage3_max_reuse_distance``."""

    max_live: int
    ahead: int
    max_reuse: int


class FetchStats:
    """Statistics since the engine was made."""

    def __init__(self) -> None:
        self.n_gathers = 0  # gathers, including uses of units in joint memory
        self.n_fences = 0
        self.n_passes = 0
        self.n_unexpected = 0  # uses that were not in the plan
        self.n_replans = 0  # passes after which an earlier plan was replaced
        self.max_live_elems = 0

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class _Mode:
    """The plan for one kind of pass, and the recorded order of units behind the plan."""

    def __init__(self, steps: list[int], plan: Any) -> None:
        self.steps, self.plan = steps, plan
        self.n_passes = 0


class _Pass:
    """A running forward or backward, and how far it has come in its plan."""

    def __init__(self, mode: _Mode, *, expects_grads: bool, forward: Forward | None = None) -> None:
        self.mode = mode
        self.expects_grads = expects_grads  # gradients may arrive at released parameters
        self.forward = forward  # set for a forward with gradients
        self.position = 0  # step of the plan that was gathered last
        self.is_on_demand = False  # in join mode: each unit is announced before it is gathered


class _BackwardPass(_Pass):
    """``task``: autograd's number of the pass if it only reads weights; None if it adds to gradients."""

    def __init__(self, mode: _Mode, route: Route, task: int | None) -> None:
        super().__init__(mode, expects_grads=task is None)
        self.route, self.task = route, task
        self.n_passed = 0  # number of steps of the plan that have been passed
        self.last_use = {unit: i for i, unit in enumerate(mode.steps)}


class _Lease:
    """All units of a fetcher, held gathered, and the content that they had at the beginning."""

    def __init__(self, groups: Sequence[GatherUnit]) -> None:
        self.groups = groups
        # Joint memory tells what this rank has written to it. A checksum is for other memory, and for joint memory with
        # a write from before the lease.
        joints = {group.unit.joint for group in groups if group.is_joint}
        self._joints = {joint for joint in joints if joint.find_write() is None}
        self._before = {group: fingerprint_of(group.buffer) for group in groups if group.unit.joint not in self._joints}

    def find_written(self) -> GatherUnit | None:
        """The first unit that somebody has written to, or one of whose parameters got other data."""
        written = {joint: joint.find_write() for joint in self._joints}
        for group in self.groups:
            before = self._before.get(group)
            if before is None:
                is_written = written[group.unit.joint] == group.bucket
            else:
                is_written = fingerprint_of(group.buffer) != before
            if is_written or not group.is_in_place:
                return group
        return None


def _forward_key(name: str, root: int) -> Any:
    return name if root == 0 else (name, root)


class Fetcher:
    """Gathers and releases the sharded units of one engine.

    Hooks call ``use``; the hooks of the root module (``hooks.py``) and the gradient reducer begin and end passes.
    ``pool`` provides the buffers of gathered units.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        whole_units: Sequence[Unit],
        comm: Collectives,
        limits: FetchLimits,
        *,
        use_broadcast: bool = False,
        pool: BufferPool | None = None,
    ) -> None:
        self.comm, self.limits, self.use_broadcast = comm, limits, use_broadcast
        self.stats = FetchStats()
        largest = max(units, key=lambda unit: unit.flat_elems, default=None)
        carrier = comm if largest is None else largest.carrier
        self.pool = _gather_pool(carrier.allocate) if pool is None else pool
        self.places = Places()
        self.live_elems = 0
        self.lock = threading.RLock()  # autograd runs one thread per device
        self._stream: Any = None
        places = [(unit, b) for unit in units for b in range(unit.n_buckets) if unit.bucket_slots[b]]
        places.sort(key=lambda place: min(slot.order for slot in place[0].bucket_slots[place[1]]))
        self.groups = [GatherUnit(i, unit, bucket, self) for i, (unit, bucket) in enumerate(places)]
        for group in self.groups:
            for slot in group.slots:
                make_sharded(slot.param, PlacedShard(slot, group, self))
                point_at_nothing(slot.param)
        self._whole_slots = [slot for unit in whole_units for slot in unit.slots]
        for slot in self._whole_slots:
            make_sharded(slot.param, WholeShard(slot, comm))
        self._elems = [group.numel for group in self.groups]
        self._run = _C.Fetch(self._elems)
        self._modes: OrderedDict[Any, _Mode] = OrderedDict()
        self._pass: _Pass | None = None  # the running pass
        self._in_flight = ForwardsInFlight(comm)
        self._forward_used: set[int] = set()
        self.saved = SavedTensors()
        self.saved.add(WeightPacker(self))
        self._hooks: ModuleHooks | None = None
        self._reducer: GradientReducer | None = None
        self._bucket_of: dict[int, int] = {}
        self._held: dict[object, Sequence[GatherUnit]] = {}
        self.n_writes = 0
        """How many times weights have been written."""
        self._lease: _Lease | None = None
        self._was_leased = False
        self._join = Join(comm, len(self.groups))
        self._is_joined = False
        self._was_joined = False
        self._kept_on_demand: list[GatherUnit] = []
        self._is_closed = False
        self._has_graphs = False  # the model is compiled, and its graphs gather by themselves
        self.is_in_graph = False
        self._held_by_graphs: list[GatherUnit] = []
        self._n_read_ahead = 0
        self._used_last: GatherUnit | None = None  # the last unit that the running pass has used
        self._no_plan = self._make_plan([])
        self._joined_mode = _Mode([], self._no_plan)
        self._joints: dict[Collectives, list[JointMemory]] = {}  # by the ranks that share it
        for unit in units:
            if unit.joint is not None:
                self._joints.setdefault(unit.comm, []).append(unit.joint)
        self._rest()
        self.end_writes()

    def store_weights(self, groups: Sequence[GatherUnit], n_ahead: int) -> None:
        """Moves this rank's shards of ``groups`` into their home. Shards are read from there ahead of their gathers,
        ``n_ahead`` gather units in the plan's order."""
        self._n_read_ahead = n_ahead
        for group in groups:
            group.unit.read_bucket(group.bucket)
            group.unit.weights.move_in(group.bucket)
        for group in groups:
            group.unit.weights.wait()

    def _read_ahead(self, index: int) -> None:
        """Called before gather unit ``index`` is gathered: starts to read the next units of the plan."""
        running = self._pass
        if self._n_read_ahead == 0 or running is None:
            return
        steps = running.mode.steps
        running.position = next((i for i in range(running.position, len(steps)) if steps[i] == index), running.position)
        ahead: dict[int, None] = {}
        for follower in steps[running.position :]:
            if len(ahead) > self._n_read_ahead:
                break
            if self.groups[follower].buffer is None:
                ahead[follower] = None
        for follower in ahead:
            group = self.groups[follower]
            group.unit.weights.read_ahead(group.bucket)

    def on_gather_stream(self, device: torch.device) -> AbstractContextManager:
        """Context for issuing gathers on a separate stream. They run beside the computation, after earlier writes to
        the shards."""
        return self._on_stream(device) if has_streams(device) else nullcontext()

    @contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            yield

    def after_gather(self, buffer: torch.Tensor) -> None:
        if has_streams(buffer.device):
            current = torch.accelerator.current_stream(buffer.device)
            current.wait_stream(self._stream)
            buffer.record_stream(current)

    def count_live(self, n_elems: int) -> None:
        self.live_elems += n_elems
        self.stats.max_live_elems = max(self.stats.max_live_elems, self.live_elems)

    def _make_plan(self, steps: list[int]) -> Any:
        return _C.FetchPlan(steps, self._elems, self.limits.max_live, self.limits.ahead, self.limits.max_reuse)

    def _live(self) -> list[int]:
        return [group.index for group in self.groups if group.buffer is not None and not group.is_leaving]

    def _rest(self) -> None:
        """Ends the pass. Between passes there is no plan, so a unit is gathered when it is used."""
        was_running = self.runs_graphs
        self._pass = None
        if was_running:
            self._show_released()
        self._run.abort()
        self._run.begin(self._no_plan, self._live())
        self._used_last = None

    def _apply(self, actions: Sequence[tuple[int, int]]) -> None:
        for kind, index in actions:
            if kind == _C.Fetch.STEP:
                if self._adds_gradients:
                    self._pace(self._pass)
                continue
            group = self.groups[index]
            if kind == _C.Fetch.GATHER:
                if self._is_on_demand and not group.is_joint:
                    self._meet(index, group)
                else:
                    self._read_ahead(index)
                    group.start()
                    self.stats.n_gathers += 1
                    if group.is_ready:  # it is held, and gathered again for the other ranks
                        group.wait()
                group.stay()
            else:
                group.leave(expects_grads=self._expects_grads)

    def _let_all_go(self, expects_grads: bool, keep: int = -1) -> None:
        """Releases all gathered units except held units and unit ``keep``."""
        for group in self.groups:
            if group.buffer is not None and group.index != keep and not group.pins:
                group.let_go(expects_grads=expects_grads)

    @property
    def is_joint(self) -> bool:
        """Whether all weights lie in joint memory, so that no gather is a collective."""
        return all(group.is_joint for group in self.groups)

    @property
    def is_leased(self) -> bool:
        return self._lease is not None

    @property
    def is_joined(self) -> bool:
        return self._is_joined

    @property
    def _is_too_large(self) -> bool:
        return not self.is_joint and sum(self._elems) > self.limits.max_live

    @property
    def can_lease(self) -> bool:
        """Whether ``lease`` makes all weights available, or has done so; the same on all ranks.

        There is no lease where the whole model has more elements than ``FetchLimits.max_live``, within a pass or
        ``joined``, and where graphs of ``torch.compile`` gather by themselves.
        """
        is_hindered = self._is_too_large or self.is_active or self._is_joined or self._has_graphs
        return self._lease is not None or not is_hindered

    def lease(self) -> bool:
        """Makes all weights available until the lease ends, if ``can_lease``. Meanwhile forwards without gradients
        gather nothing, and each rank runs as many as it likes. Returns whether there is a lease.

        Collective, unless there is a lease already or all weights lie in joint memory. Raises StateError if another
        rank has called ``refuse_lease``.
        """
        with self.lock:
            if self._lease is not None or not self.can_lease:
                return self._lease is not None
            self._agree_to_lease(refuses=False)
            if not self.is_joint and not self._was_leased:
                self._was_leased = True
                n_bytes = sum(group.numel * group.unit.dtype.itemsize for group in self.groups)
                log_dist(f"generation gathers all weights once: {n_bytes / 2**20:.1f} MiB on each rank", ranks=[0])
            self.pin(self.groups)
            self._lease = _Lease(self.groups)
            return True

    def refuse_lease(self) -> None:
        """Takes the place of ``lease`` on a rank that cannot generate, so that no rank waits for its part of a gather.
        """
        with self.lock:
            if self._lease is None and self.can_lease:
                self._agree_to_lease(refuses=True)

    def _agree_to_lease(self, *, refuses: bool) -> None:
        if self.is_joint:
            return
        n_refusals = int(self.comm.sum_numbers([float(refuses)], label="agree to generate")[0])
        if n_refusals and not refuses:
            raise StateError(
                f"{n_refusals} of {self.comm.world_size} ranks have refused to generate",
                where="generate",
                fix="their own errors say why",
            )

    def read_in_turns(self, n_units: int, read: Callable[[list[torch.nn.Parameter]], None]) -> None:
        """Calls ``read`` with the parameters of some gather units, which are whole meanwhile, until it has got all
        units: at most ``n_units`` at a time, and of more than one no more elements than ``FetchLimits.max_live``.

        Collective, unless all weights lie in joint memory.
        """
        waiting = list(self.groups)
        while waiting:
            n, n_elems = 1, waiting[0].numel
            while n < min(n_units, len(waiting)) and n_elems + waiting[n].numel <= self.limits.max_live:
                n_elems += waiting[n].numel
                n += 1
            turn, waiting = waiting[:n], waiting[n:]
            self.pin(turn)
            try:
                read([slot.param for group in turn for slot in group.slots])
            finally:
                self.unpin(turn)

    def end_lease(self) -> None:
        """Releases the weights of the lease, if there is one. Each rank does so by itself.

        Raises StateError on a rank that has written to weights during the lease. The weights are as before then.
        """
        with self.lock:
            written = None if self._lease is None else self._lease.find_written()
            self._drop_lease()
            if written is None:
                return
            # The writes are only in this rank's view of the weights.
            self._forget_writes()
        raise StateError(
            "its weights were written to during generation; the edit was not kept",
            where=written.label,
            fix="edit weights within GatheredParameters(..., modifier_rank=0), before or after generation",
        )

    def _drop_lease(self) -> None:
        """Ends the lease without a look at the weights."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self.unpin(lease.groups)

    def _mode_of(self, key: Any, first_steps: Callable[[], list[int]]) -> _Mode:
        mode = self._modes.get(key)
        if mode is None:
            steps = first_steps()
            mode = self._modes[key] = _Mode(steps, self._make_plan(steps))
        return mode

    def _begin(self, beginning: _Pass, live: Sequence[int] | None = None) -> None:
        """``live``: the units that are gathered already, the same on all ranks; default: all that are gathered."""
        self.end_lease()
        self._pass, mode = beginning, beginning.mode
        if self._has_graphs:
            self._show_released()
        # A unit that is still gathered stays if the new pass begins with it.
        keep = mode.steps[0] if mode.steps else -1
        self._let_all_go(self._expects_grads, keep)
        self._run.abort()
        self._run.begin(mode.plan, self._live() if live is None else live)
        self._used_last = None
        self.stats.n_passes += 1

    def _end(self, may_drop: Callable[[], list[bool]], keep: int) -> tuple[list[int], list[bool]]:
        """Runs the rest of the plan and replaces the plan if the pass differed from it. Returns the record of the pass.
        """
        mode = self._pass.mode
        self._apply(self._run.end(keep))
        steps, used = self._run.record
        mode.n_passes += 1
        self.stats.n_unexpected += self._run.n_unexpected
        is_new = self._run.n_unexpected > 0
        # The record of gathers is the same on all ranks, but the record of uses is not. The ranks exchange the record
        # of uses after passes 1, 2, 4, 8 and so on.
        if mode.n_passes & (mode.n_passes - 1) == 0 and steps:
            used = [n > 0 for n in self.comm.sum_numbers([float(u) for u in used], label="order of use")]
            pruned = _C.trace_prune(steps, used, may_drop())
            is_new = is_new or pruned != list(mode.steps)
        else:
            pruned = steps
        if is_new:
            if self._adds_gradients and self._reducer is not None:
                self._reducer.forget_lateness()
            mode.steps = list(pruned)
            mode.plan = self._make_plan(mode.steps)
            self.stats.n_replans += mode.n_passes > 1
        return steps, used

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

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        """Called when a forward of a root module begins. Returns an object that must live as long as the forward's
        graph, or None for a forward without gradients.

        name: train or eval. root: number of the root module; each root has plans of its own. units: returns
        the units that hold parameters of the root; default: all units.
        """
        self._drop_pass()
        if self._lease is not None and name != "train":
            return None
        if self._is_joined:
            with self.lock:
                self._announce_forward()
            return None
        forward = Forward() if name == "train" else None
        with self.lock:
            mode = self._mode_of(_forward_key(name, root), lambda: self._first_forward(root, units))
            self._begin(_Pass(mode, expects_grads=forward is not None, forward=forward))
        return forward

    def _first_forward(self, root: int = 0, units: Callable[[], list[int]] | None = None) -> list[int]:
        """The expected order of units in a forward of a kind that has not run yet: the order of another kind of
        forward, or all units in order of registration."""
        for name in ("eval", "train"):
            if (mode := self._modes.get(_forward_key(name, root))) is not None:
                return list(mode.steps)
        return list(range(len(self.groups))) if units is None else units()

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Called when a forward of a root module has ended. ``outputs``: the tensors that it returns and that require a
        gradient."""
        running = self._pass
        if running is None or self.is_in_backward:
            return
        with self.lock:
            if self._is_joined:
                self._end_joined()
                return
            is_train, mode = running.forward is not None, running.mode
            # Backward begins with the last units of forward.
            keep = mode.steps[-1] if is_train and mode.steps else -1
            if keep >= 0 and self._elems[keep] > min(self.limits.max_reuse, self.limits.max_live):
                keep = -1
            n = len(self.groups)
            steps, used = self._end(lambda: [False] * n, keep)
            # Without a reducer no backward is announced, so there is no need to remember the forward.
            if is_train and self._reducer is not None:
                self._in_flight.add(running.forward, steps, outputs)
                self._forward_used.update(u for u, is_used in zip(steps, used) if is_used)
            self._rest()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Context of join mode (``join.py``): within it ranks may run different numbers of forwards, all without a
        backward. Its end is collective: a rank that has finished takes part in the gathers of the other ranks until all
        have finished, also if it has raised. Does nothing within a pass, and within another one."""
        if self._is_joined or self.is_active or not self.groups:
            yield
            return
        if self._is_too_large and not self._was_joined:
            self._was_joined = True
            n = sum(self._elems)
            log_dist(
                f"generation gathers each unit for each token: {n} elements are more than stage3_max_live_parameters"
                f" ({self.limits.max_live}); set it to {n} to gather them once",
                ranks=[0],
            )
        self._is_joined = True
        try:
            try:
                yield
            except Exception:
                self._serve()
                raise
            self._serve()
        finally:
            self._is_joined = False

    def _serve(self) -> None:
        while not (met := self._meet(DONE)).is_over:
            if met.runs_plan:
                with self.lock:
                    self._begin_joined()
                    self._end_joined()

    @property
    def _is_on_demand(self) -> bool:
        return self._is_joined and (self._pass is None or self._pass.is_on_demand)

    def _meet(self, event: int, mine: GatherUnit | None = None) -> Round:
        """One round of join mode. Gathers the units that ranks have announced, and keeps ``mine`` of them."""
        met = self._join.meet(event)
        for group in map(self.groups.__getitem__, met.wanted):
            was_gathered, was_leaving = group.buffer is not None, group.is_leaving
            group.start()
            self.stats.n_gathers += 1
            if group is mine:
                continue
            group.wait()
            if was_leaving or not was_gathered:
                group.leave(expects_grads=False)
        return met

    def _announce_forward(self) -> None:
        """Begins a forward in join mode: along the plan of all ranks, or on demand while there is no plan."""
        while not self._meet(FORWARD).runs_plan:
            if self._join.steps is None:
                break
        self._begin_joined()

    def _begin_joined(self) -> None:
        steps = self._join.steps
        if self._joined_mode.steps != (steps or []):
            self._joined_mode = _Mode(list(steps or []), self._make_plan(steps or []))
        self._let_all_go(expects_grads=False)
        # Each rank may hold other units now, and all ranks have to gather the same ones.
        self._begin(_Pass(self._joined_mode, expects_grads=False), live=[])
        self._pass.is_on_demand = steps is None

    def _end_joined(self) -> None:
        """Ends a forward in join mode. A rank that has raised within it still takes part in the rest of the plan."""
        self._apply(self._run.end(-1))
        while self._kept_on_demand:
            self.unhold(self._kept_on_demand.pop())
        self._let_all_go(expects_grads=False)
        self._rest()

    def _leave_plan(self, group: GatherUnit, running: GatherUnit | None) -> None:
        """Called in join mode when a forward uses a unit that the plan lacks. The rest of the plan is run for the other
        ranks, and this forward goes on on demand. ``running``: the unit of the module that runs now."""
        if running is not None and running.is_ready:
            running.hold()
            self._kept_on_demand.append(running)
        self._apply(self._run.end(-1))
        self._pass.is_on_demand = True
        self._run.begin(self._no_plan, self._live())
        self._run.use(group.index)
        self._meet(self._join.missing(group.index), group)

    def begin_backward(self, starts: Sequence[Any] | None = None) -> None:
        """Called when a backward pass begins. Released parameters get their whole shape, because gradients may arrive
        for them.

        starts: the first nodes of the graph; None if the pass is running already. Collective if several forwards are in
        flight.
        """
        if self._adds_gradients:
            return
        with self.lock:
            self._drop_pass()
            for group in self.groups:
                group.expect_grads(True)
            self._begin_backward("backward", starts, None)

    def begin_reading(self) -> None:
        """Called from within a pass that reads weights as a backward does but adds to no gradient. The real backward of
        the same forwards may still come.

        Does nothing during a forward or backward pass: the reading belongs to that pass.
        """
        task = torch._C._current_graph_task_id()
        running = self._pass
        if running is not None and not (self.is_in_backward and running.task not in (None, task)):
            return
        with self.lock:
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
        self._begin(_BackwardPass(mode, route, task))

    def end_backward(self) -> None:
        if self.is_in_backward:
            with self.lock:
                route = self._pass.route
                self._end_backward()
                self._in_flight.end(route)

    def _end_reading(self, task: int) -> None:
        if self.is_in_backward and self._pass.task == task:
            with self.lock:
                self._end_backward()
                self._in_flight.leave()

    def _end_backward(self) -> None:
        self._let_held_go()
        self._pass.expects_grads = False  # all gradients have arrived
        used = self._forward_used
        self._end(lambda: [i in used for i in range(len(self.groups))], -1)
        self._leave_backward()

    def drop_reading(self) -> None:
        """Called when autograd runs no pass. If a pass that only read weights is still open here, it has raised, and
        its state is dropped."""
        if self.is_in_backward and not self._adds_gradients:
            self.abort()

    def _leave_backward(self) -> None:
        self._rest()
        for group in self.groups:
            group.expect_grads(False)

    def abort(self) -> None:
        """Called on all ranks alike when a pass has raised. Releases all units and leaves the plans unchanged."""
        with self.lock:
            was_in_backward = self.is_in_backward
            self._let_held_go()
            self._let_graphs_go()
            if self._is_joined and self.is_active:
                self._end_joined()
                return
            self._drop_pass()
            self._in_flight.forget()
            self._let_all_go(expects_grads=False)
            if was_in_backward:
                self._leave_backward()
            else:
                self._rest()

    def _drop_pass(self) -> None:
        if self._pass is not None:
            self._apply(self._run.abort())
            self._rest()

    @property
    def is_trained(self) -> bool:
        """Whether a reducer takes the gradients. Also True for a closed engine, which gets no gradients."""
        return self._reducer is not None or self._is_closed

    @property
    def is_active(self) -> bool:
        """Whether a forward of a root module or a backward pass is running."""
        return self._pass is not None

    @property
    def runs_graphs(self) -> bool:
        """Whether a pass of a compiled model is running. Released parameters are hollow then (``hollow_out``)."""
        return self._has_graphs and self._pass is not None

    def compile(self, has_graphs: bool) -> None:
        """Sets whether graphs of the compiled model gather by themselves, beside the hooks. Call it between passes."""
        self._has_graphs = has_graphs

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """Context for a run of a forward graph. Within it autograd saves parameters as they are, and backward graphs
        gather them again."""
        before, self.is_in_graph = self.is_in_graph, True
        try:
            yield
        except BaseException:
            self._let_graphs_go()
            raise
        finally:
            self.is_in_graph = before

    def start_in_graph(self, index: int) -> None:
        """Called by a graph before its reads of a gather unit. Starts the gathers that are due."""
        group = self.groups[index]
        with self.lock:
            if not self.is_in_use(group):
                self._start_use(group)
            group.hold()
            self._held_by_graphs.append(group)

    def finish_in_graph(self, index: int) -> None:
        """Called by a graph before its reads of a gather unit, after ``start_in_graph``. Makes the unit available."""
        group = self.groups[index]
        if not group.is_ready:
            with self.lock:
                group.finish()

    def release_in_graph(self, index: int) -> None:
        """Called by a graph after its reads of a gather unit."""
        group = self.groups[index]
        if group in self._held_by_graphs:
            self._held_by_graphs.remove(group)
            self.unhold(group)

    def _let_graphs_go(self) -> None:
        """Called when a graph has raised between its gathers and releases."""
        while self._held_by_graphs:
            self.unhold(self._held_by_graphs.pop())

    def _show_released(self) -> None:
        for group in self.groups:
            group.show_released()

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass is running, or a pass that only reads weights."""
        return type(self._pass) is _BackwardPass

    @property
    def _adds_gradients(self) -> bool:
        return self.is_in_backward and self._pass.task is None

    @property
    def _expects_grads(self) -> bool:
        return self._pass is not None and self._pass.expects_grads

    def is_in_use(self, group: GatherUnit) -> bool:
        """Whether a use of the unit needs no action: the unit is available, and it is held or was the last one used."""
        return group.is_ready and (group is self._used_last or group.pins > 0)

    def use(self, index: int) -> None:
        """Makes a gather unit available now. Collective, unless the plan has gathered it already."""
        group = self.groups[index]
        if self.is_in_use(group):
            return
        with self.lock:
            self._start_use(group)
            if not group.is_ready:
                group.finish()

    def _start_use(self, group: GatherUnit) -> None:
        running, self._used_last = self._used_last, group
        actions = self._run.use(group.index)
        if actions:
            if self._is_closed:
                raise self._closed_error()
            if self._is_joined and self._run.n_unexpected and not (self._is_on_demand or group.is_joint):
                self._leave_plan(group, running)
            else:
                self._apply(actions)

    @staticmethod
    def _closed_error() -> StateError:
        return StateError(
            "the engine is closed, so its weights cannot be gathered any more",
            where="backward",
            fix="run backward before engine.close()",
        )

    def pin(self, groups: Sequence[GatherUnit]) -> None:
        """Makes gather units available until ``unpin``. Collective."""
        with self.lock:
            if self._is_closed:
                raise self._closed_error()
            wanted = sorted(groups, key=lambda group: group.index)
            for group in wanted:
                if group.buffer is None:
                    group.start()
                    self.stats.n_gathers += 1
                group.hold()
            for group in wanted:
                group.finish()
            if self._pass is None:
                self._rest()

    def unpin(self, groups: Sequence[GatherUnit]) -> None:
        with self.lock:
            live = set(self._run.live) if self._pass is not None else set()
            for group in groups:
                if group.unhold() and group.buffer is not None and group.index not in live:
                    group.let_go(expects_grads=self._expects_grads)
            if self._pass is None:
                self._rest()

    def hold(self, group: GatherUnit) -> None:
        """Keeps an available unit while a module runs, even if the plan releases it."""
        group.hold()

    def unhold(self, group: GatherUnit) -> None:
        if group.unhold() and group.is_leaving and group.buffer is not None:
            with self.lock:
                group.let_go(expects_grads=self._expects_grads)

    def hold_in_backward(
        self, groups: Sequence[GatherUnit], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Makes units available from the time when a backward reaches any of ``outputs`` until it has passed all of
        ``inputs``."""
        if not outputs:
            return
        token = object()

        def enter(*_: Any) -> None:
            with self.lock:
                if self.is_in_backward and token not in self._held:
                    self._held[token] = groups
                    for group in reversed(groups):  # about the order of backward
                        self.use(group.index)
                        self.hold(group)

        def leave(*_: Any) -> None:
            for group in self._held.pop(token, ()):
                self.unhold(group)

        torch.autograd.graph.register_multi_grad_hook(outputs, enter, mode="any")
        # This hook does not work for a leaf whose gradient ``autograd.grad`` returns. If a module has leaves as inputs,
        # its units are held until the pass ends.
        if inputs and all(t.grad_fn is not None for t in inputs):
            torch.autograd.graph.register_multi_grad_hook(inputs, leave, mode="all")

    def _let_held_go(self) -> None:
        while self._held:
            for group in self._held.popitem()[1]:
                self.unhold(group)

    def weights_changed(self, group: GatherUnit | None = None) -> None:
        """Called when shards have been written to: gathered weights are out of date and are released or gathered again.
        Collective if units are pinned or lie in joint memory."""
        with self.lock:
            self.end_writes()  # has ended the lease, so no unit is held for it
            for g in self.groups if group is None else [group]:
                if g.buffer is None:
                    continue
                if g.pins:
                    g.start()
                    g.finish()
                else:
                    g.let_go(expects_grads=self._expects_grads)
            if self._pass is None:
                self._rest()

    def begin_writes(self) -> None:
        """Call it before weights are written. If weights lie in joint memory it is collective, and no rank reads them
        any more when it returns. Otherwise there is nothing to wait for, because no rank reads another rank's shards.
        """
        self.end_lease()
        self._fence("weights about to be written")

    def end_writes(self) -> None:
        """Call it when weights have been written. When it returns, the writes of all ranks are visible. Collective in
        the same cases as ``begin_writes``."""
        self._drop_lease()
        self.n_writes += 1
        self._fence("weights written")
        self._forget_writes()

    def _forget_writes(self) -> None:
        """Drops this rank's own writes to gathered weights in joint memory."""
        for joints in self._joints.values():
            for joint in joints:
                joint.forget()

    def _fence(self, label: str) -> None:
        for comm in self._joints:
            comm.barrier(label=label)
            self.stats.n_fences += 1

    def group_at(self, unit: Unit, bucket: int) -> GatherUnit | None:
        return next((g for g in self.groups if g.unit is unit and g.bucket == bucket), None)

    @property
    def hooks(self) -> ModuleHooks | None:
        """The hooks that begin and end this fetcher's forwards; None before an engine has set them."""
        return self._hooks

    def connect_hooks(self, hooks: ModuleHooks) -> None:
        """Sets the hooks that begin and end forwards. Earlier hooks must have been removed."""
        self._hooks = hooks

    def connect(self, reducer: GradientReducer) -> None:
        """Connects the gradient reducer. From now on the progress of backward decides when ``reducer`` sends each
        bucket, in the plan's order, which is the same on all ranks."""
        self._reducer = reducer
        place = {(bucket.unit, bucket.index): i for i, bucket in enumerate(reducer.buckets)}
        self._bucket_of = {
            group.index: place[group.unit, group.bucket] for group in self.groups if (group.unit, group.bucket) in place
        }

    def _pace(self, backward: _BackwardPass) -> None:
        """Called when backward has passed a step of its plan. Sends the gradients of the unit whose last use in the
        plan was ``PACE_STEPS`` steps before."""
        passed = backward.n_passed - PACE_STEPS
        backward.n_passed += 1
        if self._reducer is None or passed < 0:
            return
        unit = backward.mode.steps[passed]
        if backward.last_use[unit] == passed and unit in self._bucket_of:
            self._reducer.launch_bucket(self._bucket_of[unit])

    def close(self) -> None:
        """Detaches all parameters from the engine. Sharded parameters stay released, and each rank keeps its pieces of
        them; whole parameters become ordinary."""
        if self._is_closed:
            return
        self._pass = None
        self._drop_lease()
        self._is_closed = True
        for group in self.groups:
            group.close()
        for group in self.groups:
            for slot in group.slots:
                state = state_of(slot.param)
                alone = StandaloneShard(
                    slot.param,
                    slot.name,
                    state.comm,
                    shape=slot.shape,
                    piece=state.piece.clone(),
                    ranges=(list(state.begins), list(state.numels)),
                    everyone=self.comm,
                )
                make_sharded(slot.param, alone)
                point_at_nothing(slot.param)
        for slot in self._whole_slots:
            take_over(slot.param, slot.param.data)
        self._reducer = None
        self.pool.clear()
        self._joints.clear()
        for group in self.groups:
            group.unit.weights.end()
        logger.debug("stage 3: %s", self.stats.as_dict())
