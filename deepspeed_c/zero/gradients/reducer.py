"""Gradients from autograd's hooks to reduced sums, bucket by bucket, for every stage alike.

A *window* is the run of micro-batches between two optimizer steps. Within it:

* every parameter's hook moves its gradient into a bucket and clears ``param.grad``;
* buckets are launched in one fixed order on all ranks. A bucket is launched when its gradients are complete and all
  buckets before it have been launched, at the latest when backward ends;
* ``finish`` waits for all reductions and returns the facts that all ranks agree on.

At stage 0 all ranks keep whole gradients. There each pass is reduced and averaged when it ends: callers find the result
in ``param.grad`` and may change it (``shown.py``).

A parameter whose hook fires again after its bucket was launched is *late* (``late.py``). Its contribution is collected
separately, and ``finish`` reduces it. In the next window its bucket is launched after all others, when backward ends.
(If gradients are not sharded ``finish`` launches it, because a second backward may follow, and the whole gradients are
in memory anyway.) So late gradients cost the memory of one bucket, not of all gradients.

If parameters are sharded as well, gathers of parameters and reductions of gradients must have one common order on all
ranks. Then the fetcher launches the buckets (``launch_bucket``): it goes by the progress of backward and not by the
arrival of this rank's gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepspeed_c import _C
from deepspeed_c.comm.axes import DATA
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.stages import Sharding
from deepspeed_c.errors import BackwardError, StateError
from deepspeed_c.zero.gradients.bucket import Bucket, GradientPools
from deepspeed_c.zero.gradients.facts import FactsExchange, WindowFacts, WindowNotes
from deepspeed_c.zero.gradients.flight import Flight
from deepspeed_c.zero.gradients.hidden import HiddenGradients
from deepspeed_c.zero.gradients.intake import GradientIntake
from deepspeed_c.zero.gradients.late import LateBuckets
from deepspeed_c.zero.gradients.scaling import PassScaling
from deepspeed_c.zero.gradients.shown import ShownGradients
from deepspeed_c.zero.gradients.slots import SlotTable
from deepspeed_c.zero.gradients.summing import ReduceSettings, Summing
from deepspeed_c.zero.gradients.sums import GradientSums
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["GradientReducer", "Passes"]


class Passes(Protocol):
    """Begins backward passes (``begin_backward``), and ends them."""

    def begin_inside(self) -> None: ...

    def begin_before(self, param: torch.nn.Parameter) -> None: ...


class GradientReducer:
    """Decides the order and the pace of the reductions of a list of units.

    ``slots`` has the trained parameters, and ``buckets`` the buckets by number. A gradient comes through ``intake``,
    which multiplies it (``scaling``), into its bucket, and from there to ``sums``. ``shown`` has the gradients that
    callers find in ``param.grad``, ``late`` the buckets that are reduced after the others, ``flight`` the reductions
    that have been started.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sharding: Sharding,
        mesh: Mesh,
        settings: ReduceSettings,
        pools: GradientPools | None = None,
    ) -> None:
        # Autograd runs one thread per device, so hooks may come from several threads.
        self._lock = threading.RLock()
        self._shards_gradients = sharding.gradients
        self.slots = SlotTable(units)
        self._path = self.slots.make_path()
        if pools is None:
            largest = max(units, key=lambda unit: unit.flat_elems, default=None)
            pools = GradientPools.make((mesh.comm if largest is None else largest.carrier).allocate)
        self.sums = GradientSums(units, sharding, Summing.make(settings, sharding, mesh.size(*DATA)), pools)
        self.buckets = self.sums.make_buckets(self.slots, self._path)
        views = {slot: self.sums.views[slot] for slot in self.slots if slot in self.sums.views}
        self.scaling = PassScaling(self.slots, views, lambda param: self._passes.begin_before(param))
        self.intake = GradientIntake(
            self.slots,
            self.buckets,
            self._path,
            self.scaling,
            begin_inside=lambda: self._passes.begin_inside(),
            start=self._start,
            lock=self._lock,
        )
        self.shown = ShownGradients(self._path, views, self.intake.open_for_caller, are_sums=mesh.comm.world_size > 1)
        self._hidden = HiddenGradients(slot for slot in self.slots if slot not in views)
        self.late = LateBuckets(self.slots, self._path, mesh.stage)
        self._exchange = FactsExchange(self.sums, mesh)
        self.flight = Flight(overlaps=settings.overlap_comm)

        self.is_in_backward = False
        self._is_boundary, self._divisor = True, 1
        self._n_postponing = 0  # contexts that postpone reductions: ``no_sync`` and ``coalesce``
        self._passes: Passes | None = None  # set before the first forward
        self._fetcher: Fetcher | None = None
        self._on_summed: Callable[[Bucket], None] = lambda bucket: None
        self._on_change: Callable[[], None] = lambda: None
        self._set_mode()
        self._begin_window()

    def _begin_window(self) -> None:
        self._path.begin_window()
        self.late.begin_window()
        self.scaling.end_window()
        self._has_unreduced = False
        self._has_passed = False  # a backward that reduces has ended, or everything was finished
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
        return self.scaling.window_factor is not None

    @property
    def _reduces_this_backward(self) -> bool:
        return not self._n_postponing and (self._shards_gradients or self._is_boundary)

    @property
    def _reduces_each_pass(self) -> bool:
        """Whether each reduced pass is reduced at its own end, before later passes of its window."""
        return self._shards_gradients or bool(self.shown)

    def _set_mode(self) -> None:
        """Updates the way of handling gradients. Called whenever it may have changed."""
        reduces = self._reduces_this_backward
        self.intake.set_mode(
            is_in_pass=self.is_in_backward, will_reduce=reduces, launches=reduces and self._fetcher is None
        )

    def begin_backward(
        self, *, is_boundary: bool, factor: float, divisor: int = 1, starts: Sequence[Any] | None = None
    ) -> None:
        """Called when a backward pass starts. ``factor`` (1 / accumulation steps) multiplies the pass's gradients.
        ``divisor``: the passes that count in the mean, if sums are taken in a tree. ``starts``: the first nodes of the
        graph; None if the pass is running already."""
        if self.is_in_backward:
            raise BackwardError(
                "a backward pass began while another had not ended",
                where="engine.backward",
                fix="one backward pass at a time runs through an engine; after an exception in backward call engine.zero_grad()",
            )
        self._read_edits("loss.backward" if starts is None else "engine.backward")
        self.shown.hide()
        self._on_change()
        self._is_boundary, self._divisor = is_boundary, divisor
        self.facts = None
        self.scaling.begin_pass(factor)
        self.is_in_backward = True
        self._set_mode()
        # Clear the marks of earlier micro-batches, unless the buckets of this window have been launched already.
        if self._reduces_each_pass or not self._has_passed:
            self._path.reset()
        if self._fetcher is not None:
            self._fetcher.driver.begin_backward(starts)

    def end_backward(self) -> None:
        """Called when a backward pass has ended: reduces the buckets that are due."""
        with self._lock:
            self.intake.end_pass()
            if self._fetcher is not None:
                self._fetcher.driver.end_backward()
            self._leave_pass()
            self.is_complete = self._is_boundary
            if self._reduces_this_backward:
                self._launch(_C.GradientPath.ALL if self._reduces_each_pass else _C.GradientPath.PROMPT)
                self._has_passed = True
                self._has_unreduced = False
                if self._reduces_each_pass:
                    self.flight.wait()  # gives the staging buffers back
                if self._shards_gradients:
                    for bucket in self.buckets:
                        bucket.end_pass()
                elif self.shown and self.late.may_come:
                    self._reduce_late(self.late.sum_flags())
            else:
                self._has_unreduced = True
            self.shown.show(is_reduced=self._reduces_this_backward)

    def _leave_pass(self) -> None:
        self.is_in_backward = False
        self.scaling.end_pass()
        self._set_mode()

    def _read_edits(self, where: str) -> None:
        """Takes over callers' edits of ``param.grad``. Raises StateError for an edit that cannot count."""
        self.shown.take()
        self._hidden.check(where)

    def take_edits(self) -> None:
        """Takes over callers' edits of ``param.grad`` before a step, and sets ``param.grad`` to None. Call it on all
        ranks alike.
        """
        self._read_edits("engine.step")
        if self.shown:
            self.shown.hide()
            self._on_change()
            self.facts = None

    def _launch(self, due: int) -> None:
        """Starts the reductions that ``due`` (a constant of ``GradientPath``) selects."""
        while (i := self._path.next(due)) >= 0:
            self._start(i)

    def _start(self, i: int) -> None:
        self.flight.make_room()
        bucket = self.buckets[i]
        self.flight.add(bucket.reduce().then(lambda: self._note_sums(bucket)))

    def _note_sums(self, bucket: Bucket) -> None:
        if self._is_boundary:
            self._settle(bucket)
            if self.is_in_backward:
                self._on_summed(bucket)

    def _settle(self, bucket: Bucket) -> None:
        bucket.settle(1.0 / (self._divisor * self.sums.summing.n_ranks))

    def launch_bucket(self, i: int) -> None:
        """Called when backward has passed all parameters of bucket ``i``: starts the bucket's reduction if it is due.
        Every rank calls it at the same point of the plan."""
        if not self._reduces_this_backward:
            return
        if self.sums.summing.is_in_tree and self.late.may_come:
            # A tree takes the gradients of a grain at once.
            self.late.await_all_of(i, is_complete=self.buckets[i].is_pending and not self._path.missing(i))
        if self._path.pass_turn(i):
            self._start(i)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Postpones reductions until the first backward outside of the context. Within it gradients are collected
        unsharded, at every stage. Raises StateError with ``same_bits``."""
        if self.sums.summing.is_in_tree:
            raise StateError(
                "adds the gradients of several grains on one rank, and same_bits adds them in the order of a tree",
                where="engine.coalesce_grad_reduction",
                fix="leave the context out: with same_bits each pass is reduced by itself",
            )
        self._n_postponing += 1
        self._set_mode()
        try:
            yield
        finally:
            self._n_postponing -= 1
            self._set_mode()

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Reduces once for all backward passes within the context."""
        try:
            with self.no_sync():
                yield
        finally:
            if self._has_unreduced and self._reduces_this_backward:
                self._read_edits("coalesce_grad_reduction")
                self._path.reset()
                self.end_backward()

    def finish(
        self,
        notes: WindowNotes,
        *,
        hash_of_inputs: Callable[[], int] = lambda: 0,
    ) -> WindowFacts:
        """Completes every sum and exchanges the window's facts in one small collective. Afterwards ``sums`` holds the
        results. hash_of_inputs: returns a hash of the window's batches; called if tensor-parallel ranks compare it.

        It may be called again. A further call has an effect only after another backward or an edit of a result.
        """
        self.shown.take()
        if self.facts is not None:
            return self.facts
        if self.is_in_backward:
            raise BackwardError(
                "a backward pass did not end before the step (it raised, or is still running)",
                where="engine.step",
                fix="call engine.zero_grad() after an exception in loss.backward(), then go on with the next batch",
            )
        if self._has_unreduced or not all(bucket.has_result for bucket in self.buckets):
            if self._shards_gradients:
                self._path.reset()
            self._launch(_C.GradientPath.ALL)
            self._has_unreduced = False
        self._has_passed = True
        self.flight.wait()
        for bucket in self.buckets:
            self._settle(bucket)
        found = self._exchange.sum_over_stage(notes, self.late.flags(), hash_of_inputs)
        if self._reduce_late(found.flags):
            found = self._exchange.sum_over_stage(notes, self.late.flags(), hash_of_inputs)
        self.facts = self._exchange.sum_over_stages(found, self.late.unused(found.flags), notes.share)
        self.late.plan(found.flags)
        return self.facts

    @property
    def sizes_of_facts(self) -> tuple[int, int]:
        """``FactsExchange.sizes`` of what ``finish`` exchanges."""
        return self._exchange.sizes(len(self.late.flags()))

    def _reduce_late(self, flags: Sequence[float]) -> bool:
        """Reduces gradients that came after the reduction of their bucket. Returns whether any rank had such gradients.

        flags: the flags of ``late``, summed over the ranks."""
        late = self.late.buckets(flags)
        if late and self.sums.summing.is_in_tree:
            names = self.late.names(flags)
            self.discard()
            raise BackwardError(
                f"gradients of {names} came again after their buckets had been added to the tree of same_bits",
                where="loss.backward",
                fix="use checkpointing with use_reentrant=False: then the gradients of a pass come at once",
            )
        if late:
            self._on_change()
            for i in late:
                bucket = self.buckets[i]
                bucket.reduce().wait()
                # A gradient may be late on some twins only. Then twins have added the same numbers in different orders,
                # and their sums may differ by rounding.
                if bucket.unit.twins.world_size > 1:
                    bucket.unit.twins.broadcast(bucket.result, 0, label="late gradients")
            self._path.take_late()
        return bool(late)

    def note_edit(self, slot: Slot) -> None:
        """Called on all ranks alike when a caller has written to a parameter's finished result. The parameter then
        counts as used, and the next ``finish`` computes the facts anew."""
        self._on_change()
        self._path.see(slot.tracker_index)
        self.facts = None

    def next_window(self) -> None:
        """Begins the next window. Called after the optimizer has read the results."""
        self.shown.hide()
        self._on_change()
        self._begin_window()

    def discard(self) -> None:
        """Drops all gradients of this window. It also works after a backward pass that raised and left the window
        incomplete."""
        if self._fetcher is not None and self._fetcher.phase.is_in_backward:
            self._fetcher.driver.abort()
        self.flight.drop()
        self._leave_pass()
        self._on_change()
        self.shown.hide()
        self.intake.clear()
        self._begin_window()

    def drop(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Drops the collected gradients of ``params`` in this window. Call it between two passes and on all ranks
        alike. It leaves out parameters whose gradients are shown: callers drop those in ``param.grad``."""
        if self.is_in_backward or not self.has_window:
            return
        found = map(self.slots.find, params)
        slots = [slot for slot in found if slot is not None and slot not in self.shown]
        for slot in slots:
            self.buckets[self.slots.bucket_of(slot)].drop(slot)
            self._path.forget(slot.tracker_index)
        if slots and not self.shown and not any(self._path.seen()):
            self.discard()
        elif slots:
            self._on_change()
            self.facts = None

    def close(self) -> None:
        """Removes the hooks and frees the buffers."""
        self._on_change()
        self.shown.hide()
        self.scaling.close()
        self.intake.close()
        self.flight.clear()
        self.buckets.clear()
        self.sums.clear()
        self.slots.clear()
