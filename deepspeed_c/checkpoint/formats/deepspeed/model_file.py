"""The files of DeepSpeed's engine in the folder of a tag, and the contents of a model file: names, shapes, ties, and
the state that is no tensor.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from deepspeed_c.checkpoint.experts import expert_name
from deepspeed_c.checkpoint.formats.deepspeed.layer_files import LAYER_FILE, PIPELINE_INFO, Layers, find_ties
from deepspeed_c.checkpoint.formats.deepspeed.pieces import counters_of
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, TorchFile, materialize
from deepspeed_c.checkpoint.formats.unpickle import UNREADABLE
from deepspeed_c.errors import CheckpointError, DeepSpeedCError

__all__ = [
    "ENGINE_KEYS",
    "FIX_ANOTHER",
    "FIX_CONVERT",
    "MOST_RANKS",
    "RANKS_SHOWN",
    "Files",
    "ModelStates",
    "count_tensor_ranks",
    "find_files",
    "get_entry",
    "is_deepspeed",
    "laid_out",
    "shapes_of",
    "stage_of",
]

MODEL_FILE = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
STAGE3_MODEL_FILE = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
# Old versions left the underscore before "optim_states" out.
OPTIMIZER_FILE = re.compile(r"(?P<dtype>bf16_|fp16_|)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
# Old versions wrote one file for the experts of all layers with the same number.
EXPERT_FILE = re.compile(r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
# The "layer" of a file without one.
ALL_LAYERS = -1

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


class Files(NamedTuple):
    """The files of a checkpoint by rank; ``models`` has one for all stages but 3."""

    models: dict[int, str]
    optimizers: dict[int, str]
    is_stage3: bool
    experts: dict[tuple[int, int], str]
    """(number of the layer among those with experts, number of the expert) -> file of its weights."""
    expert_optimizers: dict[int, str]
    """Without ZeRO: optimizers of models with experts by expert-parallel rank."""
    layers: dict[int, str]
    """Of a pipeline: layer -> file of its weights."""


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
    experts: dict[tuple[int, int], str] = {}
    expert_optimizers: dict[int, str] = {}
    layers: dict[int, str] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    for name in names:
        path = os.path.join(folder, name)
        if of_layer := LAYER_FILE.fullmatch(name):
            _take_layer(layers, of_layer, tensor_rank, path)
            continue
        patterns = (MODEL_FILE, STAGE3_MODEL_FILE, OPTIMIZER_FILE, EXPERT_FILE, EXPERT_OPTIMIZER_FILE)
        found = next((found for pattern in patterns if (found := pattern.fullmatch(name))), None)
        if found is None:
            continue
        if int(found["mp"]) != tensor_rank:
            continue
        if found.re is MODEL_FILE:
            models[0] = path
        elif found.re is STAGE3_MODEL_FILE:
            stage3_models[int(found["rank"])] = path
        elif found.re is EXPERT_FILE:
            layer = ALL_LAYERS if found["layer"] is None else int(found["layer"])
            experts[layer, int(found["expert"])] = path
        elif found.re is EXPERT_OPTIMIZER_FILE:
            expert_optimizers[int(found["rank"])] = path
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
        is_stage3 = stage_of(read_file(of_dtype[0])) == 3
    return Files(stage3_models if is_stage3 else models, of_dtype, is_stage3, experts, expert_optimizers, layers)


def _take_layer(layers: dict[int, str], of_layer: re.Match[str], tensor_rank: int, path: str) -> None:
    """Adds a layer's file if it is of the tensor-parallel rank."""
    axes = of_layer["axes"]
    rank = re.fullmatch(r"model_(\d+)", axes) if axes else None
    if axes and rank is None:
        raise CheckpointError(
            f"holds a layer of a pipeline, cut over the ranks of {axes!r}, which is not read here",
            where=path,
            fix=FIX_CONVERT,
        )
    if (int(rank[1]) if rank else 0) == tensor_rank:
        layers[int(of_layer["layer"])] = path


def is_deepspeed(folder: str) -> bool:
    """Whether ``folder`` is a tag's folder of DeepSpeed."""
    return find_files(folder) is not None


def stage_of(file: TorchFile) -> int | None:
    """None if the optimizer's state does not say (bf16 with fp32 accumulation, laid out like stages 1 and 2)."""
    saved = get_entry(file.content, "optimizer_state_dict", Mapping, file.path).get("zero_stage")
    return None if saved is None else int(getattr(saved, "value", saved))


def get_entry(content: Any, key: str, kind: type | tuple, where: str) -> Any:
    value = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(value, kind):
        raise CheckpointError(
            f"has no {key!r} as DeepSpeed writes it, but {type(value).__name__}",
            where=where,
            fix="take a checkpoint of DeepSpeed 0.16 to 0.19",
        )
    return value


def shapes_of(shapes: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
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

    def __init__(self, path: str, n_tensor_ranks: int = 1, layers: Mapping[int, str] | None = None) -> None:
        """layers: the files of a pipeline's layers, which count if the model file itself has no weights."""
        self.file = read_file(path)
        self.path = path
        content = self.content = self.file.content
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
        if content.get("ds_autoep_layers") or content.get("autoep_layers"):
            raise CheckpointError(
                "holds experts that DeepSpeed made of another library's (AutoEP)", where=path, fix=FIX_CONVERT
            )
        saved = content.get("num_experts") or []
        self.num_experts: list[int] = list(saved) if isinstance(saved, (list, tuple)) else [saved]
        """The number of experts of each layer with experts, as the file says; old versions give one number for all."""
        if any(type(n) is not int or not 0 < n <= MOST_RANKS for n in self.num_experts):
            raise CheckpointError(f"has {self.num_experts} experts", where=path, fix=FIX_ANOTHER)
        self.experts: dict[str, int] = {}
        """The number of experts of each layer, by name; ``add_experts`` fills it."""
        shapes = content.get("param_shapes") or []
        # One dictionary for each group (at stage 3: each sub-group). For a single group, old versions wrote only the
        # dictionary, without a list.
        self.param_shapes: list[dict[str, tuple[int, ...]]] = [
            shapes_of(group, path) for group in ([shapes] if isinstance(shapes, Mapping) else shapes)
        ]
        self.world_size = content.get("dp_world_size")
        if isinstance(self.world_size, int) and not 0 < self.world_size <= MOST_RANKS:
            raise CheckpointError(f"was saved by {self.world_size} ranks, it says", where=path, fix=FIX_ANOTHER)
        info = content.get("universal_checkpoint_info")
        saved = info.get(PIPELINE_INFO) if isinstance(info, Mapping) else None
        self.pipeline = Layers.of_state(saved, path)
        """Ties of a pipeline; None for other models."""
        self.module: Mapping[str, Any]
        if layers and content.get("module") is None:
            self.module = self._read_layers(layers, saved)
        elif "module" in content and content["module"] is None:
            raise CheckpointError(
                "holds no weights, and there are no files of a pipeline's layers for its rank; several stages saved it",
                where=path,
                fix=FIX_CONVERT,
            )
        else:
            self.module = get_entry(content, "module", Mapping, path)
        self.buffers = [name for name in content.get("buffer_names") or () if name in self.module]
        fp16 = self.config.get("fp16")
        self.is_fp16 = bool(isinstance(fp16, Mapping) and fp16.get("enabled"))

    def _read_layers(self, files: Mapping[int, str], info: Mapping[str, Any] | None) -> dict[str, Any]:
        """The weights and buffers of all layers, by the model's names. See [Note: files of layers]."""
        wanted = info.get("layers") if info is not None else None
        if missing := [layer for layer in wanted or () if layer not in files]:
            raise CheckpointError(
                f"the files of {len(missing)} layers are missing: {missing[:RANKS_SHOWN]}",
                where=os.path.dirname(self.path),
                fix="copy the folders of all nodes into one",
            )
        # Files of further layers are left over from another model that was saved under the same tag.
        contents: dict[int, Mapping[str, Any]] = {}
        for layer, path in sorted(files.items()):
            if wanted is not None and layer not in wanted:
                continue
            content = read_file(path).content
            if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
                raise CheckpointError("holds no state of a layer", where=path, fix=FIX_ANOTHER)
            contents[layer] = content
        if self.pipeline is None:
            shapes = {name: shape for group in self.param_shapes for name, shape in group.items()}
            found = {
                layer: {key: value.shape for key, value in content.items() if isinstance(value, StoredTensor)}
                for layer, content in contents.items()
            }
            try:
                self.pipeline = find_ties(shapes, found)
            except CheckpointError as error:
                raise CheckpointError(error.what, where=self.path, fix=FIX_CONVERT) from None
        module: dict[str, Any] = {}
        for layer, content in contents.items():
            for key, value in content.items():
                # All files of a key hold the same.
                module.setdefault(self.pipeline.name(layer, key), value)
        return module

    def add_experts(self, files: Mapping[tuple[int, int], str]) -> None:
        """Adds the weights of experts from their files to ``module``, behind the gate of each layer as in the module's
        own order, and their buffers to ``buffers``.

        Raises CheckpointError for missing files, and for files of other experts than their names say.
        """
        if missing := self.missing_experts(files):
            raise CheckpointError(
                f"has {self.num_experts} experts, and the files of {len(missing)} experts are missing: (layer, expert) {missing[:RANKS_SHOWN]}",
                where=self.path,
                fix="copy the folders of all nodes into one",
            )
        found: dict[str, dict[str, StoredTensor]] = {}
        numbers: dict[str, set[int]] = {}
        for (_, number), path in sorted(files.items()):
            content = read_file(path).content
            for key, stored in (content if isinstance(content, Mapping) else {"": None}).items():
                # The layer of a model that is nothing else has an empty name.
                split = expert_name(str(key).removeprefix("."))
                if split is None or split.number != number or not isinstance(stored, StoredTensor):
                    raise CheckpointError(f"holds {key!r}, no tensor of expert {number}", where=path, fix=FIX_ANOTHER)
                found.setdefault(split.layer, {})[str(split)] = stored
                numbers.setdefault(split.layer, set()).add(number)
        for layer, its in numbers.items():
            if its != set(range(len(its))):
                raise CheckpointError(
                    f"has the experts {sorted(its)[:RANKS_SHOWN]}", where=f"{self.path}, {layer}", fix=FIX_ANOTHER
                )
        self.experts = {layer: len(its) for layer, its in numbers.items()}
        behind = {}
        for name in self.module:
            for layer in found:
                if name.startswith(f"{layer}.gate."):
                    behind[layer] = name
        at = {name: layer for layer, name in behind.items()}
        module: dict[str, Any] = {}
        for name, stored in self.module.items():
            module[name] = stored
            if name in at:
                module.update(found.pop(at[name]))
        for of_layer in found.values():
            module.update(of_layer)
        self.module = module
        buffers = set(_templates(self.content.get("buffer_names") or ()))
        self.buffers = [name for name in module if _template(name) in buffers]

    def missing_experts(self, files: Mapping[tuple[int, int], str]) -> list[tuple[int, int]]:
        """The experts without a file, as (layer, expert)."""
        is_old = not isinstance(self.content.get("num_experts"), (list, tuple))
        return [
            key
            for layer, n in enumerate(self.num_experts)
            for key in ((ALL_LAYERS if is_old else layer, i) for i in range(n))
            if key not in files
        ]

    def seen_by(self, expert_rank: int, n_ranks: int) -> ModelStates:
        """The same with the experts of one of ``n_ranks`` expert-parallel ranks, numbered from 0 as there."""
        seen = copy.copy(self)
        own: dict[str, str] = {}
        for name in self.module:
            split = expert_name(name)
            if split is None:
                own[name] = name
                continue
            n_local = self.experts[split.layer] // n_ranks
            if split.number // n_local == expert_rank:
                own[name] = str(split._replace(number=split.number % n_local))
        seen.module = {local: self.module[name] for name, local in own.items()}
        seen.buffers = [own[name] for name in self.buffers if name in own]
        return seen

    def tensor(self, name: str) -> StoredTensor:
        return get_entry(self.module, name, StoredTensor, f"{self.path}, module")

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
        if self.pipeline is not None:
            state["pipeline"] = self.pipeline.as_state()
        if isinstance(content.get("ds_version"), str):
            state["versions"] = {"deepspeed": content["ds_version"]}
        return state


def _template(name: str) -> tuple[str, ...]:
    """The same for one tensor of all experts of a layer."""
    split = expert_name(name)
    return (name,) if split is None else (split.layer, split.rest)


def _templates(names: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    return (_template(name) for name in names if isinstance(name, str))
