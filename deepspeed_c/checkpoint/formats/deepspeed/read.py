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

[Note: DeepSpeed's experts] A model with ``MoE`` layers has three differences, and no stage 3:

* ``layer_L_expert_E_mp_rank_00_model_states.pt`` has the weights of expert E, numbered over all ranks, of the L-th such
  layer. The model file has the other weights.
* Stages 1 and 2: an optimizer group of experts (``moe``) is cut over the ranks that hold the same experts, and not over
  all ranks. ``param_shapes`` has the names of rank 0's experts, numbered from 0, which stand for other experts in the
  files of other ranks.
* Stage 0: ``expp_rank_R_mp_rank_00_optim_states.pt`` has the optimizer of the R-th rank of those that hold the experts
  together.

A pipeline's weights are in files of its layers: see [Note: files of layers]. Files that several pipeline stages wrote
are not read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.checkpoint.experts import ExpertName, ExpertPlacement, expert_name
from deepspeed_c.checkpoint.formats.deepspeed.model_file import (
    FIX_CONVERT,
    RANKS_SHOWN,
    Files,
    ModelStates,
    find_files,
    get_entry,
    laid_out,
    shapes_of,
    stage_of,
)
from deepspeed_c.checkpoint.formats.deepspeed.pieces import PieceSource, StoredPiece, is_count, scaler_state
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.deepspeed.unnamed import Flat, Unnamed
from deepspeed_c.checkpoint.formats.tensor_ranks import TensorRules, megatron_cut, rules_of_info
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, materialize
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, ParamInfo, Topology
from deepspeed_c.errors import CheckpointError

__all__ = ["DeepSpeedSource"]


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
        # Without ZeRO: the optimizer of each expert-parallel rank, and the numbers that its experts begin with.
        self._unnamed: list[tuple[Unnamed, Mapping[str, int]]] = []
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
        model = self._model = ModelStates(files.models[0], self._n_tensor_ranks, files.layers)
        if model.num_experts:
            model.add_experts(files.experts)
        elif stray := [*files.experts.values(), *files.expert_optimizers.values()]:
            raise CheckpointError(
                f"holds files of experts ({os.path.basename(stray[0])}), and its model file knows of none",
                where=self.where,
                fix="remove the files that are left over from another run",
            )
        self.state = model.state()
        self._expert_parallel = 1
        n_ranks = model.world_size if isinstance(model.world_size, int) else max(len(files.optimizers), 1)
        self._placement = ExpertPlacement(n_ranks, bool(model.config.get("use_data_before_expert_parallelism")))
        if files.is_stage3:
            stage = 3
            if model.experts:
                raise CheckpointError("has a mixture of experts at stage 3", where=self.where, fix=FIX_CONVERT)
            self._open_stage3(model, files)
        elif files.optimizers:
            stage = self._open_stages_1_and_2(model, files)
        else:
            stage = 0
            self._open_stage0(model, files)
        self.topology = Topology(world_size=n_ranks, stage=stage, expert_parallel=self._expert_parallel)
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
        saved = self._optimizer_files(model, files)
        first = saved[0]
        self._set_loss_scaler(model, first.get("loss_scaler"))
        expert_ranks = self._expert_ranks(model, first, files.optimizers[0])
        trained = {
            self._on_expert_rank(model, name, rank, n)
            for shapes, n in zip(model.param_shapes, expert_ranks, strict=True)
            for name in shapes
            for rank in range(n)
        }
        self._add_module(model, trained)
        flats = [self._flats(rank_state, "single_partition_of_fp32_groups", model) for rank_state in saved]
        for g, (shapes, n) in enumerate(zip(model.param_shapes, expert_ranks, strict=True)):
            for expert_rank in range(n):
                of_group = [flats[rank][g] for rank in self._placement.holders(expert_rank, n)]
                names = {self._on_expert_rank(model, name, expert_rank, n): shape for name, shape in shapes.items()}
                self._add_group(model, g, names, of_group)
        stage = stage_of(read_file(files.optimizers[0]))
        return 1 if stage is None else stage

    def _add_group(
        self, model: ModelStates, group: int, shapes: Mapping[str, tuple[int, ...]], flats: Sequence[Flat]
    ) -> None:
        """Lists the parameters of a group that is cut over the ranks of ``flats``."""
        # Only the last rank saves less than a full shard. With a single rank the full length does not matter.
        shard_elems = flats[0].master.n_elems
        begin = 0
        for name, shape in shapes.items():
            n_elems = math.prod(shape)
            self._add_trained(model, name, shape, flats, _spread(begin, n_elems, shard_elems, len(flats)))
            self.params[name] = ParamInfo(group=group, counts=self._counts(flats[0].states, group))
            begin += n_elems

    def _expert_ranks(self, model: ModelStates, saved: Mapping[str, Any], path: str) -> list[int]:
        """The number of ranks that hold the experts of each group together; 1 for a group without experts."""
        count = saved.get("partition_count", self._placement.world_size)
        counts = count if isinstance(count, (list, tuple)) else [count] * len(model.param_shapes)
        found = []
        for g, shapes in enumerate(model.param_shapes):
            n = counts[g] if g < len(counts) else 0
            is_of_experts = any(expert_name(name) is not None for name in shapes)
            n_ranks = self._placement.world_size
            fits = type(n) is int and 0 < n <= n_ranks and n_ranks % n == 0
            if not fits or (n != n_ranks and not all(expert_name(name) is not None for name in shapes)):
                raise CheckpointError(
                    f"cuts its groups into {list(counts)} shards, and {n_ranks} ranks saved it",
                    where=path,
                    fix="groups without experts that are sharded over a part of the ranks (MiCS) are not read",
                )
            found.append(n_ranks // n if is_of_experts else 1)
        self._expert_parallel = max(found, default=1)
        return found

    def _on_expert_rank(self, model: ModelStates, name: str, expert_rank: int, n_ranks: int) -> str:
        """The name, with an expert numbered over all ranks, of a tensor that an expert-parallel rank calls ``name``."""
        split = expert_name(name)
        if split is None:
            return name
        n_local, rest = divmod(model.experts.get(split.layer, 0), n_ranks)
        if rest or split.number >= n_local:
            raise CheckpointError(
                f"has {model.experts.get(split.layer, 0)} experts, and {n_ranks} ranks hold them together",
                where=f"{self.where}, {name}",
                fix="the files are not of one checkpoint: take another",
            )
        return str(split._replace(number=split.number + expert_rank * n_local))

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
        shapes = shapes_of(model.content.get("frozen_param_shapes") or {}, model.path)
        if not shapes:
            return
        n_ranks = self._n_ranks(model, files.models, "model")
        fragments = [
            get_entry(
                (model.file if rank == 0 else read_file(files.models[rank])).content,
                "frozen_param_fragments",
                Mapping,
                files.models[rank],
            )
            for rank in range(n_ranks)
        ]
        for name, shape in shapes.items():
            stored = [
                get_entry(of_rank, name, StoredTensor, f"{self.where}, frozen_param_fragments") for of_rank in fragments
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

    def _open_stage0(self, model: ModelStates, files: Files) -> None:
        self.aliases = model.ties()
        self._add_module(model, set())
        contents = [model.content]
        if model.experts and files.expert_optimizers:
            contents = self._expert_optimizers(files)
        saved = [content.get("optimizer") for content in contents]
        if not all(isinstance(wrapped, Mapping) for wrapped in saved):
            return
        if model.is_fp16:
            self._set_loss_scaler(model, saved[0])
        for rank, wrapped in enumerate(saved):
            # fp16 and bf16 wrap the optimizer; fp32 saves its own state_dict.
            optimizer = wrapped.get("optimizer_state_dict", wrapped)
            firsts = {}
            for layer, n_experts in model.experts.items():
                if n_experts % len(saved):
                    self.problem = f"{layer} has {n_experts} experts, and {len(saved)} ranks saved its optimizer states"
                    return
                firsts[layer] = rank * (n_experts // len(saved))
            seen = model.seen_by(rank, len(saved)) if model.experts else model
            self._unnamed.append((Unnamed(self.where, seen, wrapped, optimizer), firsts))
        found = [unnamed.find_names(self.aliases) for unnamed, _ in self._unnamed]
        self.problem = next((names for names in found if isinstance(names, str)), "")
        if not self.problem:
            self._add_named(found)

    def _expert_optimizers(self, files: Files) -> list[Mapping[str, Any]]:
        """The contents of the files of all expert-parallel ranks."""
        first = read_file(files.expert_optimizers[min(files.expert_optimizers)]).content
        wrapped = get_entry(first, "optimizer", Mapping, self.where)
        groups = get_entry(wrapped.get("optimizer_state_dict", wrapped), "param_groups", (list, tuple), self.where)
        self._expert_parallel = len(files.expert_optimizers)
        sizes = {str(group.get("name")) for group in groups if group.get("moe")}
        if len(sizes) > 1:
            self.problem = f"its layers have experts on different numbers of ranks ({', '.join(sorted(sizes))}), and files without ZeRO do not say which layer has which"
            return [{}]
        # Files of further ranks are left over from another run that saved under the same tag.
        n_ranks = len(files.expert_optimizers)
        for size in sizes:
            n_ranks = int(size.removeprefix("ep_size_"))
        self._expert_parallel = n_ranks
        if missing := [rank for rank in range(n_ranks) if rank not in files.expert_optimizers]:
            raise CheckpointError(
                f"was saved by {n_ranks} expert-parallel ranks, and the optimizer files of {len(missing)} of them are missing ({missing[:RANKS_SHOWN]})",
                where=self.where,
                fix="copy the folders of all nodes into one",
            )
        return [read_file(files.expert_optimizers[rank]).content for rank in range(n_ranks)]

    def name_groups(self, names: Sequence[Sequence[str]]) -> None:
        """Lists the states of a stage 0 checkpoint under ``names``, in place of the names found by shape and value.

        Names that fit in number, shape and value are always right; found names need not be. Does nothing if the
        checkpoint itself has names, or if these do not fit and the found names are the only possible ones. Raises
        CheckpointError if these do not fit and no names were found.
        """
        if self._model.experts:
            # The names of a rank's own experts do not name those in the files of other ranks.
            if self.problem:
                raise CheckpointError(self.problem, where=self.where, fix="save it with ZeRO at stage 1 or 2")
            return
        if not self._unnamed or self._unnamed[0][0].has_names:
            return
        with laid_out(self.where):
            try:
                self._unnamed[0][0].check(names)
            except CheckpointError:
                if self.problem:
                    raise
                return
            self._add_named([names])
            self.problem = ""
            self._order(list(self._model.module))

    def _add_named(self, names_of_ranks: Sequence[Sequence[Sequence[str]]]) -> None:
        """Lists the states of all expert-parallel ranks; a model without experts has one such rank."""
        for key in [key for key in self.tensors if key[0] not in (PARAM, BUFFER)]:
            del self.tensors[key], self._pieces[key]
        self.params.clear()
        self._read_groups(self._unnamed[0][0].optimizer)
        for (unnamed, firsts), names in zip(self._unnamed, names_of_ranks, strict=True):
            for g, of_group in enumerate(names):
                for i, own in enumerate(of_group):
                    name = _numbered_from(own, firsts)
                    if name in self.params:
                        continue  # All ranks have the states of what is no expert.
                    slot = unnamed.slots[g][i]
                    weight = unnamed.model.tensor(own)
                    if slot.master is not None and slot.master.stored.dtype != weight.dtype:
                        self._add(MASTER, name, weight.shape, slot.master.stored.dtype, [slot.master])
                    for state, piece in slot.states.items():
                        self._add(state, name, weight.shape, piece.stored.dtype, [piece])
                    self.params[name] = ParamInfo(group=g, counts=self._counts(slot.counts, g))
        for kind, name in list(self.tensors):
            if kind == PARAM and name not in self.params:
                self.params[name] = ParamInfo()

    # Shared by the stages

    def _add_module(self, model: ModelStates, trained: set[str]) -> None:
        buffers = set(model.buffers)
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
        saved, expert_ranks = [], []
        for rank in range(n_ranks):
            path = files.optimizers[rank]
            content = get_entry(read_file(path).content, "optimizer_state_dict", Mapping, path)
            if saved:
                content = _in_order_of(content, saved[0])
            if (found := self._expert_ranks(model, content, path)) != expert_ranks and rank > 0:
                raise CheckpointError(
                    f"has groups of experts on {found} ranks, and rank 0's file on {expert_ranks}",
                    where=path,
                    fix="the files are not of one checkpoint: take another",
                )
            expert_ranks = found
            saved.append(content)
        return saved

    def _flats(self, saved: Mapping[str, Any], masters_key: str, model: ModelStates) -> list[Flat]:
        masters = get_entry(saved, masters_key, (list, tuple), self.where)
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
            states_by_id = get_entry(optimizer, "state", Mapping, self.where)
            self._read_groups(optimizer)
            ids = [i for group in optimizer["param_groups"] for i in group["params"]]
            if len(ids) != len(masters):
                raise CheckpointError(
                    f"its optimizer knows {len(ids)} tensors where there are {len(masters)} groups", where=self.where
                )
            states = [states_by_id.get(i, {}) for i in ids]
        return [
            Flat(get_entry({"": master}, "", StoredTensor, f"{self.where}, {masters_key}[{i}]"), of_group)
            for i, (master, of_group) in enumerate(zip(masters, states, strict=True))
        ]

    def _read_groups(self, optimizer: Mapping[str, Any]) -> None:
        groups = get_entry(optimizer, "param_groups", (list, tuple), self.where)
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
        flats: Sequence[Flat],
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


def _in_order_of(content: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a rank's optimizer with its groups in the order of rank 0's.

    DeepSpeed's engine makes a group of experts for each of their numbers of ranks, in the order of a set of strings,
    which each process has in an order of its own.
    """
    optimizers = [state.get("base_optimizer_state") for state in (first, content)]
    if not all(isinstance(optimizer, Mapping) for optimizer in optimizers):
        return content
    wanted, own = ([_key(group) for group in optimizer["param_groups"]] for optimizer in optimizers)
    if wanted == own or sorted(wanted) != sorted(own):
        return content
    left: dict[str, list[int]] = {}
    for g, key in enumerate(own):
        left.setdefault(key, []).append(g)
    order = [left[key].pop(0) for key in wanted]
    ordered = dict(content)
    for key in ("single_partition_of_fp32_groups", "partition_count"):
        if isinstance(ordered.get(key), (list, tuple)):
            ordered[key] = [ordered[key][g] for g in order]
    groups = [optimizers[1]["param_groups"][g] for g in order]
    ordered["base_optimizer_state"] = {**optimizers[1], "param_groups": groups}
    return ordered


def _key(group: Mapping[str, Any]) -> str:
    return str(group.get("name")) if group.get("moe") else ""


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


def _numbered_from(name: str, firsts: Mapping[str, int]) -> str:
    """``name`` with an expert numbered over all ranks, where a rank's own experts of a layer begin with ``firsts``."""
    split = expert_name(name)
    return name if split is None else str(ExpertName(split.layer, split.number + firsts[split.layer], split.rest))
