"""The training engine: forward, backward, step over a model whose states the ZeRO parts shard.

The engine holds parts and calls them: precision casts, the reducer sums gradients, the optimizer updates shards, timers
measure. It decides only when: which micro-batch ends a window, whether the schedule advances, what is reported.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import Self

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.checkpoint.native.background import Save
from deepspeed_c.checkpointing.blocks import Blocks
from deepspeed_c.checkpointing.recomputer import parked
from deepspeed_c.checkpointing.rng import SEQUENCE_RNG, stream_of_rank
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import DATA, WITHIN_STAGE, Mesh
from deepspeed_c.config import Config
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.engine.checkpoint.checkpoints import Checkpoints
from deepspeed_c.engine.checkpoint.model_files import save_model
from deepspeed_c.engine.getters import ABSENT_METHODS, ConfigGetters
from deepspeed_c.engine.inputs import InputCheck
from deepspeed_c.engine.offload import OffloadDeviceEnum, OffloadedStates, OffloadStateTypeEnum
from deepspeed_c.engine.parts import take_parts
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.preemption import Preemption
from deepspeed_c.engine.reductions import Reductions
from deepspeed_c.engine.shard import shard_model, take_cores_back
from deepspeed_c.engine.share import LossShare
from deepspeed_c.engine.state import TrainState
from deepspeed_c.engine.trainable import assign_groups, match_names, put_states, take_states
from deepspeed_c.engine.weights import check_weights, consolidate, load_custom, load_weights, save_weights
from deepspeed_c.engine.zero_grad import follow_zero_grad
from deepspeed_c.env import read_env
from deepspeed_c.errors import (
    BackwardError,
    BatchSizeError,
    DeepSpeedCError,
    FeatureError,
    MissingNameError,
    StateError,
)
from deepspeed_c.logging import log_dist, logger
from deepspeed_c.profile.timers import EngineTimers, ThroughputTimer, see_memory_usage
from deepspeed_c.sequence.adopt import SharedAttention, take_over_attention
from deepspeed_c.sequence.tiles_auto import TiledModel, tile_model
from deepspeed_c.zero.gradients.drift import DriftFound
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.states.access import attach, detach
from deepspeed_c.zero.states.optimizer import DeepSpeedOptimizer, ZeroOptimizer
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.hooks import ModuleHooks
from deepspeed_c.zero.weights.param import state_of

__all__ = ["DeepSpeedEngine", "take_from_others"]

# For one that is made over a model of theirs.
_open_engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def take_from_others(model: torch.nn.Module) -> None:
    """Ends other engines' hold on a model that is about to get a new engine: on its sharded parameters, and on any
    model all of whose trained parameters are among its own.

    An engine that only evaluates goes on to work: its forward runs the module, which the new engine's hooks serve. One
    that trains is closed, with a warning.
    """
    params = set(model.parameters())
    fetchers = {id(state.fetcher) for p in params if isinstance(state := state_of(p), PlacedShard)}
    for engine in list(_open_engines):
        trained = [] if engine._optimizer is None else [slot.param for slot in engine._optimizer.reducer.slots]
        if id(engine._fetcher) in fetchers or (trained and params.issuperset(trained)):
            engine._hand_over()


def _of(part: str, name: str) -> property:
    """An attribute of the engine that a part of it holds; callers may set it."""
    return property(
        lambda self: getattr(getattr(self, part), name),
        lambda self, value: setattr(getattr(self, part), name, value),
    )


class DeepSpeedEngine(ConfigGetters, Reductions, torch.nn.Module):
    """A model ready to be trained: call it, ``backward`` its loss, ``step``.

    Made by ``deepspeed_c.initialize``. ``module`` is the model; its parameters stay the same objects, their storage
    lies in flat buffers until ``close``. At stage 0 ``param.grad`` is the gradient, and edits of it count; at stages 1
    to 3 it is None after a backward pass: ``deepspeed_c.utils.safe_get_full_grad`` reads the reduced gradient.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        optimizer: ZeroOptimizer | None = None,
        lr_scheduler: Any = None,
        layout: Layout | None = None,
        mpu: Any = None,
        training_data: Any = None,
        collate_fn: Any = None,
    ) -> None:
        super().__init__()
        self.mpu = mpu
        self.module = model
        comm = mesh.comm
        self._config, self._mesh, self._comm, self._precision, self.device = config, mesh, comm, precision, device
        self._state = TrainState(config, mesh, precision, device, optimizer, lr_scheduler)
        self._window, self._passes = self._state.window, self._state.passes
        if training_data is not None:
            self.training_dataloader = self.deepspeed_io(training_data, collate_fn=collate_fn)
        self.config = config.as_dict()
        self.global_rank, self.world_size = comm.global_rank, comm.world_size
        self.dp_world_size, self.mp_world_size = mesh.size(*DATA), mesh.size("tp")
        self.local_rank = read_env().local_rank
        self._inputs = InputCheck(mesh, device)
        self._share = LossShare(mesh, config.sequence_parallel.loss)
        self._step_applied = False
        self._is_compiled = False
        self._is_closed = False
        self._is_generating = False
        self._stop_following: Callable[[], None] = lambda: None
        self.timers = EngineTimers(
            enabled=config.wall_clock_breakdown,
            throughput=config.timers.throughput.enabled,
            batch_size=config.batch.train_batch_size,
            device=device,
        )
        self._tput_timer: ThroughputTimer | None = None
        self._checkpoints = Checkpoints(self._state)
        self._preemption = Preemption(config.checkpoint.preemption, can_step=optimizer is not None)
        self._blocks: Blocks | None = None
        self._attention: SharedAttention | None = None
        self._tiles: TiledModel | None = None
        try:
            self._attention = take_over_attention(
                model, mesh, config.sequence_parallel, ranks_of_host=read_env().local_world_size or mesh.comm.world_size
            )
            if config.sequence_parallel.tiles == "auto":
                self._tiles = tile_model(model, mesh.size("tp"))
            self._blocks = Blocks(
                model,
                parked(config.activation_checkpointing, wanted=config.sequence_parallel.offload_activations),
                mesh.along("tp"),
                has_sharded=bool(layout and layout.fetcher),
                aio=config.aio,
                ranks=comm,
                peers=self._recomputing_peers(layout),
                stages=self._stage_names(),
                is_first=not any(mesh.index(axis) for axis in WITHIN_STAGE),
            )
            self._adopt(Layout([], [], None) if layout is None else layout)
        except BaseException:
            self._preemption.close()
            self._unwrap()
            raise
        if config.dump_state:
            log_dist("state of the engine:\n" + self.describe(), ranks=[0])

    def _stage_names(self) -> list[str]:
        """Of what a forward of this rank may be: of the whole model."""
        return [""]

    def _recomputing_peers(self, layout: Layout | None) -> Collectives | None:
        """The ranks that have to run the same layers again, since these send something; None: each as it likes.

        Parts of sequences are exchanged by collectives that look like the caller's own, along any axis.
        """
        if self._config.activation_checkpointing.budget is None:
            return None
        if (layout and layout.fetcher) or self._mesh.size("sp") > 1:
            return self._comm
        return self._mesh.along("tp") if self._mesh.size("tp") > 1 else None

    def _adopt(self, layout: Layout) -> None:
        """Ties parameters, hooks and passes of a layout to this engine."""
        self._state.lay_out(layout)
        optimizer = self._optimizer
        self._offloaded = OffloadedStates(layout, optimizer, self._config, self._comm)
        if optimizer is not None:
            attached = []
            try:
                for slot in optimizer.reducer.slots:
                    attach(optimizer, slot)
                    attached.append(slot)
            except StateError:
                for slot in attached:
                    detach(slot)
                raise
            self._stop_following = follow_zero_grad(self.module, self._drop_gradients)
            optimizer.lend(
                self,
                wants_stop=self._preemption.is_requested,
                begin_window=self._state.begin_window,
                hash_of_inputs=self._inputs.hash_of_window,
            )
        if self._fetcher is not None:
            ModuleHooks([self.module], self._fetcher, self._name_of_pass)
        _open_engines.add(self)

    def _drop_gradients(self, params: list[torch.nn.Parameter]) -> None:
        """``zero_grad()`` of the model, or of a module in it."""
        self._optimizer.drop_gradients(params)

    def _hand_over(self) -> None:
        if self._optimizer is None:
            self._unwrap()
            self._release()
            return
        logger.warning(
            "rank %d: the model of an engine that trains it is given to another one; the first is closed, its optimizer states are dropped",
            self.global_rank,
        )
        self.close()

    def _release(self) -> None:
        """Takes hooks and buffers away; the parameters stay, sharded ones on their own."""
        if self._optimizer is not None:
            self._stop_following()
            for slot in self._optimizer.reducer.slots:
                detach(slot)
            self._optimizer.reducer.close()
        if self._fetcher is not None:
            if self._fetcher.hooks is not None:
                self._fetcher.hooks.remove()
            self._fetcher.close()
        for unit in (*self._layout.trained, *self._layout.frozen):
            unit.release()
        self._state.lay_out(Layout([], [], None))

    def describe(self) -> str:
        """The resolved configuration, and how this rank's states are laid out (``dump_state`` logs it)."""
        lines = [self._config.table(), f"mesh: {self._mesh}"]
        for i, unit in enumerate((*self._layout.trained, *self._layout.frozen)):
            what = "frozen" if unit in self._layout.frozen else f"group {unit.group}"
            lines.append(f"unit {i}: {what}, {unit.describe()}")
        return "\n".join(lines)

    global_steps = _of("_state", "global_steps")
    global_samples = _of("_state", "global_samples")
    micro_steps = _of("_window", "micro_steps")
    skipped_steps = _of("_state", "skipped_steps")
    lr_scheduler = _of("_state", "lr_scheduler")
    training_dataloader = _of("_state", "training_dataloader")

    @property
    def _layout(self) -> Layout:
        return self._state.layout

    @property
    def _fetcher(self) -> Fetcher | None:
        return self._state.layout.fetcher

    @property
    def _optimizer(self) -> ZeroOptimizer | None:
        return self._state.optimizer

    @property
    def optimizer(self) -> DeepSpeedOptimizer | torch.optim.Optimizer | ModuleHooks | None:
        """What ``initialize`` has returned as the optimizer: at stage 0 in fp32 the caller's (or the configured one)
        itself. In an engine without one, what hooks the module at stage 3, and None below: DeepSpeed has it so, and
        trl reaches a teacher's hooks through it.
        """
        if self._optimizer is not None:
            return self._optimizer.face
        return None if self._fetcher is None else self._fetcher.hooks

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The caller's optimizer, or the one that the configuration names."""
        return None if self._optimizer is None else self._optimizer.optimizer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module, under autocast and with cast inputs where the configuration says so."""
        self._require_open()
        self._require_states("forward")
        if self._optimizer is not None:
            self._passes.recover()
            if self.training and torch.is_grad_enabled():
                self._inputs.look(self.global_steps, inputs, kwargs)
        if self._tput_timer is not None and self.training:
            self._tput_timer.start()
        self._mesh.enter_phase("forward")
        with (
            self.timers.measure("forward"),
            self._precision.autocast(self.device),
            self._blocks.active((inputs, kwargs)),
            self._sequence_stream(),
        ):
            outputs = self.module(*self._precision.cast_inputs(inputs), **self._precision.cast_inputs(kwargs))
        if self._optimizer is None or not torch.is_grad_enabled():
            return outputs
        outputs = self._passes.watch((inputs, kwargs), outputs)
        if self._share.is_needed:
            self._share.note(self.module, inputs, kwargs, outputs)
        return outputs

    def _sequence_stream(self) -> AbstractContextManager[None]:
        """What a training forward draws its random numbers from: ranks that hold parts of a sequence drop other
        elements of it."""
        if not (self._share.is_needed and self.training):
            return nullcontext()
        return stream_of_rank(SEQUENCE_RNG, self._mesh.index("sp"))

    def _name_of_pass(self) -> str:
        if torch.is_grad_enabled():
            return "train"
        return "generate" if self._is_generating else "eval"

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times 1 / accumulation steps and, in fp16, the loss scale, for a ``backward()`` of the caller's
        own."""
        optimizer = self._require_optimizer("scale")
        weighed = self._weigh(loss)
        if optimizer.scaler is not None:
            optimizer.note_loss(weighed)
        return self._passes.scale(weighed, self._window.factor())

    def _weigh(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Of the loss of sequences that are cut over ranks, this rank's term."""
        if not self._share.is_needed:
            return loss
        weight = self._share.weight(loss)
        if not retain_graph:
            self._share.forget()
        # A mean over no tokens is NaN, and counts nothing.
        return self._passes.weigh(loss if weight else torch.where(loss.isfinite(), loss, 0.0), weight)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs backward from a scalar loss and gathers the gradients.

        Gradients are averaged over micro-batches (unless ``scale_wrt_gas`` is False: the caller has done it) and over
        ranks. Returns the loss as averaged. May be called several times in one micro-batch; the gradients add up.
        Raises BackwardError for what is no scalar in a graph; after an exception within backward the window's
        gradients are dropped and the next forward starts it anew.
        """
        optimizer = self._require_optimizer("backward")
        if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            got = f"a tensor of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
            why = " that requires no gradient" if torch.is_tensor(loss) and not loss.requires_grad else ""
            raise BackwardError(
                f"backward needs a scalar loss in a graph, not {got}{why}",
                where="engine.backward",
                fix="reduce the loss with mean() or sum(); compute it from the engine's output with gradients enabled",
            )
        self._passes.recover()
        factor = self._window.factor(scale_wrt_gas)
        weighed = self._weigh(loss, retain_graph)
        optimizer.note_loss(weighed)
        with self.timers.measure("backward"):
            self._passes.run(weighed, factor, retain_graph)
        return loss.detach() * factor

    def no_sync(self) -> AbstractContextManager[None]:
        """Puts the reduction of gradients off, at every stage; meanwhile they are kept whole on each rank."""
        self._require_optimizer("no_sync")
        return self._passes.no_sync()

    def coalesce_grad_reduction(self):
        """Context in which several backward passes are reduced together, at its end."""
        return self._require_optimizer("coalesce_grad_reduction").reducer.coalesce()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` will update the weights."""
        return self._window.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Takes the decision from the engine: until the next call, every ``step()`` is, or is not, a boundary."""
        self._window.steer(is_boundary)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the global batch by changing the accumulation steps; the micro-batch stays."""
        per_step = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % per_step:
            raise BatchSizeError(
                f"{train_batch_size} is not a multiple of micro-batch x ranks = "
                f"{self.train_micro_batch_size_per_gpu()} x {self.dp_world_size}",
                where="set_train_batch_size",
                fix=f"choose a multiple of {per_step}",
            )
        self._require_window_start("set_train_batch_size")
        self._window.resize(train_batch_size=train_batch_size, accumulation_steps=train_batch_size // per_step)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch; the accumulation steps stay, the global batch follows."""
        if micro_batch_size <= 0:
            raise BatchSizeError(
                f"{micro_batch_size} is not positive", where="set_train_micro_batch_size", fix="choose at least 1"
            )
        self._require_window_start("set_train_micro_batch_size")
        gas = self.gradient_accumulation_steps()
        per_step = micro_batch_size * self.dp_world_size
        self._window.resize(train_batch_size=per_step * gas, micro_batch_size=micro_batch_size)

    def _require_window_start(self, what: str) -> None:
        if self._state.is_within_window:
            raise StateError(
                "called within an accumulation window", where=what, fix="call it right after a step that updates"
            )

    def train_batch_size(self) -> int:
        return self._window.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._window.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._window.batch.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(global batch, micro-batch per rank, accumulation steps)"""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at a boundary also reduces, clips and updates, then advances the schedule.

        A skipped step (overflow) changes no weight, no moment and not the schedule. Raises what ``ZeroOptimizer.step``
        raises, with the counters advanced as for a skipped step, so that a caller who catches it goes on with the next
        window.
        """
        optimizer = self._require_optimizer("step")
        self._require_states("step")
        if self._passes.is_inside_no_sync:
            raise BackwardError(
                "step() was called within no_sync()", where="engine.step", fix="leave the context before the step"
            )
        self._step_applied = False
        if not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            self._stop_tput_timer(is_step=False)
            return
        if self._config.memory_breakdown:
            see_memory_usage("before step", force=True)
        self._mesh.enter_phase("step")
        if self._share.compares:
            # Ranks meet in the sums of gradients first: one that has called no backward does that here.
            optimizer.complete_gradients()
            try:
                self._share.compare()
            except DeepSpeedCError:
                self._state.begin_window()  # gradients of an unknown scale
                raise
        try:
            with self.timers.measure("step"):
                optimizer.step()
        except DriftFound as drift:
            raise self._inputs.cause_of(drift) from drift
        finally:
            self._step_applied = not optimizer.overflow
            self._state.end_window(is_skipped=optimizer.overflow)
            self._mesh.enter_phase("")
        if self._step_applied and self.lr_scheduler is not None:
            # torch's schedules warn of a wrong order unless they have seen the step of their optimizer, which a fused
            # one does in another method.
            optimizer.optimizer._opt_called = True
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.timers.end_step(self.global_steps)
        self._stop_tput_timer(is_step=True)
        self._report()
        if optimizer.is_stopping:
            self._preemption.end_run(self, self._checkpoints.last_dir, self._comm)

    def _report(self) -> None:
        # Phases that somebody asked to have timed are told even where no interval was given.
        every = self._config.steps_per_print or (1 if self._config.wall_clock_breakdown else float("inf"))
        if every != float("inf") and self.global_steps % int(every) == 0:
            log_dist(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
                + self.timers.report(),
                ranks=[0],
            )
            if self._blocks is not None and (profile := self._blocks.profile(self.global_steps, self.global_rank)):
                log_dist(profile, ranks=[0])
        if self._config.memory_breakdown:
            see_memory_usage("after step", force=True)

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second from each training forward to the end of its step. It runs from when it is first asked
        for, since the configuration may have it wait for the device at each reading
        (``timers.throughput.synchronized``)."""
        if self._tput_timer is None:
            steps = self._config.steps_per_print
            self._tput_timer = ThroughputTimer(
                self._config.timers.throughput,
                batch_size=self.train_batch_size(),
                steps_per_output=None if steps in (None, float("inf")) else int(steps),
                global_step_count=self.global_steps,
            )
        return self._tput_timer

    def _stop_tput_timer(self, *, is_step: bool) -> None:
        if self._tput_timer is not None:
            self._tput_timer.stop(global_step=is_step, report_speed=self.global_rank == 0)

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged, unscaled gradients before clipping; None before the first step."""
        return None if self._optimizer is None else self._optimizer.get_global_grad_norm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops what has gathered in the present window, which starts over."""
        self._state.begin_window()
        super().zero_grad(set_to_none)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._require_optimizer("get_lr").hyper_parameters]

    def get_mom(self) -> list[Any]:
        """Each group's betas, or its momentum."""
        groups = self._require_optimizer("get_mom").hyper_parameters
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[Any]:
        """Each group's "type" (pipeline code tells the parts of a model apart by it); None where it has none."""
        return [group.get("type") for group in self._require_optimizer("get_type").hyper_parameters]

    def get_wall_clock_timers(self) -> dict[str, float]:
        """{phase: ms a step} since the last report; empty without ``wall_clock_breakdown``."""
        return self.timers.phases_ms()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader that gives this rank its share of ``dataset`` in micro-batches (``route`` "train" shuffles, "eval"
        and "predict" keep the order)."""
        return DeepSpeedDataLoader.for_engine(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            comm=self._mesh.data,
            route=route,
            pin_memory=pin_memory and self.device.type != "cpu",
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
            drop_last=self._config.dataloader_drop_last,
            seed=self._config.seed,
        )

    def module_state_dict(
        self, destination=None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any]:
        """The module's state dict: whole tensors in the dtype that is trained in.

        Where parameters are sharded, or cut over tensor-parallel ranks, it is collective and puts the whole model
        into the host memory of every rank; ``save_16bit_model`` and ``_zero3_consolidated_16bit_state_dict`` do with
        less.
        """
        if self._shards_parameters or self.mp_world_size > 1:
            state = consolidate(
                self.module, self._fetcher, self._mesh, exclude_frozen=exclude_frozen_parameters, on_all_ranks=True
            )
            named = {prefix + name: value for name, value in state.items()}
            if destination is not None:
                destination.update(named)
            return named if destination is None else destination
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, p in self.module.named_parameters():
                if not p.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Loads weights into the module, on every rank alike, and takes the fp32 masters anew from them. An
        accumulation window begins.

        checkpoint: a state dict, or a dict that holds one under "module". fetch_z3_params, z3_params_to_fetch:
        accepted; sharded parameters are loaded in any case. Raises FeatureError for allowed_missing_keys, which belong
        to expert parallelism.
        """
        self._require_open()
        if allowed_missing_keys is not None:
            raise FeatureError(
                "missing keys cannot be allowed one by one",
                where="load_module_state_dict(allowed_missing_keys=...)",
                fix="pass strict=False",
            )
        weights = checkpoint["module"] if isinstance(checkpoint.get("module"), Mapping) else checkpoint
        weights = take_parts(self.module, weights)
        if custom_load_fn is None and self._shards_parameters:
            check_weights(self.module, weights, strict)
        self._state.begin_window()
        if custom_load_fn is not None:
            load_custom(self.module, custom_load_fn, weights)
        elif self._shards_parameters:
            self._state.begin_writes()
            load_weights(self.module, weights)
        else:
            self.module.load_state_dict(weights, strict=strict)
        self._state.take_weights(has_masters=False)

    @property
    def _shards_parameters(self) -> bool:
        return self._fetcher is not None and bool(self._fetcher.groups)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights, in the dtype that is trained in, to one file that ``torch.load`` (or safetensors, by the
        suffix) reads.

        Collective at stage 3; rank 0 writes, one tensor at a time, and the file appears only when it is complete.
        Returns True. Raises CheckpointError on all ranks when it cannot be written. Needs no
        ``stage3_gather_16bit_weights_on_model_save``: nothing is ever whole in memory.
        """
        self._require_open()
        self._require_states("save_16bit_model")
        path = os.path.join(save_dir, save_filename)
        save_weights(self.module, self._fetcher, self._mesh, path, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def save_model(
        self,
        save_dir: str,
        max_shard_size: int | str = "5GB",
        exclude_frozen_parameters: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes the model as Hugging Face lays it out: ``model.safetensors``, or files of at most ``max_shard_size``
        and their index, and config.json where the module has a configuration of transformers.
        ``AutoModel.from_pretrained(save_dir)`` reads it.

        Collective, at every stage; rank 0 writes, and no rank holds more than one gather unit of the model. ``dtype``
        is that of floating-point parameters, by
        default the one that is trained in; another one is taken from the fp32 masters. A new folder appears when it is
        complete; in one that has been there the model is replaced and other files stay. Raises CheckpointError on all
        ranks when it cannot be written; everything is as it was then.
        """
        self._require_open()
        self._require_states("save_model")
        save_model(
            self.module,
            self._fetcher,
            self._mesh,
            save_dir,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen_parameters,
            dtype=dtype,
        )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        is_async: bool | None = None,
    ) -> Save | bool:
        """Saves everything that training goes on from, so that any number of ranks at any stage can load it.
        Collective.

        Args:
            save_dir: folder of all checkpoints; this one is ``save_dir/tag``. On a file system that all ranks share.
            tag: default ``global_step<n>``; a tag that exists is replaced at one instant.
            client_state: the caller's own, given back by ``load_checkpoint``: numbers, text, tensors, numpy arrays,
            containers of them; rank 0's counts. save_latest: make it the one that is loaded when no tag is named.
            exclude_frozen_parameters: leave the weights of frozen parameters out (with LoRA: of the base model).
            is_async: return when the state has been copied to host memory, and write it meanwhile; default: the key
            ``checkpoint.async``.

        Returns True when it is durable; if it was asked for asynchronously, an object that is true and has ``wait()``,
        which raises what went wrong (the next call on this engine that saves, loads or closes does, too): also where
        it is durable already, because states on NVMe, and those of 8 bits, are written before the call returns. Raises
        CheckpointError on all ranks alike when it cannot be written: the checkpoints before it are untouched then.
        """
        self._require_open()
        self._require_states("save_checkpoint")
        return self._checkpoints.save(
            self.module, save_dir, tag, client_state, save_latest, exclude_frozen_parameters, is_async
        )

    def wait_checkpoint(self) -> None:
        """Returns when no save is under way. Raises CheckpointError if the last one failed."""
        self._require_open()
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from a checkpoint of ours or of another's, saved by any number of ranks at any stage. Collective.

        An accumulation window begins, whatever is loaded: gradients that have gathered since the last step were those
        of other weights, and are dropped. The counts of steps, samples and skipped steps are those of the run that
        saved, but with ``load_module_only`` this run's; ``micro_steps`` stands at the beginning of a window. Who
        steers windows by ``set_gradient_accumulation_boundary`` goes on to do so.

        Args:
            load_dir: what ``save_checkpoint`` was given, here or in DeepSpeed (its engine's files or its universal
            format); or the folder of one tag of those; or a
                folder of ``torch.distributed.checkpoint``; or, with ``load_module_only=True``, a Hugging Face folder
                of safetensors or one ``.safetensors`` file.
            tag: default: what the file ``latest`` names; where that one is broken, the newest complete one before it
            is loaded, and the log says why. load_module_strict: names that the checkpoint lacks or has in excess are
            an error. load_optimizer_states: moments, step counts, hyper-parameters of the groups, loss scale,
            random-number generators, and the place in the data. load_lr_scheduler_states: the schedule.
            load_module_only: weights (and master weights) and nothing else.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` with whole weights instead of
            loading them here.

        Returns (path, client_state), or (None, None) where there is no checkpoint. Raises on all ranks alike:
        StateError for one that does not fit this model or optimizer, nothing being changed then, nor what has gathered
        dropped; CheckpointError for one that is broken, or whose schedule is none of the engine's (the message names
        what, and why).
        """
        self._require_open()
        if self._offloaded.kinds:
            self._reload(non_blocking=False)
        return self._checkpoints.load(
            self.module,
            load_dir,
            tag,
            strict=load_module_strict,
            load_optimizer=load_optimizer_states,
            load_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    def set_trainable(self, names: Iterable[str], keep_state: bool = True) -> list[str]:
        """From now on exactly the parameters that ``names`` give are trained; all others are frozen. Returns the names
        of the trained ones.

        names: full parameter names or shell patterns ("layers.*.bias"), each of which must fit a parameter.
        Collective, between two accumulation windows; the optimizer object stays the same. keep_state: a frozen
        parameter's master weight and optimizer state wait (in this rank's memory) for the day it is trained again;
        otherwise they are dropped. A parameter that was never trained joins the first group (with Muon, the group for
        its shape).
        """
        optimizer = self._require_optimizer("set_trainable")
        self._require_window_start("set_trainable")
        self._require_states("set_trainable")
        chosen = match_names(self.module, names)
        kept, groups = take_states(optimizer, self._state.dormant)
        self._release()
        for name, param in self.module.named_parameters():
            param.requires_grad_(name in chosen)
        assign_groups(self.module, optimizer.optimizer, groups)
        base = optimizer.optimizer
        _, layout = shard_model(self.module, base, self._config, self._precision, self._mesh, optimizer)
        take_cores_back(self._config)  # what the layout that goes has left
        self._adopt(layout)
        put_states(optimizer, kept)
        self._state.keep_dormant({p: state for p, state in kept.items() if keep_state and not p.requires_grad})
        if self._fetcher is not None:
            self._fetcher.weights_changed()
        return sorted(chosen)

    def empty_partition_cache(self) -> None:
        """Releases gathered weights that are kept for their next use, and returns the memory to the system. Not within
        a forward or backward pass."""
        self._require_open()
        if self._fetcher is not None:
            if self._fetcher.is_active:
                raise StateError(
                    "called within a forward or backward pass",
                    where="empty_partition_cache",
                    fix="call it between two of them",
                )
            self._fetcher.abort()
            self._fetcher.pool.clear()
        get_accelerator().empty_cache()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states (all kinds, or those in ``include``) out of memory until ``reload_states``; the engine cannot
        run or save meanwhile.

        device: "cpu": from the accelerator's memory to the host's. "nvme": to a file without a name under
        ``offload_optimizer.nvme_path`` (or ``offload_param``'s), whose space is free again after ``reload_states`` or
        ``destroy``; collective then, and with ``comm.zero_copy_gather``. What lives on NVMe anyway, or in host memory
        with "cpu", stays where it is.
        pin_memory: of host memory beside an accelerator. At every stage; weights that are whole on each rank stay.

        Raises StateError within an accumulation window; with "nvme", on all ranks alike and with everything still in
        memory, ConfigError where one has no folder or too little room there, and OffloadError where one cannot write.
        """
        self._require_open()
        self._require_window_start("offload_states")
        if self._fetcher is not None:
            self._fetcher.abort()
            self._fetcher.begin_writes()
        self._offloaded.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what ``offload_states`` moved out; collective where that is on NVMe, and with
        ``comm.zero_copy_gather``.

        Raises OffloadError on all ranks where one cannot read back what was written; it may be called again.
        """
        self._require_open()
        self._reload(non_blocking)

    def _reload(self, non_blocking: bool) -> None:
        self._offloaded.reload(non_blocking)
        if self._fetcher is not None:
            self._fetcher.weights_changed()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The module's state dict of whole tensors in host memory on rank 0, None on the others. Collective;
        ValueError below stage 3."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO stage 3; below it module.state_dict() is whole")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        self._require_open()
        self._require_states("_consolidated_16bit_state_dict")
        return consolidate(
            self.module, self._fetcher, self._mesh, exclude_frozen=exclude_frozen_parameters, on_all_ranks=False
        )

    def generate(self, *args: Any, synced: bool = False, **kwargs: Any) -> Any:
        """Calls the module's ``generate``. ``synced``: ranks may stop after different numbers of forwards (see
        ``synced_generation``)."""
        self._require_open()
        generate = self.module.generate
        with self.synced_generation() if synced else nullcontext():
            before, self._is_generating = self._is_generating, True
            try:
                return generate(*args, **kwargs)
            finally:
                self._is_generating = before

    @contextmanager
    def synced_generation(self) -> Iterator[None]:
        """Context in which ranks may run different numbers of forwards: a rank that leaves it serves the others until
        all have left.

        Collective to enter. One forward in evaluation or training mode should have run before, so that the order of
        use is known; without it whatever has been gathered stays until each forward ends.
        """
        before, self._is_generating = self._is_generating, True
        try:
            with self._fetcher.synced() if self._shards_parameters else nullcontext():
                yield
        finally:
            self._is_generating = before

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module in place with ``torch.compile``. Raises FeatureError for DeepCompile's schedule and for
        compiled autograd."""
        unsupported = {"schedule": schedule, "compiled_autograd_enabled": compiled_autograd_enabled}
        wanted = [name for name, value in unsupported.items() if value]
        if wanted:
            raise FeatureError(
                f"engine.compile does not take {', '.join(wanted)} yet",
                where="compile",
                fix="pass backend and compile_kwargs",
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        return self._is_compiled

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            try:
                return getattr(module, name)
            except AttributeError:
                pass
        if name in ABSENT_METHODS:
            raise MissingNameError(
                "is not part of this version",
                where=f"DeepSpeedEngine.{name}",
                fix=f"use instead: {ABSENT_METHODS[name]}",
            )
        raise AttributeError(f"neither the engine nor its module ({type(module).__name__}) has {name!r}")

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError(
                "the engine is closed",
                where="DeepSpeedEngine",
                fix="make a new one with deepspeed_c.initialize (transformers and accelerate: a new Trainer, a new prepare)",
            )

    def _require_states(self, what: str) -> None:
        if self._checkpoints.is_half_loaded:
            raise StateError(
                "a checkpoint could not be read to its end and has overwritten a part of the weights or states",
                where=f"engine.{what}",
                fix="load another checkpoint with engine.load_checkpoint(), and its optimizer states if those were being loaded",
            )
        if self._offloaded.kinds:
            raise StateError(
                f"{', '.join(sorted(kind.value for kind in self._offloaded.kinds))} have been offloaded",
                where=f"engine.{what}",
                fix="call engine.reload_states() first",
            )

    def _require_optimizer(self, what: str) -> ZeroOptimizer:
        self._require_open()
        if self._optimizer is None:
            raise StateError(
                "this engine only evaluates: it was made without an optimizer",
                where=f"engine.{what}",
                fix="pass an optimizer, or an optimizer section in the configuration, to deepspeed_c.initialize",
            )
        return self._optimizer

    def close(self) -> None:
        """Removes hooks and frees buffers and optimizer state. May be called twice.

        The module keeps its weights and works on its own. What stage 3 has sharded stays sharded, as under
        ``zero.Init``: no rank could be sure to hold all of it; ``zero.GatheredParameters`` and another ``initialize``
        take it from there.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._preemption.close()
        try:
            self._checkpoints.close()
        finally:
            self._end()

    def _unwrap(self) -> None:
        if self._attention is not None:
            self._attention.close()
        if self._tiles is not None:
            self._tiles.close()
        if self._blocks is not None:
            self._blocks.close()

    def _end(self) -> None:
        self._unwrap()
        try:
            self._offloaded.close()
        finally:
            self._release()
            if self._optimizer is not None:
                self._optimizer.close()
                take_cores_back(self._config)
            self._state.close()
            self._mesh.close()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
