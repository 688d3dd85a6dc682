"""Reads the checkpoints that DeepSpeed's engine writes (0.16 to 0.19, stages 0 to 3): where each logical tensor lies in
its files.

[Note: DeepSpeed's files] With n data-parallel ranks:

* Stage 0: ``mp_rank_00_model_states.pt`` has everything. Optimizer states go by number, without names.
* Stages 1 and 2: that file has the weights, and ``[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt`` rank R's part of
  the rest. The parameters of an optimizer group are laid end to end in the order of ``param_shapes``, padded, and cut
  into n equal shards; the last shard is saved without the padding.
* Stage 3: ``zero_pp_rank_R_mp_rank_00_model_states.pt`` has empty weights. Groups are cut into sub-groups, listed in
  ``param_shapes``. Rank R has elements [R * k, R * k + k) of each parameter, k = ceil(numel / n), padded; those pieces
  laid end to end are its shard of the sub-group.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_c.checkpoint.formats.deepspeed.names import Comparison, match_flat, match_names
from deepspeed_c.checkpoint.formats.deepspeed.pieces import (
    PieceSource,
    StoredPiece,
    counters_of,
    is_count,
    scaler_state,
)
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.tensor_ranks import TensorRules, megatron_cut, rules_of_info
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, TorchFile, materialize
from deepspeed_c.checkpoint.formats.unpickle import UNREADABLE
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, ParamInfo, Topology
from deepspeed_c.errors import CheckpointError, DeepSpeedCError

__all__ = [
    "ENGINE_KEYS",
    "DeepSpeedSource",
    "ModelStates",
    "count_tensor_ranks",
    "find_files",
    "is_deepspeed",
    "laid_out",
]

MODEL_FILE = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
STAGE3_MODEL_FILE = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
# Old versions left the underscore before "optim_states" out.
OPTIMIZER_FILE = re.compile(r"(?P<dtype>bf16_|fp16_|)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
EXPERT_FILE = re.compile(
    r"(layer_-?\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
PIPELINE_FILE = re.compile(r"layer_\d+-.*model_states\.pt")

# Keys that the engine puts into its model file; the rest is the user's client_state.
ENGINE_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "folding",
    ]
)

FIX_CONVERT = "save it with DeepSpeed without that kind of parallelism, or convert it with DeepSpeed's own tools to Hugging Face files and load those"

FIX_ANOTHER = "take another checkpoint; this one was changed after it was written, or made by hand"

# More than any job has. The limit is needed because a number in the file decides how often readers loop.
MOST_RANKS = 1 << 20
RANKS_SHOWN = 8

FIX_ORDER = "build the optimizer with the groups it was saved with, in that order"


class Files(NamedTuple):
    """The files of a checkpoint by rank; ``models`` has one for all stages but 3."""

    models: dict[int, str]
    optimizers: dict[int, str]
    is_stage3: bool


def count_tensor_ranks(folder: str) -> int:
    """The tensor-parallel ranks whose files are in the folder of a tag."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    patterns = (MODEL_FILE, STAGE3_MODEL_FILE, OPTIMIZER_FILE)
    ranks = {int(found["mp"]) for name in names for pattern in patterns if (found := pattern.fullmatch(name))}
    if ranks and max(ranks) > MOST_RANKS:
        raise CheckpointError(f"has a file of tensor-parallel rank {max(ranks)}", where=folder, fix=FIX_ANOTHER)
    return max(ranks, default=-1) + 1


def find_files(folder: str, tensor_rank: int = 0) -> Files | None:
    """DeepSpeed's files for one tensor-parallel rank in a tag's folder; None if there are none.

    Raises CheckpointError for arrangements that are not read.
    """
    models: dict[int, str] = {}
    stage3_models: dict[int, str] = {}
    optimizers: dict[str, dict[int, str]] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    for name in names:
        path = os.path.join(folder, name)
        for pattern, what in ((EXPERT_FILE, "experts of a mixture"), (PIPELINE_FILE, "layers of a pipeline")):
            if pattern.fullmatch(name):
                raise CheckpointError(
                    f"holds {what}, which cannot be read as whole tensors here", where=path, fix=FIX_CONVERT
                )
        found = MODEL_FILE.fullmatch(name) or STAGE3_MODEL_FILE.fullmatch(name) or OPTIMIZER_FILE.fullmatch(name)
        if found is None:
            continue
        if int(found["mp"]) != tensor_rank:
            continue
        if found.re is MODEL_FILE:
            models[0] = path
        elif found.re is STAGE3_MODEL_FILE:
            stage3_models[int(found["rank"])] = path
        else:
            optimizers.setdefault(found["dtype"], {})[int(found["rank"])] = path
    if not models and not stage3_models:
        return None
    if len(optimizers) > 1:
        raise CheckpointError(
            f"holds the optimizer files of two runs, with the prefixes {sorted(optimizers)}",
            where=folder,
            fix="remove those of the older one",
        )
    of_dtype = next(iter(optimizers.values()), {})
    is_stage3 = bool(stage3_models)
    if models and stage3_models and 0 in of_dtype:
        # The same tag was saved at two stages. The optimizer's files have the same names at both stages, so they are
        # from the newer save.
        is_stage3 = _stage_of(read_file(of_dtype[0])) == 3
    return Files(stage3_models if is_stage3 else models, of_dtype, is_stage3)


def is_deepspeed(folder: str) -> bool:
    """Whether ``folder`` is a tag's folder of DeepSpeed."""
    return find_files(folder) is not None


def _stage_of(file: TorchFile) -> int | None:
    """None if the optimizer's state does not say (bf16 with fp32 accumulation, laid out like stages 1 and 2)."""
    saved = _get(file.content, "optimizer_state_dict", Mapping, file.path).get("zero_stage")
    return None if saved is None else int(getattr(saved, "value", saved))


def _get(content: Any, key: str, kind: type | tuple, where: str) -> Any:
    value = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(value, kind):
        raise CheckpointError(
            f"has no {key!r} as DeepSpeed writes it, but {type(value).__name__}",
            where=where,
            fix="take a checkpoint of DeepSpeed 0.16 to 0.19",
        )
    return value


def _shapes(shapes: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name as plain tuples: only checked numbers of elements may decide how far a loop goes."""
    found = {name: tuple(shape) for name, shape in shapes.items()}
    for name, shape in found.items():
        if type(name) is not str or any(type(n) is not int or n < 0 for n in shape):
            raise CheckpointError(f"has a parameter {name!r} of shape {shape}", where=where, fix=FIX_ANOTHER)
    return found


@contextlib.contextmanager
def laid_out(where: str) -> Iterator[None]:
    """Turns errors from plain data that is not laid out as DeepSpeed's into a CheckpointError: a stranger may have
    chosen every type and number in it.
    """
    try:
        yield
    except DeepSpeedCError:
        raise
    except UNREADABLE as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"is not laid out as DeepSpeed's checkpoints are ({type(error).__name__}: {what})",
            where=where,
            fix=FIX_ANOTHER,
        ) from error


class ModelStates:
    """Contents of a model file: names, shapes, ties, and the state that is no tensor."""

    def __init__(self, path: str, n_tensor_ranks: int = 1) -> None:
        self.file = read_file(path)
        self.path = path
        content = self.content = self.file.content
        self.module: Mapping[str, Any] = _get(content, "module", Mapping, path)
        self.buffers = [name for name in content.get("buffer_names") or () if name in self.module]
        self.config = content["ds_config"] if isinstance(content.get("ds_config"), Mapping) else {}
        dims = content.get("checkpoint_parallel_dimensions") or {}
        if isinstance(n := dims.get("pp_degree"), int) and n > 1:
            raise CheckpointError(f"was saved by {n} pipeline-parallel ranks", where=path, fix=FIX_CONVERT)
        for n in (content.get("mp_world_size"), dims.get("tp_degree")):
            if isinstance(n, int) and n > 0 and n != n_tensor_ranks:
                raise CheckpointError(
                    f"was saved by {n} tensor-parallel ranks, and files of {n_tensor_ranks} are there",
                    where=path,
                    fix="copy the files of all ranks into one folder",
                )
        if content.get("ds_autoep_layers") or content.get("autoep_layers") or content.get("num_experts"):
            raise CheckpointError("was saved with expert parallelism", where=path, fix=FIX_CONVERT)
        shapes = content.get("param_shapes") or []
        # One dictionary for each group (at stage 3: each sub-group). For a single group, old versions wrote only the
        # dictionary, without a list.
        self.param_shapes: list[dict[str, tuple[int, ...]]] = [
            _shapes(group, path) for group in ([shapes] if isinstance(shapes, Mapping) else shapes)
        ]
        self.world_size = content.get("dp_world_size")
        if isinstance(self.world_size, int) and not 0 < self.world_size <= MOST_RANKS:
            raise CheckpointError(f"was saved by {self.world_size} ranks, it says", where=path, fix=FIX_ANOTHER)
        fp16 = self.config.get("fp16")
        self.is_fp16 = bool(isinstance(fp16, Mapping) and fp16.get("enabled"))

    def tensor(self, name: str) -> StoredTensor:
        return _get(self.module, name, StoredTensor, f"{self.path}, module")

    def ties(self) -> dict[str, str]:
        """Further names of weights that several names share: name -> first name with the same memory in the file."""
        first: dict[tuple, str] = {}
        ties: dict[str, str] = {}
        buffers = set(self.buffers)
        for name, stored in self.module.items():
            # Empty tensors share only the null pointer, not memory.
            if isinstance(stored, StoredTensor) and name not in buffers and stored.n_elems:
                known = first.setdefault(stored.identity, name)
                if known != name:
                    ties[name] = known
        return ties

    def state(self) -> dict[str, Any]:
        """``Source.state``, less the loss scaler."""
        content = self.content
        state: dict[str, Any] = {"counters": counters_of(content)}
        for key in ("lr_scheduler", "data_sampler", "random_ltd"):
            if content.get(key) is not None:
                state[key] = materialize(content[key])
        state["client_state"] = materialize({key: value for key, value in content.items() if key not in ENGINE_KEYS})
        if self.config:
            state["config"] = materialize(self.config)
        if isinstance(content.get("ds_version"), str):
            state["versions"] = {"deepspeed": content["ds_version"]}
        return state


class _Flat(NamedTuple):
    """The flat tensor of a group (a sub-group at stage 3) on one rank, with the optimizer's states of it."""

    master: StoredTensor
    states: dict[str, Any]


class DeepSpeedSource(PieceSource):
    """A checkpoint of DeepSpeed's engine. ``folder`` is a tag's folder.

    At stage 0 the optimizer's states have numbers and no names. Names are found by shape and order (and by value, where
    there are fp32 master weights); where that leaves a choice, ``problem`` says so, no optimizer state is listed, and
    ``name_groups`` adds it.

    Raises CheckpointError for files that are missing, damaged or of a kind that is not read.
    """

    format = "deepspeed"

    def __init__(self, folder: str, tensor_rank: int = 0, n_tensor_ranks: int = 1) -> None:
        """tensor_rank: the rank, among ``n_tensor_ranks``, whose files are read; tensors are that rank's parts."""
        super().__init__(os.fspath(folder))
        self._tensor_rank, self._n_tensor_ranks = tensor_rank, n_tensor_ranks
        self._unnamed: _Unnamed | None = None
        with laid_out(self.where):
            self._open()

    def _open(self) -> None:
        files = find_files(self.where, self._tensor_rank)
        if files is None:
            raise CheckpointError(
                "holds no model file of DeepSpeed"
                + (f" of tensor-parallel rank {self._tensor_rank}" if self._n_tensor_ranks > 1 else ""),
                where=self.where,
                fix="copy the files of all ranks into one folder",
            )
        if os.path.isdir(os.path.join(self.where, "offloaded_tensors")):
            raise CheckpointError(
                "was saved with the optimizer on NVMe: its states are raw swap files that name no tensor",
                where=os.path.join(self.where, "offloaded_tensors"),
                fix="save it once with offload_optimizer.device 'cpu'",
            )
        if 0 not in files.models:
            raise CheckpointError("the model file of rank 0 is missing", where=self.where)
        model = self._model = ModelStates(files.models[0], self._n_tensor_ranks)
        self.state = model.state()
        if files.is_stage3:
            stage = 3
            self._open_stage3(model, files)
        elif files.optimizers:
            stage = self._open_stages_1_and_2(model, files)
        else:
            stage = 0
            self._open_stage0(model)
        n_ranks = model.world_size if isinstance(model.world_size, int) else max(len(files.optimizers), 1)
        self.topology = Topology(world_size=n_ranks, stage=stage)
        self._order(list(model.module))

    def tensor_rules(self) -> TensorRules:
        """How the tensors of tensor-parallel ranks are cut: as the file says, else by Megatron's names."""
        info = self._model.content.get("universal_checkpoint_info")
        keys = ("parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns")
        if isinstance(info, Mapping) and any(key in info for key in keys):
            return rules_of_info(info, self._model.path)
        version = self._model.content.get("checkpoint_version", 0)
        return lambda name: megatron_cut(name, version)

    # Stages 1 and 2

    def _open_stages_1_and_2(self, model: ModelStates, files: Files) -> int:
        self.aliases = model.ties()
        self._add_module(model)
        saved = self._optimizer_files(model, files)
        first = saved[0]
        self._set_loss_scaler(model, first.get("loss_scaler"))
        flats = [self._flats(rank_state, "single_partition_of_fp32_groups", model) for rank_state in saved]
        for g, shapes in enumerate(model.param_shapes):
            of_group = [rank_flats[g] for rank_flats in flats]
            # Only the last rank saves less than a full shard. With a single rank the full length does not matter.
            shard_elems = of_group[0].master.n_elems
            begin = 0
            for name, shape in shapes.items():
                n_elems = math.prod(shape)
                self._add_trained(model, name, shape, of_group, _spread(begin, n_elems, shard_elems, len(flats)))
                self.params[name] = ParamInfo(group=g, counts=self._counts(of_group[0].states, g))
                begin += n_elems
        stage = _stage_of(read_file(files.optimizers[0]))
        return 1 if stage is None else stage

    # Stage 3

    def _open_stage3(self, model: ModelStates, files: Files) -> None:
        self.aliases = {
            name: first for name, first in (model.content.get("shared_params") or {}).items() if name in model.module
        }
        for name in model.buffers:
            self._add_whole(BUFFER, name, model.tensor(name))
        self._add_frozen_stage3(model, files)
        saved = self._optimizer_files(model, files)
        if any(rank_state.get("ds_zero_partition_groups") for rank_state in saved):
            raise CheckpointError("was saved with expert parallelism", where=self.where, fix=FIX_CONVERT)
        self._set_loss_scaler(model, saved[0].get("loss_scaler"))
        flats = [self._flats(rank_state, "fp32_flat_groups", model) for rank_state in saved]
        # The optimizer sees a tensor for each sub-group.
        group_of = [g for g, group in enumerate(self.groups) for _ in self._ids[g]]
        for i, shapes in enumerate(model.param_shapes):
            of_sub_group = [rank_flats[i] for rank_flats in flats]
            at = 0
            for name, shape in shapes.items():
                n_elems = math.prod(shape)
                shard_elems = -(-n_elems // len(flats))
                self._add_trained(model, name, shape, of_sub_group, _deal(n_elems, shard_elems, len(flats), at))
                self.params[name] = ParamInfo(
                    group=group_of[i], counts=self._counts(of_sub_group[0].states, group_of[i])
                )
                at += shard_elems
            for rank, flat in enumerate(of_sub_group):
                if flat.master.n_elems != at:
                    raise CheckpointError(
                        f"sub-group {i} has {flat.master.n_elems} elements, and its parameters take {at} on each of {len(flats)} ranks",
                        where=files.optimizers[rank],
                        fix="the checkpoint was saved with parameters sharded over a part of the ranks (MiCS), or its files do not belong together",
                    )

    def _add_frozen_stage3(self, model: ModelStates, files: Files) -> None:
        shapes = _shapes(model.content.get("frozen_param_shapes") or {}, model.path)
        if not shapes:
            return
        n_ranks = self._n_ranks(model, files.models, "model")
        fragments = [
            _get(
                (model.file if rank == 0 else read_file(files.models[rank])).content,
                "frozen_param_fragments",
                Mapping,
                files.models[rank],
            )
            for rank in range(n_ranks)
        ]
        for name, shape in shapes.items():
            stored = [
                _get(of_rank, name, StoredTensor, f"{self.where}, frozen_param_fragments") for of_rank in fragments
            ]
            n_elems = math.prod(shape)
            shard_elems = -(-n_elems // n_ranks)
            pieces = [
                StoredPiece(begin, n, stored[rank], first)
                for rank, begin, n, first in _deal(n_elems, shard_elems, n_ranks, 0)
            ]
            self._add(PARAM, name, shape, stored[0].dtype, pieces)
            self.params[name] = ParamInfo()

    # Stage 0

    def _open_stage0(self, model: ModelStates) -> None:
        self.aliases = model.ties()
        self._add_module(model)
        wrapped = model.content.get("optimizer")
        if not isinstance(wrapped, Mapping):
            return
        # fp16 and bf16 wrap the optimizer; fp32 saves its own state_dict.
        optimizer = wrapped.get("optimizer_state_dict", wrapped)
        if model.is_fp16:
            self._set_loss_scaler(model, wrapped)
        self._unnamed = _Unnamed(self.where, model, wrapped, optimizer)
        names = self._unnamed.find_names(self.aliases)
        if isinstance(names, str):
            self.problem = names
        else:
            self._add_named(self._unnamed, names)

    def name_groups(self, names: Sequence[Sequence[str]]) -> None:
        """Lists the states of a stage 0 checkpoint under ``names``, in place of the names found by shape and value.

        Names that fit in number, shape and value are always right; found names need not be. Does nothing if the
        checkpoint itself has names, or if these do not fit and the found names are the only possible ones. Raises
        CheckpointError if these do not fit and no names were found.
        """
        unnamed = self._unnamed
        if unnamed is None or unnamed.has_names:
            return
        with laid_out(self.where):
            try:
                unnamed.check(names)
            except CheckpointError:
                if self.problem:
                    raise
                return
            self._add_named(unnamed, names)
            self.problem = ""
            self._order(list(self._model.module))

    def _add_named(self, unnamed: _Unnamed, names: Sequence[Sequence[str]]) -> None:
        for key in [key for key in self.tensors if key[0] not in (PARAM, BUFFER)]:
            del self.tensors[key], self._pieces[key]
        self.params.clear()
        self._read_groups(unnamed.optimizer)
        for g, of_group in enumerate(names):
            for i, name in enumerate(of_group):
                slot = unnamed.slots[g][i]
                shape = unnamed.model.tensor(name).shape
                if slot.master is not None and slot.master.stored.dtype != unnamed.model.tensor(name).dtype:
                    self._add(MASTER, name, shape, slot.master.stored.dtype, [slot.master])
                for state, piece in slot.states.items():
                    self._add(state, name, shape, piece.stored.dtype, [piece])
                self.params[name] = ParamInfo(group=g, counts=self._counts(slot.counts, g))
        for kind, name in list(self.tensors):
            if kind == PARAM and name not in self.params:
                self.params[name] = ParamInfo()

    # Shared by the stages

    def _add_module(self, model: ModelStates) -> None:
        buffers = set(model.buffers)
        trained = {name for shapes in model.param_shapes for name in shapes}
        for name in model.module:
            if name in self.aliases:
                continue
            self._add_whole(BUFFER if name in buffers else PARAM, name, model.tensor(name))
            if model.param_shapes and name not in buffers and name not in trained:
                self.params[name] = ParamInfo()

    def _n_ranks(self, model: ModelStates, paths: Mapping[int, str], what: str) -> int:
        n_ranks = model.world_size if isinstance(model.world_size, int) else len(paths)
        # Further files are left over from a larger world that saved under the same tag.
        if missing := [rank for rank in range(n_ranks) if rank not in paths]:
            raise CheckpointError(
                f"was saved by {n_ranks} ranks, and the {what} files of {len(missing)} ranks are missing ({missing[:RANKS_SHOWN]})",
                where=self.where,
                fix="copy the folders of all nodes into one",
            )
        return n_ranks

    def _optimizer_files(self, model: ModelStates, files: Files) -> list[Mapping[str, Any]]:
        n_ranks = self._n_ranks(model, files.optimizers, "optimizer")
        saved = []
        for rank in range(n_ranks):
            path = files.optimizers[rank]
            content = _get(read_file(path).content, "optimizer_state_dict", Mapping, path)
            count = content.get("partition_count", n_ranks)
            counts = count if isinstance(count, (list, tuple)) else [count]
            if any(n != n_ranks for n in counts):
                raise CheckpointError(
                    f"cuts its groups into {counts} shards, and {n_ranks} ranks saved it",
                    where=path,
                    fix="groups that are sharded over a part of the ranks (experts, MiCS) are not read",
                )
            saved.append(content)
        return saved

    def _flats(self, saved: Mapping[str, Any], masters_key: str, model: ModelStates) -> list[_Flat]:
        masters = _get(saved, masters_key, (list, tuple), self.where)
        optimizer = saved.get("base_optimizer_state", saved.get("optimizer_state_dict"))
        if len(masters) != len(model.param_shapes):
            raise CheckpointError(
                f"has {len(masters)} groups in the optimizer's file and {len(model.param_shapes)} in the model's",
                where=self.where,
                fix="the files are not of one checkpoint: take another",
            )
        if isinstance(optimizer, (list, tuple)):
            # zero_optimization.elastic_checkpoint: states by group, and nothing of the groups' options.
            states = list(optimizer)
        else:
            states_by_id = _get(optimizer, "state", Mapping, self.where)
            self._read_groups(optimizer)
            ids = [i for of_group in self._ids for i in of_group]
            if len(ids) != len(masters):
                raise CheckpointError(
                    f"its optimizer knows {len(ids)} tensors where there are {len(masters)} groups", where=self.where
                )
            states = [states_by_id.get(i, {}) for i in ids]
        return [
            _Flat(_get({"": master}, "", StoredTensor, f"{self.where}, {masters_key}[{i}]"), of_group)
            for i, (master, of_group) in enumerate(zip(masters, states, strict=True))
        ]

    def _read_groups(self, optimizer: Mapping[str, Any]) -> None:
        groups = _get(optimizer, "param_groups", (list, tuple), self.where)
        if not self.groups:
            self.groups = [
                materialize({key: value for key, value in group.items() if key not in ("params", "param_names")})
                for group in groups
            ]
            self._ids = [list(group["params"]) for group in groups]

    def _counts(self, states: Mapping[str, Any], group: int) -> dict[str, Any]:
        counts = {state: value for state, value in states.items() if is_count(value)}
        # Fused optimizers of DeepSpeed may count steps in the group.
        if "step" not in counts and group < len(self.groups) and is_count(step := self.groups[group].get("step")):
            counts["step"] = step
        return materialize(counts)

    def _add_trained(
        self,
        model: ModelStates,
        name: str,
        shape: tuple[int, ...],
        flats: Sequence[_Flat],
        spread: Sequence[tuple[int, int, int, int]],
    ) -> None:
        """Lists master weight and states of a parameter; ``spread`` has (rank, begin in the parameter, number of
        elements, begin in the flat tensor).
        """

        def pieces(of_rank: Sequence[StoredTensor]) -> list[StoredPiece]:
            return [StoredPiece(begin, n, of_rank[rank], first) for rank, begin, n, first in spread]

        masters = [flat.master for flat in flats]
        weight = model.tensor(name)
        if masters[0].dtype != weight.dtype:
            self._add(MASTER, name, shape, masters[0].dtype, pieces(masters))
        elif (PARAM, name) not in self.tensors:
            # Stage 3 in fp32: the flat tensor is the weight.
            self._add(PARAM, name, shape, masters[0].dtype, pieces(masters))
        for state, value in flats[0].states.items():
            if is_count(value) or value is None:
                continue
            stored = [flat.states.get(state) for flat in flats]
            for rank, (item, master) in enumerate(zip(stored, masters, strict=True)):
                # Without elastic_checkpoint the last rank's state keeps the padding that its master weights are saved
                # without.
                if not isinstance(item, StoredTensor) or item.n_elems < master.n_elems or len(item.shape) != 1:
                    raise CheckpointError(
                        f"its optimizer state {state!r} is not one number for each element of the weights on rank {rank}",
                        where=f"{self.where}, {name}",
                        fix="optimizers with factored or compressed states are not read; load the weights alone",
                    )
            self._add(state, name, shape, stored[0].dtype, pieces(stored))

    def _set_loss_scaler(self, model: ModelStates, saved: Any) -> None:
        if saved is None or not model.is_fp16:
            return
        state = scaler_state(saved, self.state["counters"].get("global_steps", 0))
        if state is not None:
            self.state["loss_scaler"] = state


def _spread(begin: int, n_elems: int, shard_elems: int, n_ranks: int) -> list[tuple[int, int, int, int]]:
    """Elements [begin, begin + n_elems) of a group that is cut into equal shards, as (rank, begin in the parameter,
    count, begin in the shard). Elements beyond the last shard are left out.
    """
    items = []
    at = begin
    while at < begin + n_elems and shard_elems:
        rank, first = divmod(at, shard_elems)
        if rank >= n_ranks:
            break
        n = min(shard_elems - first, begin + n_elems - at)
        items.append((rank, at - begin, n, first))
        at += n
    return items


def _deal(n_elems: int, shard_elems: int, n_ranks: int, at: int) -> list[tuple[int, int, int, int]]:
    """As above, for a parameter that is divided over the ranks on its own; its shards begin at ``at``."""
    return [
        (rank, rank * shard_elems, max(0, min(shard_elems, n_elems - rank * shard_elems)), at)
        for rank in range(n_ranks)
    ]


class _Slot(NamedTuple):
    """The optimizer's entry under one number."""

    shape: tuple[int, ...] | None
    """None if nothing tells the value: the optimizer has no states."""
    master: StoredPiece | None
    states: dict[str, StoredPiece]
    counts: dict[str, Any]


class _Unnamed:
    """The optimizer of a stage 0 checkpoint, whose parameters have numbers."""

    def __init__(
        self, where: str, model: ModelStates, wrapped: Mapping[str, Any], optimizer: Mapping[str, Any]
    ) -> None:
        self.where, self.model, self.optimizer = where, model, optimizer
        states = _get(optimizer, "state", Mapping, where)
        groups = _get(optimizer, "param_groups", (list, tuple), where)
        self.names_saved = [group.get("param_names") for group in groups]
        self.has_names = all(isinstance(names, (list, tuple)) for names in self.names_saved)
        # Fused fp16 has one flat tensor for each group. The file does not say how the tensor is composed, so this is
        # found by trying.
        self.flat_masters = wrapped.get("fp32_groups_flat")
        self.slots: list[list[_Slot]] = []
        if self.flat_masters is not None:
            self.flats = [
                _Flat(flat, states.get(group["params"][0] if group["params"] else -1, {}))
                for flat, group in zip(self.flat_masters, groups, strict=True)
            ]
            return
        masters = wrapped.get("fp32_groups") or [[None] * len(group["params"]) for group in groups]
        for group, of_group in zip(groups, masters, strict=True):
            if len(group["params"]) != len(of_group):
                raise CheckpointError("its optimizer's groups and master weights differ in number", where=where)
            self.slots.append(
                [self._slot(states.get(i, {}), master) for i, master in zip(group["params"], of_group, strict=True)]
            )

    def _slot(self, states: Mapping[str, Any], master: StoredTensor | None) -> _Slot:
        tensors = {key: value for key, value in states.items() if isinstance(value, StoredTensor) and key != "step"}
        whole = {key: value for key, value in tensors.items() if value.shape != ()}
        if not whole and (master is None or master.shape == ()):
            # A weight without dimensions, whose states have no dimensions either.
            whole = tensors
        counts = {key: value for key, value in states.items() if key not in whole and is_count(value)}
        shapes = {tuple(value.shape) for value in whole.values()} | (
            {tuple(master.shape)} if master is not None else set()
        )
        if len(shapes) > 1:
            raise CheckpointError(
                f"an optimizer state has the shapes {sorted(shapes)} for one weight",
                where=self.where,
                fix="optimizers with factored states are not read; load the weights alone",
            )
        return _Slot(
            next(iter(shapes), None),
            None if master is None else StoredPiece(0, master.n_elems, master, 0),
            {key: StoredPiece(0, value.n_elems, value, 0) for key, value in whole.items()},
            counts,
        )

    def _candidates(self, aliases: Mapping[str, str]) -> list[tuple[str, StoredTensor]]:
        buffers = set(self.model.buffers)
        return [
            (name, stored)
            for name, stored in self.model.module.items()
            if isinstance(stored, StoredTensor) and name not in buffers and name not in aliases
        ]

    def find_names(self, aliases: Mapping[str, str]) -> list[list[str]] | str:
        """The names of each group's parameters in its order, or why they cannot be known."""
        candidates = self._candidates(aliases)
        if self.flat_masters is not None:
            found = match_flat(candidates, [flat.master for flat in self.flats])
            if isinstance(found, list):
                self.slots = self._cut_flats(found)
            return found
        if self.has_names:
            names = [list(of_group) for of_group in self.names_saved]
            self.check(names)
            return names
        return match_names(
            candidates,
            [[slot.shape for slot in of_group] for of_group in self.slots],
            [[slot.master.stored if slot.master else None for slot in of_group] for of_group in self.slots],
        )

    def _cut_flats(self, names: Sequence[Sequence[str]]) -> list[list[_Slot]]:
        sizes = [sum(self.model.tensor(name).n_elems for name in of_group) for of_group in names]
        wanted = [flat.master.n_elems for flat in self.flats]
        if sizes != wanted:
            raise CheckpointError(
                f"its groups have {wanted} elements, and those named {sizes}", where=self.where, fix=FIX_ORDER
            )
        slots = []
        for flat, of_group in zip(self.flats, names, strict=True):
            at = 0
            counts = {key: value for key, value in flat.states.items() if is_count(value)}
            whole = {
                key: value
                for key, value in flat.states.items()
                if isinstance(value, StoredTensor) and not is_count(value)
            }
            slots.append([])
            for name in of_group:
                stored = self.model.tensor(name)
                n = stored.n_elems
                pieces = {key: StoredPiece(0, n, value, at) for key, value in whole.items()}
                slots[-1].append(_Slot(tuple(stored.shape), StoredPiece(0, n, flat.master, at), pieces, counts))
                at += n
        return slots

    def check(self, names: Sequence[Sequence[str]]) -> None:
        """Assigns ``names`` to the groups' parameters.

        Raises CheckpointError if they do not fit in number, shape or value.
        """
        agree = Comparison([(name, self.model.tensor(name)) for of_group in names for name in of_group])
        slots = self._cut_flats(names) if self.flat_masters is not None else self._without_frozen(names)
        i = 0
        for of_group, of_slots in zip(names, slots, strict=True):
            for name, slot in zip(of_group, of_slots, strict=True):
                shape = tuple(self.model.tensor(name).shape)
                if slot.shape is not None and slot.shape != shape:
                    raise CheckpointError(
                        f"has shape {shape}, and the optimizer's state in its place {slot.shape}",
                        where=f"{self.where}, {name}",
                        fix=FIX_ORDER,
                    )
                if slot.master is not None and not agree(i, slot.master.stored, slot.master.first):
                    raise CheckpointError(
                        "is not what its master weight is when it is rounded",
                        where=f"{self.where}, {name}",
                        fix=FIX_ORDER,
                    )
                i += 1
        self.slots = slots

    def _without_frozen(self, names: Sequence[Sequence[str]]) -> list[list[_Slot]]:
        """The groups' slots. A group with too many loses the slots of frozen parameters, which have a number and no
        state.
        """
        kept = [
            of_slots
            if len(of_slots) == len(of_group)
            else [slot for slot in of_slots if slot.shape is not None or slot.counts]
            for of_slots, of_group in itertools.zip_longest(self.slots, names, fillvalue=())
        ]
        if [len(of_group) for of_group in names] != [len(of_slots) for of_slots in kept]:
            raise CheckpointError(
                f"its optimizer's groups have {[len(of_group) for of_group in self.slots]} parameters, and {[len(of_group) for of_group in names]} are named",
                where=self.where,
                fix=FIX_ORDER,
            )
        return kept
