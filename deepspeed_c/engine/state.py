"""The state of a run besides the weights: optimizer, counters, loss scale, schedule, place in the data, random numbers.
Checkpoints save and restore this state."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.checkpoint.source import Source
from deepspeed_c.comm.axes import DATA, SAME_SAMPLES, SP, TOKENS, TP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
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
    """The state of one engine's training; its public parts are attributes of the engine as well, under DeepSpeed's
    names."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        optimizer: ZeroOptimizer | NoOptimizer,
        lr_scheduler: Any,
    ) -> None:
        self.config, self.mesh, self.precision, self.device = config, mesh, precision, device
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self._loader: DeepSpeedDataLoader | None = None
        self.layout = Layout([], [], None)
        self.dormant: dict[torch.nn.Parameter, KeptState] = {}
        """States of parameters that were frozen in mid-run."""
        self.window = Window(config.batch, is_managed=config.managed_gradient_accumulation)
        needs_weights = mesh.size(SP) > 1 and config.sequence_parallel.loss != "part"
        self.passes = BackwardPass(self.window, precision.scaler, mesh, self.begin_window, needs_weights)
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.n_tokens = 0
        """In this rank's batches of the present window."""
        self._loader_state: dict[str, int] | None = None  # where the loader stood when the present window began

    def lay_out(self, layout: Layout) -> None:
        """The model is held by the units of ``layout`` now; by none, if it is empty."""
        self.layout = layout
        if layout.trained:
            self.passes.drive(self.optimizer.reducer, layout.fetcher)
        else:
            self.passes.leave()

    def keep_dormant(self, dormant: dict[torch.nn.Parameter, KeptState]) -> None:
        self.dormant = dormant

    def close(self) -> None:
        """Lets go of optimizer, schedule and loader."""
        self.optimizer, self.lr_scheduler, self._loader = NoOptimizer(), None, None
        self.dormant.clear()

    @property
    def training_dataloader(self) -> DeepSpeedDataLoader | None:
        return self._loader

    @training_dataloader.setter
    def training_dataloader(self, loader: DeepSpeedDataLoader | None) -> None:
        self._loader = loader
        self._note_loader()

    def _note_loader(self) -> None:
        self._loader_state = None if self._loader is None else self._loader.state_dict()

    def note_tokens(self, n: int) -> None:
        """This rank has got ``n`` more tokens in the present window."""
        self.n_tokens += n

    @property
    def is_within_window(self) -> bool:
        return self.window.n_micro_steps > 0 or self.optimizer.has_window

    def begin_window(self) -> None:
        """Drops the gradients, losses and counts of the present window, and starts it over."""
        self.optimizer.zero_grad()
        self.n_tokens = 0
        self.passes.begin_window()
        self.window.place(self.window.begin)
        self._note_loader()

    def end_window(self, *, is_skipped: bool) -> None:
        """Counts a step that has updated the weights, or was skipped; a window begins."""
        batch = self.window.batch
        is_counted = self.window.is_managed  # or as many micro-batches as the caller has given gradients of
        n_samples = self.passes.n_backwards * batch.micro_batch_size * batch.world_size
        self.global_samples += batch.train_batch_size if is_counted else n_samples
        self.skipped_steps += is_skipped
        self.global_steps += 1
        self.n_tokens = 0
        self.window.place(self.window.micro_steps + 1)
        self.passes.begin_window()
        self._note_loader()

    def counters(self) -> dict[str, int]:
        """The counters at the beginning of the present window: its micro-batches are not saved, and will be done again.
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
        """The state that is the same on all ranks: the schedule, the optimizer's groups, the loss scale."""
        state: dict[str, Any] = {}
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
        """Raises CheckpointError for small state that is damaged or no such state: it is restored when everything else
        has been, and that it cannot be has to be known before."""
        mine = {self._saved_rank(source, sequence_rank) for sequence_rank in (0, self.mesh.index(SP))}
        for rank in sorted({0, *mine}):
            state, where = source.rank_state(rank) or {}, f"{source.where}, state of rank {rank}"
            if "random" in state:
                files.state.check_random_state(state["random"], self.device, where)
            if "tracked" in state:
                _check_tracked(state["tracked"], self.device, where)
            if state.get("loader") and not _is_place(state["loader"]):
                raise CheckpointError("its place in the data is none", where=where, fix="load another tag")
        scaler = self.optimizer.scaler
        if scaler is not None and source.state.get("loss_scaler"):
            try:
                pickle.loads(pickle.dumps(scaler)).load_state_dict(source.state["loss_scaler"])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"its loss scale is none: {error}", where=source.where, fix="load another tag"
                ) from error

    def restore_optimizer(self, source: Source) -> None:
        """Options of the groups, and the loss scale."""
        for group, saved in zip(self.optimizer.param_groups, source.groups):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if self.optimizer.scaler is not None and source.state.get("loss_scaler"):
            self.optimizer.scaler.load_state_dict(source.state["loss_scaler"])

    def restore_scheduler(self, source: Source) -> None:
        """Raises CheckpointError where the engine's schedule cannot take the saved state."""
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
        # Saved with other accumulation steps: the next window still begins at its beginning.
        if self.window.n_micro_steps:
            self.window.place(n_micro_steps)

    def _saved_rank(self, source: Source, sequence_rank: int) -> int:
        """The rank of the run that saved whose random numbers, or place in the data, this one goes on from. Ranks that
        hold one model together go on from the same numbers where they were other ranks: their whole parameters have to
        stay the same."""
        if self._is_cut_as(source):
            return self.mesh.comm.rank
        return (self.mesh.index(*DATA) * _n_ranks(source, SP) + sequence_rank) * _n_ranks(source, TP)

    def _is_cut_as(self, source: Source) -> bool:
        return all(_n_ranks(source, axis) == self.mesh.size(axis) for axis in SAME_SAMPLES)

    def restore_of_rank(self, source: Source) -> None:
        """Random numbers, and the place in the data; ``global_steps`` are the checkpoint's already."""
        saved_ranks = source.topology.world_size
        for axis in SAME_SAMPLES:
            saved_ranks //= _n_ranks(source, axis)
        n_ranks, sequence_rank = self.mesh.size(*DATA), self.mesh.index(SP)
        first, mine = source.rank_state(self._saved_rank(source, 0)), None
        if sequence_rank < _n_ranks(source, SP):
            mine = source.rank_state(self._saved_rank(source, sequence_rank))
        if mine is not None and "random" in mine:
            files.state.restore_random_state(mine["random"], self.device)
            # Streams of a rank's own are nobody's where a model, or sequences, are cut otherwise.
            if "tracked" in mine and self._is_cut_as(source):
                get_cuda_rng_tracker().set_states(mine["tracked"])
        elif source.rank_state(0) is not None:
            # A rank that did not exist then: a stream of its own, the same in every run that resumes so.
            torch.manual_seed(self.config.seed + 7919 * (self.global_steps + 1) + self.mesh.index(*TOKENS))
        if self._loader is None:
            return
        saved = (first if saved_ranks == n_ranks else source.rank_state(0)) or {}
        if saved.get("loader"):
            self._loader.load_state_dict(_same_place(saved["loader"], self._loader.batch_size, saved_ranks, n_ranks))
            self._note_loader()

    def begin_writes(self) -> None:
        """The module's weights are about to be written. Collective as ``Fetcher.begin_writes``."""
        if self.layout.fetcher is not None:
            self.layout.fetcher.begin_writes()

    def take_weights(self, *, has_masters: bool) -> None:
        """The module's weights are others now; ``has_masters``: and the masters with them, which are taken anew from
        the weights otherwise."""
        self.optimizer.note_weights() if has_masters else self.optimizer.refresh_fp32_params()
        if self.layout.fetcher is not None:
            self.layout.fetcher.weights_changed()


def _n_ranks(source: Source, axis: str) -> int:
    """How many ranks there were along ``axis`` of the mesh that a checkpoint of ours is of."""
    return source.topology.axes.get(axis, 1)


def _is_place(state: Any) -> bool:
    """Whether this is a loader's description of its place."""
    least = {"epoch": 0, "batch": 0, "batch_size": 1}
    return isinstance(state, Mapping) and all(
        type(state.get(key)) is int and low <= state[key] < 1 << 63 for key, low in least.items()
    )


def _same_place(state: Mapping[str, int], batch_size: int, saved_ranks: int, n_ranks: int) -> dict[str, int]:
    """A loader's position on other ranks or with another micro-batch: the same samples of the epoch lie behind it
    (rounded down to whole batches)."""
    samples = state["batch"] * state["batch_size"] * saved_ranks
    return {"epoch": state["epoch"], "batch": samples // (batch_size * n_ranks), "batch_size": batch_size}


def _check_tracked(states: Any, device: torch.device, where: str) -> None:
    """Raises CheckpointError unless they are states of ``get_cuda_rng_tracker()``."""
    try:
        for state in states.values():
            torch.Generator(device).set_state(state)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"its tracked random state cannot be put back: {error}",
            where=where,
            fix="load another tag, or pass load_optimizer_states=False to go on with other random numbers",
        ) from error
