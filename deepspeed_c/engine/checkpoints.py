"""An engine's checkpoints: what is saved and when it is durable, and which one is loaded when the last one is broken."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c.checkpoint import state as state_files
from deepspeed_c.checkpoint.background import BackgroundSave, Snapshot
from deepspeed_c.checkpoint.commit import check_tag, read_latest, tags_by_age
from deepspeed_c.checkpoint.deepspeed.write import write_rank_files
from deepspeed_c.checkpoint.native import NativeSource
from deepspeed_c.checkpoint.open import format_of, open_checkpoint, read_latest_universal
from deepspeed_c.checkpoint.ranks import Ranks
from deepspeed_c.checkpoint.save import Contents, Deferred, Destination, save
from deepspeed_c.checkpoint.source import PARAM, ParamInfo, Read, Source
from deepspeed_c.engine.contents import Reading, names_of, owned_pieces, param_infos
from deepspeed_c.engine.restore import LoadOptions, plan_restore
from deepspeed_c.engine.weights import load_custom
from deepspeed_c.env import read_env
from deepspeed_c.errors import AioError, CheckpointError, DeepSpeedCError, OffloadError, StateError
from deepspeed_c.logging import log_dist, logger
from deepspeed_c.ops.adam import FusedAdam

if TYPE_CHECKING:
    from deepspeed_c.engine.engine import DeepSpeedEngine

__all__ = ["Checkpoints"]

# How often a checkpoint is opened again that another run replaces while it is being loaded.
LOAD_ATTEMPTS = 5


class Checkpoints:
    """Saves and loads one engine. Every method is collective."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._ranks = Ranks(engine._comm.rank, engine._comm.global_ranks)
        self._snapshot = Snapshot()
        self._reading = Reading()
        self._pending: BackgroundSave | None = None
        self.is_half_loaded = False
        """A load failed after it had overwritten something: the engine must not be trained on until another one has succeeded."""
        # Optimizer states may be among what it had overwritten: a load of weights alone does not mend them.
        self._has_mixed_states = False
        self.last_dir: str | None = None
        """The folder that was last saved to or loaded from."""
        self._loader_state: dict[str, int] | None = None  # where the engine's loader stood after the last step

    def note_step(self) -> None:
        """Called after every step that ends a window."""
        loader = self._engine.training_dataloader
        if loader is not None:
            self._loader_state = loader.state_dict()

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        save_latest: bool,
        exclude_frozen: bool,
        is_async: bool | None,
    ) -> BackgroundSave | bool:
        engine, config = self._engine, self._engine._config.checkpoint
        self.wait()
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        contents, error = None, None
        try:
            if engine._optimizer is not None:
                engine._optimizer.keep_edits()
            contents = self._contents(dict(client_state), exclude_frozen)
        except DeepSpeedCError as raised:
            error = raised
        tag, save_dir = self._agree(tag, os.path.abspath(save_dir), error)
        leads = self._ranks.rank == 0
        if config.use_node_local_storage:
            leads = read_env().local_rank == 0
        destination = Destination(
            save_dir=save_dir,
            tag=tag,
            save_latest=save_latest,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            is_node_local=config.use_node_local_storage,
            convert=self._convert_to_deepspeed if config.format == "deepspeed" else None,
            leads=leads,
        )
        self._ranks.connect()
        self.last_dir = save_dir
        is_streamed = any(isinstance(piece.data, Deferred) for piece in contents.pieces)
        if not (config.is_async if is_async is None else is_async) or is_streamed:
            # States that live in a file are read from it while they are written: the next step may not begin before.
            try:
                save(contents, destination, self._ranks)
            finally:
                self._reading.close()
            log_dist(f"saved {destination.path}", ranks=[0])
            return True
        contents.pieces = self._snapshot.take(contents.pieces)
        contents.params = {name: _frozen_counts(info) for name, info in contents.params.items()}
        self._pending = BackgroundSave(lambda: save(contents, destination, self._ranks), destination.path)
        return self._pending

    def _convert_to_deepspeed(self, native: str, folder: str, rank: int) -> None:
        engine = self._engine
        with NativeSource(native) as source:
            # DeepSpeed lays a group out in the order of the optimizer; our manifest has that of the module.
            names = [name for of_group in engine._layout.groups for name in of_group if name in source.params]
            source.params = {name: source.params[name] for name in (*names, *source.params)}
            write_rank_files(
                source,
                folder,
                world_size=self._ranks.world_size,
                stage=engine.zero_optimization_stage(),
                dtype=engine._precision.dtype or torch.float32,
                ranks=[rank],
                is_fused=engine._optimizer is not None and isinstance(engine._optimizer.optimizer, FusedAdam),
            )

    def wait(self) -> None:
        """Returns when no save is under way; raises what the last one failed with, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _agree(self, tag: str, save_dir: str, error: DeepSpeedCError | None) -> tuple[str, str]:
        """Rank 0's tag and folder; raises on all ranks what hinders one, before anything is written.

        Through the engine's own collectives: a rank that does not come here is named by the watchdog.
        """
        offers = self._engine._comm.gather_objects((tag, save_dir, error), label="save_checkpoint")
        for rank, (_, _, hindrance) in enumerate(offers):
            if hindrance is not None:
                raise CheckpointError(hindrance.what, where=f"rank {rank}: {hindrance.where}", fix=hindrance.fix)
        rule = self._engine._config.checkpoint.tag_validation
        first_tag, first_dir, _ = offers[0]
        other = next((rank for rank, offer in enumerate(offers) if offer[0] != first_tag), None)
        if other is not None and rule != "IGNORE":
            message = f"rank 0 saves {first_tag!r}, rank {other} {offers[other][0]!r}"
            if rule == "FAIL":
                raise CheckpointError(message, where="save_checkpoint", fix="pass the same tag on all ranks")
            logger.warning("save_checkpoint: %s; rank 0's is taken", message)
        is_node_local = self._engine._config.checkpoint.use_node_local_storage
        return check_tag(first_tag), save_dir if is_node_local else first_dir

    def _contents(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> Contents:
        """What this rank saves. Raises DeepSpeedCError for what cannot be saved."""
        engine = self._engine
        layout, optimizer, rank = engine._layout, engine._optimizer, self._ranks.rank
        named = names_of(engine.module)
        contents = Contents(
            pieces=owned_pieces(
                named,
                layout,
                optimizer,
                engine._dormant,
                engine._comm,
                reading=self._reading,
                exclude_frozen=exclude_frozen,
            ),
            stage=engine.zero_optimization_stage(),
            params=param_infos(layout, optimizer, engine._dormant, rank),
            names=named.names,
            aliases=named.aliases,
            counters=self._counters(),
            config=engine.config,
            mine=state_files.pack(self._rank_state(), f"rank {rank}"),
            excludes_frozen=exclude_frozen,
        )
        if rank == 0:
            contents.common = state_files.pack(self._common_state(client_state, named.others), "save_checkpoint")
        return contents

    def _counters(self) -> dict[str, int]:
        """As of the last step: what came after it in an open accumulation window is not saved, and will be done again."""
        engine = self._engine
        window = engine.micro_steps % engine.gradient_accumulation_steps()
        if window:
            logger.warning(
                "save_checkpoint within an accumulation window: the gradients of its %d micro-batches are not saved",
                window,
            )
        return {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps - window,
            "skipped_steps": engine.skipped_steps,
        }

    def _common_state(self, client_state: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        engine, optimizer = self._engine, self._engine._optimizer
        state: dict[str, Any] = {"client_state": dict(client_state)}
        if extra:
            state["extra_state"] = dict(extra)
        if engine.lr_scheduler is not None and hasattr(engine.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = engine.lr_scheduler.state_dict()
        if optimizer is not None:
            state["optimizer"] = type(optimizer.optimizer).__name__
            state["groups"] = [
                {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
            ]
            if optimizer.scaler is not None:
                state["loss_scaler"] = optimizer.scaler.state_dict()
        return state

    def _rank_state(self) -> dict[str, Any]:
        engine = self._engine
        state: dict[str, Any] = {"random": state_files.random_state(engine.device)}
        loader = engine.training_dataloader
        if loader is not None:
            window = engine.micro_steps % engine.gradient_accumulation_steps()
            state["loader"] = self._loader_state if window and self._loader_state is not None else loader.state_dict()
        return state

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(
        self,
        load_dir: str,
        tag: str | None,
        *,
        strict: bool,
        load_optimizer: bool,
        load_scheduler: bool,
        module_only: bool,
        custom_load_fn: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        self.wait()
        engine = self._engine
        self._ranks.connect()
        options = LoadOptions(
            strict=strict,
            optimizer=load_optimizer and not module_only,
            masters=engine._config.zero.load_from_fp32_weights,
        )
        candidates = self._candidates(load_dir, tag)
        if not candidates:
            logger.warning(
                "load_checkpoint: %s holds no checkpoint (no file 'latest' and no complete tag); nothing was loaded",
                load_dir,
            )
            return None, None
        reasons: list[str] = []
        for place, name in candidates:
            for _ in range(LOAD_ATTEMPTS):
                was_replaced = False
                source, problem = self._open(place, name, options)
                if source is not None:
                    with source:
                        problem = self._load_from(source, options, custom_load_fn)
                        if not problem:
                            self.is_half_loaded = True
                            client_state = self._restore_state(source, options, load_scheduler, module_only)
                            self.is_half_loaded = self._has_mixed_states
                            path = source.where
                        else:
                            was_replaced = any(self._ranks.all_gather(source.was_replaced))
                if not was_replaced:
                    break
            if not problem:
                if reasons:
                    logger.error("load_checkpoint: loaded %s, because %s", path, "; ".join(reasons))
                if name is not None:
                    self.last_dir = os.path.abspath(load_dir)
                log_dist(f"loaded {path}", ranks=[0])
                return path, client_state
            reasons.append(problem)
        fix = "restore the files from a copy, or load another tag"
        if self.is_half_loaded:
            fix += "; parts of the engine have been overwritten: it refuses to train until a checkpoint has been loaded"
        raise CheckpointError("; ".join(reasons), where=f"load_checkpoint({load_dir!r})", fix=fix)

    def _candidates(self, load_dir: str, tag: str | None) -> list[tuple[str, str | None]]:
        """(folder, tag) of what may be loaded, best first, as rank 0 sees it: a named tag only, or the latest and the complete ones before it, or
        the folder (or file) itself where that is a checkpoint."""
        found: list[tuple[str, str | None]] = []
        if self._ranks.rank == 0:
            if tag is not None:
                found = [(load_dir, str(tag))]
            else:
                latest = read_latest(load_dir)
                tags = [name for name, _ in tags_by_age(load_dir)]
                if latest is not None:
                    found.append((load_dir, latest))
                    older = tags[tags.index(latest) + 1 :] if latest in tags else tags
                    found += [(load_dir, name) for name in older]
                elif tags:
                    logger.warning("%s: there is no file 'latest'; the furthest trained tag is taken", load_dir)
                    found = [(load_dir, name) for name in tags]
                elif format_of(load_dir) is not None:
                    found = [(load_dir, None)]
                elif (universal := read_latest_universal(load_dir)) is not None:
                    found = [(load_dir, universal)]
        # Through the engine's own collectives: a rank that does not come here is named by the watchdog.
        everyone = self._engine._comm.gather_objects(found, label="load_checkpoint")
        return everyone[0]

    def _open(self, place: str, tag: str | None, options: LoadOptions) -> tuple[Source | None, str]:
        """The checkpoint, the same one open on all ranks, or why it is broken."""
        for _ in range(LOAD_ATTEMPTS):
            source, problem, identity = None, "", ""
            try:
                source = open_checkpoint(place, tag)
                identity = source.identity
                if options.optimizer:
                    self._check_state(source)
            except CheckpointError as error:
                problem = str(error).splitlines()[0]
            replies = self._ranks.all_gather((problem, identity))
            problem = next((p for p, _ in replies if p), "")
            is_same = len({its for _, its in replies}) == 1
            if not problem and is_same:
                return source, ""
            if source is not None:
                source.close()
            if problem:
                return None, problem
        return None, f"{os.path.join(place, tag or '')}: is replaced by another save whenever it is opened"

    def _check_state(self, source: Source) -> None:
        """Raises CheckpointError for small state that is damaged or no such state: it is restored when everything else has been, and that it cannot be has
        to be known before."""
        engine = self._engine
        for rank in sorted({0, self._ranks.rank}):
            state, where = source.rank_state(rank) or {}, f"{source.where}, state of rank {rank}"
            if "random" in state:
                state_files.check_random_state(state["random"], engine.device, where)
            if state.get("loader") and not _is_place(state["loader"]):
                raise CheckpointError("its place in the data is none", where=where, fix="load another tag")
        scaler = None if engine._optimizer is None else engine._optimizer.scaler
        if scaler is not None and source.state.get("loss_scaler"):
            try:
                pickle.loads(pickle.dumps(scaler)).load_state_dict(source.state["loss_scaler"])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"its loss scale is none: {error}", where=source.where, fix="load another tag"
                ) from error

    def _load_from(self, source: Source, options: LoadOptions, custom_load_fn: Any) -> str:
        """Fills the engine. Returns why it could not be read, the same on all ranks; raises StateError where it does not fit (nothing is changed then)."""
        engine = self._engine
        plan, error = None, None
        if custom_load_fn is None:
            named = names_of(engine.module)
            try:
                plan = plan_restore(source, named, engine._layout, engine._optimizer, engine._comm, options)
            except StateError as raised:
                error = raised
            verdicts = self._ranks.all_gather(str(error) if error else "")
            if any(verdicts):
                raise error or StateError(
                    f"the checkpoint does not fit on another rank: {next(v for v in verdicts if v)}", where=source.where
                )
        problem = ""
        reads_states = plan is not None and options.optimizer and engine._optimizer is not None
        self.is_half_loaded = True
        self._has_mixed_states |= reads_states
        try:
            if plan is None:
                load_custom(engine.module, custom_load_fn, _whole_state(source))
            else:
                plan.run(source, engine._comm)
        except (CheckpointError, OffloadError, AioError) as error:
            problem = str(error).splitlines()[0]
        problem = next((p for p in self._ranks.all_gather(problem) if p), "")
        if problem:
            return problem
        if reads_states:
            engine._optimizer.broken = ""
        if plan is None:
            if engine._optimizer is not None:
                engine._optimizer.refresh_fp32_params()
        else:
            plan.finish(engine._comm)
            if options.optimizer:
                engine._dormant = plan.dormant
            self._tell(source, plan.missing, plan.unexpected, plan.fresh)
            if engine._optimizer is not None:
                engine._optimizer.note_weights()
        if engine._fetcher is not None:
            engine._fetcher.weights_changed()
        self._has_mixed_states &= not reads_states
        self.is_half_loaded = self._has_mixed_states
        return ""

    @staticmethod
    def _tell(source: Source, missing: list[str], unexpected: list[str], fresh: list[str]) -> None:
        for what, names in (
            ("lacks, and left as they were", missing),
            ("has, and the model does not", unexpected),
            ("has no optimizer state of, which begins anew for them", fresh),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                log_dist(f"{source.where} {what}: {', '.join(names[:5])}{more}", ranks=[0])

    def _restore_state(
        self, source: Source, options: LoadOptions, load_scheduler: bool, module_only: bool
    ) -> dict[str, Any]:
        engine, state = self._engine, source.state
        client_state = dict(state.get("client_state") or {})
        if "extra_state" in state:
            _load_extra_state(engine.module, state["extra_state"])
        if module_only:
            return client_state
        optimizer = engine._optimizer
        if options.optimizer and optimizer is not None:
            for group, saved in zip(optimizer.param_groups, source.groups):
                group.update({key: value for key, value in saved.items() if key != "params"})
            if optimizer.scaler is not None and state.get("loss_scaler"):
                optimizer.scaler.load_state_dict(state["loss_scaler"])
            optimizer.zero_grad()
        scheduler = engine.lr_scheduler
        if load_scheduler and scheduler is not None and hasattr(scheduler, "load_state_dict"):
            if state.get("lr_scheduler") is not None:
                try:
                    scheduler.load_state_dict(state["lr_scheduler"])
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"{type(scheduler).__name__} cannot take the state of the schedule that was saved"
                        f" ({type(error).__name__}: {error}); the weights have been loaded",
                        where=source.where,
                        fix="build the schedule that was saved, or load again with load_lr_scheduler_states=False:"
                        " the engine refuses to train until a checkpoint has been loaded",
                    ) from error
            else:
                logger.warning(
                    "%s holds no state of a learning-rate schedule; the engine's is left as it is", source.where
                )
        counters = state.get("counters", {})
        gas = engine.gradient_accumulation_steps()
        engine.global_steps = counters.get("global_steps", 0)
        engine.skipped_steps = counters.get("skipped_steps", 0)
        engine.global_samples = counters.get("global_samples", engine.global_steps * engine.train_batch_size())
        micro_steps = counters.get("micro_steps", engine.global_steps * gas)
        # Windows are counted in micro-batches: with other accumulation steps the next window still begins at its beginning.
        engine.micro_steps = micro_steps if micro_steps % gas == 0 else engine.global_steps * gas
        if options.optimizer:
            self._restore_rank_state(source)
        return client_state

    def _restore_rank_state(self, source: Source) -> None:
        engine, rank = self._engine, self._ranks.rank
        is_same_world = source.topology.world_size == self._ranks.world_size
        mine = source.rank_state(rank)
        if mine is not None and "random" in mine:
            state_files.restore_random_state(mine["random"], engine.device)
        elif source.rank_state(0) is not None:
            # A rank that did not exist then: a stream of its own, the same in every run that resumes so.
            torch.manual_seed(engine._config.seed + 7919 * (engine.global_steps + 1) + rank)
        loader = engine.training_dataloader
        if loader is None:
            return
        saved = (mine if is_same_world else source.rank_state(0)) or {}
        if saved.get("loader"):
            loader.load_state_dict(
                _same_place(saved["loader"], loader.batch_size, source.topology.world_size, self._ranks.world_size)
            )

    def close(self) -> None:
        """Waits for a save that is under way; its failure is raised after everything has been let go of."""
        try:
            self.wait()
        finally:
            self._snapshot.clear()
            self._ranks.close()


def _frozen_counts(info: ParamInfo) -> ParamInfo:
    """``info`` as it is now: optimizers count in place."""
    counts = {key: value.clone() if torch.is_tensor(value) else value for key, value in info.counts.items()}
    return ParamInfo(group=info.group, counts=counts)


def _is_place(state: Any) -> bool:
    """Whether this is what a loader says of where it stands."""
    least = {"epoch": 0, "batch": 0, "batch_size": 1}
    return isinstance(state, Mapping) and all(
        type(state.get(key)) is int and low <= state[key] < 1 << 63 for key, low in least.items()
    )


def _same_place(state: Mapping[str, int], batch_size: int, saved_ranks: int, n_ranks: int) -> dict[str, int]:
    """A loader's position on other ranks or with another micro-batch: the same samples of the epoch lie behind it (rounded down to whole batches)."""
    samples = state["batch"] * state["batch_size"] * saved_ranks
    return {"epoch": state["epoch"], "batch": samples // (batch_size * n_ranks), "batch_size": batch_size}


def _whole_state(source: Source) -> dict[str, torch.Tensor]:
    """Every weight and buffer, whole, in host memory: for callers who load by a function of their own."""
    state: dict[str, torch.Tensor] = {}
    reads = []
    for (kind, name), tensor in source.tensors.items():
        if kind in (PARAM, "buffer") or (kind == "master" and (PARAM, name) not in source.tensors):
            state[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            reads.append(Read(tensor, 0, state[name].view(-1)))
    source.read(reads)
    state.update({alias: state[name] for alias, name in source.aliases.items() if name in state})
    return state


def _load_extra_state(module: torch.nn.Module, extra: Mapping[str, Any]) -> None:
    for prefix, child in module.named_modules():
        key = f"{prefix}{'.' if prefix else ''}_extra_state"
        if key in extra:
            child.set_extra_state(extra[key])
