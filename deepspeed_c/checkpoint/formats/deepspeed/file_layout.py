"""The contents of DeepSpeed's files, made of the tensors of any checkpoint. See [Note: DeepSpeed's files] and
[Note: DeepSpeed's experts].
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.experts import EXPERT_LIST, ExpertPlacement, expert_name
from deepspeed_c.checkpoint.formats.deepspeed.expert_layout import ExpertLayout
from deepspeed_c.checkpoint.formats.deepspeed.layer_files import PIPELINE_INFO, Layers
from deepspeed_c.checkpoint.formats.deepspeed.model_file import ENGINE_KEYS
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import UPSTREAM
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source
from deepspeed_c.errors import CheckpointError

__all__ = ["LAYOUT_VERSION", "PIPELINE_STAGES", "FileLayout", "Param", "TensorRank"]

# The version of DeepSpeed with this layout. DeepSpeed reads it from the file to choose the layout.
LAYOUT_VERSION = "0.19.6"
# Shards of stages 1 and 2 begin at even elements (stage_1_and_2.py, nccl_start_alignment_factor).
SHARD_ALIGNMENT_ELEMS = 2
# Defaults of DeepSpeed's configuration that are kept in its files.
DEFAULT_SUB_GROUP_ELEMS = 1_000_000_000
DEFAULT_GRADIENT_CLIPPING = 1.0
DEFAULT_SCALE_POWER = 16
# Stages at which DeepSpeed runs pipelines.
PIPELINE_STAGES = (0, 1)


@dataclass(frozen=True)
class Param:
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

    params: list[Param]
    index: int  # index of the optimizer's group
    states: list[str]
    counts: dict[str, Any]
    expert_ranks: int  # ranks over which the parameters differ


class _Cut(NamedTuple):
    """Elements [begin, begin + n_elems) of a parameter lie at ``at`` of a rank's shard."""

    param: Param
    begin: int
    n_elems: int
    at: int


class TensorRank(NamedTuple):
    """The tensor-parallel rank whose files are written, and the files' account of how tensors are cut."""

    rank: int = 0
    n_ranks: int = 1
    info: Mapping[str, Any] | None = None


ONE_TENSOR_RANK = TensorRank()


class FileLayout:
    """Maps the tensors of ``source`` to DeepSpeed's files."""

    def __init__(
        self,
        source: Source,
        world_size: int,
        stage: int,
        dtype: torch.dtype,
        is_fused: bool | None,
        place: TensorRank = ONE_TENSOR_RANK,
        expert_ranks: int | Mapping[str, int] | None = None,
    ) -> None:
        self.place = place
        self.source, self.world_size, self.stage, self.dtype = source, world_size, stage, dtype
        config = source.state.get("config")
        self.config: dict[str, Any] = dict(config) if isinstance(config, Mapping) else {}
        self.is_fused = self._uses_own_adam() if is_fused is None else is_fused
        placement = ExpertPlacement(world_size, bool(self.config.get("use_data_before_expert_parallelism")))
        self.experts = ExpertLayout(source, placement, expert_ranks)
        if self.experts and stage == 3:
            raise CheckpointError(
                "has a mixture of experts, which DeepSpeed does not train at stage 3",
                where=source.where,
                fix="write the files of stage 1 or 2",
            )
        self.pipeline = Layers.of_state(source.state.get("pipeline"), source.where)
        self._made: tuple[int, list[_Group]] | None = None
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
        by_group: list[list[str]] = [[] for _ in source.groups]
        self._params: dict[str, Param] = {}
        for name, info in source.params.items():
            if info.group is None:
                continue
            if name not in masters:
                raise CheckpointError("has no weight", where=f"{source.where}, {name}")
            by_group[info.group].append(name)
            self._params[name] = Param(
                name, masters[name].shape, masters[name], states.get(name, {}), dict(info.counts)
            )
        self.frozen = [name for name in self.weights if name not in self._params]
        self._options: list[dict[str, Any]] = [dict(group) for group in source.groups]
        if self.experts:
            sizes = {name: param.shape for name, param in self._params.items()}
            self._options, by_group = self.experts.split_groups(self._options, by_group, sizes)
        self._by_group = by_group
        self.groups = self.groups_of(0)
        """The groups of rank 0; those of other ranks have other experts."""
        if stage > 0 and (empty := [group.index for group in self.groups if not group.params]):
            raise CheckpointError(
                f"the optimizer's groups {empty} have no parameters, and DeepSpeed cannot have such a group",
                where=source.where,
            )

    def groups_of(self, rank: int) -> list[_Group]:
        """The groups of a data-parallel rank's optimizer, with the rank's own experts."""
        if self._made is not None and (rank == self._made[0] or not self.experts):
            return self._made[1]
        groups = []
        for g, names in enumerate(self._by_group):
            own = [name for name in names if self.experts.own(name, rank) is not None]
            n = self.experts.ranks_of(own[0]) if own else 1
            params, n_shards = [self._params[name] for name in own], self.world_size // n
            if self.stage in (1, 2) and self._zero("round_robin_gradients", False):
                params = [params[i] for r in range(n_shards) for i in range(r, len(params), n_shards)]
            for sub_group in self._sub_groups(params) if self.stage == 3 else [params]:
                groups.append(self._group(sub_group, g, n))
        self._made = rank, groups
        return groups

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

    def _sub_groups(self, params: Sequence[Param]) -> list[list[Param]]:
        """Cuts a group as stage 3 does: a sub-group ends with the parameter that fills it."""
        limit = self._zero("sub_group_size", DEFAULT_SUB_GROUP_ELEMS)
        sizes = [-(-param.n_elems // self.world_size) for param in params]
        if limit is None or limit == "auto" or limit >= sum(sizes):
            return [list(params)]
        sub_groups: list[list[Param]] = [[]]
        filled = 0
        for param, size in zip(params, sizes, strict=True):
            if filled >= limit:
                sub_groups.append([])
                filled = 0
            sub_groups[-1].append(param)
            filled += size
        return sub_groups

    def _group(self, params: list[Param], index: int, expert_ranks: int) -> _Group:
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
        made = {key: self.count(key, value) for key, value in counts.items()}
        return _Group(params, index, states, made, expert_ranks)

    def count(self, key: str, value: Any) -> Any:
        # DeepSpeed's own optimizers take a whole number, torch's a tensor.
        if key != "step":
            return value
        return int(_number(value)) if self.is_fused else torch.tensor(float(_number(value)), dtype=torch.float32)

    # The model file

    def layers(self) -> dict[int, dict[str, str]]:
        """For every layer of a pipeline that has a file, key in the file -> name in the model; empty if the model file
        has the weights. See [Note: files of layers].

        Raises CheckpointError for tensors that belong to no layer.
        """
        if self.pipeline is None or self.stage not in PIPELINE_STAGES or self.experts:
            return {}
        names = dict.fromkeys(name for _, name in self.source.tensors)
        return self.pipeline.contents([*names, *self.source.aliases], self.source.where)

    def layer_states(self, names: Mapping[str, str]) -> OrderedDict[str, torch.Tensor]:
        """The weights and buffers of a layer. ``names``: its entry in ``layers()``."""
        reads: list[Read] = []
        made: dict[str, torch.Tensor] = {}
        tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
        for key, alias in names.items():
            name = self.source.aliases.get(alias, alias)
            if name not in made:
                is_buffer = name in self.buffers
                tensor = self.buffers[name] if is_buffer else self.weights[name]
                made[name] = self.whole(tensor, tensor.dtype if is_buffer else self.dtype, reads)
            tensors[key] = made[name]
        self.source.read(reads)
        return tensors

    def model_states(self, rank: int, layers: Collection[int] = ()) -> dict[str, Any]:
        """layers: those whose weights are in files of their own; by default the model file has all weights."""
        state = self.source.state
        client_state = dict(state.get("client_state") or {})
        if taken := sorted(ENGINE_KEYS & set(client_state)):
            raise CheckpointError(
                f"the keys {taken} are DeepSpeed's own in this file", where="client_state", fix="rename them"
            )
        counters = state.get("counters") or {}
        # Frozen experts are in their files. These entries would give all ranks those of rank 0.
        saves_frozen = self.stage >= 2 and not any(expert_name(name) is not None for name in self.frozen)
        return {
            "module": None if layers else self._module(),
            "buffer_names": [own for name in self.buffers if (own := self.experts.own(name, 0)) is not None],
            # With experts, each expert-parallel rank's is in a file of its own.
            "optimizer": self.optimizer_of_stage0(0)
            if self.stage == 0 and self.source.groups and not self.experts
            else None,
            "param_shapes": self._param_shapes() if self.stage > 0 else None,
            "frozen_param_shapes": OrderedDict((name, torch.Size(self.weights[name].shape)) for name in self.frozen)
            if saves_frozen
            else None,
            "shared_params": {alias: name for alias, name in self.source.aliases.items() if expert_name(alias) is None}
            if self.stage > 0
            else None,
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
            "universal_checkpoint_info": {
                "universal_checkpoint_version": 0.2,
                **(self.place.info or {}),
                **self._pipeline_info(layers),
            },
            **({"num_experts": list(self.experts.n_experts.values())} if self.experts else {}),
            **client_state,
        }

    def _pipeline_info(self, layers: Collection[int]) -> dict[str, Any]:
        if self.pipeline is None:
            return {}
        return {PIPELINE_INFO: {**self.pipeline.as_state(), "layers": list(layers)}}

    def expert_states(self, layer: str, expert: int) -> OrderedDict[str, torch.Tensor]:
        """The weights and buffers of one expert, under names with its number among all experts."""
        prefix = f"{layer}.{EXPERT_LIST}.{expert}."
        tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
        reads: list[Read] = []
        for _, name in self.source.tensors:
            if name.startswith(prefix) and name not in tensors:
                is_buffer = name in self.buffers
                tensor = self.buffers[name] if is_buffer else self.weights[name]
                tensors[name] = self.whole(tensor, tensor.dtype if is_buffer else self.dtype, reads)
        self.source.read(reads)
        tensors.update(
            {alias: tensors[name] for alias, name in self.source.aliases.items() if alias.startswith(prefix)}
        )
        return tensors

    def _module(self) -> OrderedDict[str, torch.Tensor]:
        reads: list[Read] = []
        module: OrderedDict[str, torch.Tensor] = OrderedDict()
        for _, name in self.source.tensors:
            if name in module or expert_name(name) is not None:
                continue
            if name in self.buffers:
                module[name] = self.whole(self.buffers[name], self.buffers[name].dtype, reads)
            elif self.stage == 3:
                module[name] = torch.empty(0, dtype=self.dtype)
            else:
                module[name] = self.whole(self.weights[name], self.dtype, reads)
        self.source.read(reads)
        for alias, name in self.source.aliases.items():
            if expert_name(alias) is None:
                module[alias] = module[name]
        return module

    def whole(self, tensor: LogicalTensor, dtype: torch.dtype, reads: list[Read]) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        reads.append(Read(tensor, 0, whole.view(-1)))
        return whole

    def _frozen(self, rank: int) -> OrderedDict[str, torch.Tensor]:
        reads: list[Read] = []
        fragments: OrderedDict[str, torch.Tensor] = OrderedDict()
        for name in self.frozen:
            tensor = self.weights[name]
            if self.stage != 3:
                fragments[name] = self.whole(tensor, self.dtype, reads)
                continue
            n_elems = math.prod(tensor.shape)
            shard_elems = -(-n_elems // self.world_size)
            begin = min(rank * shard_elems, n_elems)
            fragments[name] = torch.zeros(shard_elems, dtype=self.dtype, device="cpu")
            reads.append(Read(tensor, begin, fragments[name][: min(shard_elems, n_elems - begin)]))
        self.source.read(reads)
        return fragments

    def _param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        return [
            OrderedDict((self.experts.own(param.name, 0), torch.Size(param.shape)) for param in group.params)
            for group in self.groups
        ]

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
        alignment = SHARD_ALIGNMENT_ELEMS * (self.world_size // group.expert_ranks)
        shard_elems = -(-total // alignment) * SHARD_ALIGNMENT_ELEMS
        shard = self.experts.placement.of(rank, group.expert_ranks)[1]
        first, cuts, begin = shard * shard_elems, [], 0
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
        groups = self.groups_of(rank)
        for i, group in enumerate(groups):
            n_elems, cuts = self.cuts(group, rank)
            master = torch.zeros(n_elems, dtype=torch.float32, device="cpu")
            reads += [Read(cut.param.master, cut.begin, master[cut.at : cut.at + cut.n_elems]) for cut in cuts]
            masters.append(master)
            paddings.append(n_elems - sum(cut.n_elems for cut in cuts))
            mappings.append(
                OrderedDict(
                    (self.experts.own(cut.param.name, rank), _fragment_address(cut.at, cut.n_elems)) for cut in cuts
                )
            )
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
            "param_groups": self.param_groups([[i] for i in range(len(groups))]),
        }
        common = {"loss_scaler": self.loss_scaler(), "dynamic_loss_scale": self.is_dynamic(), "overflow": False}
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
            "clip_grad": self.clipping(),
            "base_optimizer_state": optimizer,
            "single_partition_of_fp32_groups": [
                master[: master.numel() - padding].clone() for master, padding in zip(masters, paddings, strict=True)
            ],
            "zero_stage": stage,
            "group_paddings": paddings,
            "partition_count": [self.world_size // group.expert_ranks for group in groups],
            "ds_version": LAYOUT_VERSION,
            "param_slice_mappings": mappings,
        }

    def param_groups(self, ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """The optimizer's groups; ``ids``: of each of ``self.groups``, the numbers of its tensors."""
        groups = []
        for g, options in enumerate(self._options):
            group = {key: value for key, value in options.items() if key != "params"}
            if self.is_fused:
                # An option of DeepSpeed's Adam that torch's does not have.
                group.setdefault("bias_correction", True)
            group["params"] = [
                i for group, numbers in zip(self.groups, ids, strict=True) if group.index == g for i in numbers
            ]
            groups.append(group)
        return groups

    def optimizer_of_stage0(self, rank: int) -> dict[str, Any]:
        """The state that the engine's optimizer saves on a rank without ZeRO: torch's own in fp32, a wrapper with
        master weights around it in fp16 and bf16.
        """
        reads: list[Read] = []
        is_flat = self.is_fused and self.dtype != torch.float32
        states: dict[int, dict[str, Any]] = {}
        ids: list[list[int]] = []
        masters: list[Any] = []
        n = 0
        for group in self.groups_of(rank):
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
                states[n] = {key: self.count(key, value) for key, value in param.counts.items()}
                for state, tensor in param.states.items():
                    states[n][state] = self.whole(tensor, torch.float32, reads)
                if self.dtype != torch.float32:
                    masters[-1].append(self.whole(param.master, torch.float32, reads))
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
            "clip_grad": self.clipping(),
        }
        if self.dtype == torch.float16:
            scaler = vars(self.loss_scaler())
            wrapped["dynamic_loss_scale"] = self.is_dynamic()
            for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"):
                if key in scaler:
                    wrapped[key] = scaler[key]
        return wrapped

    # Loss scale and clipping

    def _fp16(self, key: str, default: Any) -> Any:
        section = self.config.get("fp16")
        value = section.get(key, default) if isinstance(section, Mapping) else default
        return default if value == "auto" else value

    def is_dynamic(self) -> bool:
        return self.dtype == torch.float16 and not self._fp16("loss_scale", 0)

    def loss_scaler(self) -> Any:
        """DeepSpeed's scaler with the state of ours, and the settings of the configuration."""
        state = self.source.state.get("loss_scaler") or {}
        kind = "DynamicLossScaler" if self.is_dynamic() else "LossScaler"
        scaler = UPSTREAM[f"deepspeed.runtime.fp16.loss_scaler.{kind}"]()
        if self.dtype != torch.float16:
            vars(scaler).update(cur_scale=1.0, dynamic=False)
            return scaler
        if not self.is_dynamic():
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

    def clipping(self) -> float:
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
