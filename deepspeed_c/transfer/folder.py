"""A folder that holds the newest weights, for readers in other processes.

Each version is a safetensors file with the tensors that have changed. ``weights.json`` lists for each tensor the file
that has it, its checksum and the version that changed it. The list is replaced by one rename when the file is on disk,
so a reader finds one version or the next one. A file stays for one version longer than it is needed, for a reader that
has opened the list before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.formats.huggingface import parse_json, read_header
from deepspeed_c.checkpoint.formats.ranges import read_bytes
from deepspeed_c.checkpoint.formats.stream import TensorFileWriter
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.transfer.target import WeightEntry, WeightsTarget, unknown_names

__all__ = ["FolderTarget", "WeightsFolder", "checksum"]

LIST_NAME = "weights.json"
_FILE_NAME = re.compile(r"weights-\d{8,}\.safetensors")


class _Stored(NamedTuple):
    """One tensor of the list."""

    file: str
    version: int
    crc32c: int
    tied_to: str | None


class _List(NamedTuple):
    version: int
    tensors: dict[str, _Stored]


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32C (RFC 3720) of a tensor's elements in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _C.crc32c(flat.view(torch.uint8).numpy()) if flat.numel() else 0


class WeightsFolder:
    """The weights that ``send_weights`` has put into ``folder``.

    Each method reads the folder anew. Raises CheckpointError where the folder has no weights, a file is damaged, or a
    tensor does not have its checksum.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    @property
    def version(self) -> int | None:
        """The number of the newest version; None while there is none."""
        found = _read_list(self.folder)
        return None if found is None else found.version

    def load(
        self, since: int | None = None, *, known: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor on the host) of one version.

        since: the version that the reader has; only tensors that have changed after it come. known: the names that the
        reader takes. Raises StateError, before the first tensor, for other names, and for ``since`` above the newest
        version.
        """
        found = _read_list(self.folder)
        if found is None:
            raise CheckpointError(
                "holds no weights", where=self.folder, fix="wait for send_weights of the trainer, or check the path"
            )
        if since is not None and since > found.version:
            raise StateError(
                f"version {since} was read before, and the folder has version {found.version}",
                where=self.folder,
                fix="load without since: another run has written to the folder",
            )
        wanted = {name: stored for name, stored in found.tensors.items() if since is None or stored.version > since}
        problem = "" if known is None else unknown_names(wanted, known)
        if problem:
            raise StateError(problem, where=self.folder, fix="load the weights into the model that they belong to")
        return self._read(wanted)

    def _read(self, wanted: dict[str, _Stored]) -> Iterator[tuple[str, torch.Tensor]]:
        headers: dict[str, Any] = {}
        last: tuple[str, torch.Tensor] | None = None
        for name, stored in wanted.items():
            if last is not None and stored.tied_to == last[0]:
                yield name, last[1]
                continue
            path = os.path.join(self.folder, stored.file)
            if path not in headers:
                headers[path] = read_header(path).tensors
            place = headers[path].get(stored.tied_to or name)
            if place is None:
                raise CheckpointError(
                    f"{name} is not in it", where=path, fix="send the weights anew, to another folder"
                )
            tensor = torch.empty(place.shape, dtype=place.dtype)
            with open(path, "rb") as file:
                read_bytes(file.fileno(), place.offset, tensor.view(-1), path)
            found = checksum(tensor)
            if found != stored.crc32c:
                raise CheckpointError(
                    f"{name} has checksum {found:#010x}, and {stored.crc32c:#010x} was sent",
                    where=path,
                    fix="the file is damaged: send the weights anew, to another folder",
                )
            last = (name, tensor)
            yield last


class FolderTarget(WeightsTarget):
    """Writes versions into a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def versions(self) -> list[int | None]:
        found = _read_list(self._folder)
        return [None if found is None else found.version]

    def put(self, version: int, entries: Sequence[WeightEntry], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        before = _read_list(self._folder)
        tensors = {} if before is None else dict(before.tensors)
        name_of_file = f"weights-{version:08d}.safetensors"
        ties = {entry.name: entry.tied_to for entry in entries if entry.tied_to is not None}
        sent = {entry.name: (entry.shape, entry.dtype) for entry in entries if entry.tied_to is None}
        os.makedirs(self._folder, exist_ok=True)
        with TensorFileWriter(os.path.join(self._folder, name_of_file), sent) as file:
            for name, tensor in weights:
                first = ties.get(name)
                if first is None:
                    file.write(name, tensor)
                    tensors[name] = _Stored(name_of_file, version, checksum(tensor), None)
                else:
                    tensors[name] = tensors[first]._replace(tied_to=first)
        _write_list(self._folder, _List(version, tensors))
        kept = {stored.file for stored in tensors.values()}
        kept |= {stored.file for stored in before.tensors.values()} if before is not None else set()
        for old in os.listdir(self._folder):
            if _FILE_NAME.fullmatch(old) and old not in kept:
                with contextlib.suppress(OSError):  # a reader may have the file open on a network file system
                    os.unlink(os.path.join(self._folder, old))


def _write_list(folder: str, found: _List) -> None:
    path = os.path.join(folder, LIST_NAME)
    temporary = f"{path}.{os.getpid()}.tmp"
    content = {"version": found.version, "tensors": {name: list(stored) for name, stored in found.tensors.items()}}
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise CheckpointError(
            f"cannot be written: {error.strerror}", where=path, fix="the folder must be writable and have room"
        ) from error


def _read_list(folder: str) -> _List | None:
    path = os.path.join(folder, LIST_NAME)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=path, fix="check the path") from error
    found = parse_json(content, path)
    try:
        tensors = {name: _Stored(*stored) for name, stored in found["tensors"].items()}
        is_sound = type(found["version"]) is int and all(
            _FILE_NAME.fullmatch(stored.file)
            and type(stored.version) is int
            and type(stored.crc32c) is int
            and (stored.tied_to is None or stored.tied_to in tensors)
            for stored in tensors.values()
        )
    except (TypeError, KeyError, AttributeError):
        is_sound = False
    if not is_sound:
        raise CheckpointError("is no list of weights", where=path, fix="send the weights anew, to another folder")
    return _List(found["version"], tensors)
