"""The optimizer over shards: norm, clip, skip, update, and the weights back to every rank.

It stands in front of a plain ``torch.optim.Optimizer`` (the *base*), whose groups it points at this rank's slices of
the master weights. A base that updates bucket by bucket (``ops.scope``) does unscale, clip, decay, moments, update and
16-bit copy in one pass; any other gets a scaled fp32 gradient.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import torch

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives, Work
from deepspeed_c.errors import AioError, LossScaleError, NonFiniteLossError, OffloadError, OptimizerError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.ops.optim import Call
from deepspeed_c.ops.scope import Shards, declaration
from deepspeed_c.zero.gradients.bucket import Bucket
from deepspeed_c.zero.gradients.reducer import GradientReducer, WindowFacts
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.states.ahead import StepAhead
from deepspeed_c.zero.states.entries import Entry, point_at_shards
from deepspeed_c.zero.states.home import MakeZeros, Tagged
from deepspeed_c.zero.states.pieces import Pieces
from deepspeed_c.zero.states.update import WholeMatrices, sum_norms
from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["DeepSpeedOptimizer", "StateMover", "ZeroOptimizer"]


class DeepSpeedOptimizer:
    """What every optimizer that an engine returns is an instance of."""


class StateMover(Protocol):
    """Moves all that an engine's units keep out of memory, and back."""

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None: ...
    def reload_states(self, non_blocking: bool) -> None: ...


class ZeroOptimizer(DeepSpeedOptimizer):
    """A base optimizer over the shards of ``units``.

    ``clip`` is the limit of the global gradient norm (0: none), ``checks_overflow`` whether a step with non-finite
    gradients is skipped, ``scaler`` the loss scale of fp16 training. Masters and states live in their unit's home
    (``Unit.states``). With ``steps_ahead`` (which wants an elementwise fused base, and states in memory) masters in
    host memory are updated while backward runs. Who asks for masters, states or the base between it and the step gets
    them as the last step left them: they are given out by ``optimizer``, ``pieces`` and ``Unit.master`` alone, and
    those ``settle`` first. With ``allow_untested`` an optimizer class that is not known to be elementwise is applied
    to slices.
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
        steps_ahead: bool = False,
    ) -> None:
        self._base, self.comm = base, comm
        self.clip, self.checks_overflow, self.scaler = float(clip), checks_overflow, scaler
        self._uses_all_gather, self._allow_untested = uses_all_gather, allow_untested
        self._ignores_unused, self._steps_ahead = ignores_unused, steps_ahead
        self.overflow = False
        self._norm: float | None = None
        self._has_bad_loss: torch.Tensor | bool = False
        # What an engine gives (`lend`): whether this rank has been asked to end, and what a load does to the window.
        self._wants_stop: Callable[[], bool] = lambda: False
        self._begin_window: Callable[[], None] = self.zero_grad
        self.is_stopping = False
        """Whether ranks agreed in the last step that one of them has been asked to end."""
        self._mover: StateMover | None = None
        self._ahead: StepAhead | None = None
        self.lay_out(units, reducer, fetcher)

    def lay_out(self, units: list[Unit], reducer: GradientReducer, fetcher: Fetcher | None) -> None:
        """Stands over the shards of ``units``, in place of those before; of them the base's groups have the
        parameters, and no state.

        What callers hold stays the same object whatever is trained, with the norm and the outcome of the last step."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        base = self._base
        self.units, self.reducer, self.fetcher = units, reducer, fetcher
        self.broken = ""
        """Why the states are not to be trusted: a step that failed in its middle. A checkpoint mends it."""
        self.pieces = Pieces(base, self._point_base(base, units, allow_untested=self._allow_untested), self.settle)
        # Forward order of use: what the next forward needs first is updated and gathered first.
        self._order = [(b.unit, b.index) for b in reversed(reducer.buckets)]
        if self._steps_ahead:
            self._ahead = StepAhead(base, self._updated, self._update_masters)
            reducer.tell(self._step_ahead, self._ahead.take_back)
        for unit in units:
            unit.states.keep(partial(self._stored, unit), partial(self._point_entries, unit), self.settle)
        for unit, bucket in self._order:
            unit.states.move_in(bucket, partial(self._make_states, unit, bucket))
        for unit in units:
            unit.states.wait()

    def _point_base(self, base: torch.optim.Optimizer, units: list[Unit], *, allow_untested: bool) -> list[Entry]:
        return point_at_shards(base, units, allow_untested=allow_untested)

    @property
    def face(self) -> DeepSpeedOptimizer | torch.optim.Optimizer:
        """What ``initialize`` returns as the optimizer."""
        return self

    def lend(self, mover: StateMover, *, wants_stop: Callable[[], bool], begin_window: Callable[[], None]) -> None:
        """Called when an engine is ready: callers get hold of ``face``.

        mover: the engine, which knows of the weights too, moves states out and back. wants_stop: whether this rank has
        been asked to end. begin_window: drops what has gathered, in the engine's counts too."""
        self._mover, self._wants_stop, self._begin_window = mover, wants_stop, begin_window

    def _stored(self, unit: Unit, bucket: int) -> list[Tagged]:
        """The tensors of a bucket that live in the unit's home: its masters, where they are no parameters, and what
        the base keeps for them."""
        found = unit.masters(bucket)
        for entry in self.pieces.entries_of(unit, bucket):
            for key, value in self._base.state.get(entry.param, {}).items():
                if torch.is_tensor(value) and value.dim() > 0:
                    found.append(self._tagged(entry, key, value))
        return found

    def _tagged(self, entry: Entry, key: str, value: torch.Tensor) -> Tagged:
        what = entry.unit.label(entry.bucket) if entry.fragment is None else entry.fragment.slot.name
        return Tagged(value, f"{key} of {what}", self._piece_of(entry, key))

    def _piece_of(self, entry: Entry, key: str) -> int:
        return self.pieces.codec.piece_elems(key, entry.unit.piece_elems(entry.bucket))

    def _is_streamed(self, unit: Unit, bucket: int) -> bool:
        """Whether a step takes a bucket piece by piece, so that all of it is never in memory."""
        entries = self.pieces.entries_of(unit, bucket)
        return (
            unit.piece_elems(bucket) > 0
            and self._base.scope == "element"
            and len(entries) == 1
            and entries[0].fragment is None
            and bool(self._stored(unit, bucket))
        )

    def _make_states(self, unit: Unit, bucket: int, make_zeros: MakeZeros) -> None:
        """Makes the states of a bucket where they do not exist yet: left to the first step, all buckets' would be made
        at once."""
        for entry in self.pieces.entries_of(unit, bucket):
            state = self._base.state[entry.param]
            state.setdefault("step", torch.tensor(0.0))
            for name, (dtype, numel) in self._base.layout_of_state(unit.group, entry.param).items():
                if name not in state:
                    shape = entry.param.shape if numel == entry.param.numel() else torch.Size([numel])
                    what = f"{name} of {unit.label(bucket)}"
                    state[name] = make_zeros(shape, dtype, what, self._piece_of(entry, name))

    def _point_entries(self, unit: Unit, bucket: int) -> None:
        """The base's parameters look at the masters wherever those are now."""
        for entry in self.pieces.entries_of(unit, bucket):
            entry.param.data = entry.part_of(unit.master)

    def _visit(self, keys: Sequence[tuple[Unit, int]]) -> Iterator[tuple[Unit, int]]:
        """Each bucket in turn, open, with the next one that must be read on its way; but one that is streamed as it
        is."""
        read = deque(key for key in keys if key[0].states.needs_open(key[1]) and not self._is_streamed(*key))
        for key in keys:
            unit, bucket = key
            if self._is_streamed(unit, bucket):
                yield key
                continue
            if read and read[0] == key:
                read.popleft()
                for follower, index in itertools.islice(read, 1):
                    # Asked for before this one is waited for: at no moment has the device nothing to read.
                    follower.states.read_ahead(index)
            with unit.states.open(bucket):
                yield key

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
        return self.reducer.finish(has_bad_loss=bool(self._has_bad_loss), wants_stop=self._wants_stop())

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights from the window's gradients, or skips and leaves every bit of state as it was.

        After it ``overflow`` says whether the step was skipped. Raises NonFiniteLossError where a loss was inf or NaN
        on any rank, and LossScaleError where the loss scale cannot fall further; both on all ranks alike, with the
        weights, moments and masters unchanged and the window dropped.
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
        """What the update begins with is on its way while the gradients' norm is taken. Where the step is skipped it
        waits for the next one."""
        read = (key for key in self._order if key[0].states.needs_open(key[1]))
        for unit, bucket in itertools.islice(read, 2):
            if self._is_streamed(unit, bucket):
                break
            unit.states.read_ahead(bucket)

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
        """The sums of a bucket are there while backward goes on: its masters are updated now, where they are neither
        the device's nor what backward reads."""
        unit = bucket.unit
        entries = self.pieces.entries_of(unit, bucket.index)
        if not entries:  # nothing but padding lies here
            return
        if unit.steps_ahead:
            if self._ahead.begins_next:
                self.keep_edits()
            self._ahead.submit(unit, bucket.index, self.gradient_factor)

    def _updated(self, unit: Unit, bucket: int) -> list[torch.Tensor]:
        """What an update ahead changes of a bucket: its masters and states, flat, past the doors that would take it
        back."""
        found: list[torch.Tensor] = []
        for entry in self.pieces.entries_of(unit, bucket):
            state = self._base.state.get(entry.param, {})
            found += [entry.param, *(value for value in state.values() if torch.is_tensor(value) and value.dim() > 0)]
        return [tensor.detach().view(-1) for tensor in found]

    def _update_masters(self, unit: Unit, bucket: int, grad_scale: float) -> None:
        shards = self._shards(unit, self.pieces.entries_of(unit, bucket), grad_scale)
        self._base.update_bucket(shards._replace(copies=[]))

    def _kept_ahead(self, grad_scale: float, facts: WindowFacts) -> set[tuple[Unit, int]]:
        """The buckets whose masters have been updated as this step does it; all others are as they were before
        backward."""
        if self._ahead is None:
            return set()
        # What is not used is not updated, and counts no step.
        self._ahead.expect(grad_scale == self.gradient_factor and not facts.unused)
        if facts.unused:
            self._ahead.take_back()
        return self._ahead.keep(grad_scale)

    def _update(self, grad_scale: float, unused: list[Slot], done: set[tuple[Unit, int]]) -> None:
        """Updates every parameter that some rank gave a gradient; the others stay as they are, as in plain torch. The
        masters of ``done`` have been updated."""
        skipped = set(unused)
        for unit, bucket in {(slot.unit, slot.bucket) for slot in unused if slot in slot.unit.fragment_of}:
            with unit.states.open(bucket):
                self.pieces.split(unit, bucket)
        with torch.no_grad():
            if declaration(self._base).updates_buckets:
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
        base = self._base
        used = {key: self._used_entries(*key, skipped) for key in self._order}
        if not done:
            base.begin_step([entry.param for entries in used.values() for entry in entries] if skipped else None)
        sums = self._sum_norms(grad_scale, used) if base.scope == "norms" else {}
        works: list[Work] = []
        for unit, bucket in self._visit(list(used)):
            entries = used[unit, bucket]
            # What is skipped is not written by the update.
            with unit.weights.open(bucket, reads=bool(skipped)):
                if (unit, bucket) in done:
                    unit.bring_weights(bucket)
                elif self._is_streamed(unit, bucket):
                    self._update_pieces(unit, bucket, entries[0], grad_scale)
                else:
                    self._update_bucket(unit, bucket, entries, grad_scale, sums.get((unit, bucket)))
            works.append(self._gather(unit, bucket))
        return works

    def _update_bucket(
        self, unit: Unit, bucket: int, entries: list[Entry], grad_scale: float, sums: torch.Tensor | None
    ) -> None:
        """A bucket whose states and weights are open."""
        is_gathered = self._base.scope_of_group(unit.group) == "matrix"
        # Where this rank has nothing but padding, the others wait for its slice all the same.
        if entries or is_gathered:
            matrices = WholeMatrices(unit, bucket, entries) if is_gathered else None
            shards = self._shards(unit, entries, grad_scale)
            self._base.update_bucket(shards._replace(sums=sums, matrices=matrices))
        unit.copy_up(bucket)

    def _update_pieces(self, unit: Unit, bucket: int, entry: Entry, grad_scale: float) -> None:
        """A bucket that is streamed, and whose weights are open."""
        base, piece = self._base, unit.piece_elems(bucket)
        names = base.names_of_states(unit.group)
        keys = self.pieces.codec.tensor_names(names)
        state = base.state[entry.param]
        kept, copies = unit.masters(bucket), unit.copies(bucket)
        stored = kept + [self._tagged(entry, key, state[key]) for key in keys]
        weights, gradients = unit.param_slice(bucket), self.reducer.results[unit][bucket]
        with closing(unit.states.stream(stored)) as pieces:
            # Pieces are asked for first: the last ones are written when there are no more.
            for tensors, begin in zip(pieces, range(0, unit.slice_elems[bucket], piece)):
                mine = slice(begin, begin + piece)
                masters, *states = tensors if kept else [weights[mine], *tensors]
                slots, copied = [[tensor] for tensor in states], [copy[mine] for copy in copies]
                call = Call([masters], [gradients[mine]], slots[: len(names)], copied, slots[len(names) :])
                is_last = mine.stop >= unit.slice_elems[bucket]
                base.step_slice(unit.group, entry.param, call, grad_scale, is_last=is_last)
                unit.copy_up_part(bucket, begin, masters)

    def _tensors(self, entries: list[Entry]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """(masters, gradients, 16-bit copies) of entries of one bucket; no copies where the master is the parameter,
        or where they lie elsewhere."""
        unit, bucket = entries[0].unit, entries[0].bucket
        results = self.reducer.results[unit]
        params = [entry.param for entry in entries]
        grads = [entry.part_of(results) for entry in entries]
        copies = [{bucket: copy} for copy in unit.copies(bucket)]
        # type: ignore[arg-type]
        return params, grads, [entry.part_of(of_bucket) for of_bucket in copies for entry in entries]

    def _shards(self, unit: Unit, entries: list[Entry], grad_scale: float) -> Shards:
        return Shards(unit.group, *(self._tensors(entries) if entries else ([], [], [])), grad_scale)

    def _sum_norms(self, grad_scale: float, used: dict[tuple[Unit, int], list[Entry]]) -> dict:
        keys = self._visit([key for key, entries in used.items() if entries])
        buckets = ((key, used[key], self._shards(key[0], used[key], grad_scale)) for key in keys)
        return sum_norms(self._base, buckets, self.units, self.comm)

    def _update_plain(self, grad_scale: float, skipped: set[Slot]) -> list[Work]:
        """Any ``torch.optim`` optimizer: scaled gradients in the masters' dtype, its own step, then the 16-bit
        copies."""
        for unit, bucket in self._order:
            for entry in self._used_entries(unit, bucket, skipped):
                grad = entry.part_of(self.reducer.results[unit]).to(entry.param.dtype)
                if grad_scale != 1.0:
                    torch.ops.deepspeed_c.flat_scale_([grad], grad_scale)
                entry.param.grad = grad
        with torch.enable_grad():
            self._step_base()
        works: list[Work] = []
        for unit, bucket in self._order:
            for entry in self.pieces.entries_of(unit, bucket):
                entry.param.grad = None
            with unit.weights.open(bucket, reads=False):
                unit.bring_weights(bucket)
            works.append(self._gather(unit, bucket))
        return works

    def _step_base(self) -> None:
        self._base.step()

    def _gather(self, unit: Unit, bucket: int) -> Work:
        return unit.gather_weights(bucket, use_broadcast=not self._uses_all_gather)

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
        """A master was edited: brings the weights that forward uses in line, on every rank (collective when
        sharded)."""
        unit, bucket = slot.unit, slot.bucket
        with unit.states.open(bucket, writes=False), unit.weights.open(bucket, reads=False):
            unit.bring_weights(bucket)
        self._gather(unit, bucket).wait()
        gather_unit = None if self.fetcher is None else self.fetcher.group_at(unit, bucket)
        if gather_unit is not None:
            self.fetcher.weights_changed(gather_unit)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The base, as the last step left it."""
        self.settle()
        return self._base

    def settle(self, *, frees_copies: bool = False) -> None:
        """Masters and states are those of the last step, also between a backward pass and the next one, when they may
        have been updated ahead.

        Not for a thread that runs beside training."""
        if self._ahead is not None:
            self._ahead.take_back()
            if frees_copies:
                self._ahead.free_copies()

    def keep_edits(self, slot: Slot | None = None) -> None:
        """Masters (``slot``: of this parameter only) take over what somebody has written in place to whole weights of
        which they are copies, as AdaLoRA's masks do: the next step would bring the old values back."""
        for unit, slots in [(unit, unit.slots) for unit in self.units] if slot is None else [(slot.unit, [slot])]:
            for bucket, group in itertools.groupby(unit.edited(slots), key=lambda slot: slot.bucket):
                with unit.states.open(bucket):
                    unit.keep_edits(list(group))

    def mend(self) -> None:
        """All masters and states have been loaded."""
        self.broken = ""

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
        """DeepSpeed's name for what hooks the module under stage 3: an object with ``module``, ``forward_hooks``,
        ``backward_hooks``."""
        if self.fetcher is None or self.fetcher.hooks is None:
            raise AttributeError("parameter_offload exists where parameters are sharded (stage 3)")
        return self.fetcher.hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's, whose parameters are this rank's masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Each group without its parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self._base.param_groups]

    @property
    def state(self):
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
                    with unit.states.open(bucket, writes=False):
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

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """As the engine's ``offload_states``."""
        self._require_mover().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """As the engine's ``reload_states``."""
        self._require_mover().reload_states(non_blocking)

    def _require_mover(self) -> StateMover:
        if self._mover is None:
            raise StateError(
                "belongs to no engine", where="ZeroOptimizer.offload_states", fix="use an engine's optimizer"
            )
        return self._mover

    def add_param_group(self, group: dict[str, Any]) -> None:
        raise OptimizerError(
            "parameter groups cannot be added once the shards are laid out",
            where="add_param_group",
            fix="give all groups to deepspeed_c.initialize (frozen parameters belong in none)",
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: base optimizer, masters, loss scale. ``load_state_dict`` takes it back on the same world
        and layout.

        The weights that forward uses are the module's (``engine.module_state_dict``)."""
        self._require_in_memory("state_dict")
        self.keep_edits()
        return {
            "base_optimizer_state": self.optimizer.state_dict(),
            "masters": [unit.copy_of_masters() for unit in self.units],
            "shard_elems": [u.shard_elems for u in self.units],
            "world_size": self.comm.world_size,
            "loss_scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def _require_in_memory(self, what: str) -> None:
        if any(unit.states.has_slices for unit in self.units):
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
        """Takes back what ``state_dict`` gave. A window begins: gradients were those of other masters, and had another
        loss scale.

        Raises StateError, nothing being changed, where it was saved on another arrangement."""
        self._require_in_memory("load_state_dict")
        mine = [u.shard_elems for u in self.units]
        if state["world_size"] != self.comm.world_size or list(state["shard_elems"]) != mine:
            raise StateError(
                f"the state was saved on {state['world_size']} ranks with shards of {state['shard_elems']} elements;"
                f" here are {self.comm.world_size} ranks with {mine}",
                where="ZeroOptimizer.load_state_dict",
                fix="load it on the arrangement that saved it",
            )
        self._begin_window()
        self.optimizer.load_state_dict(state["base_optimizer_state"])
        with torch.no_grad():
            for unit, master in zip(self.units, state["masters"]):
                unit.put_masters(master)
        self.note_weights()
        if self.scaler is not None and state["loss_scaler"] is not None:
            self.scaler.load_state_dict(state["loss_scaler"])

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        for unit in self.units:
            unit.states.end()
        self.pieces.clear()
        self._order.clear()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.units = []
