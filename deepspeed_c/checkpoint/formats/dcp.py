"""Reads and writes folders of torch.distributed.checkpoint (DCP), the format of FSDP: tensors by range, and no class of
theirs is ever run on reading.
"""

from __future__ import annotations

import math
import os
import pickle
import secrets
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.ranges import fill, read_bytes
from deepspeed_c.checkpoint.formats.torch_file import Part, StoredTensor, TorchFile, load_part, materialize
from deepspeed_c.checkpoint.formats.unpickle import PLAIN, UNREADABLE, Global, Unpickler, check_attributes, in_full
from deepspeed_c.checkpoint.native import state as state_files
from deepspeed_c.checkpoint.native.commit import sync_path
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, ParamInfo, Read, Source, Topology
from deepspeed_c.errors import CheckpointError
from deepspeed_c.logging import logger

__all__ = ["DcpSource", "read_metadata", "write_dcp"]

METADATA = ".metadata"
# Key of our own state in a folder that we write, beside the model and its optimizer; its value is bytes.
OWN_STATE = "deepspeed_c.state"
# Usual keys for a model's state dict and for an optimizer's, the preferred key first.
MODEL_KEYS = ("model", "module", "state_dict", "net", "network")
OPTIMIZER_KEYS = ("optim", "optimizer", "optimizers")


class _Inert:
    """An object from the pickle in .metadata, in place of DCP's dataclass: keeps its arguments and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: the pickle omits attributes with default values.
        return self.__dict__.get("fields", {}).get(name)


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_INERT: dict[tuple[str, str], type] = {
    (module, name): type(name, (_Inert,), {})
    for module, names in {
        _METADATA_MODULE: (
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta "
            "_MEM_FORMAT_ENCODING"
        ),
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        "torch.serialization": "_get_layout",
        "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath Path",
        "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath Path",
    }.items()
    for name in names.split()
}
_TABLE = {**PLAIN, **{f"{module}.{name}": Global(call=kind, new=kind) for (module, name), kind in _INERT.items()}}


class _Unpickler(Unpickler):
    def refuse_name(self, path: str) -> Any:
        raise pickle.UnpicklingError(f"it names {in_full(path)}, which is no part of DCP's metadata")

    def set_state(self, value: Any, state: Any) -> None:
        if type(value) not in _INERT.values():
            super().set_state(value, state)
        elif type(state) is tuple:
            value.args = state
        else:
            value.fields = check_attributes(state)


class Chunk(NamedTuple):
    """A part of a tensor, or a whole value of another type, and its place in a file."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    n_bytes: int


class Stored(NamedTuple):
    """One entry of the folder."""

    path: tuple[str | int, ...]  # keys of the containers that it was saved from, outermost first, and its own
    dtype: torch.dtype | None  # None: no tensor
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: str) -> dict[str, Stored]:
    """Flat name -> entry of a DCP folder.

    No function or class that the pickle names is run. Raises CheckpointError if the file is damaged or hostile.
    """
    path = os.path.join(folder, METADATA)
    try:
        with open(path, "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            metadata = _Unpickler(file, n_bytes, _TABLE, objects=_INERT.values()).load()
        return _entries(metadata)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=path, fix="check the path") from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"is no metadata of torch.distributed.checkpoint, or is damaged ({type(error).__name__}: {error})",
            where=path,
            fix="take another checkpoint; this one was cut off or changed after it was written",
        ) from error


def _entries(metadata: Any) -> dict[str, Stored]:
    infos: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in _dict(metadata.storage_data).items():
        infos[index.fqn, None if index.offset is None else _sizes(index.offset)] = info
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    entries = {}
    for name, value in _dict(metadata.state_dict_metadata).items():
        if not isinstance(name, str):
            raise TypeError(f"a name of type {type(name).__name__}")
        path = paths.get(name, (name,))
        if not isinstance(path, tuple) or not path or not all(isinstance(key, (str, int)) for key in path):
            raise TypeError(f"{name}: a path {path!r}")
        if type(value) is _INERT[_METADATA_MODULE, "BytesStorageMetadata"]:
            entries[name] = Stored(path, None, (), (_chunk((), (), infos[name, None]),))
            continue
        dtype = value.properties.args[0] if value.properties.args else value.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: a dtype of type {type(dtype).__name__}")
        shape = _sizes(value.size)
        chunks = []
        for chunk in value.chunks:
            start, size = _sizes(chunk.offsets), _sizes(chunk.sizes)
            if len(start) != len(shape) or len(size) != len(shape):
                raise ValueError(f"{name}: a chunk of {len(start)} dimensions, the tensor has {len(shape)}")
            if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
                raise ValueError(f"{name}: the chunk {start}, {size} is no part of {shape}")
            chunks.append(_chunk(start, size, infos[name, start]))
            if math.prod(size) * dtype.itemsize > chunks[-1].n_bytes:
                raise ValueError(f"{name}: the chunk {start}, {size} in {chunks[-1].n_bytes} bytes")
        entries[name] = Stored(path, dtype, shape, tuple(chunks))
    return entries


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in the place of a dictionary")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    # torch.Size is pickled as a call with one tuple.
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise TypeError(f"{value!r} in the place of sizes")
    return value


def _chunk(start: tuple[int, ...], size: tuple[int, ...], info: Any) -> Chunk:
    file, offset, n_bytes = info.relative_path, info.offset, info.length
    # A path could point anywhere on the reader's machine.
    if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/") or "\0" in file or not file:
        raise ValueError(f"{file!r} is no file of the folder")
    if type(offset) is not int or type(n_bytes) is not int or offset < 0 or n_bytes < 0:
        raise ValueError(f"{file}: bytes {offset!r}, {n_bytes!r}")
    if info.transform_descriptors:
        raise ValueError(f"it was written with extensions ({info.transform_descriptors}), which are not known here")
    return Chunk(start, size, file, offset, n_bytes)


class _Place(NamedTuple):
    """Place of a chunk's elements in its file: a chunk is a small file of torch.save within it.

    ``whole`` has the elements where they are not in rows there.
    """

    offset: int
    whole: torch.Tensor | None


class DcpSource(Source):
    """A folder that ``torch.distributed.checkpoint.save`` wrote.

    Names come from the saved state dicts. From a nested {"model": {...}, "optim": {"state": ...,
    "param_groups": ...}} the weights lose the key "model". Optimizer states ("optim.state.NAME.exp_avg", flattened by
    ``flatten_optimizer_state_dict`` or not) stand under the name of their weight. DCP does not tell weights from
    buffers: all are PARAM. Tensors that belong to neither keep their full names, and values that are no tensors are not
    looked at, apart from the optimizer's options.
    """

    format = "torch-dcp"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.where = os.fspath(folder)
        self.aliases, self.params, self.groups, self.state = {}, {}, [], {}
        self.tensors = {}
        self._files: dict[str, int] = {}
        self._places: dict[Chunk, _Place] = {}
        self._stored: dict[tuple[str, str], Stored] = {}
        entries = read_metadata(self.where)
        self.topology = Topology(world_size=_world_size(entries))
        try:
            self._take_own_state(entries)
            options, counts = self._sort(entries)
            self._take_groups(options, counts)
        except BaseException:
            self.close()
            raise

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            stored = self._stored.get(read.tensor.key)
            if stored is None:
                raise CheckpointError(
                    f"holds no {read.tensor.kind} named {read.tensor.name!r}",
                    where=self.where,
                    fix="read what is listed",
                )

            def fetch(first: int, into: torch.Tensor, stored: Stored = stored, name: str = read.tensor.name) -> None:
                self._fetch(name, stored, first, into)

            fill(read, fetch, self.where)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _take_own_state(self, entries: dict[str, Stored]) -> None:
        stored = entries.pop(OWN_STATE, None)
        if stored is None or stored.dtype != torch.uint8 or len(stored.shape) != 1:
            return
        content = self._whole(OWN_STATE, stored)
        buffer = bytes(content.tolist())
        found = state_files.unpack(buffer, f"{self.where}, {OWN_STATE}")
        self.state = found if isinstance(found, dict) else {}

    def _sort(
        self, entries: dict[str, Stored]
    ) -> tuple[dict[tuple[str | int, ...], Stored], dict[str, dict[str, Stored]]]:
        """Lists the tensors.

        Returns the optimizer's options by (group or weight, option), and the entries that belong to a weight as a
        whole, by weight and state.
        """
        options: dict[tuple[str | int, ...], Stored] = {}
        states: list[tuple[str, str, Stored]] = []
        weights: dict[str, Stored] = {}
        for name, stored in entries.items():
            place = _optimizer_place(stored.path)
            if place is None:
                if stored.dtype is not None:
                    weights[name] = stored
            elif place[0] == "param_groups":
                options[place[1:]] = stored
            else:
                states.append((place[1], place[2], stored))
        self._list_weights(weights)
        counts: dict[str, dict[str, Stored]] = {}
        for weight, kind, stored in states:
            own = self._stored.get((PARAM, weight))
            is_single = stored.shape in ((), (1,))
            if is_single and (kind == "step" or own is None or stored.shape != own.shape or stored.dtype is None):
                counts.setdefault(weight, {})[kind] = stored
            else:
                self._list(kind, weight, stored)
        return options, counts

    def _list_weights(self, weights: dict[str, Stored]) -> None:
        containers: dict[tuple[str | int, ...], int] = {}
        for stored in weights.values():
            container = stored.path[:-1]
            containers[container] = containers.get(container, 0) + math.prod(stored.shape)
        # The model's own state dict has a usual key; if no container has, it is the container with most elements.
        model = max(containers, key=lambda c: (-_preference(c), containers[c]), default=())
        seen: dict[tuple[Chunk, ...], str] = {}
        for flat, stored in weights.items():
            name = str(stored.path[-1]) if stored.path[:-1] == model else flat
            if (PARAM, name) in self._stored:
                name = flat
            if stored.chunks and (first := seen.setdefault(stored.chunks, name)) != name:
                self.aliases[name] = first
            else:
                self._list(PARAM, name, stored)

    def _list(self, kind: str, name: str, stored: Stored) -> None:
        if (kind, name) in self._stored:
            raise CheckpointError(f"{kind} of {name} is there twice", where=self.where, fix="save one model a folder")
        self._stored[kind, name] = stored
        self.tensors[kind, name] = LogicalTensor(name=name, kind=kind, shape=stored.shape, dtype=stored.dtype)

    def _take_groups(self, options: dict[tuple[str | int, ...], Stored], counts: dict[str, dict[str, Stored]]) -> None:
        values: dict[str | int, dict[str, Any]] = {}
        for (owner, option), stored in options.items():
            try:
                values.setdefault(owner, {})[str(option)] = self._value(option, stored)
            except CheckpointError as error:
                logger.warning("%s: the optimizer's option %s is left out: %s", self.where, option, error.what)
        group_of: dict[str, int] = {}
        # Groups in the order of their index; options that are stored by weight stay in the file's order.
        for owner in sorted(values, key=lambda o: o if isinstance(o, int) else 0):
            found = values[owner]
            names = found.pop("params", None) if isinstance(owner, int) else [owner]
            if found in self.groups and not isinstance(owner, int):
                index = self.groups.index(found)
            else:
                index = len(self.groups)
                self.groups.append(found)
            if isinstance(names, (list, tuple)):
                group_of.update(dict.fromkeys((n for n in names if isinstance(n, str)), index))
        stated = {name for kind, name in self.tensors if kind not in (PARAM, MASTER, BUFFER)} | counts.keys()
        if stated and not self.groups:
            self.groups.append({})
        if not self.groups:
            return
        for _, name in [key for key in self.tensors if key[0] == PARAM]:
            own = {kind: self._value(f"{kind} of {name}", stored) for kind, stored in counts.get(name, {}).items()}
            group = group_of.get(name, 0 if name in stated else None)
            self.params[name] = ParamInfo(group=group, counts=own)

    def _value(self, what: str | int, stored: Stored) -> Any:
        """A small value. A tensor of shape (1,) loses its dimension; a value that is no tensor is unpickled."""
        if stored.dtype is None:
            return self._load(stored.chunks[0])
        value = self._whole(str(what), stored)
        return value.reshape(()) if stored.shape == (1,) else value.reshape(stored.shape)

    def _whole(self, name: str, stored: Stored) -> torch.Tensor:
        """All elements, flat.

        The files must have at least as many bytes: numbers in the metadata alone cannot cause a huge allocation.
        """
        files = {chunk.file for chunk in stored.chunks}
        n_bytes = math.prod(stored.shape) * stored.dtype.itemsize
        if n_bytes > (available := sum(os.fstat(self._open(file)).st_size for file in files)):
            raise CheckpointError(
                f"has shape {stored.shape}, {n_bytes} bytes, and its files have {available}",
                where=f"{self.where}, {name}",
                fix="a rank's file is missing in its metadata: take another checkpoint",
            )
        value = torch.empty(math.prod(stored.shape), dtype=stored.dtype)
        self._fetch(name, stored, 0, value)
        return value

    def _fetch(self, name: str, stored: Stored, first: int, into: torch.Tensor) -> None:
        """Elements of the whole tensor from ``first`` on, each from the chunk that has it."""
        strides = _strides(stored.shape)
        at, hint = 0, 0
        while at < into.numel():
            rest, index = first + at, []
            for stride in strides:
                i, rest = divmod(rest, stride)
                index.append(i)
            n_chunks = len(stored.chunks)
            for k in range(n_chunks):
                chunk = stored.chunks[(hint + k) % n_chunks]
                if all(a <= i < a + n for i, a, n in zip(index, chunk.start, chunk.size, strict=True)):
                    hint = (hint + k) % n_chunks
                    break
            else:
                raise CheckpointError(
                    f"element {tuple(index)} of {stored.shape} is in no chunk",
                    where=f"{self.where}, {name}",
                    fix="a rank's file is missing in its metadata: take another checkpoint",
                )
            cut = max((d for d, n in enumerate(chunk.size) if n != stored.shape[d]), default=-1)
            if cut < 0:
                n = math.prod(stored.shape) - (first + at)
            else:
                n = (chunk.start[cut] + chunk.size[cut] - index[cut]) * strides[cut] - (first + at) % strides[cut]
            n = min(n, into.numel() - at)
            local = sum((i - a) * s for i, a, s in zip(index, chunk.start, _strides(chunk.size), strict=True))
            self._fetch_chunk(stored, chunk, local, into[at : at + n])
            at += n

    def _fetch_chunk(self, stored: Stored, chunk: Chunk, first: int, into: torch.Tensor) -> None:
        place = self._places.get(chunk)
        if place is None:
            place = self._find(stored, chunk)
            # Of the chunks that are read into memory as a whole, keep only the last.
            self._places = {c: p for c, p in self._places.items() if p.whole is None or place.whole is None}
            self._places[chunk] = place
        if place.whole is not None:
            into.copy_(place.whole[first : first + into.numel()])
        else:
            path = os.path.join(self.where, chunk.file)
            read_bytes(self._open(chunk.file), place.offset + first * into.dtype.itemsize, into, path)

    def _find(self, stored: Stored, chunk: Chunk) -> _Place:
        saved = self._saved(chunk)
        found = saved.content
        if type(found) is not StoredTensor or found.dtype != stored.dtype or found.shape != chunk.size:
            is_tensor = type(found) is StoredTensor
            raise CheckpointError(
                f"byte {chunk.offset} should begin {chunk.size}, {stored.dtype}, and begins "
                f"{(found.shape, found.dtype) if is_tensor else type(found).__name__}",
                where=os.path.join(self.where, chunk.file),
                fix="the file does not belong to its metadata: take another checkpoint",
            )
        if found.is_contiguous:
            return _Place(saved.byte_range(found)[0] if found.n_elems else 0, None)
        return _Place(0, materialize(found).reshape(-1))

    def _part(self, chunk: Chunk) -> Part:
        part = Part(self._open(chunk.file), chunk.offset, chunk.n_bytes)
        total_bytes = os.fstat(part.descriptor).st_size
        if part.begin + part.n_bytes > total_bytes:
            raise self._damaged(chunk, f"the file ends at byte {total_bytes}")
        return part

    def _saved(self, chunk: Chunk) -> TorchFile:
        part = self._part(chunk)
        try:
            return TorchFile(os.path.join(self.where, chunk.file), part=part)
        except CheckpointError as error:
            raise self._damaged(chunk, error.what) from error

    def _load(self, chunk: Chunk) -> Any:
        """A value that is no tensor, or not alone."""
        part = self._part(chunk)
        try:
            return load_part(part, os.path.join(self.where, chunk.file))
        except CheckpointError as error:
            raise self._damaged(chunk, error.what) from error

    def _damaged(self, chunk: Chunk, what: str) -> CheckpointError:
        return CheckpointError(
            f"bytes {chunk.offset} to {chunk.offset + chunk.n_bytes} are no plain data of torch.save: {what}",
            where=os.path.join(self.where, chunk.file),
            fix="the file is damaged, or holds objects of a program: take another checkpoint",
        )

    def _open(self, file: str) -> int:
        if file not in self._files:
            path = os.path.join(self.where, file)
            try:
                self._files[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be opened: {error.strerror}", where=path, fix="get the whole folder"
                ) from error
        return self._files[file]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _world_size(entries: dict[str, Stored]) -> int:
    """Ranks that wrote it: files are called __RANK_NUMBER.distcp."""
    ranks = {c.file.split("_")[2] for s in entries.values() for c in s.chunks if c.file.startswith("__")}
    return max(1, len(ranks))


def _preference(container: tuple[str | int, ...]) -> int:
    """Position of a container's name among the usual keys of a model; the lowest is preferred."""
    last = container[-1] if container else None
    return MODEL_KEYS.index(last) if last in MODEL_KEYS else len(MODEL_KEYS)


def _optimizer_place(path: tuple[str | int, ...]) -> tuple[Any, ...] | None:
    """("state", weight, state) or ("param_groups", group or weight, option) if the path belongs to an optimizer, else
    None.
    """
    at = next((i for i, key in enumerate(path) if key in OPTIMIZER_KEYS), None)
    if at is None:
        # The name has one part: no planner of torch wrote it, or the state dict was flat.
        head, _, rest = str(path[-1]).partition(".")
        if len(path) > 1 or head not in OPTIMIZER_KEYS:
            return None
        keys: list[str | int] = [rest]
    else:
        keys = list(path[at + 1 :])
    if keys and isinstance(keys[0], str):
        for head in ("state", "param_groups"):
            if keys[0].startswith(f"{head}."):
                keys = [head, keys[0][len(head) + 1 :], *keys[1:]]
    if len(keys) == 2 and isinstance(keys[1], str) and "." in keys[1]:
        keys = [keys[0], *keys[1].rsplit(".", 1)]
    if len(keys) != 3 or keys[0] not in ("state", "param_groups"):
        return None
    if keys[0] == "param_groups" and isinstance(keys[1], str) and keys[1].isdigit():
        keys[1] = int(keys[1])
    return tuple(keys) if keys[0] == "param_groups" else (keys[0], str(keys[1]), str(keys[2]))


# A larger tensor is written in chunks of rows, so that only one chunk is in memory.
CHUNK_BYTES = 64 << 20
PAYLOAD = "__0_0.distcp"


class _Planned(NamedTuple):
    path: tuple[str | int, ...]
    tensor: LogicalTensor


def write_dcp(source: Source, folder: str | os.PathLike[str]) -> None:
    """Writes any checkpoint as ``torch.distributed.checkpoint.load`` reads it, in one process, with 64 MiB or one row
    of a tensor in memory.

    ``folder`` is new or empty, and appears when it is complete. In it are, as ``get_state_dict`` of torch names them:
    "model" with the weights (fp32 masters where there are, as FSDP keeps them), their aliases and the buffers; "optim"
    with "state" and "param_groups", where the source has them; and the rest of the source's state as bytes of ours.
    Raises CheckpointError if reading or writing fails.
    """
    target = os.path.abspath(os.fspath(folder))
    if os.path.isdir(target) and os.listdir(target):
        raise CheckpointError("is not empty", where=target, fix="name a new folder")
    temporary = os.path.join(os.path.dirname(target), f".{os.path.basename(target)[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        os.makedirs(temporary)
        try:
            _write(source, temporary)
            for name in (PAYLOAD, METADATA, ""):
                sync_path(os.path.join(temporary, name))
            os.rename(temporary, target)
            sync_path(os.path.dirname(target))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror}",
            where=error.filename or target,
            fix="write to a folder that you may write to and that has room",
        ) from error


def _write(source: Source, folder: str) -> None:
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}

    with open(os.path.join(folder, PAYLOAD), "wb") as file:

        def put(value: Any) -> _StorageInfo:
            begin = file.tell()
            torch.save(value, file)
            return _StorageInfo(PAYLOAD, begin, file.tell() - begin)

        def add_tensor(path: tuple[str | int, ...], shape: Sequence[int], dtype: torch.dtype) -> str:
            name = ".".join(map(str, path))
            if name in entries:
                raise CheckpointError(f"{name} would be there twice", where=source.where, fix="rename the parameter")
            paths[name] = path
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            return name

        def add_chunk(name: str, start: tuple[int, ...], size: tuple[int, ...], info: _StorageInfo) -> None:
            entries[name].chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
            places[MetadataIndex(name, torch.Size(start), len(entries[name].chunks) - 1)] = info

        def add_small(path: tuple[str | int, ...], value: Any) -> None:
            if torch.is_tensor(value):
                value = value.detach().cpu().clone()
                name = add_tensor(path, value.shape, value.dtype)
                add_chunk(name, (0,) * value.dim(), tuple(value.shape), put(value))
                return
            name = ".".join(map(str, path))
            paths[name], entries[name] = path, BytesStorageMetadata()
            places[MetadataIndex(name)] = put(value)

        planned = list(_plan(source))
        names = [add_tensor(path, tensor.shape, tensor.dtype) for path, tensor in planned]
        for i, start, size, value in _stream(source, [tensor for _, tensor in planned]):
            add_chunk(names[i], start, size, put(value))
        for alias, first in source.aliases.items():
            whole = entries.get(f"model.{first}")
            if whole is None:
                continue
            name = add_tensor(("model", alias), whole.size, whole.properties.dtype)
            for k, chunk in enumerate(whole.chunks):
                # The same bytes under a second name.
                info = places[MetadataIndex(f"model.{first}", chunk.offsets, k)]
                add_chunk(name, tuple(chunk.offsets), tuple(chunk.sizes), info)
        for path, value in _options(source):
            add_small(path, value)
        rest = {key: value for key, value in source.state.items() if key != "versions"}
        if rest:
            packed = state_files.pack(rest, f"{source.where}, state")
            add_small(tuple(OWN_STATE.split(".")), torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    metadata = Metadata(entries, paths, places, None, CURRENT_DCP_VERSION)
    with open(os.path.join(folder, METADATA), "wb") as file:
        pickle.dump(metadata, file)


def _plan(source: Source) -> Iterator[_Planned]:
    """The tensors of the folder, under the keys that torch's state dicts have."""
    for (kind, name), tensor in source.tensors.items():
        if kind == MASTER or kind == BUFFER or (kind == PARAM and (MASTER, name) not in source.tensors):
            yield _Planned(("model", name), tensor)
        elif kind != PARAM:
            yield _Planned(("optim", "state", name, kind), tensor)


def _options(source: Source) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Contents of torch's optimizer state dict other than the tensors of its states."""
    for name, info in source.params.items():
        for key, value in info.counts.items():
            # A tensor, as in torch's optimizers: DCP cannot load a plain number into an existing tensor.
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            yield ("optim", "state", name, key), torch.tensor(float(value)) if is_number else value
    for i, group in enumerate(source.groups):
        for key, value in group.items():
            if not torch.is_tensor(value):
                state_files.pack(
                    {key: value}, f"{source.where}, groups[{i}]"
                )  # refuses a value that could not be loaded again
            yield ("optim", "param_groups", i, key), value
        names = [name for name, info in source.params.items() if info.group == i]
        yield ("optim", "param_groups", i, "params"), names


def _stream(
    source: Source, tensors: Sequence[LogicalTensor]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """(index of the tensor, start, size, values) of chunks in order; small ones are read together."""
    batch: list[tuple[int, tuple[int, ...], torch.Tensor, Read]] = []
    room = CHUNK_BYTES
    for i, tensor in enumerate(tensors):
        shape = tensor.shape
        row_elems = math.prod(shape[1:])
        n_rows = shape[0] if shape else 1
        step = max(1, CHUNK_BYTES // max(1, row_elems * tensor.dtype.itemsize))
        for row in range(0, max(1, n_rows), step):
            rows = min(step, n_rows - row)
            value = torch.empty((rows, *shape[1:]) if shape else (), dtype=tensor.dtype)
            if batch and value.nbytes > room:
                yield from _filled(source, batch)
                batch, room = [], CHUNK_BYTES
            start = (row,) + (0,) * (len(shape) - 1) if shape else ()
            batch.append((i, start, value, Read(tensor, row * row_elems, value.reshape(-1))))
            room -= value.nbytes
    yield from _filled(source, batch)


def _filled(
    source: Source, batch: list[tuple[int, tuple[int, ...], torch.Tensor, Read]]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    source.read([read for *_, read in batch if read.into.numel()])
    for i, start, value, _ in batch:
        yield i, start, tuple(value.shape), value
