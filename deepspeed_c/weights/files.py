"""Opens every form of ``init_inference(checkpoint=...)``: folders and files of weights, checkpoints of engines, and
DeepSpeed's lists of files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_c.checkpoint.formats.huggingface import HuggingFaceSource, parse_json
from deepspeed_c.checkpoint.formats.tensor_ranks import MergedSource, TensorCut, megatron_cut
from deepspeed_c.checkpoint.formats.torch_weights import TORCH_INDEX_FILE, TORCH_SINGLE_FILE, TorchWeightsSource
from deepspeed_c.checkpoint.open import format_of, open_checkpoint
from deepspeed_c.checkpoint.source import LogicalTensor, Read, Source
from deepspeed_c.errors import CheckpointError
from deepspeed_c.logging import logger

__all__ = ["LIST_FILE", "JoinedSource", "Weights", "open_weights"]

LIST_FILE = "ds_inference_config.json"
_LIST_LIMIT_BYTES = 16 << 20
_TYPES = ("ds_model", "bloom", "megatron")
_PARALLELIZATIONS = ("pp", "tp")
_FIX_LIST = 'write {"type": "ds_model", "checkpoints": ["a.safetensors", ...], "parallelization": "pp", "version": 1.0}'
NAMES_SHOWN = 5


class Weights(NamedTuple):
    """Opened weights of a model."""

    source: Source
    are_parts: bool
    """Whether files hold this tensor-parallel rank's part of each tensor that is cut. Otherwise tensors are whole."""


class JoinedSource(Source):
    """The tensors of several sources as one. If several sources have a tensor of one name, the last of them counts, as
    in DeepSpeed, and a warning names the tensor."""

    def __init__(self, where: str, sources: Sequence[Source]) -> None:
        first = sources[0]
        self.where, self.format, self.topology = where, first.format, first.topology
        self.aliases, self.params, self.groups, self.state = {}, {}, [], {}
        self.tensors: dict[tuple[str, str], LogicalTensor] = {}
        self._sources, self._of = list(sources), {}
        twice: list[str] = []
        for source in sources:
            self.aliases.update(source.aliases)
            for key, tensor in source.tensors.items():
                if key in self.tensors:
                    twice.append(key[1])
                self.tensors[key], self._of[key] = tensor, source
        if twice:
            logger.warning(
                "%s: %d tensors are in several files, the last is used: %s",
                where,
                len(twice),
                ", ".join(twice[:NAMES_SHOWN]),
            )

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            if read.tensor.key not in self._of:
                raise CheckpointError(
                    f"holds no {read.tensor.kind} named {read.tensor.name!r}",
                    where=self.where,
                    fix="read what is listed",
                )
            self._of[read.tensor.key].read([read])

    def close(self) -> None:
        for source in self._sources:
            source.close()


def open_weights(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any], *, base_dir: str, rank: int, n_ranks: int
) -> Weights:
    """Open the weights that ``checkpoint`` names, for tensor-parallel rank ``rank`` of ``n_ranks``.

    checkpoint: a folder or file of weights, a checkpoint of an engine, or DeepSpeed's list of files, as a mapping or as
    a JSON file. base_dir: folder of relative paths. Only headers are read.

    Raises CheckpointError where there is nothing to open, or where files are damaged.
    """
    if isinstance(checkpoint, Mapping):
        return _open_list(checkpoint, "checkpoint", [base_dir or os.curdir], rank, n_ranks)
    path = os.fspath(checkpoint)
    if not os.path.exists(path) and base_dir and os.path.exists(os.path.join(base_dir, path)):
        path = os.path.join(base_dir, path)
    if os.path.isdir(path) and format_of(path) is None:
        names = set(os.listdir(path))
        if names & {TORCH_SINGLE_FILE, TORCH_INDEX_FILE}:
            return Weights(TorchWeightsSource(path), are_parts=False)
        if LIST_FILE in names:
            path = os.path.join(path, LIST_FILE)
    is_index = path.endswith(".index.json")
    if os.path.isfile(path) and path.endswith(".json") and not is_index:
        folders = [base_dir, os.path.dirname(path) or os.curdir] if base_dir else [os.path.dirname(path) or os.curdir]
        return _open_list(_read_list(path), path, folders, rank, n_ranks)
    return Weights(_open_file(path) if os.path.isfile(path) else open_checkpoint(path), are_parts=False)


def _open_file(path: str) -> Source:
    if path.endswith((".safetensors", ".safetensors.index.json")):
        return HuggingFaceSource(path)
    return TorchWeightsSource(path)


def _read_list(path: str) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_LIST_LIMIT_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=path, fix="check the path") from error
    if len(content) > _LIST_LIMIT_BYTES:
        raise CheckpointError(f"is longer than {_LIST_LIMIT_BYTES} bytes", where=path, fix=_FIX_LIST)
    found = parse_json(content, path)
    if not isinstance(found, dict):
        raise CheckpointError(f"is a {type(found).__name__}, no object", where=path, fix=_FIX_LIST)
    return found


def _open_list(found: Mapping[str, Any], where: str, folders: Sequence[str], rank: int, n_ranks: int) -> Weights:
    kind, way = found.get("type"), found.get("parallelization", "pp")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise CheckpointError(
            f"{kind!r} is no type of checkpoint", where=f"{where}, type", fix='write "ds_model", "BLOOM" or "Megatron"'
        )
    if way not in _PARALLELIZATIONS:
        raise CheckpointError(
            f"{way!r} is no way that files are divided",
            where=f"{where}, parallelization",
            fix='write "pp" for files of whole tensors, "tp" for a file for each tensor-parallel rank',
        )
    listed = found.get("checkpoints")
    in_parts = listed.get("tp") if isinstance(listed, Mapping) else listed if way == "tp" else None
    whole = listed.get("non_tp", []) if isinstance(listed, Mapping) else listed if way == "pp" else []
    if kind.lower() == "megatron":
        in_parts, whole = None, listed
    for files, may_be_empty in ((in_parts, in_parts is None), (whole, in_parts is not None)):
        if files is None and may_be_empty:
            continue
        if not isinstance(files, (list, tuple)) or not all(isinstance(name, str) and name for name in files):
            raise CheckpointError(f"{files!r} is no list of files", where=f"{where}, checkpoints", fix=_FIX_LIST)
        if not files and not may_be_empty:
            raise CheckpointError("lists no file", where=f"{where}, checkpoints", fix=_FIX_LIST)
    given = found.get("base_dir")
    if isinstance(given, str) and given:
        folders = [given, *folders]
    if kind.lower() == "megatron":
        return Weights(_open_megatron(found, where, whole, folders), are_parts=False)
    paths = [_find(name, folders, where) for name in whole]
    if in_parts is not None:
        paths += [_find(name, folders, where) for name in _own_files(found, where, in_parts, rank, n_ranks)]
    sources: list[Source] = []
    try:
        sources.extend(_open_file(path) for path in paths)
        return Weights(sources[0] if len(sources) == 1 else JoinedSource(where, sources), in_parts is not None)
    except BaseException:
        for source in sources:
            source.close()
        raise


def _own_files(found: Mapping[str, Any], where: str, in_parts: Sequence[str], rank: int, n_ranks: int) -> Sequence[str]:
    """The files of ``rank``: files are listed rank by rank, and that once for each part of the model."""
    size = found.get("tp_size", found.get("mp_size", len(in_parts)))
    if type(size) is not int or size < 1 or len(in_parts) % size:
        raise CheckpointError(
            f"{len(in_parts)} files are no multiple of tp_size {size!r}",
            where=f"{where}, tp_size",
            fix="list one file for each rank, or the same number for each",
        )
    if size != n_ranks:
        # The list does not say how a tensor was cut: a fused layer's parts would be put together in a wrong order.
        raise CheckpointError(
            f"files are of {size} tensor-parallel ranks, and there are {n_ranks}",
            where=f"{where}, tp_size",
            fix=f"load with tp_size {size} and save with save_mp_checkpoint_path, which any number of ranks reads",
        )
    return in_parts[rank::size]


def _open_megatron(found: Mapping[str, Any], where: str, files: Sequence[str], folders: Sequence[str]) -> Source:
    version = found.get("version", 0)
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        raise CheckpointError(f"{version!r} is no number", where=f"{where}, version", fix="write 0, 1.0, 2.0 or 3.0")

    def rules(name: str) -> TensorCut:
        # As in DeepSpeed, a tensor without a rule is taken from the first file.
        return megatron_cut(name, version) or TensorCut(None, takes_first=True)

    sources = [_open_file(_find(name, folders, where)) for name in files]
    return sources[0] if len(sources) == 1 else MergedSource(sources, rules)


def _find(name: str, folders: Sequence[str], where: str) -> str:
    tried = [os.path.join(folder, name) for folder in folders]
    for path in tried:
        if os.path.isfile(path):
            return path
    raise CheckpointError(
        f"there is no file {' or '.join(dict.fromkeys(tried))}",
        where=f"{where}, checkpoints",
        fix="give base_dir, the folder that the listed paths are relative to",
    )
