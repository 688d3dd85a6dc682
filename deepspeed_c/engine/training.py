"""The host of a model in training. It holds optimizer, training state, checkpoints, data and schedule. Its subclasses,
the engines, run the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.checkpoint_engine import TorchCheckpointEngine
from deepspeed_c.checkpoint.fingerprint import Fingerprint, TensorPrint
from deepspeed_c.checkpoint.native.background import Save
from deepspeed_c.comm.axes import SP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.comm.observed import listen, stop_listening
from deepspeed_c.compression.model import CompressionSteps
from deepspeed_c.config import Config
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.data.sampler import DeepSpeedDataSampler
from deepspeed_c.engine.backward import BackwardPass
from deepspeed_c.engine.checkpoint.checkpoints import Checkpoints
from deepspeed_c.engine.edits import Edits
from deepspeed_c.engine.experiment import ExperimentMeter
from deepspeed_c.engine.forward_arguments import ForwardArguments, sampling_section
from deepspeed_c.engine.host import ModelHost
from deepspeed_c.engine.inputs import InputCheck
from deepspeed_c.engine.no_optimizer import NoOptimizer
from deepspeed_c.engine.offload import OffloadDeviceEnum, OffloadedStates, OffloadStateTypeEnum
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.preemption import Preemption
from deepspeed_c.engine.python_gc import CollectorPause
from deepspeed_c.engine.reductions import Reductions
from deepspeed_c.engine.same_bits import Arithmetic
from deepspeed_c.engine.shard import shard_model, take_cores_back
from deepspeed_c.engine.share import LossShare
from deepspeed_c.engine.state import TrainState
from deepspeed_c.engine.trainable import assign_groups, match_names, put_states, take_states
from deepspeed_c.engine.window import Window
from deepspeed_c.errors import BatchSizeError, ConfigError, StateError
from deepspeed_c.logging import log_dist, logger
from deepspeed_c.monitor.monitor import MonitorMaster
from deepspeed_c.observe.phases import Phases
from deepspeed_c.observe.record import SampleRate, StepRecord
from deepspeed_c.profile.flops_step import StepFlops, profiled_section
from deepspeed_c.profile.timers import (
    SynchronizedWallClockTimer,
    ThroughputTimer,
    device_bytes,
    resident_bytes,
    see_memory_usage,
)
from deepspeed_c.recompute.rng import SEQUENCE_RNG, stream_of_rank
from deepspeed_c.step_file import StepNotes
from deepspeed_c.zero.gradients.drift import DriftFound
from deepspeed_c.zero.gradients.facts import StepRequests
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.layout.unit import UnitPlan
from deepspeed_c.zero.states.access import attach, detach
from deepspeed_c.zero.states.optimizer import DeepSpeedOptimizer, ZeroOptimizer
from deepspeed_c.zero.weights.hooks import ModuleHooks

__all__ = ["Training", "TrainingHost"]


def _of(part: str, name: str) -> property:
    """A property of the engine for attribute ``name`` of the engine's part ``part``. Callers may set it."""
    return property(
        lambda self: getattr(getattr(self, part), name),
        lambda self, value: setattr(getattr(self, part), name, value),
    )


class Training(NamedTuple):
    """The objects that a model needs for training. Without an optimizer the model is only evaluated."""

    optimizer: ZeroOptimizer | None = None
    lr_scheduler: Any = None
    data: Any = None
    collate_fn: Any = None
    mpu: Any = None
    mesh_device: Any = None
    pause: CollectorPause | None = None
    """The pause of Python's collector, which the engine ends."""


class TrainingHost(Reductions, ModelHost):
    """The part of an engine that does not depend on how micro-batches go through the model."""

    takes_arguments = True
    """Whether the module's forward gets keyword arguments."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        edits: Edits,
        layout: Layout,
        training: Training,
    ) -> None:
        super().__init__(model, config, mesh, precision, device, edits)
        self.mpu, self.mesh_device = training.mpu, training.mesh_device
        self._pause = training.pause
        optimizer = training.optimizer or NoOptimizer()
        self._notes: StepNotes | None = None
        if training.optimizer is not None:
            self._notes = StepNotes(60 * config.elasticity.min_time if config.elasticity.enabled else 0)
        window = Window(
            config.batch,
            is_managed=config.managed_gradient_accumulation,
            divides_sums=config.same_bits.enabled,
        )
        self._state = TrainState(
            window,
            mesh,
            precision,
            device,
            optimizer,
            training.lr_scheduler,
            loss=config.sequence_parallel.loss,
            seed=config.seed,
        )
        self._window, self._passes = self._state.window, self._state.passes
        self.phases = Phases(enabled=config.wall_clock_breakdown or config.autotuning.enabled, device=device)
        if config.wall_clock_breakdown:
            listen(self.phases)
        self.timers = SynchronizedWallClockTimer(device=device)
        """Timers for the program's own use, as in DeepSpeed. The engine's timers are in ``get_wall_clock_timers``."""
        self._rate = SampleRate(is_counted=config.timers.throughput.enabled)
        if training.data is not None:
            self.training_dataloader = self.deepspeed_io(training.data, collate_fn=training.collate_fn)
        self._inputs = InputCheck(mesh, device)
        self._arguments = ForwardArguments(
            config.curriculum_learning, config.progressive_layer_drop, takes_arguments=self.takes_arguments
        )
        self._share = LossShare(mesh, config.sequence_parallel.loss)
        self._step_applied = False
        self._tput_timer: ThroughputTimer | None = None
        self._flops = StepFlops(profiled_section(config.flops_profiler, config.autotuning), self)
        self._experiment = ExperimentMeter(config.autotuning, self, mesh.comm, lambda: self._flops.forward_flops)
        on_commit = (lambda: None) if self._notes is None else self._notes.note_save
        arithmetic: Arithmetic | None = edits.get("arithmetic")
        bits = None if arithmetic is None else arithmetic.kept
        self._checkpoints = Checkpoints(self._state, config.checkpoint, config.zero, config.as_dict(), on_commit, bits)
        self.client_state: dict[str, Any] = {}
        """The program's own state in checkpoints that the engine saves by itself (``checkpoint.every`` and
        ``checkpoint.preemption``); the program may change it before each ``step``. After ``checkpoint.auto_resume`` has
        loaded a checkpoint, the state that was saved in it, whoever saved it."""
        self.resumed_from: str | None = None
        """The checkpoint that ``checkpoint.auto_resume`` has loaded; None if there was none."""
        self.checkpoint_engine = TorchCheckpointEngine.with_zip(config.checkpoint.checkpoint_serialization)
        """Writes and reads files for programs. The engine does not use it for its own checkpoints."""
        self.monitor = MonitorMaster(config, comm=mesh.comm)
        self._preemption = Preemption(config.checkpoint.preemption, can_step=self._trains)
        self._open(layout)
        self._compression = CompressionSteps(model, self._state.applied_steps)
        if config.dump_state:
            log_dist("state of the engine:\n" + self.describe(), ranks=[0])

    global_steps = _of("_state", "global_steps")
    global_samples = _of("_state", "global_samples")
    micro_steps = _of("_window", "micro_steps")
    skipped_steps = _of("_state", "skipped_steps")
    lr_scheduler = _of("_state", "lr_scheduler")
    training_dataloader = _of("_state", "training_dataloader")

    def _open(self, layout: Layout) -> None:
        try:
            super()._open(layout)
        except BaseException:
            self._stop_watching()
            raise

    def _graph_reducer(self) -> GradientReducer | None:
        return self._optimizer.reducer if self._trains else None

    def _graph_passes(self) -> BackwardPass | None:
        return self._passes if self._trains else None

    def _graph_step(self) -> int:
        return self.global_steps

    def _stop_watching(self) -> None:
        """Stops listeners and background work that run beside the training."""
        self._preemption.close()
        self._flops.close()
        stop_listening(self.phases)
        self.monitor.close()

    def _adopt(self, layout: Layout) -> None:
        super()._adopt(layout)
        self._state.lay_out(layout, trains=self._trains)
        optimizer = self._optimizer
        self._offloaded = OffloadedStates(layout, optimizer, self._config.zero, self._config.aio, self._comm)
        for slot in optimizer.slots:
            attach(optimizer, slot)
        if self._trains:
            optimizer.bind_engine(
                self,
                requests=self._requests,
                begin_window=self._state.begin_window,
                hash_of_inputs=self._inputs.hash_of_window,
                n_tokens=lambda: self._state.n_tokens,
                measure=self.phases.measure,
            )

    def _requests(self) -> StepRequests:
        """The requests of this rank at the end of the present step."""
        return StepRequests(
            stop=self._preemption.is_requested(),
            save=self._checkpoints.is_due(),
            is_saving=self._checkpoints.is_saving(),
        )

    def _undo_edits(self) -> None:
        with ExitStack() as stack:
            if self._pause is not None:
                stack.callback(self._pause.close)
            stack.callback(self._compression.close)
            super()._undo_edits()

    def _claimed_params(self) -> list[torch.nn.Parameter]:
        return [slot.param for slot in self._optimizer.slots]

    def _hand_over(self) -> None:
        if not self._trains:
            super()._hand_over()
            return
        logger.warning(
            "rank %d: the model of an engine that trains it is given to another one; the first is closed, its optimizer states are dropped",
            self.global_rank,
        )
        self.close()

    def _release(self) -> None:
        for slot in self._optimizer.slots:
            detach(slot)
        self._optimizer.release()
        super()._release()
        self._state.lay_out(self._layout, trains=False)

    @property
    def _optimizer(self) -> ZeroOptimizer | NoOptimizer:
        return self._state.optimizer

    @property
    def _trains(self) -> bool:
        """Whether there is an optimizer. An engine without one only evaluates."""
        return not isinstance(self._optimizer, NoOptimizer)

    @property
    def optimizer(self) -> DeepSpeedOptimizer | torch.optim.Optimizer | ModuleHooks | None:
        """The optimizer that ``initialize`` has returned. At stage 0 in fp32 that is the caller's (or the configured)
        optimizer itself. In an engine without an optimizer it is the object with the module's hooks at stage 3, and
        None below stage 3, as in DeepSpeed: trl finds a teacher model's hooks in this way.
        """
        if self._fetcher is None or self._trains:
            return self._optimizer.face
        return self._fetcher.hooks

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The caller's optimizer, or the configured one."""
        return self._optimizer.optimizer

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the global batch by changing the accumulation steps; the micro-batch stays the same."""
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
        """Changes the micro-batch. The accumulation steps stay the same, and the global batch changes with the
        micro-batch. Raises StateError with ``same_bits``."""
        if self._config.same_bits.enabled:
            raise StateError(
                "a micro-batch is the grain of same_bits, whose size decides the bits, and checkpoints keep it",
                where="set_train_micro_batch_size",
                fix="change the global batch with set_train_batch_size, or set same_bits.grain before initialize",
            )
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

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` will update the weights."""
        return self._window.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decides instead of the engine whether a ``step()`` is a boundary. It applies to every ``step()`` until the
        next call."""
        self._window.steer(is_boundary)

    def get_batch_info(self) -> tuple[int, int, int]:
        """(global batch, micro-batch per rank, accumulation steps)"""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def _report(self) -> None:
        """Reports the numbers of the finished step to the monitors and, if a line is due, to the log."""
        # If phases are timed, they are logged even if no interval is configured.
        every = self._config.steps_per_print or (1 if self._config.wall_clock_breakdown else float("inf"))
        is_due = every != float("inf") and self.global_steps % int(every) == 0
        if is_due or self.monitor.is_writing:
            record = self._record()
            if self.monitor.is_writing:
                self.monitor.write_events(record.events())
            if is_due:
                for line in self._lines(record):
                    log_dist(line, ranks=[0])
                if self._blocks is not None and (profile := self._blocks.profile(self.global_steps, self.global_rank)):
                    log_dist(profile, ranks=[0])
        if self._config.memory_breakdown:
            see_memory_usage("after step", force=True)
        if (every := self._config.fingerprint_every) and self.global_steps % every == 0:
            log_dist(f"step {self.global_steps}: fingerprint {self.fingerprint():016x}", ranks=[0])

    def _lines(self, record: StepRecord) -> list[str]:
        """The log lines of a step. Collective if ranks have parts of the model."""
        return [record.line(self.phases.mean_ms(reset=True))]

    def _record(self) -> StepRecord:
        optimizer, facts = self._optimizer, self._optimizer.last_facts
        is_written = self.monitor.is_writing
        return StepRecord(
            step=self.global_steps,
            samples=self.global_samples,
            skipped_steps=self.skipped_steps,
            lr=self.get_lr(),
            momentum=self.get_mom(),
            loss=None if facts is None else facts.loss,
            loss_scale=None if optimizer.scaler is None else optimizer.loss_scale,
            grad_norm=self.get_global_grad_norm(),
            n_tokens=0 if facts is None else facts.n_tokens,
            samples_per_sec=self._rate.samples_per_sec(),
            phases_ms=self.phases.last_step_ms() if is_written else {},
            host_bytes=resident_bytes() if is_written else None,
            device_bytes=device_bytes(self.device) if is_written else None,
        )

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged, unscaled gradients before clipping; None before the first step."""
        return self._optimizer.get_global_grad_norm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the present window, and begins the window again."""
        self._state.begin_window()
        super().zero_grad(set_to_none)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._require_optimizer("get_lr").hyper_parameters]

    def get_mom(self) -> list[Any]:
        """Each group's betas, or its momentum."""
        groups = self._require_optimizer("get_mom").hyper_parameters
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[Any]:
        """Each group's "type", or None. Pipeline code uses it to tell the parts of a model apart."""
        return [group.get("type") for group in self._require_optimizer("get_type").hyper_parameters]

    def get_wall_clock_timers(self) -> dict[str, float]:
        """{phase: ms} of the last step; empty without ``wall_clock_breakdown``.

        The phases are "data", "forward", "backward", "step" and "other", which add up to its wall clock; parts of a
        phase ("backward.reduce"); and DeepSpeed's timers (``fwd``, ``bwd``, ``bwd_inner``, ``bwd_allreduce``, and with
        ``_microstep`` behind their names those of the last micro-batch).
        """
        return self.phases.last_step_ms()

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
            num_local_io_workers=self._config.data_efficiency.n_workers
            if num_local_io_workers is None
            else num_local_io_workers,
            drop_last=self._config.dataloader_drop_last,
            seed=self._config.seed,
            measure=self.phases.measure,
            efficiency=sampling_section(self._config.data_efficiency),
            accumulation_steps=self._config.batch.accumulation_steps,
            # A run that resumes by itself may do so on any number of ranks, in the middle of an epoch too.
            is_unbroken=self._config.checkpoint.auto_resume is not None or self._config.same_bits.enabled,
            whole_batches=self._config.same_bits.enabled,
        )

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Sets the functions from step to difficulty of metrics with ``schedule_type`` "custom", by the metric's
        name."""
        sampler = getattr(self.training_dataloader, "data_sampler", None)
        if not isinstance(sampler, DeepSpeedDataSampler):
            logger.warning("set_custom_curriculum_learning_schedule: no curriculum chooses the samples, nothing is set")
            return
        sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Sets the function that changes each batch of ``training_dataloader``, as by cutting sequences: it gets the
        batch and the sampler's state (``current_difficulties`` by metric), and returns the batch. It is called only if
        ``data_efficiency`` chooses the samples."""
        if self.training_dataloader is None:
            logger.warning("set_data_post_process_func: there is no training_dataloader, nothing is set")
            return
        self.training_dataloader.set_post_process_func(post_process_func)

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
        """Saves the whole state of training, so that any number of ranks at any stage can load it. Collective.

        Args:
            save_dir: folder of all checkpoints; this one is ``save_dir/tag``. On a file system that all ranks share.
            tag: default ``global_step<n>``; a tag that exists is replaced at one instant.
            client_state: the caller's own state, which ``load_checkpoint`` returns: numbers, text, tensors, numpy
            arrays, and containers of them. Rank 0's is saved. save_latest: make this checkpoint the default of
            ``load_checkpoint``.
            exclude_frozen_parameters: leave the weights of frozen parameters out (with LoRA: of the base model).
            is_async: return as soon as the state has been copied to host memory, and write the files in the background;
            default: the key ``checkpoint.async``.

        Returns True when the checkpoint is durable. An asynchronous save returns an object that is true and has
        ``wait()``. ``wait()`` raises the save's error, and so does the next call that saves, loads or closes. States on
        NVMe and 8-bit states are written before the call returns; even then it returns such an object. Raises
        CheckpointError on all ranks alike if the checkpoint cannot be written; earlier checkpoints are unchanged then.
        """
        self._require_open()
        self._require_states("save_checkpoint")
        return self._checkpoints.save(
            self.module, save_dir, tag, client_state, save_latest, exclude_frozen_parameters, is_async
        )

    def wait_checkpoint(self) -> None:
        """Waits until no save is running. Raises CheckpointError if the last save failed."""
        self._require_open()
        self._checkpoints.wait()

    def fingerprint(self) -> int:
        """64 bits that stand for all weights and optimizer states: names, dtypes, shapes and bytes. Equal for every
        stage, every place of states and every number of ranks, and equal to the fingerprint of a checkpoint that is
        saved now (``deepspeed_c checkpoint verify A --like B``). Collective.

        A weight that has an fp32 master counts as its master. Padding, buffers and counts of steps do not count, and
        neither do states that are zero in every element: some places hold such states before the first step that is
        applied, and others hold none.

        Raises RankMismatchError on all ranks alike if copies that ranks hold of the same elements (of 16-bit weights,
        too) differ in a bit. It names the tensor and the rank; the rank in the minority, if there is one.
        """
        return self._fingerprint().number

    def tensor_fingerprints(self) -> dict[tuple[str, str], TensorPrint]:
        """(kind, name) -> dtype, shape and CRC32C of the tensor's bytes, for each tensor of ``fingerprint``. The kind
        is "param" or the name of an optimizer state. Collective; raises as ``fingerprint`` does."""
        return self._fingerprint().tensors

    def _fingerprint(self) -> Fingerprint:
        self._require_open()
        self._require_states("fingerprint")
        return self._checkpoints.fingerprint(self.module)

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
        """Continues from a checkpoint of this package or of another one, saved by any number of ranks at any stage.
        Collective.

        It always begins an accumulation window and drops gradients since the last step, because they belong to other
        weights. The counts of steps, samples and skipped steps are the saved run's; with ``load_module_only`` they stay
        unchanged. ``micro_steps`` is at the beginning of a window. An earlier ``set_gradient_accumulation_boundary``
        still applies.

        Args:
            load_dir: the folder that was given to ``save_checkpoint`` of this package or of DeepSpeed (its engine's
            files or its universal format), or the folder of one tag in it. It may also be a folder of
            ``torch.distributed.checkpoint``. With ``load_module_only=True`` it may be a Hugging Face folder of
            safetensors, or one ``.safetensors`` file.
            tag: default: the tag in the file ``latest``. If this checkpoint is broken, the newest complete checkpoint
            before it is loaded, and the log says why. load_module_strict: missing or unexpected names in the checkpoint
            are an error. load_optimizer_states: moments, step counts, hyper-parameters of the groups, loss scale,
            random-number generators, and the place in the data. load_lr_scheduler_states: the schedule.
            load_module_only: weights (and master weights) and nothing else.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` with whole weights instead of
            loading them here.

        Returns (path, client_state), or (None, None) if there is no checkpoint. Raises on all ranks alike: StateError
        if the checkpoint does not fit this model or optimizer (nothing is changed or dropped then), and ConfigError
        if its run had another grain or number of threads of ``same_bits`` (nor then); CheckpointError if
        the checkpoint is broken, or if the engine's schedule cannot load the saved schedule (the message says why).
        """
        self._require_open()
        if self._offloaded.kinds:
            self._reload(non_blocking=False)
        loaded = self._checkpoints.load(
            self.module,
            load_dir,
            tag,
            strict=load_module_strict,
            load_optimizer=load_optimizer_states,
            load_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        self._note_step()
        return loaded

    def auto_resume(self) -> None:
        """Loads the newest complete checkpoint of ``checkpoint.auto_resume``, as ``load_checkpoint`` does. The end of
        ``initialize`` calls it. Afterwards ``resumed_from`` and ``client_state`` describe the loaded checkpoint. A
        ``training_dataloader`` that is set later goes on at the saved place. Collective.

        Does nothing without the key, without an optimizer, or if the folder has no checkpoint. Raises CheckpointError
        if all checkpoints in it are damaged, StateError if the checkpoint does not fit this model or optimizer, and
        ElasticityConfigError if its run had another section ``elasticity``; nothing is changed then.
        """
        self._require_open()
        folder = self._config.checkpoint.auto_resume
        if folder is not None and self._trains:
            self.resumed_from, self.client_state = self._checkpoints.resume(self.module, folder)
            self._note_step()

    def _note_step(self) -> None:
        if self._notes is not None:
            self._notes.note_step(self.global_steps)

    def set_trainable(self, names: Iterable[str], keep_state: bool = True) -> list[str]:
        """Trains exactly the parameters that match ``names`` from now on, and freezes all others. Returns the names of
        the trained parameters.

        names: full parameter names or shell patterns ("layers.*.bias"); each must fit a parameter. Collective, between
        two accumulation windows; the optimizer object stays the same. keep_state: keep the master weight and optimizer
        state of a frozen parameter (in this rank's memory) until it is trained again; otherwise drop them. A parameter
        that was never trained joins the first group (with Muon, the group for its shape).

        In a pipeline ``names`` are those of all stages. Raises ModelError for names that do not fit. At ZeRO stage 3 of
        a pipeline raises ConfigError on all ranks if a new gather unit is above ``stage3_max_live_parameters``; the
        same parameters as before are trained then.
        """
        optimizer = self._require_optimizer("set_trainable")
        self._require_window_start("set_trainable")
        self._require_states("set_trainable")
        chosen = match_names(self.module, names, self._mesh.pipeline)
        kept, groups = take_states(optimizer, self._state.dormant)
        trained = {id(slot.param) for slot in optimizer.slots}
        before = {name for name, param in self.module.named_parameters() if id(param) in trained}
        self._release()
        try:
            self._train_only(chosen, optimizer, groups)
        except ConfigError:
            self._train_only(before, optimizer, groups)
            put_states(optimizer, kept)
            raise
        put_states(optimizer, kept)
        self._state.keep_dormant({p: state for p, state in kept.items() if keep_state and not p.requires_grad})
        return sorted(chosen)

    def _train_only(
        self, names: Collection[str], optimizer: ZeroOptimizer, groups: Mapping[torch.nn.Parameter, int]
    ) -> None:
        """Lays out a model without a layout for the training of ``names``. ``groups``: the optimizer's group of each
        parameter that has been trained."""
        for name, param in self.module.named_parameters():
            param.requires_grad_(name in names)
        base = optimizer.optimizer
        assign_groups(self.module, base, groups)
        _, layout = shard_model(
            self.module, base, self._config, self._precision, self._mesh, optimizer, check=self._check_plans
        )
        take_cores_back(self._config.zero.offload_optimizer)  # left by the old layout
        self._adopt(layout)
        if self._fetcher is not None:
            self._fetcher.weights_changed()

    def _check_plans(self, plans: Sequence[UnitPlan]) -> None:
        """Raises ConfigError on all ranks if units of a new layout do not fit the configuration."""

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states (all kinds, or the kinds in ``include``) out of memory until ``reload_states``. Meanwhile the
        engine cannot run or save.

        device: "cpu": from the accelerator's memory to the host's. "nvme": to a file without a name in
        ``offload_optimizer.nvme_path`` (or ``offload_param``'s); ``reload_states`` or ``destroy`` frees its space. The
        call is collective with "nvme", and with ``comm.zero_copy_gather``. States that live on NVMe already stay there,
        and with "cpu" also states in host memory.
        pin_memory: whether to pin the host memory, if there is an accelerator. The method works at every stage, but
        weights that are whole on each rank are not moved.

        Raises StateError within an accumulation window. With "nvme" it raises on all ranks alike, and everything is
        still in memory then: ConfigError if a rank has no folder or too little space there, OffloadError if a rank
        cannot write.
        """
        self._require_open()
        self._require_window_start("offload_states")
        if self._fetcher is not None:
            self._fetcher.driver.abort()
            self._fetcher.begin_writes()
        self._offloaded.offload(include, device, pin_memory, non_blocking)

    def movable_bytes(self, device: OffloadDeviceEnum = OffloadDeviceEnum.cpu) -> int:
        """Bytes of this rank's memory that ``offload_states`` of all kinds frees, whether they are moved or not."""
        self._require_open()
        return self._offloaded.n_bytes(device)

    @property
    def lease_bytes(self) -> int:
        """Bytes of this rank's memory that all sharded weights take while they are whole, as in a generation: at most
        ``stage3_max_live_parameters`` elements."""
        fetcher = self._fetcher
        if fetcher is None:
            return 0
        itemsize = max((group.unit.dtype.itemsize for group in fetcher.groups), default=0)
        return min(fetcher.whole_bytes, fetcher.limits.max_live * itemsize)

    @property
    def kinds_away(self) -> set[OffloadStateTypeEnum]:
        """The kinds of state that ``offload_states`` has moved out of memory."""
        return self._offloaded.kinds

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves back the states that ``offload_states`` has moved out. Collective if they are on NVMe, and with
        ``comm.zero_copy_gather``.

        Raises OffloadError on all ranks if a rank cannot read back the bytes that it wrote. It may be called again.
        """
        self._require_open()
        self._reload(non_blocking)

    def _reload(self, non_blocking: bool) -> None:
        self._offloaded.reload(non_blocking)
        if self._fetcher is not None:
            self._fetcher.weights_changed()

    def _begin_load(self) -> None:
        self._state.begin_window()

    def _take_weights(self) -> None:
        self._state.take_weights(has_masters=False)

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
        if not self._trains:
            raise StateError(
                "this engine only evaluates: it was made without an optimizer",
                where=f"engine.{what}",
                fix="pass an optimizer, or an optimizer section in the configuration, to deepspeed_c.initialize",
            )
        return self._optimizer

    @property
    def tput_timer(self) -> ThroughputTimer:
        """A timer of samples per second, from each training forward to the end of its step. It starts when this
        property is first read, because it may cost time: ``timers.throughput.synchronized`` makes it wait for the
        device at each reading."""
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

    def _sequence_stream(self) -> AbstractContextManager[None]:
        """Context that sets the random numbers for a training forward. Ranks that hold parts of one sequence get
        different numbers, so that dropout differs between the parts."""
        if not (self._share.is_needed and self.module.training):
            return nullcontext()
        return stream_of_rank(SEQUENCE_RNG, self._mesh.index(SP))

    def _complete_window(self, optimizer: ZeroOptimizer) -> None:
        """The last work of a window before the step. Raises if the window's losses do not fit together."""

    def _update(self, optimizer: ZeroOptimizer, lr_kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Ends an accumulation window: completes reductions, clips gradients, updates the weights, advances the
        schedule."""
        self._step_applied = False
        if self._config.memory_breakdown:
            see_memory_usage("before step", force=True)
        self._mesh.enter_phase("step")
        self._flops.begin_step()
        self._complete_window(optimizer)
        try:
            with self.phases.measure("step"):
                optimizer.step()
        except DriftFound as drift:
            raise self._inputs.cause_of(drift) from drift
        finally:
            self._step_applied = not optimizer.overflow
            self._state.end_window(is_skipped=optimizer.overflow)
            self._mesh.enter_phase("")
        if (balance := self._edits.get("load balance")) is not None:
            balance.end_window(moves=self._step_applied)
        if self._step_applied and self.lr_scheduler is not None:
            # Torch's schedules warn of a wrong order if ``step`` of their optimizer has not been called. A fused
            # optimizer updates in another method.
            optimizer.optimizer._opt_called = True
            self.lr_scheduler.step(**lr_kwargs)
        self.phases.end_micro_step(is_step=True)
        self._rate.end_step(self.train_batch_size())
        self._stop_tput_timer(is_step=True)
        self._flops.end_step()
        self._report()
        self._experiment.end_step()
        self._note_step()
        agreed, folder = optimizer.agreed, self._config.checkpoint.auto_resume
        if agreed.stop:
            self._preemption.end_run(self, folder or self._checkpoints.last_dir, self._comm)
        elif agreed.save and not agreed.is_saving:
            self.save_checkpoint(folder, client_state=self.client_state, is_async=True)

    def close(self) -> None:
        if not self._is_closed:
            self._stop_watching()
        super().close()

    def _end(self) -> None:
        try:
            self._checkpoints.close()
        finally:
            if self._notes is not None:
                self._notes.close()
            self._end_training()

    def _end_training(self) -> None:
        self._uncompile()
        self._undo_edits()
        try:
            self._offloaded.close()
        finally:
            self._release()
            if self._trains:
                self._optimizer.close()
                take_cores_back(self._config.zero.offload_optimizer)
            self._state.close()
            self._mesh.close()
