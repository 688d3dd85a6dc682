"""The optimizer over shards: norm, clip, skip, update, and the weights back to every rank.

It stands in front of a plain ``torch.optim.Optimizer`` (the *base*), whose groups it points at this rank's slices of the master
weights. A fused base of ours does unscale, clip, decay, moments, update and 16-bit copy in one pass; any other base gets a scaled fp32 gradient.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives, Work
from deepspeed_c.errors import AioError, LossScaleError, NonFiniteLossError, OffloadError, OptimizerError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.optim import Call, FusedOptimizer
from deepspeed_c.ops.q8 import BLOCK_ELEMS, SCALE_SUFFIX, scale_name
from deepspeed_c.zero.ahead import StepAhead
from deepspeed_c.zero.bucket import Bucket
from deepspeed_c.zero.entries import Entry, point_at_shards
from deepspeed_c.zero.fetch import Fetcher
from deepspeed_c.zero.pieces import Pieces
from deepspeed_c.zero.reducer import GradientReducer, WindowFacts
from deepspeed_c.zero.store import StateStore, Tagged
from deepspeed_c.zero.unit import Slot, Unit

__all__ = ["DeepSpeedOptimizer", "ZeroOptimizer", "send_masters"]


class DeepSpeedOptimizer:
    """What every optimizer that an engine returns is an instance of."""


def _masters(unit: Unit, bucket: int) -> list[Tagged]:
    if unit.master_is_param:
        return []
    return [Tagged(unit.master[bucket], f"masters of {unit.label(bucket)}", unit.piece_elems(bucket))]


def send_masters(units: Iterable[Unit], store: StateStore) -> None:
    """Moves the masters of new units to where they live; no optimizer has looked at them yet."""
    for unit in units:
        if unit.placement.swaps_states:
            for bucket in range(unit.n_buckets):
                store.send(_masters(unit, bucket))
    store.wait()


class ZeroOptimizer(DeepSpeedOptimizer):
    """A base optimizer over the shards of ``units``.

    ``clip`` is the limit of the global gradient norm (0: none), ``checks_overflow`` whether a step with non-finite gradients is skipped,
    ``scaler`` the loss scale of fp16 training. With ``store`` masters and states live there, and are in memory within ``resident`` only. With ``steps_ahead`` (which
    wants an elementwise fused base, and no store) masters in host memory are updated while backward runs: what they hold between it and the step is for ``resident`` to say.
    With ``allow_untested`` an optimizer class that is not known to be elementwise is applied to slices.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        units: list[Unit],
        reducer: GradientReducer,
        comm: Collectives,
        *,
        clip: float = 0.0,
        checks_overflow: bool = True,
        scaler: _C.LossScaler | None = None,
        uses_all_gather: bool = True,
        allow_untested: bool = False,
        ignores_unused: bool = True,
        fetcher: Fetcher | None = None,
        store: StateStore | None = None,
        reads_ahead: bool = True,
        steps_ahead: bool = False,
    ) -> None:
        self.store, self._reads_ahead = store, reads_ahead
        self._resident: set[tuple[Unit, int]] = set()  # buckets that are in memory now
        self.broken = ""
        """Why the states are not to be trusted: a step that failed in its middle. A checkpoint mends it."""
        self._ignores_unused = ignores_unused
        self.fetcher = fetcher
        self.optimizer, self.units, self.reducer, self.comm = base, units, reducer, comm
        self.clip, self.checks_overflow, self.scaler = float(clip), checks_overflow, scaler
        self._uses_all_gather = uses_all_gather
        self.is_sharded = reducer.sharding.optimizer and comm.world_size > 1
        self.overflow = False
        self._norm: float | None = None
        self._has_bad_loss: torch.Tensor | bool = False
        # Whether this rank has been asked to end; what ranks agree on with the other facts of a step stands in `is_stopping`.
        self.wants_stop: Callable[[], bool] = lambda: False
        self.is_stopping = False
        entries = point_at_shards(base, units, is_sharded=self.is_sharded, allow_untested=allow_untested)
        self.pieces = Pieces(base, entries)
        # Forward order of use: what the next forward needs first is updated and gathered first.
        self._order = [(b.unit, b.index) for b in reversed(reducer.buckets)]
        self._ahead: StepAhead | None = None
        if steps_ahead:
            self._ahead = StepAhead(
                base,
                lambda unit, bucket: [tagged.tensor for tagged in self._stored(unit, bucket)],
                self._update_masters,
            )
            reducer.on_summed, reducer.on_change = self._step_ahead, self._ahead.take_back
        if store is not None or steps_ahead:
            for unit in units:
                unit.resident = partial(self.resident, unit)
        if store is not None:
            for unit, bucket in (key for key in self._order if self._is_stored(key[0])):
                self._make_stored(unit, bucket)
                store.send(self._stored(unit, bucket))
                self._point_entries(unit, bucket)
            store.wait()

    # -- states that live elsewhere ---------------------------------------------------------------------------------

    def _is_stored(self, unit: Unit) -> bool:
        return self.store is not None and unit.placement.swaps_states

    def _stored(self, unit: Unit, bucket: int) -> list[Tagged]:
        """The tensors of a bucket that live in the store: its masters, where they are no parameters, and what the base keeps for them."""
        found = _masters(unit, bucket)
        for entry in self.pieces.entries_of(unit, bucket):
            for key, value in self.optimizer.state.get(entry.param, {}).items():
                if torch.is_tensor(value) and value.dim() > 0:
                    found.append(self._tagged(entry, key, value))
        return found

    def _tagged(self, entry: Entry, key: str, value: torch.Tensor) -> Tagged:
        what = entry.unit.label(entry.bucket) if entry.fragment is None else entry.fragment.slot.name
        return Tagged(value, f"{key} of {what}", self._piece_of(entry, key))

    def _piece_of(self, entry: Entry, key: str) -> int:
        elems = entry.unit.piece_elems(entry.bucket)
        return elems // BLOCK_ELEMS if self.pieces.is_quantized and key.endswith(SCALE_SUFFIX) else elems

    def _is_streamed(self, unit: Unit, bucket: int) -> bool:
        """Whether a step takes a bucket piece by piece, so that all of it is never in memory."""
        entries = self.pieces.entries_of(unit, bucket)
        return (
            self._is_stored(unit)
            and unit.piece_elems(bucket) > 0
            and self.optimizer.is_elementwise
            and len(entries) == 1
            and entries[0].fragment is None
            and not (unit.master_is_param and not self.optimizer.names_of_states(unit.group))  # nothing is away
        )

    def _make_stored(self, unit: Unit, bucket: int) -> None:
        """Makes the states of a bucket where they do not exist yet: left to the first step, all buckets' would be made at once."""
        for entry in self.pieces.entries_of(unit, bucket):
            state = self.optimizer.state[entry.param]
            state.setdefault("step", torch.tensor(0.0))
            for name, (dtype, numel) in self.optimizer.layout_of_state(unit.group, entry.param).items():
                if name not in state:
                    shape = entry.param.shape if numel == entry.param.numel() else torch.Size([numel])
                    what = f"{name} of {unit.label(bucket)}"
                    state[name] = self.store.new_zeros(shape, dtype, what, self._piece_of(entry, name))

    def _point_entries(self, unit: Unit, bucket: int) -> None:
        """The base's parameters look at the masters wherever those are now."""
        if not unit.master_is_param:
            for entry in self.pieces.entries_of(unit, bucket):
                entry.param.data = entry.part_of(unit.master)

    @contextmanager
    def resident(
        self, unit: Unit, bucket: int, *, reads: bool = True, writes: bool = True, ahead: tuple[Unit, int] | None = None
    ) -> Iterator[None]:
        """Within it a bucket's masters and states are in memory; may be nested. ``ahead`` is read meanwhile; without ``writes`` changes are lost; without ``reads``
        they hold anything, to be overwritten."""
        key = unit, bucket
        self.settle()
        if not self._is_stored(unit) or key in self._resident:
            yield
            return
        if ahead is not None and self._reads_ahead:
            # Asked for before this one is waited for: at no moment has the device nothing to read.
            self.store.prefetch(self._stored(*ahead))
        self.store.bring(self._stored(*key), reads=reads)
        self._point_entries(*key)
        self._resident.add(key)
        try:
            yield
        finally:
            self._resident.remove(key)
            stored = self._stored(*key)
            if not writes:
                self.store.let_go(stored)
            self.store.send(stored)  # what is new, where nothing else was to be written
            self._point_entries(*key)

    def _visit(self, keys: Sequence[tuple[Unit, int]]) -> Iterator[tuple[Unit, int]]:
        """Each bucket in turn, resident, with the next one that is stored on its way; but one that is streamed as it is."""
        stored = deque(key for key in keys if self._is_stored(key[0]) and not self._is_streamed(*key))
        for key in keys:
            if self._is_streamed(*key):
                yield key
                continue
            if stored and stored[0] == key:
                stored.popleft()
            with self.resident(*key, ahead=stored[0] if stored else None):
                yield key

    # -- one step ---------------------------------------------------------------------------------------------------

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remembers whether a loss of this window was inf or NaN; waits for no device."""
        bad = ~torch.isfinite(loss.detach()).all()
        self._has_bad_loss = bad if self._has_bad_loss is False else self._has_bad_loss | bad

    def forget_losses(self) -> None:
        self._has_bad_loss = False

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    cur_scale = loss_scale

    @property
    def gradient_factor(self) -> float:
        """Stored sums times this are the averaged, unscaled gradients."""
        factor = 1.0 if self.reducer.factor is None else self.reducer.factor
        return self.reducer.post_factor * factor / self.loss_scale

    def complete_gradients(self) -> WindowFacts:
        """Finishes the window's reductions, once; gradients may then be read and edited until ``step``."""
        return self.reducer.finish(has_bad_loss=bool(self._has_bad_loss), wants_stop=self.wants_stop())

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights from the window's gradients, or skips and leaves every bit of state as it was.

        After it ``overflow`` says whether the step was skipped. Raises NonFiniteLossError where a loss was inf or NaN on any rank, and LossScaleError where the
        loss scale cannot fall further; both on all ranks alike, with the weights, moments and masters unchanged and the window dropped.
        """
        if closure is not None:
            raise OptimizerError(
                "closures cannot be re-evaluated over sharded gradients", where="step", fix="call step()"
            )
        if self.broken:
            raise StateError(
                f"an earlier step failed in its middle: {self.broken}",
                where="engine.step",
                fix="load a checkpoint; masters and moments of some buckets have been updated and others not",
            )
        self.keep_edits()
        self._read_first()
        facts = self.complete_gradients()
        post = self.gradient_factor
        self.is_stopping = facts.n_stops > 0
        self.overflow = facts.n_nonfinite > 0 and self.checks_overflow
        self._norm = math.inf if facts.n_nonfinite else facts.norm * post
        try:
            if facts.n_bad_losses:
                self.overflow = True
                raise self._bad_loss_error(facts)
            if self.overflow:
                self._report_overflow(facts)
            else:
                if facts.unused and not self._ignores_unused:
                    self.overflow = True
                    raise OptimizerError(
                        f"{len(facts.unused)} parameters got no gradient on any rank, the first is {facts.unused[0].name}",
                        where="engine.step",
                        fix='freeze them, or set "zero_optimization.ignore_unused_parameters": true',
                    )
                coefficient = min(1.0, self.clip / (self._norm + 1e-6)) if self.clip > 0.0 else 1.0
                try:
                    self._update(post * coefficient, facts.unused, self._kept_ahead(post * coefficient, facts))
                except (OffloadError, AioError) as error:
                    self.broken = error.what
                    raise
        finally:
            self._drop_window()
        if self.scaler is not None and self.scaler.update(self.overflow):
            raise LossScaleError(
                f"gradients overflow at the lowest loss scale ({self.scaler.scale:g})",
                where=f"step {self.scaler.step}",
                fix='train in bf16, lower the learning rate, or look at the parameter named in the log; "min_loss_scale" is the floor',
            )

    def _read_first(self) -> None:
        """What the update begins with is on its way while the gradients' norm is taken. Where the step is skipped it waits for the next one."""
        if self._reads_ahead:
            for key in itertools.islice((key for key in self._order if self._is_stored(key[0])), 2):
                if self._is_streamed(*key):
                    break
                self.store.prefetch(self._stored(*key))

    def _drop_window(self) -> None:
        self.forget_losses()
        self.reducer.next_window()

    def _bad_loss_error(self, facts: WindowFacts) -> NonFiniteLossError:
        bad = [float(r) for r in self.comm.gather_numbers(int(bool(self._has_bad_loss)))]
        ranks = ", ".join(str(r) for r, is_bad in enumerate(bad) if is_bad)
        return NonFiniteLossError(
            "the loss is inf or NaN; the step was skipped and weights and optimizer state are unchanged",
            where=f"rank {ranks}",
            fix="look at the batch and the forward pass of that rank (torch.autograd.detect_anomaly helps); no loss scale mends this",
        )

    def _report_overflow(self, facts: WindowFacts) -> None:
        found = self.reducer.first_nonfinite()
        if found is not None:
            name, n_inf, n_nan = found
            logger.warning(
                "rank %d: step skipped, the sum of gradients over ranks is not finite: %d elements in all;"
                " the first in this rank's shard is in %s (%d inf, %d NaN)%s",
                self.comm.rank,
                facts.n_nonfinite,
                name,
                n_inf,
                n_nan,
                f"; loss scale {self.loss_scale:g}" if self.scaler is not None else "",
            )

    def _step_ahead(self, bucket: Bucket) -> None:
        """The sums of a bucket are there while backward goes on: its masters are updated now, where they are neither the device's nor what backward reads."""
        unit = bucket.unit
        if not self.pieces.entries_of(unit, bucket.index):  # nothing but padding lies here
            return
        if not unit.master_is_param and unit.master[bucket.index].device.type == "cpu":
            if self._ahead.begins_next:
                self.keep_edits()
            self._ahead.submit(unit, bucket.index, self.gradient_factor)

    def _update_masters(self, unit: Unit, bucket: int, grad_scale: float) -> None:
        params, grads, _ = self._tensors(self.pieces.entries_of(unit, bucket))
        self.optimizer.step_tensors(unit.group, params, grads, [], grad_scale)

    def _kept_ahead(self, grad_scale: float, facts: WindowFacts) -> set[tuple[Unit, int]]:
        """The buckets whose masters have been updated as this step does it; all others are as they were before backward."""
        if self._ahead is None:
            return set()
        # What is not used is not updated, and counts no step.
        self._ahead.is_promising = grad_scale == self.gradient_factor and not facts.unused
        if facts.unused:
            self._ahead.take_back()
        return self._ahead.keep(grad_scale)

    def _update(self, grad_scale: float, unused: list[Slot], done: set[tuple[Unit, int]]) -> None:
        """Updates every parameter that some rank gave a gradient; the others stay as they are, as in plain torch. The masters of ``done`` have been updated."""
        skipped = set(unused)
        for unit, bucket in {(slot.unit, slot.bucket) for slot in unused if slot in slot.unit.fragment_of}:
            with self.resident(unit, bucket):
                self.pieces.split(unit, bucket)
        with torch.no_grad():
            if isinstance(self.optimizer, FusedOptimizer):
                works = self._update_fused(grad_scale, skipped, done)
            else:
                works = self._update_plain(grad_scale, skipped)
        for work in works:
            work.wait()
        if self.fetcher is not None:
            self.fetcher.weights_changed()

    def _used_entries(self, unit: Unit, bucket: int, skipped: set[Slot]) -> list[Entry]:
        entries = self.pieces.entries_of(unit, bucket)
        if not skipped:
            return entries
        return [entry for entry in entries if entry.fragment is None or entry.fragment.slot not in skipped]

    def _update_fused(self, grad_scale: float, skipped: set[Slot], done: set[tuple[Unit, int]]) -> list[Work]:
        base = self.optimizer
        used = {key: self._used_entries(*key, skipped) for key in self._order}
        if not done:
            base.begin_step([entry.param for entries in used.values() for entry in entries] if skipped else None)
        ratios = self._trust_ratios(grad_scale, used) if base.needs_norms else None
        works: list[Work] = []
        for unit, bucket in self._visit(list(used)):
            entries = used[unit, bucket]
            # What is skipped is not written by the update.
            with unit.weights(bucket, reads=bool(skipped), writes=True):
                if (unit, bucket) in done:
                    self._bring_weights(unit, bucket)
                elif self._is_streamed(unit, bucket):
                    self._update_pieces(unit, bucket, entries[0], grad_scale)
                else:
                    self._update_bucket(unit, bucket, entries, grad_scale, ratios)
            works.append(self._gather(unit, bucket))
        return works

    def _update_bucket(
        self,
        unit: Unit,
        bucket: int,
        entries: list[Entry],
        grad_scale: float,
        ratios: Mapping[tuple[Unit, int], torch.Tensor] | None,
    ) -> None:
        """A bucket that is resident, and its weights, within ``unit.weights``."""
        base = self.optimizer
        if isinstance(base, Muon) and base.param_groups[unit.group].get("use_muon"):
            self._update_muon(unit, bucket, entries, grad_scale)
        elif entries:
            params, grads, copies = self._tensors(entries)
            if ratios is not None:
                base.apply(unit.group, params, grads, copies, grad_scale, ratios[unit, bucket])
            else:
                base.step_tensors(unit.group, params, grads, copies, grad_scale)
        if unit.copies_up:
            self._bring_weights(unit, bucket)

    def _update_pieces(self, unit: Unit, bucket: int, entry: Entry, grad_scale: float) -> None:
        """A bucket that is streamed, and its weights, within ``unit.weights``."""
        base, piece = self.optimizer, unit.piece_elems(bucket)
        names = base.names_of_states(unit.group)
        keys = [*names, *map(scale_name, names)] if self.pieces.is_quantized else names
        state = base.state[entry.param]
        stored = _masters(unit, bucket) + [self._tagged(entry, key, state[key]) for key in keys]
        weights, gradients = unit.param_slice(bucket), self.reducer.results[unit][bucket]
        with closing(self.store.stream(stored)) as pieces:
            # Pieces are asked for first: the last ones are written when there are no more.
            for tensors, begin in zip(pieces, range(0, unit.slice_elems[bucket], piece)):
                mine = slice(begin, begin + piece)
                masters, *states = [weights[mine], *tensors] if unit.master_is_param else tensors
                copies = [] if unit.master_is_param or unit.copies_up else [weights[mine]]
                slots = [[tensor] for tensor in states]
                call = Call([masters], [gradients[mine]], slots[: len(names)], copies, slots[len(names) :])
                is_last = mine.stop >= unit.slice_elems[bucket]
                base.step_slice(unit.group, entry.param, call, grad_scale, is_last=is_last)
                if unit.copies_up:
                    weights[mine].copy_(masters)  # waited for: the buffer is used again

    @staticmethod
    def _bring_weights(unit: Unit, bucket: int) -> None:
        """The weights that forward uses, from the masters, within ``unit.weights``: cast to their dtype, or from one memory to the other."""
        if unit.master_is_param:
            return
        if unit.copies_up:
            # What is not in pinned memory is staged before the call returns; a pinned master is not written to before gradients of the new weights have come.
            unit.param_slice(bucket).copy_(unit.master[bucket], non_blocking=unit.placement.states)
        elif unit.slice_elems[bucket]:
            torch.ops.deepspeed_c.flat_cast_(unit.master[bucket], unit.param_slice(bucket))

    def _tensors(self, entries: list[Entry]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """(masters, gradients, 16-bit copies) of entries of one bucket; no copies where the master is the parameter, or where they lie elsewhere."""
        unit, bucket = entries[0].unit, entries[0].bucket
        results = self.reducer.results[unit]
        params = [entry.param for entry in entries]
        grads = [entry.part_of(results) for entry in entries]
        if unit.master_is_param or unit.copies_up:
            return params, grads, []
        slices = {bucket: unit.param_slice(bucket)}
        return params, grads, [entry.part_of(slices) for entry in entries]  # type: ignore[arg-type]

    def _trust_ratios(
        self, grad_scale: float, used: dict[tuple[Unit, int], list[Entry]]
    ) -> dict[tuple[Unit, int], torch.Tensor]:
        """LAMB: norms of whole parameters, whose pieces lie on several ranks, in one small collective."""
        base = self.optimizer
        table = torch.zeros(len(self.reducer.slots), 2, dtype=torch.float64)
        places: dict[tuple[Unit, int], list[int]] = {}
        for unit, bucket in self._visit([key for key, entries in used.items() if entries]):
            entries = used[unit, bucket]
            params, grads, copies = self._tensors(entries)
            at = [entry.fragment.slot.tracker_index for entry in entries]
            table[at] = base.norms(unit.group, params, grads, copies, grad_scale).to(table.device)
            places[unit, bucket] = at
        if self.is_sharded:
            summed = self.comm.sum_numbers(table.view(-1).tolist())
            table = torch.tensor(summed, dtype=torch.float64).view(-1, 2)
        return {key: base.trust_ratios(key[0].group, table[at]).to(key[0].device) for key, at in places.items()}

    def _update_muon(self, unit: Unit, bucket: int, entries: list[Entry], grad_scale: float) -> None:
        """Muon needs whole matrices: momentum runs on the shard, its result is gathered, and each rank
        orthogonalises just the matrices that its shard touches."""
        base: Muon = self.optimizer
        whole = torch.zeros(unit.bucket_numel(bucket), dtype=torch.float32, device=unit.device)
        own = {bucket: unit.own_slice(whole, bucket)}
        if entries:
            params, grads, copies = self._tensors(entries)
            base.momentum_tensors(unit.group, params, grads, [e.part_of(own) for e in entries], grad_scale)
        if self.is_sharded:
            self.comm.all_gather(whole).wait()
        if not entries:  # nothing of the bucket but padding lies here, yet the others wait for this rank's slice
            return
        begin = unit.bucket_begin[bucket]
        updates = []
        for entry in entries:
            fragment = entry.fragment
            matrix = base.orthogonalize(fragment.slot.view(whole, begin), base.param_groups[unit.group]["ns_steps"])
            updates.append(matrix.reshape(-1).narrow(0, fragment.begin, fragment.numel).view(entry.param.shape))
        base.apply_tensors(unit.group, params, updates, copies)

    def _update_plain(self, grad_scale: float, skipped: set[Slot]) -> list[Work]:
        """Any ``torch.optim`` optimizer: scaled gradients in the masters' dtype, its own step, then the 16-bit copies."""
        for unit, bucket in self._order:
            for entry in self._used_entries(unit, bucket, skipped):
                grad = entry.part_of(self.reducer.results[unit]).to(entry.param.dtype)
                if grad_scale != 1.0:
                    torch.ops.deepspeed_c.flat_scale_([grad], grad_scale)
                entry.param.grad = grad
        with torch.enable_grad():
            self.optimizer.step()
        works: list[Work] = []
        for unit, bucket in self._order:
            for entry in self.pieces.entries_of(unit, bucket):
                entry.param.grad = None
            with unit.weights(bucket, reads=False, writes=True):
                self._bring_weights(unit, bucket)
            works.append(self._gather(unit, bucket))
        return works

    def _gather(self, unit: Unit, bucket: int) -> Work:
        if not self.is_sharded or unit.is_sharded:
            return Work.done()
        return self.comm.all_gather(unit.bucket_view(unit.flat_param, bucket), use_broadcast=not self._uses_all_gather)

    # -- between steps ----------------------------------------------------------------------------------------------

    def local_gradient(self, slot: Slot) -> torch.Tensor | None:
        """This rank's piece of the summed gradient as stored (see ``gradient_factor``); None where it owns nothing."""
        fragment = slot.unit.fragment_of.get(slot)
        if fragment is None:
            return None
        return slot.unit.piece(self.reducer.results[slot.unit], fragment)

    @property
    def can_read_gradients(self) -> bool:
        """The window's last backward has ended and its step has not begun."""
        return self.reducer.is_complete and not self.reducer.is_in_backward

    def write_back(self, slot: Slot) -> None:
        """A master was edited: brings the weights that forward uses in line, on every rank (collective when sharded)."""
        unit, bucket = slot.unit, slot.bucket
        with self.resident(unit, bucket, writes=False), unit.weights(bucket, reads=False, writes=True):
            self._bring_weights(unit, bucket)
        self._gather(unit, bucket).wait()
        if unit.is_sharded:
            self.fetcher.weights_changed(self.fetcher.group_at(unit, bucket))

    def settle(self, *, frees_copies: bool = False) -> None:
        """Masters and states are those of the last step, also between a backward pass and the next one, when they may have been updated ahead."""
        if self._ahead is not None:
            self._ahead.take_back()
            if frees_copies:
                self._ahead.free_copies()

    def keep_edits(self, slot: Slot | None = None) -> None:
        """Masters (``slot``: of this parameter only) take over what somebody has written in place to whole weights of which they are copies, as AdaLoRA's masks do: the next
        step would bring the old values back."""
        for unit, slots in [(unit, unit.slots) for unit in self.units] if slot is None else [(slot.unit, [slot])]:
            for bucket, group in itertools.groupby(unit.edited(slots), key=lambda slot: slot.bucket):
                with self.resident(unit, bucket):
                    unit.keep_edits(list(group))

    def note_weights(self) -> None:
        """Masters and weights have been loaded together."""
        for unit in self.units:
            unit.note_weights()

    def refresh_fp32_params(self) -> None:
        """Takes the masters anew from the weights (after ``load_state_dict`` on the module)."""
        for unit in self.units:
            unit.refresh_master()

    @property
    def parameter_offload(self) -> Any:
        """DeepSpeed's name for what hooks the module under stage 3: an object with ``module``, ``forward_hooks``, ``backward_hooks``."""
        if self.fetcher is None or self.fetcher.hooks is None:
            raise AttributeError("parameter_offload exists where parameters are sharded (stage 3)")
        return self.fetcher.hooks

    # -- the torch.optim face ---------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self):
        self.settle()
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, one flat tensor a group (a copy where they lie in several places)."""
        flat: list[torch.Tensor] = []
        for index in range(len(self.param_groups)):
            mine = [unit for unit in self.units if unit.group == index]
            if len(mine) == 1 and mine[0].master_flat is not None:
                flat.append(mine[0].master_flat)
                continue
            parts: list[torch.Tensor] = []
            for unit in mine:
                for bucket in range(unit.n_buckets):
                    with self.resident(unit, bucket, writes=False):
                        parts.append(unit.master[bucket].to(torch.float32, copy=True))
            flat.append(torch.cat(parts) if parts else torch.empty(0))
        return flat

    # DeepSpeed's name for it at stage 3.
    fp32_partitioned_groups_flat = single_partition_of_fp32_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the window's gradients."""
        self.forget_losses()
        self.reducer.discard()

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged, unscaled gradients, before clipping; None before the first step."""
        return self._norm

    def add_param_group(self, group: dict[str, Any]) -> None:
        raise OptimizerError(
            "parameter groups cannot be added once the shards are laid out",
            where="add_param_group",
            fix="give all groups to deepspeed_c.initialize (frozen parameters belong in none)",
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: base optimizer, masters, loss scale. ``load_state_dict`` takes it back on the same world and layout."""
        self._require_in_memory("state_dict")
        self.keep_edits()
        return {
            "base_optimizer_state": self.optimizer.state_dict(),
            "masters": [None if u.master_is_param else torch.cat(u.master) for u in self.units],
            "shard_elems": [u.shard_elems for u in self.units],
            "world_size": self.comm.world_size,
            "loss_scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def _require_in_memory(self, what: str) -> None:
        self.settle()
        if self.store is not None:
            raise StateError(
                "masters and optimizer states live on NVMe, where they have room; a dict of them would be in memory",
                where=f"ZeroOptimizer.{what}",
                fix="use engine.save_checkpoint() and engine.load_checkpoint()",
            )
        held = [unit.master_flat for unit in self.units if unit.master_flat is not None]
        held += [value for state in self.state.values() for value in state.values() if torch.is_tensor(value)]
        if any(tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0 for tensor in held):
            raise StateError(
                "masters or optimizer states have been offloaded",
                where=f"ZeroOptimizer.{what}",
                fix="call engine.reload_states() first",
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_in_memory("load_state_dict")
        mine = [u.shard_elems for u in self.units]
        if state["world_size"] != self.comm.world_size or list(state["shard_elems"]) != mine:
            raise StateError(
                f"the state was saved on {state['world_size']} ranks with shards of {state['shard_elems']} elements;"
                f" here are {self.comm.world_size} ranks with {mine}",
                where="ZeroOptimizer.load_state_dict",
                fix="load it on the arrangement that saved it",
            )
        self.optimizer.load_state_dict(state["base_optimizer_state"])
        with torch.no_grad():
            for unit, master in zip(self.units, state["masters"]):
                if not unit.master_is_param:
                    for bucket, mine in enumerate(unit.master):
                        mine.copy_(unit.shard_slice(master, bucket))
        self.note_weights()
        if self.scaler is not None and state["loss_scaler"] is not None:
            self.scaler.load_state_dict(state["loss_scaler"])

    def take_over(self, other: ZeroOptimizer) -> None:
        """Goes on as ``other``, made for another set of parameters: what callers hold stays the same object."""
        self.__dict__ = {**other.__dict__, "_norm": self._norm, "overflow": self.overflow}

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        if self.store is not None:
            self.store.close()
        self.pieces.clear()
        self._order.clear()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.units = []
