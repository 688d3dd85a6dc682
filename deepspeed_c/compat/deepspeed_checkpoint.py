"""``DeepSpeedCheckpoint``: the folder of a tag in DeepSpeed's layout, with the files and states of each rank, merged
for the same number of ranks or fewer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.compat.checkpoint_folder import (
    ZeROCheckpoint,
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_model_3d_descriptor,
    load_file,
    merge_state,
    model_3d_desc,
    partition_data,
    reshape_meg_2d_parallel,
)
from deepspeed_c.errors import CheckpointError

__all__ = ["DeepSpeedCheckpoint", "dp_index_to_str", "dump_param_fragment", "extract_zero_shards"]

_MODEL, _LAYER_FILE = "mp_rank_", re.compile(r"layer_(\d+)-model_.*")
# Parameters of a Megatron layer that are equal on all tensor-parallel ranks, and parameters that are cut in the second
# dimension.
_ALIKE = {
    *("input_layernorm.weight", "input_layernorm.bias", "self_attention.dense.bias"),
    *("post_attention_layernorm.weight", "post_attention_layernorm.bias", "mlp.dense_4h_to_h.bias"),
    "position_embeddings.weight",
}
_COLUMNS = {"self_attention.dense.weight", "mlp.dense_4h_to_h.weight"}


class DeepSpeedCheckpoint:
    """The folder of a tag.

    Args:
        dir: the folder.
        tp_degree, pp_degree, dp_degree: number of ranks to merge the checkpoint for, at most the number of ranks that
        wrote it; None for this number.
        final_layer_norm_idx: index of the pipeline layer that is the final norm.

    Raises:
        CheckpointError: ``dir`` is not such a folder, or a number of ranks does not divide the old number.
    """

    def __init__(
        self,
        dir: str,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        basic_folder_validation(dir)
        self.dir, self.final_layer_norm_idx = dir, final_layer_norm_idx
        self.file_list = get_files(dir)
        self.layer_files = sorted(path for path in self.file_list if _LAYER_FILE.fullmatch(os.path.basename(path)))
        self.mp_rank_files = get_files_with_prefix(self.file_list, _MODEL)
        if not self.mp_rank_files:
            raise CheckpointError(
                f"has no files {_MODEL}*_model_states.pt",
                where=dir,
                fix="pass the folder of a tag that was written at stage 0, 1 or 2; open_checkpoint reads all",
            )
        source = get_model_3d_descriptor(dir)
        self.zero_checkpoint = ZeROCheckpoint(dir, source_3d=source)
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size, self.world_size = (
            source.world_size(),
            self.tp_degree * self.pp_degree * self.dp_degree,
        )
        self.new_2d_map = reshape_meg_2d_parallel(source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree)
        if self.is_change_tp_degree() or self.is_change_pp_degree() or self.is_change_dp_degree():
            self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        numbers = {int(_LAYER_FILE.fullmatch(os.path.basename(path))[1]): path for path in self.layer_files}
        names = [os.path.basename(numbers[number]).split("-")[0] for number in sorted(numbers)]
        self.layer_keys, self.layer_count = names, len(names)
        self.global_state: dict[str, Any] = {}

    def is_change_tp_degree(self) -> bool:
        return self.tp_degree != self.zero_checkpoint.get_src_tp_degree()

    def is_change_pp_degree(self) -> bool:
        return self.pp_degree != self.zero_checkpoint.get_src_pp_degree()

    def is_change_dp_degree(self) -> bool:
        return self.dp_degree != self.zero_checkpoint.get_src_dp_degree()

    def _value(self, key: str) -> Any:
        if not self.global_state:
            first = load_file(self.mp_rank_files[0])
            kept = ("iteration", "args", "checkpoint_info", "universal_checkpoint_info")
            self.global_state = {name: first.get(name) for name in {*kept, key}}
        if key not in self.global_state:
            self.global_state[key] = load_file(self.mp_rank_files[0]).get(key)
        return self.global_state[key]

    def get_iteration(self) -> int:
        """The iteration that the saving program recorded; 0 if it recorded none."""
        return self._value("iteration") or 0

    def get_args(self) -> Any:
        """The arguments of the program, which Megatron saves; None if they were not saved."""
        return self._value("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """An entry of the first file of model states; None if the file lacks it."""
        return self._value(info_key)

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """The content of a rank's optimizer file, or the merged content of several files."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, ["param_shapes"], strip_tensor_paddings
        )

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """The files of model states that a rank takes over."""
        return [self.mp_rank_files[i] for i in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """The merged content of the files of ``get_2d_parallel_files``."""
        first, *others = map(load_file, self.get_2d_parallel_files(tp_index, pp_index))
        for other in others:
            first = merge_state(first, other)
        return first

    def show_2d_mapping(self) -> None:
        """Print the files of model states that each rank takes over."""
        for i in range(self.pp_degree):
            for j in range(self.tp_degree):
                print(f"[{i}, {j}] = {self.get_2d_parallel_files(pp_index=i, tp_index=j)}")

    def _layer_files(self, layer: str) -> list[list[str]]:
        """The files of a layer for each tensor-parallel rank."""
        return partition_data(get_files_with_prefix(self.layer_files, f"{layer}-"), self.tp_degree)

    def _layer_state(self, files: Sequence[str]) -> dict[str, Any]:
        states = [load_file(file) for file in files]
        return {key: _merged(key, [state[key] for state in states]) for key in states[0]}

    def get_embedding_layer_id(self) -> str:
        return self.layer_keys[0]

    def get_final_norm_layer_id(self) -> str:
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_files(self, tp_index: int) -> list[str]:
        return self._layer_files(self.layer_keys[0])[tp_index]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        return self._layer_state(self.get_embedding_files(tp_index))

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        return self._layer_files(self.get_final_norm_layer_id())[tp_index]

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        return load_file(self.get_final_norm_files(tp_index)[0])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """The layers of a pipeline rank between the embedding and the final norm."""
        layers = self.layer_keys[1 : self.final_layer_norm_idx]
        n_each = len(layers) // self.pp_degree
        return layers[pp_index * n_each : (pp_index + 1) * n_each]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """The states of the layers of ``get_pp_transformer_map``, each merged for a tensor-parallel rank."""
        layers = self.get_pp_transformer_map(pp_index)
        return [self._layer_state(self._layer_files(layer)[tp_index]) for layer in layers]


def _merged(key: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    return values[0] if key in _ALIKE else torch.cat(values, dim=1 if key in _COLUMNS else 0)


def dp_index_to_str(dp_index: int) -> str:
    """The rank as text with at least two digits."""
    return f"{dp_index:02d}"


def dump_param_fragment(
    dir: str,
    tp_index: int,
    dp_index: int,
    state_name: str,
    state_flat_tensor: Any,
    param_name: str,
    offset: int,
    numel: int,
) -> None:
    """Save elements [offset, offset + numel) of a flat state as ``dir/param_name/tp_index/state_name.dp_index``. The
    state "step" and values that are no tensors are saved whole.
    """
    folder = os.path.join(dir, param_name, str(tp_index))
    os.makedirs(folder, exist_ok=True)
    if state_name != "step" and torch.is_tensor(state_flat_tensor):
        state_flat_tensor = state_flat_tensor.narrow(0, offset, numel).clone()
    torch.save(state_flat_tensor, os.path.join(folder, f"{state_name}.{dp_index_to_str(dp_index)}"))


def extract_zero_shards(dir: str, ds_checkpoint: DeepSpeedCheckpoint, indices_3D: tuple[int, int, int]) -> None:
    """Save the part of each parameter that the rank ``indices_3D`` (pipeline, tensor, data) holds, by
    ``dump_param_fragment``. The checkpoint must come from Adam at stage 1 or 2.

    Raises:
        CheckpointError: the file does not record where its parameters lie, as is the case in other stages.
    """
    pp_index, tp_index, dp_index = indices_3D
    optimizer = ds_checkpoint.get_zero_checkpoint_state(pp_index, tp_index, dp_index).get("optimizer_state_dict", {})
    if "param_slice_mappings" not in optimizer:
        raise CheckpointError(
            "does not say where its parameters lie",
            where=ds_checkpoint.dir,
            fix="`deepspeed_c checkpoint convert` reads it",
        )
    info: Mapping[str, Any] = ds_checkpoint.get_checkpoint_info("universal_checkpoint_info") or {}
    replicated = info.get("pipeline_replicated_parameter_patterns", [])
    for group, mapping in enumerate(optimizer["param_slice_mappings"]):
        state = optimizer["base_optimizer_state"]["state"][group]
        flat = {key: state[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in state}
        flat["fp32"] = optimizer["single_partition_of_fp32_groups"][group]
        for name, place in mapping.items():
            # Tied weights: the last stage of a pipeline has copies of them, which are not saved.
            if pp_index > 0 and any(re.match(pattern, name) for pattern in replicated):
                continue
            for key, value in flat.items():
                dump_param_fragment(dir, tp_index, dp_index, key, value, name, place.start, place.numel)
