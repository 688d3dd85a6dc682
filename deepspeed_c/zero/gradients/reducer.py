"""Gradients from autograd's hooks to reduced sums, bucket by bucket, for every stage alike.

A *window* is the run of micro-batches between two optimizer steps. Within it:

* every parameter's hook moves its gradient into a bucket and clears ``param.grad``;
* buckets are launched in one fixed order on all ranks. A bucket is launched when its gradients are complete and all
  buckets before it have been launched, at the latest when backward ends;
* ``finish`` waits for all reductions and returns the facts that all ranks agree on.

At stage 0 all ranks keep whole gradients. There each pass is reduced and averaged when it ends: callers find the result
in ``param.grad`` and may change it (``shown.py``).

A parameter whose hook fires again after its bucket was launched is *late*. Its contribution is collected separately,
and ``finish`` reduces it. ``finish`` also tells all ranks which parameters were late on any rank. In the next window
the buckets of these parameters *wait*: they are launched after all other buckets, when backward ends. (If gradients are
not sharded ``finish`` launches them, because a second backward may follow, and the whole gradients are in memory
anyway.) So late gradients cost an extra collective only in the first window in which they come. They cost the memory of
one bucket, not of all gradients. A bucket stops waiting after a window without late gradients.

If parameters are sharded as well, gathers of parameters and reductions of gradients must have one common order on all
ranks. Then the fetcher launches the buckets (``launch_bucket``): it goes by the progress of backward and not by the
arrival of this rank's gradients.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from deepspeed_c import _C
from deepspeed_c.comm.axes import DATA, SP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import BackwardError, CommError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.bucket import Bucket, GradientPools, Summing
from deepspeed_c.zero.gradients.drift import DriftCheck
from deepspeed_c.zero.gradients.early import EarlyHooks
from deepspeed_c.zero.gradients.shown import ShownGradients
from deepspeed_c.zero.layout.stages import Sharding
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from deepspeed_c.zero.weights.grad_face import GRAD

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

# Most reductions in flight while backward goes on (overlap_comm): one is being sent, and one is queued behind it.
MAX_IN_FLIGHT = 2
# Most late parameters that the log message about them names.
MAX_NAMES = 8

__all__ = ["GradientReducer", "Passes", "ReduceSettings", "WindowFacts", "WindowNotes"]


class Passes(Protocol):
    """Begins backward passes (``begin_backward``), and ends them."""

    def begin_inside(self) -> None: ...

    def begin_before(self, param: torch.nn.Parameter) -> None: ...


class ReduceSettings(NamedTuple):
    """How gradients are reduced; each field is the configuration key of that name."""

    overlap_comm: bool = True
    reduce_scatter: bool = True
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    is_mean: bool = True  # gradient_allreduce_op
    accum_dtype: torch.dtype | None = None  # grad_accum_dtype; None: the parameters' dtype


class WindowNotes(NamedTuple):
    """A rank's own part of the facts of a window, beside its gradients."""

    has_bad_loss: bool
    wants_stop: bool
    loss: float | None  # sum of this rank's losses, each times 1 / accumulation steps
    n_tokens: int  # in the batches of this rank


class WindowFacts(NamedTuple):
    """The facts that all ranks agree on at the end of a window."""

    norm: float  # global L2 norm of the summed gradients as stored; padding and unused parameters are zero
    n_nonfinite: int  # inf or NaN elements over all ranks
    n_bad_losses: int  # ranks whose loss was inf or NaN
    unused: list[Slot]  # parameters that no rank gave a gradient
    n_stops: int = 0  # ranks that have been asked to end after this step
    loss: float | None = None  # mean over ranks and micro-batches; None where no rank's loss is known
    n_tokens: int = 0  # of all ranks; tokens that several ranks were given count once


# How many numbers an exchange of facts begins with (``GradientReducer._exchange``).
_N_NUMBERS = 7


class GradientReducer:
    """Owns the gradient buffers and hooks of a list of units."""

    def __init__(
        self,
        units: Sequence[Unit],
        sharding: Sharding,
        mesh: Mesh,
        settings: ReduceSettings,
        pools: GradientPools | None = None,
    ) -> None:
        comm = mesh.comm
        self.units, self.sharding, self.comm, self.settings = list(units), sharding, comm, settings
        self._stage, self._pipeline = mesh.stage, mesh.pipeline
        self._drift = DriftCheck(self.units, mesh)
        self._n_parts = mesh.size(SP)
        # Autograd runs one thread per device, so hooks may come from several threads.
        self._lock = threading.RLock()
        largest = max(self.units, key=lambda unit: unit.flat_elems, default=None)
        carrier = comm if largest is None else largest.carrier
        self.pools = GradientPools.make(carrier.allocate) if pools is None else pools
        self._works: deque[Work] = deque()
        self._depth = MAX_IN_FLIGHT if settings.overlap_comm else 0
        # Tensor-parallel ranks do not count in the mean: they have parts of one gradient, or the same gradient. Ranks
        # that share a sequence do not count either: their gradients are terms of one mean.
        world = mesh.size(*DATA)
        if settings.prescale_gradients:
            pre_factor, self.post_factor = 1.0 / world, 1.0
        else:
            pre_factor = 1.0 / settings.gradient_predivide_factor if world > 1 else 1.0
            self.post_factor = 1.0 / (pre_factor * world)
        if not settings.is_mean:
            self.post_factor *= world
        # Sums of shards are averaged in the optimizer's single pass. Callers read whole gradients, so those are
        # averaged when they are summed.
        sum_factor = 1.0
        if not sharding.optimizer:
            sum_factor, self.post_factor = self.post_factor, 1.0
        self._summing = Summing(settings.reduce_scatter, pre_factor, sum_factor)

        self._make_buckets()
        self.slots: list[Slot] = [slot for bucket in self.buckets for slot in bucket.slots]
        self._slot_of = {id(slot.param): slot for slot in self.slots}
        # The order of registration is the same on all ranks. The order of buckets may not be: tensor-parallel ranks may
        # have parts of different sizes, and then their buckets differ.
        self._in_order = sorted(self.slots, key=lambda slot: slot.order)
        self._is_first_twin = mesh.tensors.rank == 0
        self._after_turn = self._stage.world_size + 1  # more than the sum of all ranks' flags for SEEN
        self._late = (self._after_turn + 1) ** 2  # more than the sum of all ranks' other flags
        weighed = (
            (_C.GradientPath.SEEN, 1),
            (_C.GradientPath.SEEN_AFTER, self._after_turn),
            (_C.GradientPath.SEEN_LATE, self._late),
        )
        # State of a parameter's gradient -> the flag that is summed over ranks.
        self._flag_of = [float(sum(n for bit, n in weighed if seen & bit)) for seen in range(8)]
        self._path.connect(lock=self._lock, add=self._add, open=self._open, start=self._start)
        for slot in self.slots:
            GRAD.__set__(slot.param, None)  # the engine's first window begins without gradients
        self._path_hooks = [self._hook(slot) for slot in self.slots]
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(hook) for slot, hook in zip(self.slots, self._path_hooks)
        ]
        self._early = EarlyHooks(self._begin_before)
        self._early.watch(slot for slot in self.slots if slot in self._views)
        self._shown = ShownGradients(self._path, self._views, self._open_for_caller)
        self._may_be_late = True  # whether the next reduced pass may have late gradients; alike on all ranks

        self.is_in_backward = False
        self.is_sync = True  # False within no_sync
        self._is_boundary = True
        self._is_coalescing = False  # within coalesce_grad_reduction
        # The pass's factor divided by the window's. ``_early_ratio`` is for gradients that early hooks have multiplied
        # by the pass's factor already: 1 divided by the window's.
        self._ratio = self._early_ratio = 1.0
        self._passes: Passes | None = None  # set before the first forward
        self._fetcher: Fetcher | None = None
        self._on_summed: Callable[[Bucket], None] = lambda bucket: None
        self._on_change: Callable[[], None] = lambda: None
        self._parts: set[int] = set()  # parameters of which ``param.grad`` holds a part of this pass's gradient
        self._waiting: set[int] = set()  # buckets that are launched after all others; alike on all ranks
        self._has_told_of_late = False
        self._reset_window()

    def _make_buckets(self) -> None:
        """Makes the memory for the sums of each unit's gradients."""
        self.results: dict[Unit, list[torch.Tensor]] = {}
        self.sum_bytes: dict[Unit, int] = {}
        entries: list[tuple[int, Unit, int]] = []
        for unit in self.units:
            for b in range(unit.n_buckets):
                # Backward runs from the last parameter to the first, so the first one registered completes the bucket.
                last = min((slot.order for slot in unit.bucket_slots[b]), default=0)
                entries.append((-last, unit, b))
        entries.sort(key=lambda entry: entry[0])
        wholes: dict[Unit, torch.Tensor] = {}
        shards: dict[Unit, torch.Tensor] = {}
        for unit in self.units:
            dtype = self.sum_dtype(unit)
            in_place = self._summing.is_in_place(unit)
            if (self.sharding.gradients and not in_place) or unit.states.is_apart:
                shards[unit] = unit.states.new_zeros(unit.shard_elems, dtype)
            if not self.sharding.gradients or in_place:
                wholes[unit] = unit.new_zeros(unit.flat_elems, dtype)
            self.sum_bytes[unit] = sum(sums[unit].nbytes for sums in (shards, wholes) if unit in sums)
            self.results[unit] = [None] * unit.n_buckets  # type: ignore[list-item]
        self._bucket_of: list[int] = []  # by parameter
        places: list[tuple[int, int, int]] = []
        for number, (_, unit, b) in enumerate(entries):
            for slot in unit.bucket_slots[b]:
                slot.tracker_index = len(places)
                self._bucket_of.append(number)
                places.append((number, slot.offset - unit.bucket_begin[b], slot.numel))
        self._path = _C.GradientPath(places, len(entries))
        self.buckets: list[Bucket] = []
        self._views: dict[Slot, torch.Tensor] = {}  # of gradients that callers find in ``param.grad``
        for number, (_, unit, b) in enumerate(entries):
            whole = unit.bucket_view(wholes[unit], b) if unit in wholes else None
            if not self.sharding.optimizer and unit not in shards and self.sum_dtype(unit) == unit.dtype:
                # ``data`` gives each view a version counter of its own: it shows whether a caller has written to this
                # gradient.
                self._views.update({slot: slot.view(wholes[unit]).data for slot in unit.bucket_slots[b]})
            if unit in shards:
                result = unit.shard_slice(shards[unit], b)
            else:
                result = unit.own_slice(whole, b)
            self.results[unit][b] = result
            self.buckets.append(
                Bucket(
                    unit,
                    b,
                    number,
                    path=self._path,
                    whole=whole,
                    result=result,
                    pools=self.pools,
                    summing=self._summing,
                )
            )

    def sum_dtype(self, unit: Unit) -> torch.dtype:
        """The dtype in which the summed gradients of ``unit`` are stored."""
        return self.settings.accum_dtype or unit.dtype

    def _reset_window(self) -> None:
        self._path.begin_window()
        self._has_unreduced = False
        self._has_passed = False  # a backward that reduces has ended, or everything was finished
        self.factor: float | None = None  # the window's 1 / accumulation steps; applied once, in the optimizer step
        self.facts: WindowFacts | None = None  # set by finish; a further backward or an edit makes them stale
        self.is_complete = False  # the boundary's backward has ended: gradients may be finished and read
        for bucket in self.buckets:
            bucket.reset()

    def bind_passes(self, passes: Passes) -> None:
        """Sets the object that begins a backward pass if the engine learns of the pass from its first gradient only."""
        self._passes = passes

    def set_callbacks(self, on_summed: Callable[[Bucket], None], on_change: Callable[[], None]) -> None:
        """Sets the callbacks of an optimizer that updates ahead of the step. ``on_summed`` is called with each bucket
        whose sums are complete for the step. ``on_change`` is called when the step will see other sums after all."""
        self._on_summed, self._on_change = on_summed, on_change

    def connect(self, fetcher: Fetcher) -> None:
        """Connects the fetcher of sharded parameters: the reducer reports backward passes to ``fetcher``, and
        ``fetcher`` decides when a bucket is launched."""
        self._fetcher = fetcher
        self._set_mode()
        fetcher.drivers.of(RecordedPlan).connect(self)

    @property
    def has_window(self) -> bool:
        """Whether a backward pass has begun whose gradients wait for a step."""
        return self.factor is not None

    @property
    def _reduces_this_backward(self) -> bool:
        return self.is_sync and not self._is_coalescing and (self.sharding.gradients or self._is_boundary)

    def begin_backward(self, *, is_boundary: bool, factor: float, starts: Sequence[Any] | None = None) -> None:
        """Called when a backward pass starts. ``factor`` (1 / accumulation steps) multiplies the pass's gradients.
        ``starts``: the first nodes of the graph; None if the pass is running already."""
        if self.is_in_backward:
            raise BackwardError(
                "a backward pass began while another had not ended",
                where="engine.backward",
                fix="one backward pass at a time runs through an engine; after an exception in backward call engine.zero_grad()",
            )
        self._take_edits("loss.backward" if starts is None else "engine.backward")
        self._shown.hide()
        self._on_change()
        self._is_boundary = is_boundary
        self.facts = None
        self._scale_early(factor)
        self.is_in_backward = self._early.is_in_backward = True
        self._set_mode()
        # Clear the marks of earlier micro-batches, unless the buckets of this window have been launched already.
        if self._reduces_each_pass or not self._has_passed:
            self._path.reset()
        if self._fetcher is not None:
            self._fetcher.driver.begin_backward(starts)

    @property
    def _reduces_each_pass(self) -> bool:
        """Whether each reduced pass is reduced at its own end, before later passes of its window."""
        return self.sharding.gradients or bool(self._shown)

    def _scale_early(self, factor: float) -> None:
        """Multiplies gradients by ``factor`` before hooks of users see them. If there are such hooks, or if gradients
        are shown, backward applies the factor and the optimizer's step does not."""
        self._early.factor = factor
        if factor != 1.0:
            self._early.watch(slot for slot in self.slots if slot.param._backward_hooks)
        if self.factor is None:
            self.factor = 1.0 if self._early else factor
        self._ratio = factor / self.factor
        self._early_ratio = 1.0 / self.factor

    def _take_edits(self, where: str) -> None:
        """Takes over callers' edits of ``param.grad``. Raises StateError for an edit that cannot count."""
        self._shown.take()
        for slot in self.slots:
            if GRAD.__get__(slot.param) is not None and slot not in self._views:
                raise StateError(
                    f"param.grad of {slot.name} was assigned; this engine holds its gradients as shards, or in another dtype, and would not notice the assignment",
                    where=where,
                    fix="call deepspeed_c.utils.safe_set_full_grad(param, value) between backward and step instead",
                )

    def take_edits(self) -> None:
        """Takes over callers' edits of ``param.grad`` before a step, and sets ``param.grad`` to None. Call it on all
        ranks alike.
        """
        self._take_edits("engine.step")
        if self._shown:
            self._shown.hide()
            self._on_change()
            self.facts = None

    def _open_for_caller(self, slot: Slot) -> None:
        bucket = self.buckets[self._bucket_of[slot.tracker_index]]
        if not bucket.has_result:
            bucket.open(self._reduces_this_backward)
            self._path.note(slot.tracker_index)

    def _begin_before(self, param: torch.nn.Parameter) -> None:
        self._passes.begin_before(param)

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        """The hook that autograd calls with a gradient. It handles all gradients in C, except for the cases that it
        passes to ``_add``.
        """
        return self._path.hook(slot.tracker_index)

    def _set_mode(self) -> None:
        """Updates the hooks' mode of handling gradients. Called whenever the mode may have changed."""
        ratios = {self._early_ratio} if len(self._early) == len(self.slots) else {self._early_ratio, self._ratio}
        is_plain = self.is_in_backward and ratios == {1.0}
        self._path.set_mode(takes=is_plain, launches=self._reduces_this_backward and self._fetcher is None)

    def _open(self, i: int) -> None:
        self.buckets[i].open(self._reduces_this_backward)

    def _add(self, i: int, param: torch.Tensor) -> None:
        """Takes a gradient that the C hook does not handle. Such gradients are the first one of an unannounced pass,
        gradients that must be scaled, sparse gradients, gradients that are not contiguous, and gradients on a device.
        """
        grad = GRAD.__get__(param)
        GRAD.__set__(param, None)
        if not self.is_in_backward:
            self._passes.begin_inside()
        slot, bucket = self.slots[i], self.buckets[self._bucket_of[i]]
        ratio = self._early_ratio if slot in self._early else self._ratio
        bucket.add(slot, grad, ratio, will_reduce=self._reduces_this_backward)
        self._path.mark(i)

    def number_of(self, tensor: Any) -> int | None:
        """The number of a parameter whose gradients a graph may hand to ``take``. None for another tensor, and for a
        parameter whose gradients are shown to callers or to their hooks."""
        slot = self._slot_of.get(id(tensor))
        if slot is None or slot in self._views or tensor._backward_hooks or slot in self._early:
            return None
        return slot.tracker_index

    def take(self, i: int, gradient: torch.Tensor) -> None:
        """Takes the gradient of parameter ``i`` from a compiled backward, in place of autograd's hook."""
        param = self.slots[i].param
        GRAD.__set__(param, gradient)
        self._path_hooks[i](param)

    def take_part(self, i: int, gradient: torch.Tensor) -> None:
        """Takes a part of the gradient of parameter ``i`` from a compiled backward. Autograd adds the other parts, if
        there are any, and calls its hook with the sum."""
        param = self.slots[i].param
        before = GRAD.__get__(param)
        # Other parameters may have the same tensor as their gradient, and autograd adds in place.
        GRAD.__set__(param, gradient.clone() if before is None else before + gradient)
        self._parts.add(i)

    def wrap_hooks(self, wrap: Callable[[int, Callable[[torch.Tensor], None]], Callable[[torch.Tensor], None]]) -> None:
        """From now on autograd calls ``wrap(i, hook)`` in place of the hook of each parameter ``i``."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(wrap(slot.tracker_index, hook))
            for slot, hook in zip(self.slots, self._path_hooks)
        ]

    def end_backward(self) -> None:
        """Called when a backward pass has ended: reduces the buckets that are due."""
        with self._lock:
            for i in sorted(self._parts):
                self._path_hooks[i](self.slots[i].param)
            self._parts.clear()
            if self._fetcher is not None:
                self._fetcher.driver.end_backward()
            self.is_in_backward = self._early.is_in_backward = False
            self._set_mode()
            self.is_complete = self._is_boundary
            if self._reduces_this_backward:
                self._launch(_C.GradientPath.ALL if self._reduces_each_pass else _C.GradientPath.PROMPT)
                self._has_passed = True
                self._has_unreduced = False
                if self._reduces_each_pass:
                    self.wait()  # gives the staging buffers back
                if self.sharding.gradients:
                    for bucket in self.buckets:
                        bucket.is_launched = False
                elif self._shown and self._may_be_late:
                    self._reduce_late(self._flags_of_ranks())
            else:
                self._has_unreduced = True
            self._shown.show(everything=self._reduces_this_backward and self.comm.world_size > 1)

    def _launch(self, due: int) -> None:
        """Starts the reductions that ``due`` (a constant of ``GradientPath``) selects. At most ``_depth`` of them run
        while backward goes on.

        Each running reduction holds buffers, so an unbounded number would cost as much memory as stage 2 saves. If
        ``_depth`` reductions are running, the oldest is waited for before the next one starts. This happens at the same
        place of the same order on all ranks.
        """
        while (i := self._path.next(due)) >= 0:
            self._start(i)

    def forget_lateness(self) -> None:
        """Lets no bucket wait any more. Called on all ranks when the order of backward is planned anew: gradients that
        were late in the old order may be in time in the new order."""
        self._have_waiting(set())

    def _have_waiting(self, buckets: set[int]) -> None:
        for i in self._waiting ^ buckets:
            self._path.set_waiting(i, i in buckets)
        self._waiting = buckets

    def _start(self, i: int) -> None:
        while self._works and len(self._works) >= self._depth:
            self._works.popleft().wait()
        bucket = self.buckets[i]
        self._works.append(bucket.reduce().then(lambda: self._note_sums(bucket)))
        if self._depth == 0:
            self.wait()

    def _note_sums(self, bucket: Bucket) -> None:
        if self.is_in_backward and self._is_boundary:
            self._on_summed(bucket)

    def launch_bucket(self, i: int) -> None:
        """Called when backward has passed all parameters of bucket ``i``: starts the bucket's reduction if it is due.
        Every rank calls it at the same point of the plan."""
        if self._reduces_this_backward and self._path.pass_turn(i):
            self._start(i)

    def wait(self) -> None:
        """Waits for the reductions that have been started."""
        while self._works:
            self._works.popleft().wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Postpones reductions until the first backward outside of the context. Within it gradients are collected
        unsharded, at every stage."""
        before, self.is_sync = self.is_sync, False
        self._set_mode()
        try:
            yield
        finally:
            self.is_sync = before
            self._set_mode()

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Reduces once for all backward passes within the context."""
        before, self._is_coalescing = self._is_coalescing, True
        self._set_mode()
        try:
            yield
        finally:
            self._is_coalescing = before
            self._set_mode()
            if self._has_unreduced and self._reduces_this_backward:
                self._take_edits("coalesce_grad_reduction")
                self._path.reset()
                self.end_backward()

    def finish(
        self,
        notes: WindowNotes,
        *,
        hash_of_inputs: Callable[[], int] = lambda: 0,
    ) -> WindowFacts:
        """Completes every sum and exchanges the window's facts in one small collective. Afterwards ``results`` holds
        the sums. hash_of_inputs: returns a hash of the window's batches; called if tensor-parallel ranks compare it.

        It may be called again. A further call has an effect only after another backward or an edit of a result.
        """
        self._shown.take()
        if self.facts is not None:
            return self.facts
        if self.is_in_backward:
            raise BackwardError(
                "a backward pass did not end before the step (it raised, or is still running)",
                where="engine.step",
                fix="call engine.zero_grad() after an exception in loss.backward(), then go on with the next batch",
            )
        if self._has_unreduced or not all(bucket.has_result for bucket in self.buckets):
            if self.sharding.gradients:
                self._path.reset()
            self._launch(_C.GradientPath.ALL)
            self._has_unreduced = False
        self._has_passed = True
        self.wait()
        facts = self._exchange(notes, hash_of_inputs)
        if self._reduce_late(facts[_N_NUMBERS : _N_NUMBERS + len(self._in_order)]):
            facts = self._exchange(notes, hash_of_inputs)
        flags = self._flags(facts)
        hashes = facts[_N_NUMBERS + len(self.slots) :]
        mine = [*facts[:_N_NUMBERS], float(self._drift.differs(hashes))]
        *numbers, n_drifting = self._pipeline.sum_numbers(mine, label="facts of all stages")
        if n_drifting:
            self._drift.report(hashes, self.results)
        self._plan_waiting([slot for slot, flag in flags if flag >= self._after_turn])
        self.facts = WindowFacts(
            norm=math.sqrt(numbers[0]),
            n_nonfinite=int(numbers[1]),
            n_bad_losses=int(numbers[2]),
            unused=[slot for slot, flag in flags if not flag],
            n_stops=int(numbers[3]),
            # Ranks of a sequence have terms of its loss, and each counts as a rank with a loss.
            loss=numbers[4] / numbers[5] * self._n_parts if numbers[5] else None,
            n_tokens=int(numbers[6]),
        )
        return self.facts

    def _reduce_late(self, flags: Sequence[float]) -> bool:
        """Reduces gradients that came after the reduction of their bucket. Returns whether any rank had such gradients.

        flags: the flag of each parameter, summed over the ranks; parameters in order of registration."""
        late = {self._bucket_of[slot.tracker_index] for slot, flag in zip(self._in_order, flags) if flag >= self._late}
        if late:
            self._on_change()
            for index in sorted(late):
                bucket = self.buckets[index]
                bucket.reduce().wait()
                # A gradient may be late on some twins only. Then twins have added the same numbers in different orders,
                # and their sums may differ by rounding.
                if bucket.unit.twins.world_size > 1:
                    bucket.unit.twins.broadcast(bucket.result, 0, label="late gradients")
            self._path.take_late()
        return bool(late)

    def _plan_waiting(self, slots: Sequence[Slot]) -> None:
        """Makes the buckets of ``slots`` wait in the next window, and no other buckets. ``slots``: the parameters whose
        gradients came after their bucket's turn on some rank."""
        self._have_waiting({self._bucket_of[slot.tracker_index] for slot in slots})
        self._may_be_late = bool(slots)
        if slots and not self._has_told_of_late:
            self._has_told_of_late = True
            names = ", ".join(slot.name for slot in slots[:MAX_NAMES])
            logger.info(
                "gradients of %s%s came again after their buckets had been reduced (a second use, as under reentrant checkpointing, or a second"
                " backward); as long as such gradients come, their %d of %d buckets are reduced after the others",
                names,
                f" and {len(slots) - MAX_NAMES} more parameters" if len(slots) > MAX_NAMES else "",
                len(self._waiting),
                len(self.buckets),
            )

    def _flags(self, facts: Sequence[float]) -> list[tuple[Slot, float]]:
        """The ranks' flags of each parameter, added up."""
        return list(zip(self._in_order, facts[_N_NUMBERS : _N_NUMBERS + len(self._in_order)]))

    def _exchange(self, notes: WindowNotes, hash_of_inputs: Callable[[], int]) -> list[float]:
        """[sum of squares, non-finite elements, bad losses, stops, losses, ranks with a loss, tokens, a flag for each
        parameter, hashes...], summed over the ranks that hold the same layers.
        Parameters stand in order of registration. The flag of a parameter includes ``_late`` if its bucket needs
        another reduction."""
        # If several ranks hold the same sums, only one of them counts them. The sums of twins stand apart, because the
        # exchange also checks that twins agree.
        with_twins = [unit for unit in self.units if unit.twins.world_size > 1]
        facts = [0.0, 0.0, float(notes.has_bad_loss), float(notes.wants_stop)]
        facts += [notes.loss or 0.0, float(notes.loss is not None), float(notes.n_tokens * self._is_first_twin)]
        sums = self._sum_squares(unit for unit in self.units if unit not in with_twins and unit.speaks)
        of_twins = self._sum_squares(unit for unit in with_twins if unit.replicas.rank == 0)
        for both in (sums, of_twins) if self._is_first_twin else (sums,):
            facts[0], facts[1] = facts[0] + both[0], facts[1] + both[1]
        facts += self._own_flags()
        facts += self._drift.numbers(float(of_twins[1]) if of_twins[1] else of_twins[0], hash_of_inputs)
        return self._stage.sum_numbers(facts)

    def _own_flags(self) -> list[float]:
        """This rank's flag of each parameter, in order of registration."""
        seen = self._path.seen()
        return [self._flag_of[seen[slot.tracker_index]] for slot in self._in_order]

    def _flags_of_ranks(self) -> list[float]:
        return self._stage.sum_numbers(self._own_flags(), label="late gradients")

    def _sum_squares(self, units: Iterable[Unit]) -> list[float]:
        """[sum of squares, non-finite elements] of this rank's part of the sums of ``units``."""
        results = [r for unit in units for r in self.results[unit] if r.numel()]
        return torch.ops.deepspeed_c.flat_sumsq(results).tolist() if results else [0.0, 0.0]

    def note_edit(self, slot: Slot) -> None:
        """Called on all ranks alike when a caller has written to a parameter's finished result. The parameter then
        counts as used, and the next ``finish`` computes the facts anew."""
        self._on_change()
        self._path.see(slot.tracker_index)
        self.facts = None

    def first_nonfinite(self) -> tuple[str, int, int] | None:
        """(name, inf elements, NaN elements) of the first parameter with such elements in this rank's results. It reads
        the results once."""
        for unit in self.units:
            results = self.results[unit]
            for fragment in sorted(unit.fragments, key=lambda f: f.slot.order):
                piece = unit.piece(results, fragment)
                n_inf, n_nan = int(piece.isinf().sum()), int(piece.isnan().sum())
                if n_inf or n_nan:
                    return fragment.slot.name, n_inf, n_nan
        return None

    def next_window(self) -> None:
        """Begins the next window. Called after the optimizer has read the results."""
        self._shown.hide()
        self._on_change()
        self._reset_window()

    def discard(self) -> None:
        """Drops all gradients of this window. It also works after a backward pass that raised and left the window
        incomplete."""
        if self._fetcher is not None and self._fetcher.phase.is_in_backward:
            self._fetcher.driver.abort()
        while self._works:
            try:
                self._works.popleft().wait()
            except CommError as error:
                logger.warning("a reduction of the dropped window failed: %s", error)
        self.is_in_backward = self._early.is_in_backward = False
        self._set_mode()
        self._on_change()
        self._shown.hide()
        for slot in self.slots:
            GRAD.__set__(slot.param, None)
        self._parts.clear()
        self._reset_window()

    def shows(self, slot: Slot) -> bool:
        """Whether callers find the gradient of ``slot`` in ``param.grad``."""
        return slot in self._views

    def drop(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Drops the collected gradients of ``params`` in this window. Call it between two passes and on all ranks
        alike. It leaves out parameters whose gradients are shown: callers drop those in ``param.grad``."""
        if self.is_in_backward or not self.has_window:
            return
        slots = [slot for slot in map(self._slot_of.get, map(id, params)) if slot is not None and not self.shows(slot)]
        for slot in slots:
            self.buckets[self._bucket_of[slot.tracker_index]].drop(slot)
            self._path.forget(slot.tracker_index)
        if slots and not self._views and not any(self._path.seen()):
            self.discard()
        elif slots:
            self._on_change()
            self.facts = None

    def drop_spare_buffers(self) -> None:
        """Frees the staging buffers that are not in use."""
        self.pools.staging.clear()
        self.comm.scratch.clear()

    def close(self) -> None:
        """Removes the hooks and frees the buffers."""
        self._on_change()
        self._shown.hide()
        self._early.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._works.clear()
        self.pools.staging.clear()
        self.buckets.clear()
        self.results.clear()
        self.slots.clear()
        self._slot_of.clear()
