"""An engine's checkpoints: saves them durably, and chooses the checkpoint to load, even if the last one is broken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.checkpoint.experts import expert_name
from deepspeed_c.checkpoint.fingerprint import Fingerprint
from deepspeed_c.checkpoint.native.background import BackgroundSave, Save, Snapshot
from deepspeed_c.checkpoint.native.ranks import Ranks
from deepspeed_c.checkpoint.source import PARAM, ParamInfo, Read, Source, Topology
from deepspeed_c.comm.axes import PP
from deepspeed_c.config.checkpoint import Checkpoint
from deepspeed_c.config.zero import Zero
from deepspeed_c.engine.checkpoint.contents import (
    Reading,
    held_pieces,
    names_of,
    names_of_all,
    owned_pieces,
    param_infos,
)
from deepspeed_c.engine.checkpoint.kept_bits import KeptBits
from deepspeed_c.engine.checkpoint.kept_section import check_kept_section
from deepspeed_c.engine.checkpoint.restore import LoadOptions, plan_restore
from deepspeed_c.engine.fingerprint import RankPrints
from deepspeed_c.engine.parts import take_parts
from deepspeed_c.engine.weights import load_custom
from deepspeed_c.env import read_env
from deepspeed_c.errors import AioError, CheckpointError, DeepSpeedCError, OffloadError, StateError
from deepspeed_c.logging import log_dist, logger
from deepspeed_c.ops.scope import declaration
from deepspeed_c.pipe.module import PipelineModule
from deepspeed_c.weights.names import named_as_in_model

if TYPE_CHECKING:
    from deepspeed_c.checkpoint.native.save import Contents
    from deepspeed_c.engine.state import TrainState

__all__ = ["Checkpoints"]

# Most attempts to open a checkpoint, if another run replaces it while it is being loaded.
LOAD_ATTEMPTS = 5


class Checkpoints:
    """Saves and loads one engine. Every method is collective. ``written``: the user's configuration, which a checkpoint
    keeps. ``on_commit`` is called when a checkpoint is durable, by the thread that wrote it. ``bits``: the record of an
    engine with ``same_bits``."""

    def __init__(
        self,
        state: TrainState,
        section: Checkpoint,
        zero: Zero,
        written: dict[str, Any],
        on_commit: Callable[[], None],
        bits: KeptBits | None = None,
    ) -> None:
        self._state, self._comm = state, state.mesh.comm
        self._section, self._zero, self._written = section, zero, written
        self._on_commit, self._bits = on_commit, bits
        self._every_seconds = section.every_seconds
        self._begun = time.monotonic()  # when the last save or load began
        self._ranks = Ranks(self._comm.rank, self._comm.global_ranks)
        self._snapshot = Snapshot()
        self._reading = Reading()
        self._prints = RankPrints(self._comm, state.mesh.index(PP))
        self._pending: BackgroundSave | None = None
        self.is_half_loaded = False
        """Whether a load failed after it had overwritten something. The engine must not go on training until another
        load has succeeded."""
        # Whether the failed load may have overwritten optimizer states. A load of weights alone does not mend them.
        self._has_mixed_states = False
        self.last_dir: str | None = None
        """The folder of the last save or load."""
        self.loaded: Topology | None = None
        """The arrangement of ranks of the run that saved the checkpoint which was loaded last."""

    def save(
        self,
        module: torch.nn.Module,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        save_latest: bool,
        exclude_frozen: bool,
        is_async: bool | None,
    ) -> Save | bool:
        state, config = self._state, self._section
        self.wait()
        tag = f"global_step{state.global_steps}" if tag is None else str(tag)
        contents, error, expert_ranks = None, None, {}
        try:
            state.optimizer.keep_edits()
            contents = self._contents(module, dict(client_state), exclude_frozen)
            expert_ranks = self._expert_ranks(contents.names, names_of(module).expert_ranks)
        except DeepSpeedCError as raised:
            error = raised
        tag, save_dir = self._agree(tag, os.path.abspath(save_dir), error)
        leads = self._ranks.rank == 0
        if config.use_node_local_storage:
            leads = read_env().local_rank == 0
        destination = files.save.Destination(
            save_dir=save_dir,
            tag=tag,
            save_latest=save_latest,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            is_node_local=config.use_node_local_storage,
            convert=self._converter(expert_ranks) if config.format == "deepspeed" else None,
            leads=leads,
        )
        self._ranks.connect()
        self.last_dir = save_dir
        self._begun = time.monotonic()
        is_async = config.is_async if is_async is None else is_async
        if not is_async or any(isinstance(piece.data, files.save.Deferred) for piece in contents.pieces):
            # States in a file are read, and 8-bit states are converted, while the checkpoint is written. The next step
            # must not begin before this has ended.
            try:
                self._write(contents, destination)
            finally:
                self._reading.close()
            log_dist(f"saved {destination.path}", ranks=[0])
            return Save(destination.path) if is_async else True
        params = {name: _frozen_counts(info) for name, info in contents.params.items()}
        copied = replace(contents, pieces=self._snapshot.take(contents.pieces), params=params)
        self._pending = BackgroundSave(lambda: self._write(copied, destination), destination.path)
        return self._pending

    def _write(self, contents: Contents, destination: files.save.Destination) -> None:
        files.save.save(contents, destination, self._ranks)
        self._on_commit()

    def fingerprint(self, module: torch.nn.Module) -> Fingerprint:
        """The fingerprint of weights and optimizer states, the same as that of a checkpoint that is saved now. Raises
        RankMismatchError on all ranks alike if copies that ranks hold of the same elements differ."""
        state = self._state
        state.optimizer.keep_edits()
        named = names_of_all(names_of(module), state.mesh)
        pieces = held_pieces(named, state.layout, state.optimizer, state.dormant, reading=self._reading)
        try:
            return self._prints.of(pieces, named.names)
        finally:
            self._reading.close()

    def is_due(self) -> bool:
        """Whether ``checkpoint.every`` requests a save now. Only rank 0 says so, by its clock."""
        every = self._every_seconds
        return every is not None and self._ranks.rank == 0 and time.monotonic() - self._begun >= every

    def is_saving(self) -> bool:
        """Whether a save of this rank is still being written."""
        return self._pending is not None and not self._pending.is_done()

    def _expert_ranks(self, names: Iterable[str], of_names: Mapping[str, int]) -> dict[str, int]:
        """The number of ranks that hold the experts of each layer together, for DeepSpeed's files.

        Raises CheckpointError if these files cannot hold the model's experts.
        """
        if self._section.format != "deepspeed":
            return {}
        layers = {split.layer for name in names if (split := expert_name(name)) is not None}
        if layers and self._zero.sharding.parameters:
            raise CheckpointError(
                "DeepSpeed does not train mixtures of experts at stage 3, and has no files for them",
                where="checkpoint.format",
                fix='save with "format": "deepspeed_c", and convert with `deepspeed_c checkpoint convert --stage 2`',
            )
        if odd := [name for name in of_names if expert_name(name) is None]:
            raise CheckpointError(
                "is spread over ranks, and DeepSpeed's files hold such experts in layers of the class MoE only",
                where=odd[0],
                fix='save with "format": "deepspeed_c"',
            )
        return {expert_name(name).layer: n for name, n in of_names.items()}

    def _converter(self, expert_ranks: Mapping[str, int]) -> Callable[[str, str, int], None]:
        """Returns the function that writes this rank's files in DeepSpeed's layout. The function may run later on
        another thread, so it gets everything that it needs from the engine now."""
        state, n_ranks = self._state, self._ranks.world_size
        stage, dtype = self._zero.stage, state.precision.dtype or torch.float32
        # DeepSpeed stores a group in the optimizer's order; our manifest has the module's order.
        order = [name for of_group in state.layout.groups for name in of_group]
        is_fused = declaration(state.optimizer.optimizer).is_fused_in_deepspeed

        def convert(native: str, folder: str, rank: int) -> None:
            with files.reader.NativeSource(native) as source:
                source.put_first(order)
                files.deepspeed.write_rank_files(
                    source,
                    folder,
                    world_size=n_ranks,
                    stage=files.deepspeed.stage_for(source, stage),
                    dtype=dtype,
                    ranks=[rank],
                    is_fused=is_fused,
                    expert_ranks=expert_ranks,
                )

        return convert

    def wait(self) -> None:
        """Waits until no save is running. Raises the error of the last save, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _agree(self, tag: str, save_dir: str, error: DeepSpeedCError | None) -> tuple[str, str]:
        """Agrees on rank 0's tag and folder. An error of any rank is raised on all ranks before anything is written.

        This uses the engine's own collectives, so the watchdog names a rank that does not take part.
        """
        offers = self._comm.gather_objects((tag, save_dir, error), label="save_checkpoint")
        for rank, (_, _, hindrance) in enumerate(offers):
            if hindrance is not None:
                raise CheckpointError(hindrance.what, where=f"rank {rank}: {hindrance.where}", fix=hindrance.fix)
        rule = self._section.tag_validation
        first_tag, first_dir, _ = offers[0]
        other = next((rank for rank, offer in enumerate(offers) if offer[0] != first_tag), None)
        if other is not None and rule != "IGNORE":
            message = f"rank 0 saves {first_tag!r}, rank {other} {offers[other][0]!r}"
            if rule == "FAIL":
                raise CheckpointError(message, where="save_checkpoint", fix="pass the same tag on all ranks")
            logger.warning("save_checkpoint: %s; rank 0's tag is used", message)
        is_node_local = self._section.use_node_local_storage
        return files.commit.check_tag(first_tag), save_dir if is_node_local else first_dir

    def _contents(self, module: torch.nn.Module, client_state: Mapping[str, Any], exclude_frozen: bool) -> Contents:
        """This rank's part of a checkpoint. Raises DeepSpeedCError for objects that cannot be saved."""
        state = self._state
        layout, optimizer, rank = state.layout, state.optimizer, self._ranks.rank
        named = names_of_all(names_of(module), state.mesh)
        return files.save.Contents(
            pieces=owned_pieces(
                named,
                layout,
                optimizer,
                state.dormant,
                state.mesh,
                reading=self._reading,
                exclude_frozen=exclude_frozen,
            ),
            stage=self._zero.stage,
            axes=state.mesh.wide_axes,
            expert_parallel=max(named.expert_ranks.values(), default=1),
            params=param_infos(layout, optimizer, state.dormant, state.mesh.stage.rank),
            names=named.names,
            aliases=named.aliases,
            counters=state.counters(),
            config=self._written,
            mine=files.state.pack(state.of_rank(), f"rank {rank}"),
            common=self._common(module, client_state, named.others) if rank == 0 else b"",
            excludes_frozen=exclude_frozen,
        )

    def _common(self, module: torch.nn.Module, client_state: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        common = {"client_state": dict(client_state), **self._state.common()}
        if isinstance(module, PipelineModule):
            common["pipeline"] = {"tied": module.saved_ties()}
        if extra:
            common["extra_state"] = dict(extra)
        if self._bits is not None:
            common["same_bits"] = self._bits.record()
        return files.state.pack(common, "save_checkpoint")

    def load(
        self,
        module: torch.nn.Module,
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
        self._ranks.connect()
        candidates, _ = self._candidates(load_dir, tag)
        if not candidates:
            logger.warning(
                "load_checkpoint: %s holds no checkpoint (no file 'latest' and no complete tag); nothing was loaded",
                load_dir,
            )
            return None, None
        wants_optimizer = load_optimizer and not module_only
        options = LoadOptions(
            strict=strict,
            optimizer=wants_optimizer,
            states=wants_optimizer and bool(self._state.optimizer.units),
            masters=self._zero.load_from_fp32_weights,
        )
        loaded = self._load_first(module, load_dir, candidates, options, load_scheduler, module_only, custom_load_fn)
        self._state.forget_place()
        return loaded

    def resume(self, module: torch.nn.Module, folder: str) -> tuple[str | None, dict[str, Any]]:
        """Loads everything from the newest complete checkpoint of ``folder``. Returns (None, {}) if there is none.

        A damaged checkpoint is skipped, and the log names it. Raises CheckpointError if all are damaged, because a run
        that begins anew would replace them; ElasticityConfigError if the section ``elasticity`` has changed since the
        save, and ConfigError if the grain or the threads of ``same_bits`` have, before anything is overwritten.
        """
        self._ranks.connect()
        candidates, damaged = self._candidates(folder, None)
        where = f"checkpoint.auto_resume = {folder!r}"
        if damaged and not candidates:
            raise CheckpointError(
                f"no checkpoint is complete: {'; '.join(damaged)}",
                where=where,
                fix="restore one from a copy, or move the damaged ones away, to begin from the first step",
            )
        if not candidates:
            log_dist(f"{where}: there is no checkpoint yet, training begins", ranks=[0])
            return None, {}
        options = LoadOptions(
            strict=True,
            optimizer=True,
            states=bool(self._state.optimizer.units),
            masters=self._zero.load_from_fp32_weights,
            same_batch=True,
        )
        return self._load_first(module, folder, candidates, options, True, False, None, damaged)

    def _load_first(
        self,
        module: torch.nn.Module,
        load_dir: str,
        candidates: list[tuple[str, str | None]],
        options: LoadOptions,
        load_scheduler: bool,
        module_only: bool,
        custom_load_fn: Any,
        damaged: Iterable[str] = (),
    ) -> tuple[str, dict[str, Any]]:
        """Loads the first of the candidates that is not broken. Raises as ``load_checkpoint``. damaged: known
        problems of the folder."""
        reasons = list(damaged)
        for place, name in candidates:
            for _ in range(LOAD_ATTEMPTS):
                was_replaced = False
                source, problem = self._open(place, name, options)
                if source is not None:
                    with source:
                        if options.same_batch:
                            check_kept_section(self._written, source.state.get("config") or {}, source.where)
                        if self._bits is not None and options.optimizer:
                            self._bits.check(source.state.get("same_bits"), source.where)
                        problem = self._load_from(module, source, options, custom_load_fn)
                        if not problem:
                            self.is_half_loaded = True
                            client_state = self._restore_state(module, source, options, load_scheduler, module_only)
                            self.is_half_loaded = self._has_mixed_states
                            path, self.loaded = source.where, source.topology
                        else:
                            was_replaced = any(self._ranks.all_gather(source.was_replaced))
                if not was_replaced:
                    break
            if not problem:
                if reasons:
                    logger.error("load_checkpoint: loaded %s, because %s", path, "; ".join(reasons))
                if name is not None:
                    self.last_dir = os.path.abspath(load_dir)
                self._begun = time.monotonic()
                log_dist(f"loaded {path}", ranks=[0])
                return path, client_state
            if problem not in reasons:
                reasons.append(problem)
        fix = "restore the files from a copy, or load another tag"
        if self.is_half_loaded:
            fix += "; parts of the engine have been overwritten: it refuses to train until a checkpoint has been loaded"
        raise CheckpointError("; ".join(reasons), where=f"load_checkpoint({load_dir!r})", fix=fix)

    def _candidates(self, load_dir: str, tag: str | None) -> tuple[list[tuple[str, str | None]], list[str]]:
        """(folder, tag) of the checkpoints that may be loaded, best first, as rank 0 sees them; and the other tags of
        the folder, which are damaged, each with what is wrong. If a tag is named it is
        the only one. Otherwise they are the latest tag and the complete tags before it, or the folder (or file) itself
        if that is a checkpoint."""
        found: list[tuple[str, str | None]] = []
        damaged: list[str] = []
        if self._ranks.rank == 0:
            if tag is not None:
                found = [(load_dir, str(tag))]
            else:
                latest = files.commit.read_latest(load_dir)
                complete, damaged = files.commit.read_tags(load_dir)
                tags = [name for name, _ in complete]
                if latest is not None:
                    found.append((load_dir, latest))
                    older = tags[tags.index(latest) + 1 :] if latest in tags else tags
                    found += [(load_dir, name) for name in older]
                elif tags:
                    logger.warning("%s: there is no file 'latest'; the furthest trained tag is taken", load_dir)
                    found = [(load_dir, name) for name in tags]
                elif files.open.format_of(load_dir) is not None:
                    found = [(load_dir, None)]
                elif (universal := files.open.read_latest_universal(load_dir)) is not None:
                    found = [(load_dir, universal)]
        # This uses the engine's own collectives, so the watchdog names a rank that does not take part.
        everyone = self._comm.gather_objects((found, damaged), label="load_checkpoint")
        return everyone[0]

    def _open(self, place: str, tag: str | None, options: LoadOptions) -> tuple[Source | None, str]:
        """Opens the same checkpoint on all ranks. Returns (source, "") or (None, the reason why it is broken)."""
        for _ in range(LOAD_ATTEMPTS):
            source, problem, identity = None, "", ""
            try:
                source = files.open.open_checkpoint(place, tag)
                identity = source.identity
                if options.optimizer:
                    self._state.check(source)
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

    def _load_from(self, module: torch.nn.Module, source: Source, options: LoadOptions, custom_load_fn: Any) -> str:
        """Fills the engine from ``source``. An accumulation window begins, because earlier gradients belong to other
        weights. Returns the reason of a failed read, the same on all ranks. Raises StateError if the checkpoint does
        not fit the engine; nothing is changed then."""
        state = self._state
        plan, whole, error, problem = None, {}, None, ""
        if custom_load_fn is None:
            named = names_of_all(names_of(module), state.mesh)
            try:
                if source.format == "huggingface":  # names and stacks of the file's own, such as an entry an expert
                    source = named_as_in_model(source, module, named.names)
                plan = plan_restore(source, module, named, state.layout, state.optimizer, state.mesh, options)
            except (StateError, CheckpointError) as raised:
                error = raised
            verdicts = self._ranks.all_gather(str(error) if error else "")
            if any(verdicts):
                raise error or StateError(
                    f"the checkpoint does not fit the engine of another rank: {next(v for v in verdicts if v)}",
                    where=source.where,
                )
        else:
            try:
                whole = take_parts(module, _whole_state(source))
            except CheckpointError as raised:
                problem = str(raised).splitlines()[0]
            problem = next((p for p in self._ranks.all_gather(problem) if p), "")
            if problem:
                return problem
        reads_states = plan is not None and options.states
        state.begin_window()
        self.is_half_loaded = True
        self._has_mixed_states |= reads_states
        try:
            if plan is None:
                load_custom(module, custom_load_fn, whole)
            else:
                state.begin_writes()
                plan.run(source)
        except (CheckpointError, OffloadError, AioError) as error:
            problem = str(error).splitlines()[0]
        problem = next((p for p in self._ranks.all_gather(problem) if p), "")
        if problem:
            return problem
        if reads_states:
            state.optimizer.mend()
        if plan is not None:
            plan.finish()
            if options.optimizer:
                state.keep_dormant(plan.dormant)
            self._tell(source, plan.missing, plan.unexpected, plan.fresh)
        state.take_weights(has_masters=plan is not None)
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
        self, module: torch.nn.Module, source: Source, options: LoadOptions, load_scheduler: bool, module_only: bool
    ) -> dict[str, Any]:
        client_state = dict(source.state.get("client_state") or {})
        if "extra_state" in source.state:
            _load_extra_state(module, source.state["extra_state"])
        if module_only:
            return client_state
        if options.optimizer:
            self._state.restore_optimizer(source)
        if load_scheduler:
            self._state.restore_scheduler(source)
        self._state.restore_counters(source)
        if options.optimizer:
            self._state.restore_of_rank(source)
        return client_state

    def close(self) -> None:
        """Waits for a running save. If the save fails, its error is raised after everything has been released."""
        try:
            self.wait()
        finally:
            self._snapshot.clear()
            self._ranks.close()


def _frozen_counts(info: ParamInfo) -> ParamInfo:
    """``info`` with copies of its counts, because optimizers change counts in place."""
    counts = {key: value.clone() if torch.is_tensor(value) else value for key, value in info.counts.items()}
    return ParamInfo(group=info.group, counts=counts)


def _whole_state(source: Source) -> dict[str, torch.Tensor]:
    """Every weight and buffer, whole, in host memory, for callers with a load function of their own."""
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
