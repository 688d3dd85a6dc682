"""Writes DeepSpeed's own files and its universal format from any checkpoint, so that DeepSpeed 0.19 goes on from it.

See [Note: DeepSpeed's files].

DeepSpeed need not be installed: its classes are named in the pickles, not imported.
"""

from __future__ import annotations

import math
import os
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.deepspeed.model_file import ENGINE_KEYS
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import UPSTREAM
from deepspeed_c.checkpoint.formats.deepspeed.universal import (
    MASTER_FILE,
    OPTIMIZER_FILE,
    STATES_FOLDER,
    STEP_FILE,
    check_folder,
    check_state,
)
from deepspeed_c.checkpoint.formats.tensor_ranks import PartSource, TensorCut, megatron_cut, rules_of_info
from deepspeed_c.checkpoint.native.commit import (
    check_tag,
    commit_folder,
    make_temporary,
    remove_tree,
    replace_durably,
    sync_path,
    write_latest,
)
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source
from deepspeed_c.errors import CheckpointError

__all__ = ["write_deepspeed", "write_rank_files", "write_universal"]

# The version of DeepSpeed with this layout. DeepSpeed reads it from the file to choose the layout.
LAYOUT_VERSION = "0.19.6"
# Shards of stages 1 and 2 begin at even elements (stage_1_and_2.py, nccl_start_alignment_factor).
SHARD_ALIGNMENT_ELEMS = 2
# Defaults of DeepSpeed's configuration that are kept in its files.
DEFAULT_SUB_GROUP_ELEMS = 1_000_000_000
DEFAULT_GRADIENT_CLIPPING = 1.0
DEFAULT_SCALE_POWER = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Pickler(pickle._Pickler):
    """Writes the names of DeepSpeed's classes without importing them. The C pickler cannot do that."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        path = f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', None)}"
        if UPSTREAM.get(path) is not obj:
            return super().save_global(obj, name)
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode("ascii"))
        self.memoize(obj)


# As torch.save takes it.
_PICKLE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def write_deepspeed(
    source: Source,
    folder: str | os.PathLike,
    *,
    tag: str,
    world_size: int,
    stage: int,
    dtype: torch.dtype,
    ranks: Iterable[int] | None = None,
    is_fused: bool | None = None,
    n_tensor_ranks: int = 1,
    tensor_info: Mapping[str, Any] | None = None,
) -> str:
    """Writes the files that DeepSpeed's engine would at ``stage`` on ``world_size`` data-parallel ranks, training in
    ``dtype``.

    Returns the path of the tag's folder.

    ranks: data-parallel ranks whose files this call writes; the call for rank 0 also writes the shared files. With
    None all are written into a hidden folder that then gets the tag's name, and ``latest`` names it. With some, files
    go straight into ``folder/tag`` and the caller, when all are there, commits. is_fused: whether DeepSpeed will train
    with an Adam of its own; by default taken from the optimizer in ``source.state["config"]``. The groups' parameters
    are written in the order of ``source.params``, which must be the order in the optimizer's groups. n_tensor_ranks:
    number of tensor-parallel ranks; each gets files of its own with its part of every tensor. tensor_info: how tensors
    are cut over them, in the form of DeepSpeed's ``universal_checkpoint_info``; by default by Megatron's names.

    Memory: one rank's files; at stages 0 to 2 rank 0's file has the whole model in ``dtype``, as in DeepSpeed. Raises
    CheckpointError if DeepSpeed's layout cannot hold the source, or if files cannot be written.
    """
    folder, tag = os.fspath(folder), check_tag(tag)
    if ranks is not None:
        path = os.path.join(folder, tag)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot be made: {error.strerror}", where=path) from error
        write_rank_files(
            source,
            path,
            world_size=world_size,
            stage=stage,
            dtype=dtype,
            ranks=ranks,
            is_fused=is_fused,
            n_tensor_ranks=n_tensor_ranks,
            tensor_info=tensor_info,
        )
        return path

    def write(path: str) -> None:
        write_rank_files(
            source,
            path,
            world_size=world_size,
            stage=stage,
            dtype=dtype,
            ranks=range(world_size),
            is_fused=is_fused,
            n_tensor_ranks=n_tensor_ranks,
            tensor_info=tensor_info,
        )

    return _commit(folder, tag, write, write_latest)


def write_rank_files(
    source: Source,
    path: str,
    *,
    world_size: int,
    stage: int,
    dtype: torch.dtype,
    ranks: Iterable[int],
    is_fused: bool | None = None,
    n_tensor_ranks: int = 1,
    tensor_info: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes the files of ``ranks`` into the existing folder ``path`` and returns their names.

    Each is on disk and whole when it has its name. See write_deepspeed.
    """
    _check(world_size, stage, dtype)
    numbers = sorted(set(ranks))
    for rank in numbers:
        if not 0 <= rank < world_size:
            raise CheckpointError(f"there is no rank {rank} among {world_size}", where="ranks")
    if n_tensor_ranks == 1:
        return _write_files(_Layout(source, world_size, stage, dtype, is_fused), path, numbers)
    if n_tensor_ranks < 1:
        raise CheckpointError(
            f"{n_tensor_ranks} is no number of tensor-parallel ranks", where="n_tensor_ranks", fix="write at least 1"
        )
    if tensor_info is not None:
        rules = rules_of_info(tensor_info, "tensor_info")
    else:
        version = (source.state.get("client_state") or {}).get("checkpoint_version", 0)

        def rules(name: str) -> TensorCut | None:
            return megatron_cut(name, version)

    # If one tensor cannot be cut, nothing is written.
    layouts = [
        _Layout(
            PartSource(source, rules, n_tensor_ranks, rank),
            world_size,
            stage,
            dtype,
            is_fused,
            TensorRank(rank, n_tensor_ranks, tensor_info),
        )
        for rank in range(n_tensor_ranks)
    ]
    return [name for layout in layouts for name in _write_files(layout, path, numbers)]


def _write_files(layout: _Layout, path: str, ranks: Sequence[int]) -> list[str]:
    written, stage, of_tensor = [], layout.stage, f"mp_rank_{layout.place.rank:02d}"
    for rank in ranks:
        if rank == 0 or stage == 3:
            name = f"zero_pp_rank_{rank}_{of_tensor}_model_states.pt" if stage == 3 else f"{of_tensor}_model_states.pt"
            _save(os.path.join(path, name), layout.model_states(rank))
            written.append(name)
        if stage > 0:
            prefix = "bf16_" if layout.dtype == torch.bfloat16 else ""
            name = f"{prefix}zero_pp_rank_{rank}_{of_tensor}_optim_states.pt"
            saved = {
                "optimizer_state_dict": layout.optimizer_states(rank),
                "ds_config": layout.config,
                "ds_version": LAYOUT_VERSION,
            }
            _save(os.path.join(path, name), saved)
            written.append(name)
    return written


def write_universal(
    source: Source,
    folder: str | os.PathLike,
    tag: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    stage3_world_size: int = 1,
    is_fused: bool | None = None,
) -> str:
    """Writes DeepSpeed's universal format, which ``"checkpoint": {"load_universal": true}`` loads at stages 1 to 3 and
    any world size. Returns the folder of the tag.

    dtype: dtype of the weights in the model files. is_fused: as for write_deepspeed. The file ``latest_universal`` will
    name the tag. stage3_world_size: ranks among which frozen weights are cut in the files for stage 3 (DeepSpeed reads
    each rank's from rank 0's file, so that they suit one rank only). Memory: the model in ``dtype``, then one
    parameter's state at a time. Raises CheckpointError if the format cannot hold the source, and, before anything is
    written, for names of parameters and states that leave its folders or take each other's.
    """
    check_tag(tag)
    _check(stage3_world_size, 3, dtype)
    flat = _Layout(source, 1, 1, dtype, is_fused)
    cut = _Layout(source, stage3_world_size, 3, dtype, is_fused)
    for group in flat.groups:
        for param in group.params:
            check_folder(param.name, source.where)
            for state in param.states:
                check_state(state, f"{source.where}, {param.name}")

    def write(path: str) -> None:
        _save(os.path.join(path, "mp_rank_00_model_states.pt"), flat.model_states(0))
        for rank in range(stage3_world_size):
            _save(os.path.join(path, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"), cut.model_states(rank))
        states = os.path.join(path, STATES_FOLDER)
        for group in flat.groups:
            for param in group.params:
                _write_param(flat, param, os.path.join(states, param.name))
        _save(os.path.join(states, OPTIMIZER_FILE), _universal_optimizer(flat, cut))
        for where, _, _ in os.walk(path):
            sync_path(where)

    def set_latest(save_dir: str, tag: str) -> None:
        replace_durably(os.path.join(save_dir, "latest_universal"), tag.encode())

    return _commit(os.fspath(folder), tag, write, set_latest)


def _commit(folder: str, tag: str, write: Callable[[str], None], set_latest: Callable[[str, str], None]) -> str:
    temporary = None
    try:
        temporary = make_temporary(folder, tag)
        write(temporary)
        commit_folder(temporary, folder, tag)
        temporary = None
        set_latest(folder, tag)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror or error}",
            where=os.path.join(folder, tag),
            fix="look at space and permissions there",
        ) from error
    finally:
        if temporary is not None:
            remove_tree(temporary)
    return os.path.join(folder, tag)


def _save(path: str, content: Any) -> None:
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file, pickle_module=_PICKLE)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_path(folder)
    # torch.save turns an error of the file system into a RuntimeError of its zip writer.
    except (OSError, RuntimeError) as error:
        remove_tree(temporary)
        raise CheckpointError(
            f"cannot be written: {error}", where=path, fix="look at space and permissions there"
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        remove_tree(temporary)
        raise CheckpointError(
            f"its state cannot be pickled: {error}", where=path, fix="keep numbers, strings and tensors in client_state"
        ) from error


def _check(world_size: int, stage: int, dtype: torch.dtype) -> None:
    if world_size < 1 or stage not in (0, 1, 2, 3):
        raise CheckpointError(f"DeepSpeed has no stage {stage} on {world_size} ranks", where="write_deepspeed")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"DeepSpeed does not train in {dtype}", where="write_deepspeed", fix=f"use one of {DTYPES}"
        )


@dataclass(frozen=True)
class _Param:
    """A trained parameter."""

    name: str
    shape: tuple[int, ...]
    master: LogicalTensor
    """Source of its fp32 weight."""
    states: dict[str, LogicalTensor]
    counts: dict[str, Any]

    @property
    def n_elems(self) -> int:
        return math.prod(self.shape)


class _Group(NamedTuple):
    """A group of the optimizer; at stage 3 a sub-group, which DeepSpeed gives to the optimizer as one tensor."""

    params: list[_Param]
    index: int  # index of the optimizer's group
    states: list[str]
    counts: dict[str, Any]


class _Cut(NamedTuple):
    """Elements [begin, begin + n_elems) of a parameter lie at ``at`` of a rank's shard."""

    param: _Param
    begin: int
    n_elems: int
    at: int


class TensorRank(NamedTuple):
    """The tensor-parallel rank whose files are written, and the files' account of how tensors are cut."""

    rank: int = 0
    n_ranks: int = 1
    info: Mapping[str, Any] | None = None


ONE_TENSOR_RANK = TensorRank()


class _Layout:
    """Maps the tensors of ``source`` to DeepSpeed's files."""

    def __init__(
        self,
        source: Source,
        world_size: int,
        stage: int,
        dtype: torch.dtype,
        is_fused: bool | None,
        place: TensorRank = ONE_TENSOR_RANK,
    ) -> None:
        self.place = place
        self.source, self.world_size, self.stage, self.dtype = source, world_size, stage, dtype
        config = source.state.get("config")
        self.config: dict[str, Any] = dict(config) if isinstance(config, Mapping) else {}
        self.is_fused = self._uses_own_adam() if is_fused is None else is_fused
        self.weights: dict[str, LogicalTensor] = {}
        self.buffers: dict[str, LogicalTensor] = {}
        masters: dict[str, LogicalTensor] = {}
        states: dict[str, dict[str, LogicalTensor]] = {}
        for (kind, name), tensor in source.tensors.items():
            if kind == BUFFER:
                self.buffers[name] = tensor
            elif kind == PARAM:
                masters.setdefault(name, tensor)
                # The weight itself if it has the wanted type, otherwise its master.
                if name not in self.weights or tensor.dtype == dtype:
                    self.weights[name] = tensor
            elif kind == MASTER:
                masters[name] = tensor
                if name not in self.weights or self.weights[name].dtype != dtype:
                    self.weights[name] = tensor
            else:
                states.setdefault(name, {})[kind] = tensor
        if not source.groups and stage > 0:
            raise CheckpointError(
                "holds no optimizer state, which DeepSpeed's files of stages 1 to 3 are made of",
                where=source.where,
                fix="export the weights instead, or write stage 0",
            )
        by_group: list[list[_Param]] = [[] for _ in source.groups]
        for name, info in source.params.items():
            if info.group is None:
                continue
            if name not in masters:
                raise CheckpointError("has no weight", where=f"{source.where}, {name}")
            by_group[info.group].append(
                _Param(name, masters[name].shape, masters[name], states.get(name, {}), dict(info.counts))
            )
        trained = {param.name for params in by_group for param in params}
        self.frozen = [name for name in self.weights if name not in trained]
        if stage in (1, 2) and self._zero("round_robin_gradients", False):
            by_group = [
                [params[i] for r in range(world_size) for i in range(r, len(params), world_size)] for params in by_group
            ]
        self.groups = [
            self._group(sub_group, g)
            for g, params in enumerate(by_group)
            for sub_group in (self._sub_groups(params) if stage == 3 else [params])
        ]
        if stage > 0 and (empty := [group.index for group in self.groups if not group.params]):
            raise CheckpointError(
                f"the optimizer's groups {empty} have no parameters, and DeepSpeed cannot have such a group",
                where=source.where,
            )

    def _zero(self, key: str, default: Any) -> Any:
        section = self.config.get("zero_optimization")
        return section.get(key, default) if isinstance(section, Mapping) else default

    def _uses_own_adam(self) -> bool:
        section = self.config.get("optimizer")
        if not isinstance(section, Mapping):
            return False
        params = section.get("params")
        is_torch = isinstance(params, Mapping) and bool(params.get("torch_adam"))
        return str(section.get("type", "")).lower() in ("adam", "adamw") and not is_torch

    def _sub_groups(self, params: Sequence[_Param]) -> list[list[_Param]]:
        """Cuts a group as stage 3 does: a sub-group ends with the parameter that fills it."""
        limit = self._zero("sub_group_size", DEFAULT_SUB_GROUP_ELEMS)
        sizes = [-(-param.n_elems // self.world_size) for param in params]
        if limit is None or limit == "auto" or limit >= sum(sizes):
            return [list(params)]
        sub_groups: list[list[_Param]] = [[]]
        filled = 0
        for param, size in zip(params, sizes, strict=True):
            if filled >= limit:
                sub_groups.append([])
                filled = 0
            sub_groups[-1].append(param)
            filled += size
        return sub_groups

    def _group(self, params: list[_Param], index: int) -> _Group:
        # A parameter that never had a gradient has no states yet; DeepSpeed has one tensor for all parameters, and
        # starts it with zeros.
        states = list(dict.fromkeys(state for param in params for state in param.states))
        counts: dict[str, Any] = {}
        for param in params:
            for key, value in param.counts.items():
                if key in counts and not _equal(counts[key], value):
                    raise CheckpointError(
                        f"has {key} {_number(value)} where others of its group have {_number(counts[key])}; DeepSpeed keeps one for all",
                        where=f"{self.source.where}, {param.name}",
                        fix="use stage 0",
                    )
                counts.setdefault(key, value)
        return _Group(params, index, states, {key: self._count(key, value) for key, value in counts.items()})

    def _count(self, key: str, value: Any) -> Any:
        # DeepSpeed's own optimizers take a whole number, torch's a tensor.
        if key != "step":
            return value
        return int(_number(value)) if self.is_fused else torch.tensor(float(_number(value)), dtype=torch.float32)

    # The model file

    def model_states(self, rank: int) -> dict[str, Any]:
        state = self.source.state
        client_state = dict(state.get("client_state") or {})
        if taken := sorted(ENGINE_KEYS & set(client_state)):
            raise CheckpointError(
                f"the keys {taken} are DeepSpeed's own in this file", where="client_state", fix="rename them"
            )
        counters = state.get("counters") or {}
        saves_frozen = self.stage >= 2
        return {
            "module": self._module(),
            "buffer_names": list(self.buffers),
            "optimizer": self._optimizer_of_stage0() if self.stage == 0 and self.source.groups else None,
            "param_shapes": self._param_shapes() if self.stage > 0 else None,
            "frozen_param_shapes": OrderedDict((name, torch.Size(self.weights[name].shape)) for name in self.frozen)
            if saves_frozen
            else None,
            "shared_params": dict(self.source.aliases) if self.stage > 0 else None,
            "frozen_param_fragments": self._frozen(rank) if saves_frozen else None,
            "lr_scheduler": state.get("lr_scheduler"),
            "data_sampler": state.get("data_sampler"),
            "random_ltd": state.get("random_ltd"),
            "sparse_tensor_module_names": set(),
            "skipped_steps": counters.get("skipped_steps", 0),
            "global_steps": counters.get("global_steps", 0),
            "global_samples": counters.get("global_samples", 0),
            "dp_world_size": self.world_size,
            "mp_world_size": self.place.n_ranks,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": self.place.n_ranks},
            "ds_config": self.config,
            "ds_version": LAYOUT_VERSION,
            # DeepSpeed's converter requires this entry. On its own the entry says that no tensor is cut over
            # tensor-parallel ranks.
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2, **(self.place.info or {})},
            **client_state,
        }

    def _module(self) -> OrderedDict[str, torch.Tensor]:
        reads: list[Read] = []
        module: OrderedDict[str, torch.Tensor] = OrderedDict()
        for _, name in self.source.tensors:
            if name in module:
                continue
            if name in self.buffers:
                module[name] = self._whole(self.buffers[name], self.buffers[name].dtype, reads)
            elif self.stage == 3:
                module[name] = torch.empty(0, dtype=self.dtype)
            else:
                module[name] = self._whole(self.weights[name], self.dtype, reads)
        self.source.read(reads)
        for alias, name in self.source.aliases.items():
            module[alias] = module[name]
        return module

    def _whole(self, tensor: LogicalTensor, dtype: torch.dtype, reads: list[Read]) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        reads.append(Read(tensor, 0, whole.view(-1)))
        return whole

    def _frozen(self, rank: int) -> OrderedDict[str, torch.Tensor]:
        reads: list[Read] = []
        fragments: OrderedDict[str, torch.Tensor] = OrderedDict()
        for name in self.frozen:
            tensor = self.weights[name]
            if self.stage != 3:
                fragments[name] = self._whole(tensor, self.dtype, reads)
                continue
            n_elems = math.prod(tensor.shape)
            shard_elems = -(-n_elems // self.world_size)
            begin = min(rank * shard_elems, n_elems)
            fragments[name] = torch.zeros(shard_elems, dtype=self.dtype, device="cpu")
            reads.append(Read(tensor, begin, fragments[name][: min(shard_elems, n_elems - begin)]))
        self.source.read(reads)
        return fragments

    def _param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        return [OrderedDict((param.name, torch.Size(param.shape)) for param in group.params) for group in self.groups]

    # The optimizer's file

    def cuts(self, group: _Group, rank: int) -> tuple[int, list[_Cut]]:
        """(elements of the rank's shard of the group, padding included; the part of each parameter in it)."""
        if self.stage == 3:
            cuts, at = [], 0
            for param in group.params:
                shard_elems = -(-param.n_elems // self.world_size)
                begin = min(rank * shard_elems, param.n_elems)
                cuts.append(_Cut(param, begin, min(shard_elems, param.n_elems - begin), at))
                at += shard_elems
            return at, cuts
        total = sum(param.n_elems for param in group.params)
        alignment = SHARD_ALIGNMENT_ELEMS * self.world_size
        shard_elems = -(-total // alignment) * SHARD_ALIGNMENT_ELEMS
        first, cuts, begin = rank * shard_elems, [], 0
        for param in group.params:
            low, high = max(begin, first), min(begin + param.n_elems, first + shard_elems)
            if low < high:
                cuts.append(_Cut(param, low - begin, high - low, low - first))
            begin += param.n_elems
        return shard_elems, cuts

    def optimizer_states(self, rank: int) -> dict[str, Any]:
        """The state that the ZeRO optimizer of stages 1 to 3 saves on a rank."""
        masters, states, paddings, mappings = [], {}, [], []
        reads: list[Read] = []
        for i, group in enumerate(self.groups):
            n_elems, cuts = self.cuts(group, rank)
            master = torch.zeros(n_elems, dtype=torch.float32, device="cpu")
            reads += [Read(cut.param.master, cut.begin, master[cut.at : cut.at + cut.n_elems]) for cut in cuts]
            masters.append(master)
            paddings.append(n_elems - sum(cut.n_elems for cut in cuts))
            mappings.append(OrderedDict((cut.param.name, _fragment_address(cut.at, cut.n_elems)) for cut in cuts))
            states[i] = dict(group.counts)
            for state in group.states:
                states[i][state] = flat = torch.zeros(n_elems, dtype=torch.float32, device="cpu")
                reads += [
                    Read(cut.param.states[state], cut.begin, flat[cut.at : cut.at + cut.n_elems])
                    for cut in cuts
                    if state in cut.param.states
                ]
        self.source.read(reads)
        optimizer = {
            "state": {i: of_group for i, of_group in states.items() if of_group},
            "param_groups": self.param_groups([[i] for i in range(len(self.groups))]),
        }
        common = {"loss_scaler": self.loss_scaler(), "dynamic_loss_scale": self._is_dynamic(), "overflow": False}
        stage = UPSTREAM["deepspeed.runtime.zero.config.ZeroStageEnum"](self.stage)
        if self.stage == 3:
            return {
                "zero_stage": stage,
                **common,
                "partition_count": self.world_size,
                "optimizer_state_dict": optimizer,
                "fp32_flat_groups": masters,
            }
        return {
            **common,
            "clip_grad": self._clipping(),
            "base_optimizer_state": optimizer,
            "single_partition_of_fp32_groups": [
                master[: master.numel() - padding].clone() for master, padding in zip(masters, paddings, strict=True)
            ],
            "zero_stage": stage,
            "group_paddings": paddings,
            "partition_count": [self.world_size] * len(self.groups),
            "ds_version": LAYOUT_VERSION,
            "param_slice_mappings": mappings,
        }

    def param_groups(self, ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """The optimizer's groups; ``ids``: of each of ``self.groups``, the numbers of its tensors."""
        groups = []
        for g, options in enumerate(self.source.groups):
            group = {key: value for key, value in options.items() if key != "params"}
            if self.is_fused:
                # An option of DeepSpeed's Adam that torch's does not have.
                group.setdefault("bias_correction", True)
            group["params"] = [
                i for group, numbers in zip(self.groups, ids, strict=True) if group.index == g for i in numbers
            ]
            groups.append(group)
        return groups

    def _optimizer_of_stage0(self) -> dict[str, Any]:
        """The state that the engine's optimizer saves without ZeRO: torch's own in fp32, a wrapper with master weights
        around it in fp16 and bf16.
        """
        reads: list[Read] = []
        is_flat = self.is_fused and self.dtype != torch.float32
        states: dict[int, dict[str, Any]] = {}
        ids: list[list[int]] = []
        masters: list[Any] = []
        n = 0
        for group in self.groups:
            if is_flat:
                total = sum(param.n_elems for param in group.params)
                master = torch.empty(total, dtype=torch.float32, device="cpu")
                states[n] = dict(group.counts)
                flats = [(None, master)]
                for state in group.states:
                    states[n][state] = torch.zeros(total, dtype=torch.float32, device="cpu")
                    flats.append((state, states[n][state]))
                at = 0
                for param in group.params:
                    for state, flat in flats:
                        tensor = param.master if state is None else param.states.get(state)
                        if tensor is not None:
                            reads.append(Read(tensor, 0, flat[at : at + param.n_elems]))
                    at += param.n_elems
                masters.append(master)
                ids.append([n])
                n += 1
                continue
            masters.append([])
            ids.append(list(range(n, n + len(group.params))))
            for param in group.params:
                states[n] = {key: self._count(key, value) for key, value in param.counts.items()}
                for state, tensor in param.states.items():
                    states[n][state] = self._whole(tensor, torch.float32, reads)
                if self.dtype != torch.float32:
                    masters[-1].append(self._whole(param.master, torch.float32, reads))
                n += 1
        self.source.read(reads)
        optimizer = {
            "state": {i: of_param for i, of_param in states.items() if of_param},
            "param_groups": self.param_groups(ids),
        }
        if self.dtype == torch.float32:
            return optimizer
        wrapped: dict[str, Any] = {
            "dynamic_loss_scale": False,
            "cur_scale": 1.0,
            "cur_iter": (self.source.state.get("counters") or {}).get("global_steps", 0),
            "optimizer_state_dict": optimizer,
            "fp32_groups_flat" if is_flat else "fp32_groups": masters,
            "clip_grad": self._clipping(),
        }
        if self.dtype == torch.float16:
            scaler = vars(self.loss_scaler())
            wrapped["dynamic_loss_scale"] = self._is_dynamic()
            for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"):
                if key in scaler:
                    wrapped[key] = scaler[key]
        return wrapped

    # Loss scale and clipping

    def _fp16(self, key: str, default: Any) -> Any:
        section = self.config.get("fp16")
        value = section.get(key, default) if isinstance(section, Mapping) else default
        return default if value == "auto" else value

    def _is_dynamic(self) -> bool:
        return self.dtype == torch.float16 and not self._fp16("loss_scale", 0)

    def loss_scaler(self) -> Any:
        """DeepSpeed's scaler with the state of ours, and the settings of the configuration."""
        state = self.source.state.get("loss_scaler") or {}
        kind = "DynamicLossScaler" if self._is_dynamic() else "LossScaler"
        scaler = UPSTREAM[f"deepspeed.runtime.fp16.loss_scaler.{kind}"]()
        if self.dtype != torch.float16:
            vars(scaler).update(cur_scale=1.0, dynamic=False)
            return scaler
        if not self._is_dynamic():
            vars(scaler).update(cur_scale=float(state.get("scale", self._fp16("loss_scale", 1.0))), dynamic=False)
            return scaler
        hysteresis = self._fp16("hysteresis", 2)
        vars(scaler).update(
            cur_scale=float(state.get("scale", 2.0 ** self._fp16("initial_scale_power", DEFAULT_SCALE_POWER))),
            dynamic=True,
            cur_iter=int(state.get("step", 0)),
            last_overflow_iter=int(state.get("last_overflow_step", -1)),
            scale_factor=2.0,
            scale_window=self._fp16("loss_scale_window", 1000),
            min_scale=self._fp16("min_loss_scale", 1),
            delayed_shift=hysteresis,
            cur_hysteresis=int(state.get("hysteresis_left", hysteresis)),
            consecutive_hysteresis=bool(self._fp16("consecutive_hysteresis", False)),
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )
        return scaler

    def _clipping(self) -> float:
        value = self.config.get("gradient_clipping", DEFAULT_GRADIENT_CLIPPING)
        return DEFAULT_GRADIENT_CLIPPING if value == "auto" else float(value)


def _fragment_address(start: int, numel: int) -> Any:
    address = UPSTREAM["deepspeed.utils.tensor_fragment.fragment_address"]()
    vars(address).update(numel=numel, start=start)
    return address


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else value


def _equal(a: Any, b: Any) -> bool:
    return _number(a) == _number(b)


def _write_param(layout: _Layout, param: _Param, folder: str) -> None:
    try:
        os.makedirs(folder)
    except OSError as error:
        raise CheckpointError(f"cannot be made: {error.strerror}", where=folder) from error
    for state, tensor in {MASTER_FILE: param.master, **param.states}.items():
        reads: list[Read] = []
        whole = layout._whole(tensor, torch.float32, reads)
        layout.source.read(reads)
        # cat_dim: dimension for joining tensor-parallel ranks' parts.
        _save(os.path.join(folder, f"{state}.pt"), {"cat_dim": 0, "param": whole})
    if "step" in param.counts:
        _save(os.path.join(folder, f"{STEP_FILE}.pt"), layout._count("step", param.counts["step"]))


def _universal_optimizer(flat: _Layout, cut: _Layout) -> dict[str, Any]:
    step = next((group.counts["step"] for group in flat.groups if "step" in group.counts), None)
    groups = flat.param_groups([[i] for i in range(len(flat.groups))])
    return {
        "loss_scaler": flat.loss_scaler(),
        "dynamic_loss_scale": flat._is_dynamic(),
        "overflow": False,
        "clip_grad": flat._clipping(),
        "zero_stage": UPSTREAM["deepspeed.runtime.zero.config.ZeroStageEnum"](1),
        "partition_count": [1] * len(flat.groups),
        "ds_version": LAYOUT_VERSION,
        "param_groups": groups,
        # Stage 3 reads the count of steps and the options of its groups from here.
        "optimizer_state_dict": {
            "state": {i: {} if step is None else {"step": step} for i in range(len(cut.groups))},
            "param_groups": cut.param_groups([[i] for i in range(len(cut.groups))]),
        },
    }
