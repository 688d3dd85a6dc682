"""The optimizer over shards, which ``initialize`` returns. It decides from the gradient norm whether to clip, skip or
update.

It stands in front of a plain ``torch.optim.Optimizer`` (the *base*). The base's groups have this rank's slices of the
master weights as their parameters. ``update.py`` does the update, ``stored.py`` knows the tensors in the units' homes,
``ahead.py`` updates before the step, and ``skips.py`` explains skipped steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.zero import Zero
from deepspeed_c.errors import AioError, OffloadError, OptimizerError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.bucket import Bucket
from deepspeed_c.zero.gradients.facts import StepRequests, WindowFacts, WindowNotes
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.states.ahead import StepAhead
from deepspeed_c.zero.states.attributes import ATTRIBUTES
from deepspeed_c.zero.states.entries import Entry, point_at_shards
from deepspeed_c.zero.states.lent import LentMethods
from deepspeed_c.zero.states.pieces import Pieces
from deepspeed_c.zero.states.skips import (
    WindowLosses,
    broken_error,
    lowest_scale_error,
    unused_error,
    warn_of_overflow,
)
from deepspeed_c.zero.states.state_dict import check_fits, fp32_masters, put_shard, require_in_memory, shard_dict
from deepspeed_c.zero.states.stored import StoredBuckets
from deepspeed_c.zero.states.update import Updates
from deepspeed_c.zero.states.whole import matrices_in_step
from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["DeepSpeedOptimizer", "StateMover", "StepOptions", "ZeroOptimizer"]


class DeepSpeedOptimizer:
    """The base class of every optimizer that an engine returns."""


class StateMover(Protocol):
    """Moves the weights, masters and states of an engine's units out of memory, and back."""

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None: ...
    def reload_states(self, non_blocking: bool) -> None: ...
    @property
    def kinds_away(self) -> set[Any]: ...


class StepOptions(NamedTuple):
    """The configuration's options for an optimizer step."""

    clip: float = 0.0
    """The limit of the global gradient norm; 0: none."""
    checks_overflow: bool = True
    """Whether gradients that are not finite make the optimizer skip the step."""
    uses_all_gather: bool = True
    """Whether updated weights are gathered by all-gather; otherwise each rank broadcasts its own slice."""
    allow_untested: bool = False
    """Whether the base may get slices although its class is not known to be elementwise."""
    ignores_unused: bool = True
    """Whether a parameter that no rank has used is allowed; otherwise it is an error."""
    section: Zero = Zero()
    """The section ``zero_optimization``. Callers read its values as attributes of the optimizer."""
    steps_ahead: bool = False
    """Whether masters in host memory are updated while backward runs. This needs an elementwise, fused base, and states
    in memory."""


class ZeroOptimizer(DeepSpeedOptimizer):
    """A base optimizer over the shards of ``units``, whose masters and states live in the units' homes.

    scaler: the loss scale of fp16 training.

    Callers do not see an update ahead before the step. They get the base, states and masters only from ``optimizer``,
    ``pieces`` and ``Unit.master``, and these undo such an update first (``settle``).
    """

    _attributes = ATTRIBUTES

    def __init__(
        self,
        base: torch.optim.Optimizer,
        units: list[Unit],
        reducer: GradientReducer,
        comm: Collectives,
        options: StepOptions,
        *,
        scaler: _C.LossScaler | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self._base, self.comm, self._options = base, comm, options
        self._given = [list(group["params"]) for group in base.param_groups]
        self.clip, self.checks_overflow, self.scaler = float(options.clip), options.checks_overflow, scaler
        self.overflow = False
        self._norm: float | None = None
        self._is_read_noted = False  # whether a warning has said that param.grad shows no gradient
        self.last_facts: WindowFacts | None = None
        """The facts of the last window for which a step was made."""
        self._losses = WindowLosses()
        # Functions of the engine (`bind_engine`). The first returns the requests of this rank at the end of a step. The
        # second begins a window after a load.
        self._requests: Callable[[], StepRequests] = StepRequests
        self._begin_window: Callable[[], None] = self.zero_grad
        self._hash_of_inputs: Callable[[], int] = lambda: 0
        self._n_tokens: Callable[[], int] = lambda: 0
        self._measure: Callable[[str], AbstractContextManager[None]] = lambda part: nullcontext()
        self._lent: LentMethods | None = None
        self._has_told_who_steps = False
        self.agreed = StepRequests()
        """The requests of all ranks in the last step."""
        self._mover: StateMover | None = None
        self._ahead: StepAhead | None = None
        self.lay_out(units, reducer, fetcher)

    def lay_out(self, units: list[Unit], reducer: GradientReducer, fetcher: Fetcher | None) -> None:
        """Takes over the shards of ``units`` in place of earlier units. Call it when the base's groups hold the units'
        parameters and the base has no state.

        Callers keep the same optimizer object for other parameters. It remembers the norm and the outcome of the last
        step."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        base = self._base
        self.units, self.reducer, self.fetcher = units, reducer, fetcher
        self.broken = ""
        """The reason why the states are broken: a step failed halfway. "" if they are not. Loading a checkpoint mends
        them."""
        self.pieces = Pieces(
            base, self._point_base(base, units, allow_untested=self._options.allow_untested), self.settle
        )
        # Buckets in the order in which forward uses them, so that the first weights of the next forward are updated and
        # gathered first.
        order = [(b.unit, b.index) for b in reversed(reducer.buckets)]
        self._order = matrices_in_step(order, base, units)
        self._stored = StoredBuckets(base, self.pieces, units, order=self._order, settle=self.settle)
        self._updates = Updates(
            base,
            reducer.sums,
            self.comm,
            self.pieces,
            self._stored,
            fetcher,
            order=self._order,
            step_base=self._step_base,
            use_broadcast=not self._options.uses_all_gather,
        )
        if self._options.steps_ahead:
            self._ahead = StepAhead(base, self._updates.changed, self._updates.update_masters, self.keep_edits)
            reducer.set_callbacks(self._step_ahead, self._ahead.take_back)

    def _point_base(self, base: torch.optim.Optimizer, units: list[Unit], *, allow_untested: bool) -> list[Entry]:
        return point_at_shards(base, units, allow_untested=allow_untested)

    @property
    def face(self) -> DeepSpeedOptimizer | torch.optim.Optimizer:
        """The optimizer that ``initialize`` returns."""
        return self

    def bind_engine(
        self,
        mover: StateMover,
        *,
        requests: Callable[[], StepRequests],
        begin_window: Callable[[], None],
        hash_of_inputs: Callable[[], int],
        n_tokens: Callable[[], int],
        measure: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Called by the engine when it is ready and about to give ``face`` to callers.

        mover: moves states and weights out of memory and back (the engine). requests: returns this rank's requests at
        the end of a step. begin_window: drops collected gradients, and resets the engine's counts of the window.
        hash_of_inputs: returns a hash of the window's batches. n_tokens: returns the number of tokens in the batches.
        measure: measure(part) returns a context, whose time counts for that part of the step."""
        self._mover, self._requests, self._begin_window = mover, requests, begin_window
        self._hash_of_inputs, self._n_tokens, self._measure = hash_of_inputs, n_tokens, measure
        self._lent = LentMethods(self._base, self._methods_for_caller())

    def _methods_for_caller(self) -> dict[str, Callable[..., Any]]:
        """Replacements of methods of the base, for callers that hold the base itself."""
        return {"step": self._say_who_steps, "zero_grad": self.zero_grad}

    def _say_who_steps(self, closure: Callable[[], Any] | None = None) -> None:
        if not self._has_told_who_steps:
            self._has_told_who_steps = True
            logger.warning(
                "step() of the %s that was given to initialize does nothing: its parameters are shards now, and"
                " engine.step() updates them",
                type(self._base).__name__,
            )

    def note_loss(self, loss: torch.Tensor, share: float) -> None:
        """Remembers a loss of this window; ``share`` is its weight in the window's mean. Does not wait for a device."""
        self._losses.note(loss, share)

    def forget_losses(self) -> None:
        self._losses.forget()

    @property
    def slots(self) -> list[Slot]:
        """The places of all parameters that are trained."""
        return self.reducer.slots

    @property
    def has_window(self) -> bool:
        """Whether gradients have been collected since the last step."""
        return self.reducer.has_window

    def sums_of(self, unit: Unit) -> list[torch.Tensor]:
        """This rank's sums of the gradients of ``unit``, one tensor per bucket; empty if the unit has no gradients."""
        return self.reducer.sums.results.get(unit, [])

    def drop_spare_buffers(self) -> None:
        """Frees gradient buffers that are not in use. The next backward makes them again."""
        self.reducer.sums.pools.staging.clear()
        self.comm.scratch.clear()

    def release(self) -> None:
        """Removes its hooks from the parameters. Afterwards ``lay_out`` may be called with other parameters."""
        self.reducer.close()

    def saved_options(self) -> dict[str, Any]:
        """The optimizer's entries in a checkpoint apart from states: the base's class, the options of its groups, and
        the loss scale."""
        saved: dict[str, Any] = {"optimizer": type(self.optimizer).__name__, "groups": self.hyper_parameters}
        if self.scaler is not None:
            saved["loss_scaler"] = self.scaler.state_dict()
        return saved

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    cur_scale = loss_scale

    @property
    def gradient_factor(self) -> float:
        """The factor that turns stored sums into averaged, unscaled gradients."""
        factor = self.reducer.scaling.window_factor
        return self.reducer.sums.summing.step_factor * (1.0 if factor is None else factor) / self.loss_scale

    def complete_gradients(self) -> WindowFacts:
        """Finishes the window's reductions; further calls do nothing. Afterwards gradients may be read and edited until
        ``step``."""
        losses = self._losses
        notes = WindowNotes(losses.has_bad, self._requests(), losses.terms, losses.share, self._n_tokens())
        return self.reducer.finish(notes, hash_of_inputs=self._hash_of_inputs)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights from the window's gradients, or skips the update and leaves every bit of state as it was.

        Afterwards ``overflow`` says whether the update was skipped. Raises NonFiniteLossError if a loss was inf or NaN
        on any rank, and LossScaleError if the loss scale cannot fall further. Both errors are raised on all ranks
        alike. In both cases weights, moments and masters are unchanged, and the window is dropped.
        """
        if closure is not None:
            raise OptimizerError(
                "closures cannot be re-evaluated over sharded gradients", where="step", fix="call step()"
            )
        if self.broken:
            raise broken_error(self.broken)
        self.keep_edits()
        self.reducer.take_edits()
        self._stored.read_first()
        with self._measure("norm"):
            facts = self.last_facts = self.complete_gradients()
        post = self.gradient_factor
        self.agreed = facts.requests
        self.overflow = facts.n_nonfinite > 0 and self.checks_overflow
        self._norm = math.inf if facts.n_nonfinite else facts.norm * post
        try:
            if facts.n_bad_losses:
                self.overflow = True
                raise self._losses.error(self.comm)
            if self.overflow:
                warn_of_overflow(self.reducer.sums, self.comm.rank, facts.n_nonfinite, self.scaler)
            else:
                if facts.unused and not self._options.ignores_unused:
                    self.overflow = True
                    raise unused_error(facts.unused)
                coefficient = min(1.0, self.clip / (self._norm + 1e-6)) if self.clip > 0.0 else 1.0
                try:
                    with self._measure("update"):
                        done = self._kept_ahead(post * coefficient, facts)
                        self._updates.run(post * coefficient, facts.unused, done)
                except (OffloadError, AioError) as error:
                    self.broken = error.what
                    raise
        finally:
            self._drop_window()
        if self.scaler is not None and self.scaler.update(self.overflow):
            raise lowest_scale_error(self.scaler)

    def _drop_window(self) -> None:
        self.forget_losses()
        self.reducer.next_window()

    def _step_ahead(self, bucket: Bucket) -> None:
        """Called while backward runs, when the sums of a bucket are complete: its masters may be updated now."""
        unit, index = bucket.unit, bucket.index
        # A bucket without entries holds only padding on this rank.
        if unit.steps_ahead and self.pieces.entries_of(unit, index):
            self._ahead.submit(unit, index, self.gradient_factor)

    def _kept_ahead(self, grad_scale: float, facts: WindowFacts) -> set[tuple[Unit, int]]:
        """The buckets whose masters have been updated ahead, exactly as this step would do it. The masters of all other
        buckets are as they were before backward."""
        if self._ahead is None:
            return set()
        # The step leaves an unused parameter and its step count unchanged, but an update ahead has changed both.
        self._ahead.expect(grad_scale == self.gradient_factor and not facts.unused)
        if facts.unused:
            self._ahead.take_back()
        return self._ahead.keep(grad_scale)

    def _step_base(self) -> None:
        type(self._base).step(self._base)

    def local_gradient(self, slot: Slot) -> torch.Tensor | None:
        """This rank's piece of the summed gradient as stored (see ``gradient_factor``); None if the rank owns nothing
        of the parameter."""
        fragment = slot.unit.fragment_of.get(slot)
        if fragment is None:
            return None
        return slot.unit.piece(self.reducer.sums.results[slot.unit], fragment)

    @property
    def can_read_gradients(self) -> bool:
        """Whether the window's last backward has ended and its step has not begun."""
        return self.reducer.is_complete and not self.reducer.is_in_backward

    def begin_writes(self) -> None:
        """Call it before editing a master, which may be the weight itself. Collective in the same cases as
        ``Fetcher.begin_writes``."""
        self._updates.begin_writes()

    def write_back(self, slot: Slot) -> None:
        """Copies an edited master to the weights that forward uses, on every rank. Collective if masters are sharded."""
        self._updates.write_back(slot.unit, slot.bucket)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The base optimizer in the state after the last step."""
        self.settle()
        return self._base

    def settle(self, *, frees_copies: bool = False) -> None:
        """Undoes updates ahead of the step, so that masters and states are as the last step left them.

        Do not call it from a thread that runs beside training. frees_copies: also frees the copies that undoing needs.
        """
        if self._ahead is not None:
            self._ahead.take_back()
            if frees_copies:
                self._ahead.free_copies()

    def keep_edits(self, slot: Slot | None = None) -> None:
        """Copies edits in place of whole weights to the masters (``slot``: of this parameter only). AdaLoRA's masks are
        such edits. Without the copy the next step would restore the old values."""
        if slot is not None:
            slot.unit.keep_edits([slot])
        else:
            for unit in self.units:
                unit.keep_edits(unit.slots)

    def mend(self) -> None:
        """Called when all masters and states have been loaded: they are no longer broken."""
        self.broken = ""

    def note_weights(self) -> None:
        """Called when masters and weights have been loaded together: writes to the weights do not count as edits."""
        for unit in self.units:
            unit.note_weights()

    def refresh_fp32_params(self) -> None:
        """Overwrites the masters with the weights (after ``load_state_dict`` on the module)."""
        for unit in self.units:
            unit.refresh_master()

    @property
    def parameter_offload(self) -> Any:
        """The hooks of the module at stage 3, under DeepSpeed's name: an object with ``module``, ``forward_hooks`` and
        ``backward_hooks``."""
        if self.fetcher is None or self.fetcher.hooks is None:
            raise AttributeError("parameter_offload exists where parameters are sharded (stage 3)")
        return self.fetcher.hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's groups. Their parameters are this rank's masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def hyper_parameters(self) -> list[dict[str, Any]]:
        """The options of each group, without its parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self._base.param_groups]

    @property
    def section(self) -> Zero:
        """The configuration section ``zero_optimization`` of this optimizer."""
        return self._options.section

    @property
    def kinds_away(self) -> set[Any]:
        """The kinds of state that ``offload_states`` has moved out of memory."""
        return set() if self._mover is None else self._mover.kinds_away

    @property
    def state(self):
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, one flat tensor per group (a copy if they are not contiguous in memory)."""
        n_groups = len(self.param_groups)
        return [fp32_masters([unit for unit in self.units if unit.group == index]) for index in range(n_groups)]

    # DeepSpeed's name of this attribute at stage 3.
    fp32_partitioned_groups_flat = single_partition_of_fp32_groups

    def __getattr__(self, name: str) -> Any:
        if name in self._attributes and self.units:
            return self._attributes[name](self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_lr(self) -> float:
        """The first group's learning rate."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the window's gradients."""
        self.forget_losses()
        self.reducer.discard()

    def is_first_reader(self) -> bool:
        """True at the first call: a reader of ``param.grad`` gets the warning that other readers need no more."""
        is_first, self._is_read_noted = not self._is_read_noted, True
        return is_first

    def drop_gradients(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Drops the window's gradients of ``params``."""
        self.reducer.drop(params)
        if not self.reducer.has_window:
            self.forget_losses()

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
        """This rank's shard: base optimizer, masters, loss scale. ``load_state_dict`` loads it again on the same number
        of ranks and the same layout.

        It does not hold the weights that forward uses: ``engine.module_state_dict`` does."""
        self._require_in_memory("state_dict")
        self.keep_edits()
        return shard_dict(self.units, self.optimizer, self.scaler, self.comm.world_size)

    def _require_in_memory(self, what: str) -> None:
        require_in_memory(self.units, self.optimizer, what)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a result of ``state_dict``. It begins a new window, because the collected gradients belong to other
        masters and may have another loss scale.

        Raises StateError if it was saved with another number of ranks or layout. Nothing has been changed then."""
        self._require_in_memory("load_state_dict")
        check_fits(state, self.units, self.comm.world_size)
        self._begin_window()
        put_shard(state, self.units, self.optimizer, self.scaler)

    def close(self) -> None:
        if self._lent is not None:
            self._lent.close()
        if self._ahead is not None:
            self._ahead.close()
        for unit in self.units:
            unit.states.end()
        self.pieces.clear()
        self._order.clear()
        self.optimizer.state.clear()
        # The base gets its own parameters back, because the program that made it may go on using it.
        groups = self.optimizer.param_groups
        for group, params in zip(groups, self._given if len(self._given) == len(groups) else [[]] * len(groups)):
            group["params"] = params
        self.units = []
