"""Writes DeepSpeed's own files and its universal format from any checkpoint, so that DeepSpeed 0.19 goes on from it.

See [Note: DeepSpeed's files].

DeepSpeed need not be installed: its classes are named in the pickles, not imported.
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.experts import expert_name
from deepspeed_c.checkpoint.formats.deepspeed.file_layout import (
    LAYOUT_VERSION,
    PIPELINE_STAGES,
    FileLayout,
    Param,
    TensorRank,
)
from deepspeed_c.checkpoint.formats.deepspeed.layer_files import layer_file
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
from deepspeed_c.checkpoint.source import Read, Source
from deepspeed_c.errors import CheckpointError

__all__ = ["stage_for", "write_deepspeed", "write_rank_files", "write_universal"]

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


def stage_for(source: Source, stage: int) -> int:
    """The stage of DeepSpeed's files for a run at ``stage``: the same, but for pipelines no more than DeepSpeed runs
    them at."""
    if source.state.get("pipeline") is None or any(expert_name(name) is not None for _, name in source.tensors):
        return stage
    return min(stage, max(PIPELINE_STAGES))


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
    expert_ranks: int | Mapping[str, int] | None = None,
) -> str:
    """Writes the files that DeepSpeed's engine would at ``stage`` on ``world_size`` data-parallel ranks, training in
    ``dtype``. A pipeline's weights are in files of its layers, at stages 0 and 1: see [Note: files of layers].

    Returns the path of the tag's folder.

    ranks: data-parallel ranks whose files this call writes; the call for rank 0 also writes the shared files. With
    None all are written into a hidden folder that then gets the tag's name, and ``latest`` names it. With some, files
    go straight into ``folder/tag`` and the caller, when all are there, commits. is_fused: whether DeepSpeed will train
    with an Adam of its own; by default taken from the optimizer in ``source.state["config"]``. The groups' parameters
    are written in the order of ``source.params``, which must be the order in the optimizer's groups. n_tensor_ranks:
    number of tensor-parallel ranks; each gets files of its own with its part of every tensor. tensor_info: how tensors
    are cut over them, in the form of DeepSpeed's ``universal_checkpoint_info``; by default by Megatron's names.
    expert_ranks: number of ranks that hold the experts of ``MoE`` layers together, of all layers or by the name
    of a layer's ``deepspeed_moe``; by default as in the run that saved.

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
            expert_ranks=expert_ranks,
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
            expert_ranks=expert_ranks,
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
    expert_ranks: int | Mapping[str, int] | None = None,
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
        return _write_files(
            FileLayout(source, world_size, stage, dtype, is_fused, expert_ranks=expert_ranks), path, numbers
        )
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
        FileLayout(
            PartSource(source, rules, n_tensor_ranks, rank),
            world_size,
            stage,
            dtype,
            is_fused,
            TensorRank(rank, n_tensor_ranks, tensor_info),
            expert_ranks,
        )
        for rank in range(n_tensor_ranks)
    ]
    return [name for layout in layouts for name in _write_files(layout, path, numbers)]


def _write_files(layout: FileLayout, path: str, ranks: Sequence[int]) -> list[str]:
    written, stage, of_tensor = [], layout.stage, f"mp_rank_{layout.place.rank:02d}"
    layers = layout.layers() if 0 in ranks else {}
    for number, names in layers.items():
        name = layer_file(number, layout.place.rank, layout.place.n_ranks)
        _save(os.path.join(path, name), layout.layer_states(names))
        written.append(name)
    for rank in ranks:
        if rank == 0 or stage == 3:
            name = f"zero_pp_rank_{rank}_{of_tensor}_model_states.pt" if stage == 3 else f"{of_tensor}_model_states.pt"
            _save(os.path.join(path, name), layout.model_states(rank, layers))
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
        written += _write_experts(layout, path, rank)
    return written


def _write_experts(layout: FileLayout, path: str, rank: int) -> list[str]:
    """Writes the files of experts that the rank writes. The first of the ranks with the same experts writes them."""
    written, of_tensor = [], f"mp_rank_{layout.place.rank:02d}"
    for number, layer, expert in layout.experts.files_of(rank):
        name = f"layer_{number}_expert_{expert}_{of_tensor}_model_states.pt"
        _save(os.path.join(path, name), layout.expert_states(layer, expert))
        written.append(name)
    if layout.experts and layout.stage == 0:
        expert_rank, holder = layout.experts.placement.of(rank, layout.experts.most_ranks)
        if holder == 0:
            name = f"expp_rank_{expert_rank}_{of_tensor}_optim_states.pt"
            optimizer = layout.optimizer_of_stage0(rank) if layout.source.groups else None
            _save(os.path.join(path, name), {"optimizer": optimizer})
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
    flat = FileLayout(source, 1, 1, dtype, is_fused, expert_ranks=1)
    if flat.experts:
        raise CheckpointError(
            "has a mixture of experts, which DeepSpeed's universal format does not hold",
            where=source.where,
            fix="write DeepSpeed's own files, at stage 0, 1 or 2",
        )
    cut = FileLayout(source, stage3_world_size, 3, dtype, is_fused)
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


def _write_param(layout: FileLayout, param: Param, folder: str) -> None:
    try:
        os.makedirs(folder)
    except OSError as error:
        raise CheckpointError(f"cannot be made: {error.strerror}", where=folder) from error
    for state, tensor in {MASTER_FILE: param.master, **param.states}.items():
        reads: list[Read] = []
        whole = layout.whole(tensor, torch.float32, reads)
        layout.source.read(reads)
        # cat_dim: dimension for joining tensor-parallel ranks' parts.
        _save(os.path.join(folder, f"{state}.pt"), {"cat_dim": 0, "param": whole})
    if "step" in param.counts:
        _save(os.path.join(folder, f"{STEP_FILE}.pt"), layout.count("step", param.counts["step"]))


def _universal_optimizer(flat: FileLayout, cut: FileLayout) -> dict[str, Any]:
    step = next((group.counts["step"] for group in flat.groups if "step" in group.counts), None)
    groups = flat.param_groups([[i] for i in range(len(flat.groups))])
    return {
        "loss_scaler": flat.loss_scaler(),
        "dynamic_loss_scale": flat.is_dynamic(),
        "overflow": False,
        "clip_grad": flat.clipping(),
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
