"""The state of a run apart from the weights: optimizer, counters, loss scale, schedule, place in the data, random
numbers. Checkpoints save and restore this state."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.checkpoint.source import Source
from deepspeed_c.comm.axes import DATA, SAME_SAMPLES, SP, TOKENS, TP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.data.history import SampleHistory
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.engine.backward import BackwardPass
from deepspeed_c.engine.no_optimizer import NoOptimizer
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.trainable import KeptState
from deepspeed_c.engine.window import Window
from deepspeed_c.errors import CheckpointError
from deepspeed_c.logging import logger
from deepspeed_c.recompute.rng import get_cuda_rng_tracker
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.states.optimizer import ZeroOptimizer

__all__ = ["TrainState"]


class TrainState:
    """The state of one engine's training. The engine has attributes with DeepSpeed's names for the public parts of it."""

    def __init__(
        self,
        window: Window,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        optimizer: ZeroOptimizer | NoOptimizer,
        lr_scheduler: Any,
        *,
        loss: str,
        seed: int,
    ) -> None:
        self.window, self.mesh, self.precision, self.device = window, mesh, precision, device
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self._seed = seed
        self._loader: DeepSpeedDataLoader | None = None
        self.layout = Layout([], [], None)
        self.dormant: dict[torch.nn.Parameter, KeptState] = {}
        """States of parameters that were frozen during the run."""
        needs_weights = mesh.size(SP) > 1 and loss != "part"
        self.passes = BackwardPass(self.window, precision.scaler, mesh, self.begin_window, needs_weights)
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.n_tokens = 0
        """Number of tokens in this rank's batches of the present window."""
        self._history = SampleHistory()
        self._loader_state: dict[str, Any] | None = None  # the loader's position at the beginning of the window
        self._unclaimed: tuple[Any, Any] | None = (
            None  # position and history that were loaded before there was a loader
        )

    def lay_out(self, layout: Layout, *, trains: bool) -> None:
        """Sets the layout whose units now hold the model; an empty layout means that no units do. trains: whether
        backward passes belong to the optimizer. A frozen stage of a pipeline has such passes, but no trained units.
        """
        self.layout = layout
        if trains:
            self.passes.drive(self.optimizer.reducer, layout.fetcher)
        else:
            self.passes.leave()

    def keep_dormant(self, dormant: dict[torch.nn.Parameter, KeptState]) -> None:
        self.dormant = dormant

    def close(self) -> None:
        """Drops the references to optimizer, schedule and loader."""
        self.optimizer, self.lr_scheduler, self._loader = NoOptimizer(), None, None
        self.dormant.clear()

    @property
    def training_dataloader(self) -> DeepSpeedDataLoader | None:
        return self._loader

    @training_dataloader.setter
    def training_dataloader(self, loader: DeepSpeedDataLoader | None) -> None:
        self._loader = loader
        if loader is not None and self._unclaimed is not None:
            self._restore_loader(*self._unclaimed)
            return
        self._note_loader()

    def forget_place(self) -> None:
        """Lets a loader that is set later begin at its own position, instead of the one that was loaded before."""
        self._unclaimed = None

    def _restore_loader(self, place: Mapping[str, Any], samples: Mapping[str, Any] | None) -> None:
        self._loader.load_state_dict(place)
        self._unclaimed = None
        self._history = SampleHistory()  # a checkpoint of an older version has none
        if samples:
            self._history.load_state_dict(samples)
        self._note_loader()

    def _note_loader(self) -> None:
        self._loader_state = None if self._loader is None else self._loader.state_dict()

    def note_tokens(self, n: int) -> None:
        """Adds ``n`` to the number of this rank's tokens in the present window."""
        self.n_tokens += n

    @property
    def is_within_window(self) -> bool:
        return self.window.n_micro_steps > 0 or self.optimizer.has_window

    def begin_window(self) -> None:
        """Drops the gradients, losses and counts of the present window, and begins the window again."""
        self.optimizer.zero_grad()
        self.n_tokens = 0
        self.passes.begin_window()
        self.window.place(self.window.begin)
        self._note_loader()

    def end_window(self, *, is_skipped: bool) -> None:
        """Counts a step that has updated the weights or was skipped, and begins a window."""
        batch = self.window.batch
        is_counted = self.window.is_managed  # else: the micro-batches that the caller ran backward on
        n_samples = self.passes.n_backwards * batch.micro_batch_size * batch.world_size
        self.global_samples += batch.train_batch_size if is_counted else n_samples
        self.skipped_steps += is_skipped
        self.global_steps += 1
        if self._loader is not None:
            place = (self._loader_state or {}).get("sampler")
            self._history.note(self.global_steps, self._loader.take_runs(), self._loader.reading, place)
        self.n_tokens = 0
        self.window.place(self.window.micro_steps + 1)
        self.passes.begin_window()
        self._note_loader()

    def applied_steps(self) -> int:
        """Number of steps that have updated the weights."""
        return self.global_steps - self.skipped_steps

    def counters(self) -> dict[str, int]:
        """The counters at the beginning of the present window. Micro-batches of the window are not saved: a resumed run
        does them again.
        """
        if self.is_within_window:
            logger.warning(
                "save_checkpoint within an accumulation window: the gradients of its micro-batches are not saved"
            )
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.window.begin,
            "skipped_steps": self.skipped_steps,
        }

    def common(self) -> dict[str, Any]:
        """The state of which rank 0's is saved: the schedule, the optimizer's groups, the loss scale, and which samples
        were read."""
        state: dict[str, Any] = {}
        if self._loader is not None:
            state["samples"] = self._history.state_dict()
        if hasattr(self.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        return {**state, **self.optimizer.saved_options()}

    def of_rank(self) -> dict[str, Any]:
        """This rank's own state: random numbers, and its place in the data."""
        state: dict[str, Any] = {"random": files.state.random_state(self.device)}
        if tracked := get_cuda_rng_tracker().get_states():
            state["tracked"] = tracked
        if self._loader is not None:
            is_open = self.is_within_window and self._loader_state is not None
            state["loader"] = self._loader_state if is_open else self._loader.state_dict()
        return state

    def check(self, source: Source) -> None:
        """Raises CheckpointError if the saved random numbers, loader position or loss scale are damaged or have an
        unknown form. They are restored after everything else, so a load must check them first."""
        mine = {self._saved_rank(source, sequence_rank) for sequence_rank in (0, self.mesh.index(SP))}
        for rank in sorted({0, *mine}):
            state, where = source.rank_state(rank) or {}, f"{source.where}, state of rank {rank}"
            if "random" in state:
                files.state.check_random_state(state["random"], self.device, where)
            if "tracked" in state:
                _check_tracked(state["tracked"], self.device, where)
            if state.get("loader") and not _is_place(state["loader"]):
                raise CheckpointError("its place in the data is none", where=where, fix="load another tag")
            if state.get("loader") and self._loader is not None:
                self._loader.check_state_dict(state["loader"])
        if source.state.get("samples"):
            SampleHistory.check(source.state["samples"], source.where)
        scaler = self.optimizer.scaler
        if scaler is not None and source.state.get("loss_scaler"):
            try:
                pickle.loads(pickle.dumps(scaler)).load_state_dict(source.state["loss_scaler"])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"its loss scale is none: {error}", where=source.where, fix="load another tag"
                ) from error

    def restore_optimizer(self, source: Source) -> None:
        """Restores the options of the groups, and the loss scale."""
        for group, saved in zip(self.optimizer.param_groups, source.groups):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if self.optimizer.scaler is not None and source.state.get("loss_scaler"):
            self.optimizer.scaler.load_state_dict(source.state["loss_scaler"])

    def restore_scheduler(self, source: Source) -> None:
        """Restores the schedule. Raises CheckpointError if the engine's schedule cannot load the saved state."""
        scheduler, saved = self.lr_scheduler, source.state.get("lr_scheduler")
        if not hasattr(scheduler, "load_state_dict"):
            return
        if saved is None:
            logger.warning("%s holds no state of a learning-rate schedule; the engine's is left as it is", source.where)
            return
        try:
            scheduler.load_state_dict(saved)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{type(scheduler).__name__} cannot take the state of the schedule that was saved"
                f" ({type(error).__name__}: {error}); the weights have been loaded",
                where=source.where,
                fix="build the schedule that was saved, or load again with load_lr_scheduler_states=False:"
                " the engine refuses to train until a checkpoint has been loaded",
            ) from error

    def restore_counters(self, source: Source) -> None:
        counters, batch = source.state.get("counters", {}), self.window.batch
        self.global_steps = counters.get("global_steps", 0)
        self.skipped_steps = counters.get("skipped_steps", 0)
        self.global_samples = counters.get("global_samples", self.global_steps * batch.train_batch_size)
        n_micro_steps = self.global_steps * batch.accumulation_steps
        self.window.place(counters.get("micro_steps", n_micro_steps))
        # The checkpoint may have other accumulation steps. Counters are moved so that the next micro-batch begins a
        # window.
        if self.window.n_micro_steps:
            self.window.place(n_micro_steps)

    def _saved_rank(self, source: Source, sequence_rank: int) -> int:
        """The rank of the saved run from which this rank takes its random numbers or its place in the data. If the
        model or sequences are cut differently now, all ranks that hold one model together take the same numbers,
        because parameters that are whole on each of them must stay equal."""
        if self._is_cut_as(source):
            return self.mesh.comm.rank
        return (self.mesh.index(*DATA) * _n_ranks(source, SP) + sequence_rank) * _n_ranks(source, TP)

    def _is_cut_as(self, source: Source) -> bool:
        return all(_n_ranks(source, axis) == self.mesh.size(axis) for axis in SAME_SAMPLES)

    def restore_of_rank(self, source: Source) -> None:
        """Restores random numbers and the place in the data. ``global_steps`` has been restored before."""
        saved_ranks = source.topology.world_size
        for axis in SAME_SAMPLES:
            saved_ranks //= _n_ranks(source, axis)
        n_ranks, sequence_rank = self.mesh.size(*DATA), self.mesh.index(SP)
        first, mine = source.rank_state(self._saved_rank(source, 0)), None
        if sequence_rank < _n_ranks(source, SP):
            mine = source.rank_state(self._saved_rank(source, sequence_rank))
        if mine is not None and "random" in mine:
            files.state.restore_random_state(mine["random"], self.device)
            # A rank's own random streams have no owner if the model or sequences are cut differently now.
            if "tracked" in mine and self._is_cut_as(source):
                get_cuda_rng_tracker().set_states(mine["tracked"])
        elif source.rank_state(0) is not None:
            # A rank that did not exist in the saved run gets a new seed, the same in every run that resumes from this
            # checkpoint in this way.
            torch.manual_seed(self._seed + 7919 * (self.global_steps + 1) + self.mesh.index(*TOKENS))
        saved = (first if saved_ranks == n_ranks else source.rank_state(0)) or {}
        if saved.get("loader") and self._loader is None:
            self._unclaimed = saved["loader"], source.state.get("samples")
        elif saved.get("loader"):
            self._restore_loader(saved["loader"], source.state.get("samples"))

    def begin_writes(self) -> None:
        """Call it before the module's weights are written. Collective in the same cases as ``Fetcher.begin_writes``."""
        if self.layout.fetcher is not None:
            self.layout.fetcher.begin_writes()

    def take_weights(self, *, has_masters: bool) -> None:
        """Call it after other weights have been written to the module. ``has_masters``: the masters have been loaded
        too; otherwise they are overwritten with the weights."""
        self.optimizer.note_weights() if has_masters else self.optimizer.refresh_fp32_params()
        if self.layout.fetcher is not None:
            self.layout.fetcher.weights_changed()


def _n_ranks(source: Source, axis: str) -> int:
    """The number of ranks along ``axis`` in the run that saved the checkpoint ``source``."""
    return source.topology.axes.get(axis, 1)


def _is_place(state: Any) -> bool:
    """Whether ``state`` is the saved position of a loader."""
    return isinstance(state, Mapping) and all(
        type(state.get(key)) is int and 0 <= state[key] < 1 << 63 for key in ("epoch", "position")
    )


def _check_tracked(states: Any, device: torch.device, where: str) -> None:
    """Raises CheckpointError unless ``states`` are states of ``get_cuda_rng_tracker()``."""
    try:
        for state in states.values():
            torch.Generator(device).set_state(state)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"its tracked random state cannot be put back: {error}",
            where=where,
            fix="load another tag, or pass load_optimizer_states=False to go on with other random numbers",
        ) from error
