"""Gradients from autograd's hooks to reduced sums, bucket by bucket, for every stage alike.

A *window* is the run of micro-batches between two optimizer steps. Within it:

* every parameter's hook moves its gradient into a bucket and clears ``param.grad``;
* buckets are launched in one fixed order on all ranks, each as soon as its members are there, at the latest when backward ends;
* ``finish`` waits for everything and returns the facts that all ranks agree on.

A parameter whose hook fires again after its bucket was launched is *late*: its contribution gathers by itself and ``finish`` reduces it.
From then on nothing is launched before ``finish``, so that lateness costs an extra collective once and not in every step.

Where parameters are sharded as well, their gathers and these reductions must come in one order on all ranks: the fetcher then says when which bucket is
launched (``launch_bucket``), by how far backward has come and not by which gradients this rank has seen; a bucket that was late once waits for the end of backward.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import Variable

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives, Work
from deepspeed_c.errors import BackwardError, CommError
from deepspeed_c.logging import logger
from deepspeed_c.zero.bucket import Bucket, StagingPool
from deepspeed_c.zero.stages import Sharding
from deepspeed_c.zero.unit import Slot, Unit

if TYPE_CHECKING:
    from deepspeed_c.zero.fetch import Fetcher

# Reductions that run while backward goes on (overlap_comm): one on the wire and one behind it.
MAX_IN_FLIGHT = 2

__all__ = ["GradientReducer", "ReduceSettings", "WindowFacts"]


class ReduceSettings(NamedTuple):
    """How gradients are reduced; each field is the configuration key of that name."""

    overlap_comm: bool = True
    reduce_scatter: bool = True
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    is_mean: bool = True  # gradient_allreduce_op
    accum_dtype: torch.dtype | None = None  # grad_accum_dtype; None: the parameters' dtype


class WindowFacts(NamedTuple):
    """What all ranks agree on at the end of a window."""

    norm: float  # global L2 norm of the summed gradients as stored, padding and unused parameters being zero
    n_nonfinite: int  # inf or NaN elements over all ranks
    n_bad_losses: int  # ranks whose loss was inf or NaN
    unused: list[Slot]  # parameters that no rank gave a gradient
    n_stops: int = 0  # ranks that have been asked to end after this step


class GradientReducer:
    """Owns the gradient buffers and hooks of a list of units."""

    def __init__(self, units: Sequence[Unit], sharding: Sharding, comm: Collectives, settings: ReduceSettings) -> None:
        self.units, self.sharding, self.comm, self.settings = list(units), sharding, comm, settings
        # Autograd runs one thread per device, so hooks may come from several threads.
        self._lock = threading.RLock()
        self._pool = StagingPool()
        self._works: deque[Work] = deque()
        self._depth = MAX_IN_FLIGHT if settings.overlap_comm else 0
        world = comm.world_size
        if settings.prescale_gradients:
            self._pre_factor, self.post_factor = 1.0 / world, 1.0
        else:
            self._pre_factor = 1.0 / settings.gradient_predivide_factor if world > 1 else 1.0
            self.post_factor = 1.0 / (self._pre_factor * world)
        if not settings.is_mean:
            self.post_factor *= world

        self._make_buckets()
        self.slots: list[Slot] = [slot for bucket in self.buckets for slot in bucket.slots]
        bucket_of: list[int] = []
        for i, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                slot.tracker_index = len(bucket_of)
                bucket_of.append(i)
        self._bucket_of = bucket_of
        self._tracker = _C.BucketTracker(bucket_of, len(self.buckets))
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(partial(self._on_grad, slot)) for slot in self.slots
        ]

        self.is_in_backward = False
        self.is_sync = True  # False within no_sync
        self._is_boundary = True
        self._is_coalescing = False  # within coalesce_grad_reduction
        self._saw_late = False  # decided by all ranks together
        self._fetcher: Fetcher | None = None
        self._waits_for_end: set[int] = set()  # buckets that were late, where the fetcher paces
        self._reset_window()

    def _make_buckets(self) -> None:
        replicated = not self.sharding.optimizer
        is_single = self.comm.world_size == 1
        self.results: dict[Unit, list[torch.Tensor]] = {}
        entries: list[tuple[int, Unit, int]] = []
        for unit in self.units:
            for b in range(unit.n_buckets):
                # The bucket is full when its last gradient comes: that of the parameter registered first.
                last = min((slot.order for slot in unit.bucket_slots[b]), default=0)
                entries.append((-last, unit, b))
        entries.sort(key=lambda entry: entry[0])
        homes: dict[Unit, torch.Tensor] = {}
        shards: dict[Unit, torch.Tensor] = {}
        for unit in self.units:
            dtype = self.settings.accum_dtype or unit.dtype
            if (self.sharding.gradients and not is_single) or unit.placement.states:
                shards[unit] = unit.new_states(unit.shard_elems, dtype)
            if not self.sharding.gradients or (is_single and not unit.placement.states):
                homes[unit] = torch.zeros(unit.flat_elems, dtype=dtype, device=unit.device)
            self.results[unit] = [None] * unit.n_buckets  # type: ignore[list-item]
        self.buckets: list[Bucket] = []
        for key, (_, unit, b) in enumerate(entries):
            home = unit.bucket_view(homes[unit], b) if unit in homes else None
            if unit in shards:
                result = unit.shard_slice(shards[unit], b)
            else:
                result = home if replicated else unit.own_slice(home, b)
            self.results[unit][b] = result
            self.buckets.append(
                Bucket(
                    unit,
                    b,
                    key,
                    home=home,
                    result=result,
                    accum_dtype=self.settings.accum_dtype or unit.dtype,
                    pool=self._pool,
                    comm=self.comm,
                    is_replicated=replicated,
                    use_reduce_scatter=self.settings.reduce_scatter,
                    pre_factor=self._pre_factor,
                )
            )

    def _reset_window(self) -> None:
        self._tracker.reset()
        self._contributed = bytearray(len(self.slots))
        self._has_unreduced = False
        self._n_late = [0] * len(self.buckets)
        self.factor: float | None = None  # the window's 1 / accumulation steps; applied once, in the optimizer step
        self.facts: WindowFacts | None = None  # set by finish; a further backward makes them stale
        self.is_complete = False  # the boundary's backward has ended: gradients may be finished and read
        for bucket in self.buckets:
            bucket.reset()

    def connect(self, fetcher: Fetcher) -> None:
        """From now on ``fetcher`` is told of backward passes, and says when a bucket is launched."""
        self._fetcher = fetcher
        fetcher.connect(self)

    # -- a backward pass --------------------------------------------------------------------------------------------

    @property
    def _is_deferred(self) -> bool:
        return self._saw_late or self._is_coalescing

    @property
    def _reduces_this_backward(self) -> bool:
        return self.is_sync and not self._is_deferred and (self.sharding.gradients or self._is_boundary)

    def begin_backward(self, *, is_boundary: bool, factor: float) -> None:
        """Called when a backward pass starts. ``factor`` is what its gradients are to be multiplied with (1 / accumulation steps)."""
        if self.is_in_backward:
            raise BackwardError(
                "a backward pass began while another had not ended",
                where="engine.backward",
                fix="one backward pass at a time runs through an engine; after an exception in backward call engine.zero_grad()",
            )
        self.on_change()
        self.is_in_backward = True
        self._is_boundary = is_boundary
        self.facts = None
        if self.factor is None:
            self.factor = factor
        self._ratio = factor / self.factor
        # What earlier micro-batches have marked says nothing of this one, unless its bucket has gone already in this window.
        if self.sharding.gradients or not any(bucket.has_result for bucket in self.buckets):
            self._tracker.reset()
        if self._fetcher is not None:
            self._fetcher.begin_backward()

    def begin_backward_in_graph(self, *, is_boundary: bool, factor: float) -> None:
        """As ``begin_backward``, from within autograd (``loss.backward()`` called by the user): ends itself with the pass."""
        self.begin_backward(is_boundary=is_boundary, factor=factor)
        Variable._execution_engine.queue_callback(self.end_backward)

    def _on_grad(self, slot: Slot, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        with self._lock:
            if not self.is_in_backward:
                # No output of the engine was on the way here: the pass began inside the module.
                self.begin_backward_in_graph(is_boundary=self.next_is_boundary(), factor=self.next_factor())
            will_reduce = self._reduces_this_backward
            bucket_index = self._bucket_of[slot.tracker_index]
            self.buckets[bucket_index].add(slot, grad, self._ratio, will_reduce=will_reduce)
            param.grad = None
            self._contributed[slot.tracker_index] = 1
            is_late = self._tracker.mark(slot.tracker_index)
            if self._fetcher is not None:
                is_late = self.buckets[bucket_index].is_launched
            if is_late:
                self._n_late[bucket_index] = 1
            elif will_reduce and self._fetcher is None:
                self._launch(force=False)

    # An optimizer that updates ahead of the step sets these: the sums of a bucket are what the step will see, unless told otherwise; the step will see other sums.
    @staticmethod
    def on_summed(bucket: Bucket) -> None:
        pass

    @staticmethod
    def on_change() -> None:
        pass

    # The engine sets these: what a pass that began inside the module belongs to.
    @staticmethod
    def next_is_boundary() -> bool:
        return True

    @staticmethod
    def next_factor() -> float:
        return 1.0

    def end_backward(self) -> None:
        """Called when a backward pass has ended: reduces what is due."""
        with self._lock:
            if self._fetcher is not None:
                self._fetcher.end_backward()
            self.is_in_backward = False
            self.is_complete = self._is_boundary
            if self._reduces_this_backward:
                self._launch_rest()
                self._has_unreduced = False
                if self.sharding.gradients:
                    self._wait()  # gives the staging buffers back
                    for bucket in self.buckets:
                        bucket.is_launched = False
            else:
                self._has_unreduced = True

    def _launch(self, force: bool) -> None:
        """Starts every reduction that is due, and lets ``_depth`` of them run while backward goes on.

        Each holds buffers, so an unbounded number would cost as much memory as stage 2 saves. The oldest is waited for before the next one starts, in
        the same place of the same order on all ranks.
        """
        while (i := self._tracker.next(force)) >= 0:
            self._start(i)

    def forget_lateness(self) -> None:
        """The order of backward is planned anew (on all ranks): what was late by the old one need not be by the new one."""
        self._waits_for_end.clear()

    def _launch_rest(self) -> None:
        """At the end of a backward: what the fetcher has launched on the way is not launched again."""
        while (i := self._tracker.next(True)) >= 0:
            if self._fetcher is None or not self.buckets[i].is_launched:
                self._start(i)

    def _start(self, i: int) -> None:
        while self._works and len(self._works) >= self._depth:
            self._works.popleft().wait()
        bucket = self.buckets[i]
        self._works.append(bucket.reduce().then(lambda: self._note_sums(bucket)))
        if self._depth == 0:
            self._wait()

    def _note_sums(self, bucket: Bucket) -> None:
        if self.is_in_backward and self._is_boundary:
            self.on_summed(bucket)

    def launch_bucket(self, i: int) -> None:
        """The backward has gone past a bucket's parameters: starts its reduction, on every rank at the same point of the plan."""
        if self._reduces_this_backward and i not in self._waits_for_end and not self.buckets[i].is_launched:
            self._start(i)

    def _wait(self) -> None:
        while self._works:
            self._works.popleft().wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Puts reductions off until the first backward outside. Gradients gather unsharded meanwhile, at every stage."""
        before, self.is_sync = self.is_sync, False
        try:
            yield
        finally:
            self.is_sync = before

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Reduces once for all backward passes within."""
        before, self._is_coalescing = self._is_coalescing, True
        try:
            yield
        finally:
            self._is_coalescing = before
            if self._has_unreduced and self._reduces_this_backward:
                self._tracker.reset()
                self.end_backward()

    # -- the end of a window ----------------------------------------------------------------------------------------

    def finish(self, *, has_bad_loss: bool = False, wants_stop: bool = False) -> WindowFacts:
        """Completes every sum and exchanges the window's facts in one small collective. ``results`` holds the sums afterwards.

        May be called again; it does something only after a further backward.
        """
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
                self._tracker.reset()
            self._launch(force=True)
            self._has_unreduced = False
        self._wait()
        facts = self._exchange(has_bad_loss, wants_stop)
        late = facts[4 : 4 + len(self.buckets)]
        if any(late):
            self.on_change()
            for bucket, is_late in zip(self.buckets, late):
                if is_late:
                    bucket.reduce().wait()
            self._n_late = [0] * len(self.buckets)
            if self._fetcher is None:
                self._saw_late = True
            else:
                self._waits_for_end.update(i for i, is_late in enumerate(late) if is_late)
            facts = self._exchange(has_bad_loss, wants_stop)
        flags = facts[4 + len(self.buckets) :]
        self.facts = WindowFacts(
            norm=math.sqrt(facts[0]),
            n_nonfinite=int(facts[1]),
            n_bad_losses=int(facts[2]),
            unused=[slot for slot, flag in zip(self.slots, flags) if not flag],
            n_stops=int(facts[3]),
        )
        return self.facts

    def _exchange(self, has_bad_loss: bool, wants_stop: bool) -> list[float]:
        """[sum of squares, non-finite elements, bad losses, stops, late buckets..., used parameters...], summed over ranks."""
        # Where every rank holds all sums, one speaks for all.
        speaks = self.sharding.optimizer or self.comm.rank == 0
        results = [r for unit in self.units for r in self.results[unit] if r.numel()]
        facts = [0.0, 0.0, float(has_bad_loss), float(wants_stop)]
        if speaks and results:
            stats = torch.ops.deepspeed_c.flat_sumsq(results)
            facts[0], facts[1] = stats.tolist()
        facts += [float(n) for n in self._n_late]
        facts += [float(c) for c in self._contributed]
        return self.comm.sum_numbers(facts)

    def measure_again(self) -> None:
        """Somebody wrote to the finished results: takes their norm anew (collective)."""
        self.on_change()
        if self.facts is not None:
            numbers = self._exchange(False, False)
            self.facts = self.facts._replace(norm=math.sqrt(numbers[0]), n_nonfinite=int(numbers[1]), unused=[])

    def first_nonfinite(self) -> tuple[str, int, int] | None:
        """(name, inf elements, NaN elements) of the first bad parameter in this rank's results; costs a pass over them."""
        for unit in self.units:
            results = self.results[unit]
            for fragment in sorted(unit.fragments, key=lambda f: f.slot.order):
                piece = unit.piece(results, fragment)
                n_inf, n_nan = int(piece.isinf().sum()), int(piece.isnan().sum())
                if n_inf or n_nan:
                    return fragment.slot.name, n_inf, n_nan
        return None

    def next_window(self) -> None:
        """Forgets the window: called after the optimizer has read the results."""
        self.on_change()
        self._reset_window()

    def discard(self) -> None:
        """Drops everything that has gathered in this window, also when a backward pass raised and it is incomplete."""
        if self._fetcher is not None and self._fetcher.is_in_backward:
            self._fetcher.abort()
        while self._works:
            try:
                self._works.popleft().wait()
            except CommError as error:
                logger.warning("a reduction of the dropped window failed: %s", error)
        self.is_in_backward = False
        self.on_change()
        for slot in self.slots:
            slot.param.grad = None
        self._reset_window()

    def drop_spare_buffers(self) -> None:
        """Frees the staging buffers that no gradient is in."""
        self._pool.clear()
        self.comm.scratch.clear()

    def close(self) -> None:
        """Removes the hooks and frees the buffers."""
        self.on_change()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._works.clear()
        self._pool.clear()
        self.buckets.clear()
        self.results.clear()
        self.slots.clear()
