"""The files of a checkpoint in DeepSpeed's layout by pipeline, tensor and data rank, and the merging of their states
for fewer ranks. The interface is DeepSpeed's ``deepspeed.checkpoint``.

This module serves converters that were written for DeepSpeed, and users who inspect such a folder. ``deepspeed_c
checkpoint convert`` and ``load_checkpoint`` do not use it.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.torch_file import materialize
from deepspeed_c.errors import CheckpointError

__all__ = [
    "SubparamShape",
    "ZeROCheckpoint",
    "basic_folder_validation",
    "get_files",
    "get_files_with_prefix",
    "get_model_3d_descriptor",
    "get_zero_files",
    "load_file",
    "meg_2d_parallel_map",
    "merge_state",
    "model_3d_desc",
    "partition_data",
    "reshape_meg_2d_parallel",
]

_MODEL, _LAYER = "mp_rank_", "layer_"
_OPTIMIZER_PREFIXES = ("zero_pp_rank_", "fp16_zero_pp_rank_", "bf16_zero_pp_rank_")


@dataclass
class SubparamShape:
    """Parameters that hold several concatenated tensors: patterns of their names, the whole shape (with a tuple of
    sizes for the dimension of concatenation), and the dimension in which tensor-parallel ranks cut each tensor.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def load_file(path: str) -> Any:
    """The content of a file that DeepSpeed wrote, with its tensors on the CPU. No code in the file is executed.

    Raises CheckpointError.
    """
    return materialize(read_file(path).content)


def basic_folder_validation(dir: str) -> None:
    """Raises CheckpointError unless ``dir`` is a folder."""
    if not os.path.isdir(dir):
        raise CheckpointError("is no folder", where=dir, fix="pass the folder of a tag, such as ckpt/global_step10")


def get_files(dir: str) -> list[str]:
    """All files in and below ``dir``."""
    return [os.path.join(root, file) for root, _, files in os.walk(dir) for file in files]


def get_files_with_prefix(all_files: Iterable[str], prefix: str) -> list[str]:
    """The files whose base name begins with ``prefix``, sorted."""
    return sorted(path for path in all_files if os.path.basename(path).startswith(prefix))


def get_zero_files(dir: str) -> list[str]:
    """The optimizer files, sorted by data-parallel rank, then by model-parallel rank.

    Raises CheckpointError: a name has no such ranks.
    """
    files = get_files(dir)
    for prefix in _OPTIMIZER_PREFIXES:
        if found := get_files_with_prefix(files, prefix):
            return sorted(found, key=lambda path: _ranks_of(path, prefix))
    return []


def _ranks_of(path: str, prefix: str) -> tuple[int, int]:
    match = re.match(rf"{prefix}(\d+)_{_MODEL}(\d+)", os.path.basename(path))
    if match is None:
        raise CheckpointError(
            "has no ranks in its name", where=path, fix=f"its name should be like {prefix}0_mp_rank_00_optim_states.pt"
        )
    return int(match[1]), int(match[2])


def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[Any]:
    """Cut the list into ``num_partitions`` equal parts. Raises CheckpointError: the length is not a multiple of
    that."""
    if len(data_list) % num_partitions:
        raise CheckpointError(
            f"{len(data_list)} entries cannot be dealt out to {num_partitions} ranks evenly",
            where="partition_data",
            fix="choose a number of ranks that divides them",
        )
    size = len(data_list) // num_partitions
    return [data_list[i : i + size] for i in range(0, len(data_list), size)] if size else []


class meg_2d_parallel_map:
    """A list for each pair of pipeline and tensor rank; ``map`` holds the lists under keys such as "0,1"."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Give each pair of ranks a list with its own number. Numbers count along tensor ranks first."""
        places = ((i, j) for i in range(self.pp_degree) for j in range(self.tp_degree))
        self.map = {self._key(i, j): [i * self.tp_degree + j] for i, j in places}

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        self.map.setdefault(self._key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """The list of one pair of ranks. None for an index concatenates the lists of all ranks of that kind."""
        rows = range(self.pp_degree) if pp_index is None else [pp_index]
        columns = range(self.tp_degree) if tp_index is None else [tp_index]
        return [entry for i in rows for j in columns for entry in self.map[self._key(i, j)]]

    def print_data(self, tag: str) -> None:
        print(tag, *(f"{key} = {value}" for key, value in self.map.items()), sep="\n")

    def _key(self, pp_index: int, tp_index: int) -> str:
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise CheckpointError(
                f"there is no rank ({pp_index}, {tp_index}) among {self.pp_degree} x {self.tp_degree}",
                where="meg_2d_parallel_map",
                fix="pass the pipeline and tensor rank",
            )
        return f"{pp_index},{tp_index}"


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """Map each new rank to the old ranks that it takes over. Neighbouring tensor ranks are merged first, then
    neighbouring pipeline ranks.

    Raises CheckpointError if there are more new ranks than old ranks.
    """
    if new_pp_degree > old_pp_degree or new_tp_degree > old_tp_degree:
        raise CheckpointError(
            f"{old_pp_degree} x {old_tp_degree} ranks cannot become {new_pp_degree} x {new_tp_degree}",
            where="reshape_meg_2d_parallel",
            fix="choose as many ranks or fewer, of each kind",
        )
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    middle = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for i in range(old_pp_degree):
        for j, part in enumerate(partition_data(old.get_data(pp_index=i), new_tp_degree)):
            middle.add_data(i, j, part)
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for j in range(new_tp_degree):
        for i, part in enumerate(partition_data(middle.get_data(tp_index=j), new_pp_degree)):
            new.add_data(i, j, part)
    if verbose:
        for each, tag in ((old, "old ranks:"), (new, "new ranks:")):
            each.print_data(tag)
    return new


class model_3d_desc:
    """How many pipeline, tensor and data-parallel ranks there are."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def _degrees(self) -> dict[str, int]:
        return {"PP": self.pp_degree, "TP": self.tp_degree, "DP": self.dp_degree}

    def get_desc(self) -> str:
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """(whether this rank exists, the reasons if it does not)."""
        indices = zip(self._degrees().items(), (pp_index, tp_index, dp_index))
        wrong = [f"{name} indexing error: index {i} >= degree {degree}" for (name, degree), i in indices if i >= degree]
        return not wrong, wrong

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """(whether the target has at most as many ranks of each kind as this object, the reasons if not)."""
        target = target_3d_desc._degrees()
        wrong = [
            f"Expansion reshape not supported - {name}: {degree} ---> {target[name]}"
            for name, degree in self._degrees().items()
            if target[name] > degree
        ]
        return not wrong, wrong

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """For each data-parallel rank of the target, a map from its pipeline and tensor ranks to optimizer files. A
        file is an index in the list of ``get_zero_files``.

        Raises:
            CheckpointError: the target has more ranks of a kind, or a number of ranks that does not divide the old
                number.
        """
        can, wrong = self.can_reshape(target_3d_desc)
        if not can:
            raise CheckpointError("; ".join(wrong), where="model_3d_desc.reshape", fix="choose as many ranks or fewer")
        target = target_3d_desc
        flat = reshape_meg_2d_parallel(self.pp_degree, self.tp_degree, target.pp_degree, target.tp_degree, verbose)
        maps = [meg_2d_parallel_map(target.pp_degree, target.tp_degree) for _ in range(target.dp_degree)]
        n_model = self.pp_degree * self.tp_degree
        for i in range(target.pp_degree):
            for j in range(target.tp_degree):
                files = [at + k * n_model for at in flat.get_data(i, j) for k in range(self.dp_degree)]
                for part, of_rank in zip(partition_data(files, target.dp_degree), maps):
                    of_rank.add_data(i, j, part)
        return maps


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """The ranks that wrote the folder of a tag: the numbers recorded in its files, else the numbers of files.

    Raises CheckpointError: the files do not agree.
    """
    files = get_files(dir)
    models, n_zero = get_files_with_prefix(files, _MODEL), len(get_zero_files(dir))
    said = {path: load_file(path).get("checkpoint_parallel_dimensions") for path in models}
    if any(each is not None for each in said.values()):
        degrees = {tuple((each or {}).get(key) for key in ("pp_degree", "tp_degree")) for each in said.values()}
        (pp, tp), *others = degrees
        is_whole = not others and all(type(n) is int and n > 0 for n in (pp, tp))
        if not is_whole or pp * tp != len(models) or n_zero % (pp * tp):
            raise CheckpointError(
                f"{len(models)} model files and {n_zero} optimizer files say (pipeline, tensor) {sorted(degrees, key=str)}",
                where=dir,
                fix="the folder lacks files, or holds those of two runs",
            )
    elif first := get_files_with_prefix(files, f"{_LAYER}01"):
        tp, pp = len(first), len(models) // len(first)
    else:
        tp, pp = len(models), 1
    return model_3d_desc(pp, tp, max(1, n_zero // max(1, pp * tp)))


def merge_state(state_a: Any, state_b: Any, key_list: Collection[str] = ()) -> Any:
    """Merge the states of two ranks. Tensors are concatenated along the first dimension, dictionaries and lists are
    merged entry by entry, and other values are taken from ``state_a``.

    A key that only ``state_b`` has is kept; a key that only ``state_a`` has is dropped. Raises CheckpointError: types
    or lengths differ. ``key_list`` is the path of keys for the error.
    """
    where = ".".join(map(str, key_list)) or "merge_state"
    if type(state_a) is not type(state_b):
        raise CheckpointError(
            f"a {type(state_a).__name__} cannot be merged with a {type(state_b).__name__}",
            where=where,
            fix="merge states of the same run",
        )
    if type(state_a) in (dict, OrderedDict):
        merged = type(state_a)()
        for key, value in state_b.items():
            merged[key] = merge_state(state_a[key], value, [*key_list, str(key)]) if key in state_a else value
        return merged
    if type(state_a) in (list, tuple):
        if len(state_a) != len(state_b):
            raise CheckpointError(
                f"lists of {len(state_a)} and {len(state_b)} entries cannot be merged",
                where=where,
                fix="merge states of the same run",
            )
        return type(state_a)(merge_state(a, b, key_list) for a, b in zip(state_a, state_b))
    return torch.cat([state_a, state_b]) if torch.is_tensor(state_a) else state_a


class ZeROCheckpoint:
    """The optimizer files of a tag's folder, merged for the same number of ranks or fewer.

    Args:
        dir: the folder.
        source_3d: the ranks that wrote the folder; None reads them from the files.

    Raises:
        CheckpointError: the folder has no optimizer files, or its files contradict each other.
    """

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir, self.file_list = dir, get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise CheckpointError("has no optimizer files", where=dir, fix="pass the folder of a tag")
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(model_3d_desc(self.src_3d.pp_degree, self.src_3d.tp_degree, self.src_3d.dp_degree))

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Use the ranks of ``target_3d_desc`` from now on."""
        self._3d_file_map = self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc

    def get_src_world_size(self) -> int:
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Indices in ``file_list`` of the files that this rank takes over."""
        if not 0 <= dp_index < len(self._3d_file_map):
            raise CheckpointError(
                f"there is no data-parallel rank {dp_index} of {len(self._3d_file_map)}",
                where=self.dir,
                fix="call reshape() for more or fewer ranks",
            )
        return self._3d_file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        return [self.file_list[i] for i in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Collection[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """The merged content of this rank's files. Entries in ``keys_to_ignore`` are left out, and by default also the
        padding at the ends of flat states.
        """
        merged: dict[str, Any] | None = None
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {key: value for key, value in load_file(path).items() if key not in keys_to_ignore}
            if strip_tensor_paddings:
                _strip(state)
            merged = state if merged is None else merge_state(merged, state)
        optimizer = merged.get("optimizer_state_dict") or {}
        if counts := optimizer.get("partition_count"):
            optimizer["partition_count"] = (
                [self.target_3d.dp_degree] * len(counts) if isinstance(counts, list) else self.target_3d.dp_degree
            )
        if strip_tensor_paddings and optimizer.get("group_paddings"):
            optimizer["group_paddings"] = [0] * len(optimizer["group_paddings"])
        return merged


def _strip(state: dict[str, Any]) -> None:
    optimizer = state.get("optimizer_state_dict") or {}
    paddings = optimizer.get("group_paddings")
    states = (optimizer.get("base_optimizer_state") or {}) if paddings is not None else {}
    states = states.get("state", {}) if isinstance(states, dict) else {}
    for group, entries in states.items():
        for name, value in entries.items() if paddings[group] else ():
            if name != "step" and torch.is_tensor(value):
                entries[name] = value[: value.numel() - paddings[group]].clone()
