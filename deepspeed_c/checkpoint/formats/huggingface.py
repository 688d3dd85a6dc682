"""Reads weights as Hugging Face stores them: one safetensors file, or several with an index, by range and without
trusting their headers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.ranges import fill_from_file
from deepspeed_c.checkpoint.formats.weight_file import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_HEADER_LIMIT_BYTES,
    SAFETENSORS_METADATA,
)
from deepspeed_c.checkpoint.source import PARAM, LogicalTensor, Read, Source, Topology
from deepspeed_c.errors import CheckpointError

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "Header",
    "HuggingFaceSource",
    "TensorPlace",
    "parse_json",
    "read_header",
    "shards_of_index",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Limit on the size of an index. An index names each tensor once; for the largest models it has some megabytes.
INDEX_LIMIT_BYTES = 256 << 20
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
# Larger numbers of elements do not fit the 64-bit offsets of the format.
_ELEMS_LIMIT = 1 << 63


class TensorPlace(NamedTuple):
    """Where one tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    n_bytes: int


class Header(NamedTuple):
    """Contents of the header of a safetensors file."""

    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]


def parse_json(content: bytes, where: str) -> Any:
    """Parses JSON of an untrusted file: repeated names, invalid UTF-8 and nesting that is too deep raise
    CheckpointError.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{twice!r} is there twice", where=where, fix="get the file anew from where it came")
        return found

    try:
        return json.loads(content.decode(), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise _malformed(where, f"is no JSON: {error}") from error


def read_header(path: str) -> Header:
    """The header of a safetensors file, every number of it checked against the others and against the size of the file.

    Raises CheckpointError for violations of the format: a length beyond the file or 100 MB, names that come twice,
    unknown dtypes, offsets that do not fit the shape, overlap, leave gaps or lie beyond the end.
    """
    try:
        with open(path, "rb") as file:
            total_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if total_bytes < 8 or header_bytes > min(total_bytes - 8, SAFETENSORS_HEADER_LIMIT_BYTES):
                raise _malformed(path, f"a header of {header_bytes} bytes does not fit a file of {total_bytes}")
            content = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=path, fix="check the path") from error
    header = parse_json(content, path)
    if not isinstance(header, dict):
        raise _malformed(path, "the header is no JSON object")
    metadata = header.pop(SAFETENSORS_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(path, f"{SAFETENSORS_METADATA} holds something else than texts")
    payload = 8 + header_bytes
    tensors = {name: _stored(path, name, value, payload) for name, value in header.items()}
    end, last = payload, ""
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].n_bytes)):
        if stored.offset != end:
            what = "overlaps" if stored.offset < end else "leaves a gap behind"
            raise _malformed(path, f"{name} {what} {last or 'the header'} (byte {stored.offset}, expected {end})")
        end, last = end + stored.n_bytes, name
    if end != total_bytes:
        raise _malformed(path, f"its tensors end at byte {end}, the file has {total_bytes}")
    return Header(tensors, metadata)


def _stored(path: str, name: str, value: Any, payload: int) -> TensorPlace:
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise _malformed(path, f"{name} lacks dtype, shape or data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _malformed(path, f"{name} has shape {shape!r} and data_offsets {offsets!r}")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{name} has dtype {value['dtype']!r}, which is not known here",
            where=path,
            fix=f"convert it to one of {', '.join(_DTYPES)}",
        )
    begin, end = offsets
    n_elems = math.prod(shape)
    if n_elems >= _ELEMS_LIMIT or end - begin != n_elems * dtype.itemsize:
        raise _malformed(path, f"{name}, {shape} of {dtype}, cannot lie in bytes {begin} to {end}")
    return TensorPlace(dtype, tuple(shape), payload + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _ELEMS_LIMIT for item in value)


def shards_of_index(index: str) -> dict[str, list[str]]:
    """Path of each file that an index lists -> its tensors. Raises CheckpointError for an index that cannot be read."""
    try:
        with open(index, "rb") as file:
            content = file.read(INDEX_LIMIT_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=index, fix="check the path") from error
    if len(content) > INDEX_LIMIT_BYTES:
        raise _malformed(index, f"is longer than {INDEX_LIMIT_BYTES} bytes")
    found = parse_json(content, index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict):
        raise _malformed(index, "has no weight_map")
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # A path could point anywhere on the reader's machine.
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise _malformed(index, f"{name} lies in {file!r}, which is no file of this folder")
        shards.setdefault(os.path.join(os.path.dirname(index), file), []).append(name)
    return shards


def _malformed(where: str, what: str) -> CheckpointError:
    return CheckpointError(what, where=where, fix="the file is damaged or no safetensors file: get it anew")


class HuggingFaceSource(Source):
    """A safetensors file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    The format does not tell weights from buffers: everything is listed as PARAM, under the names as they are. Names in
    the metadata of a file that stand for another of its tensors are aliases.
    """

    format = "huggingface"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.fspath(path)
        self.aliases, self.params, self.groups, self.state = {}, {}, [], {}
        self.topology = Topology()
        self._files: dict[str, int] = {}
        self._stored: dict[str, tuple[str, TensorPlace]] = {}
        for file, names in self._shards().items():
            self._add(file, names)
        self.tensors = {
            (PARAM, name): LogicalTensor(name=name, kind=PARAM, shape=stored.shape, dtype=stored.dtype)
            for name, (_, stored) in self._stored.items()
        }

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            place = self._stored.get(read.tensor.name)
            if place is None or read.tensor.kind != PARAM:
                raise CheckpointError(
                    f"holds no {read.tensor.kind} named {read.tensor.name!r}",
                    where=self.where,
                    fix="read what is listed",
                )
            path, stored = place
            fill_from_file(read, self._open(path), stored.offset, path)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _shards(self) -> dict[str, list[str] | None]:
        """Path of each file -> the tensors that are to be read from it; None: all."""
        if os.path.isfile(self.where) and not self.where.endswith(".json"):
            return {self.where: None}
        index = self.where if self.where.endswith(".json") else os.path.join(self.where, INDEX_FILE)
        if not os.path.exists(index):
            return {os.path.join(self.where, SINGLE_FILE): None}
        return shards_of_index(index)

    def _add(self, path: str, names: list[str] | None) -> None:
        header = read_header(path)
        for name in header.tensors if names is None else names:
            if name not in header.tensors:
                raise CheckpointError(
                    f"{name} is missing, and {INDEX_FILE} says it is here", where=path, fix="get the file anew"
                )
            self._stored[name] = path, header.tensors[name]
        for alias, first in header.metadata.items():
            if alias != "format" and first in header.tensors and alias not in header.tensors:
                self.aliases[alias] = first

    def _open(self, path: str) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be opened: {error.strerror}", where=path, fix="check the path"
                ) from error
        return self._files[path]
