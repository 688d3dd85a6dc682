"""Writes a model's weights as Hugging Face lays them out: one file, or several of a limited size and an index, in a
folder that is complete or not there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from typing_extensions import Self

from deepspeed_c.checkpoint.formats.huggingface import read_header
from deepspeed_c.checkpoint.formats.stream import TensorFileWriter
from deepspeed_c.checkpoint.formats.weight_file import FileEntry
from deepspeed_c.checkpoint.native.commit import sync_path
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.logging import logger

__all__ = ["FORMATS", "FolderFormat", "ModelFolderWriter", "parse_size", "plan_shards"]

# Names of tensors that a message lists before it only counts.
NAMES_SHOWN = 5
# Size of the pieces that are searched for NaN and inf.
CHECKED_BYTES = 8 << 20

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?b)?", re.IGNORECASE)
_UNITS = (
    {"b": 1}
    | {f"{u}b": 1000**n for n, u in enumerate("kmgt", 1)}
    | {f"{u}ib": 1024**n for n, u in enumerate("kmgt", 1)}
)


class FolderFormat(NamedTuple):
    """Names of the files of a format."""

    stem: str
    suffix: str


FORMATS = {"safetensors": FolderFormat("model", ".safetensors"), "fp32-pt": FolderFormat("pytorch_model", ".bin")}


def parse_size(size: int | str, where: str = "max_shard_size") -> int:
    """Bytes of "5GB" (powers of 1000), "5GiB" (powers of 1024) or a number; at least 1.

    Raises CheckpointError for anything else.
    """
    n_bytes = 0
    if isinstance(size, int) and not isinstance(size, bool):
        n_bytes = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        n_bytes = int(float(match[1]) * _UNITS[(match[2] or "b").lower()])
    if n_bytes < 1:
        raise CheckpointError(f"{size!r} is no size", where=where, fix="write a size such as 5GB, 500MB or 2GiB")
    return n_bytes


def plan_shards(entries: Sequence[FileEntry], max_bytes: int) -> list[list[FileEntry]]:
    """The entries in order, cut wherever the next one would not fit; a tensor that is larger than ``max_bytes`` has a
    file of its own.
    """
    shards: list[list[FileEntry]] = [[]]
    n_bytes = 0
    for entry in entries:
        if shards[-1] and n_bytes + entry.n_bytes > max_bytes:
            shards.append([])
            n_bytes = 0
        shards[-1].append(entry)
        n_bytes += entry.n_bytes
    return shards


class ModelFolderWriter:
    """Writes ``folder`` from tensors that come in the order of ``entries`` (name, shape, dtype), whole or in parts.

    ``aliases`` are further names of tensors among them (see :class:`TensorFileWriter`); they stand in the file of their
    tensor, and in the index of a format that can load them. ``form`` is a key of ``FORMATS``. Use it as a context
    manager, from one thread and on one rank.

    When the block ends without an exception, all files are complete, read back by their headers, and on disk. A new
    folder appears as a whole, by one rename. In an existing folder the new model replaces an older model of the
    same format. At any instant the folder loads as the old model, nothing or the new one, never as a mixture. Other
    files stay. After an exception everything is as it was. A crash may leave a hidden ``.*.tmp`` folder.

    NaN and inf in the tensors cause a warning with their names, no error: training may have produced them.

    ``staging`` is the folder that the files are being made in: other files of the model (config.json) may be put there
    within the block.

    Raises CheckpointError as TensorFileWriter does, and for tensors that come out of order.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        entries: Iterable[tuple[str, Sequence[int], torch.dtype]],
        aliases: Mapping[str, str] | None = None,
        *,
        form: str = "safetensors",
        max_shard_size: int | str = "5GB",
    ) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self._form = FORMATS[form]
        aliases = dict(aliases or {})
        planned = [FileEntry(name, tuple(shape), dtype) for name, shape, dtype in entries]
        self.total_bytes = sum(entry.n_bytes for entry in planned)
        self.n_tensors = len(planned)
        shards = plan_shards(planned, parse_size(max_shard_size))
        # Checked over all files; each file's writer checks only within its file.
        twice = _first_twice([*(entry.name for entry in planned), *aliases])
        if twice is not None:
            raise CheckpointError(
                "this name is given twice", where=f"{self.folder}, {twice}", fix="name each tensor once"
            )
        stem, suffix = self._form
        self._names = (
            [f"{stem}{suffix}"]
            if len(shards) == 1
            else [f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}" for i in range(1, len(shards) + 1)]
        )
        self._shards = [[entry.name for entry in shard] for shard in shards]
        self._entries = [{entry.name: entry for entry in shard} for shard in shards]
        self._aliases = [{a: first for a, first in aliases.items() if first in shard} for shard in self._entries]
        unknown = aliases.keys() - {alias for shard in self._aliases for alias in shard}
        if unknown:
            raise CheckpointError(
                "is an alias of something that is not written",
                where=f"{self.folder}, {min(unknown)}",
                fix="let aliases point to the name under which the tensor is written",
            )
        self._next = iter(self._order())
        self._current: tuple[int, FileEntry] | None = None
        self._n_left = 0
        self._is_finite = True
        self._writer: TensorFileWriter | None = None
        self._open_shard = -1
        self.not_finite: list[str] = []
        self.staging = ""

    @property
    def files(self) -> list[str]:
        """Names of the weight files."""
        return list(self._names)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, whole; any device, any strides."""
        entry = self._turn(name)
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(
                f"has shape {tuple(tensor.shape)}, and {entry.shape} was announced", where=f"{self.folder}, {name}"
            )
        self.write_part(name, tensor)

    def write_part(self, name: str, part: torch.Tensor) -> None:
        """The next elements, in row-major order, of the tensor whose turn it is; one without elements is written by one
        empty part.
        """
        entry = self._turn(name)
        self._writer.write_part(name, part)
        self._is_finite = self._is_finite and _is_finite(part)
        self._n_left -= part.numel()
        if self._n_left == 0:
            if not self._is_finite:
                self.not_finite.append(entry.name)
            self._current = None

    def __enter__(self) -> Self:
        parent, name = os.path.split(self.folder)
        # Inside a folder that is in use: its parent need not be writable, nor on the same file system.
        self._is_new = not _has_files(self.folder)
        with _file_system_errors(self.folder):
            if self._is_new:
                os.makedirs(parent, exist_ok=True)
            self.staging = os.path.join(
                parent if self._is_new else self.folder, f".{name[:200]}.{secrets.token_hex(8)}.tmp"
            )
            os.mkdir(self.staging)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
            elif self._writer is not None:
                self._writer.__exit__(kind, error, traceback)
        finally:
            self._writer = None
            shutil.rmtree(self.staging, ignore_errors=True)

    def _order(self) -> Iterator[tuple[int, FileEntry]]:
        for i, shard in enumerate(self._entries):
            for entry in shard.values():
                yield i, entry

    def _turn(self, name: str) -> FileEntry:
        """The entry of ``name``, whose turn it must be, with its file open."""
        if not self.staging:
            raise StateError("is not open", where=self.folder, fix="write inside `with ModelFolderWriter(...)`")
        if self._current is None:
            self._current = next(self._next, None)
            if self._current is not None:
                self._n_left, self._is_finite = self._current[1].n_elems, True
                self._open(self._current[0])
        if self._current is None or self._current[1].name != name:
            expected = "nothing" if self._current is None else self._current[1].name
            raise CheckpointError(
                f"comes when {expected} is expected", where=f"{self.folder}, {name}", fix="write in the announced order"
            )
        return self._current[1]

    def _open(self, shard: int) -> None:
        if shard == self._open_shard:
            return
        self._close_file()
        path = os.path.join(self.staging, self._names[shard])
        entries = [(entry.name, (entry.shape, entry.dtype)) for entry in self._entries[shard].values()]
        writer = TensorFileWriter(path, entries, self._aliases[shard])
        self._writer = writer.__enter__()
        self._open_shard = shard

    def _close_file(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.__exit__(None, None, None)

    def _complete(self) -> None:
        missing = [self._current[1].name] if self._current else []
        missing += [entry.name for _, entry in self._next]
        if missing:
            if self._writer is not None:
                error = CheckpointError("incomplete")
                self._writer.__exit__(type(error), error, None)
            names = ", ".join(missing[:NAMES_SHOWN]) + (", ..." if len(missing) > NAMES_SHOWN else "")
            raise CheckpointError(
                f"{len(missing)} of {self.n_tensors} tensors were not written: {names}",
                where=self.folder,
                fix="write all that was announced; nothing was saved",
            )
        if not self.n_tensors:
            self._open(0)
        self._close_file()
        for i, name in enumerate(self._names):
            self._verify(os.path.join(self.staging, name), i)
        if self.not_finite:
            names = ", ".join(self.not_finite[:NAMES_SHOWN]) + (", ..." if len(self.not_finite) > NAMES_SHOWN else "")
            logger.warning("%s: %d tensors hold NaN or inf: %s", self.folder, len(self.not_finite), names)
        with _file_system_errors(self.folder):
            if len(self._names) > 1:
                self._write_index()
            for name in os.listdir(self.staging):
                sync_path(os.path.join(self.staging, name))
            sync_path(self.staging)
            self._commit()

    def _verify(self, path: str, shard: int) -> None:
        """Reads the file's header back, by other code than wrote it, and compares names, shapes and dtypes."""
        entries = self._entries[shard]
        if self._form.suffix == ".safetensors":
            found = {name: (stored.shape, stored.dtype) for name, stored in read_header(path).tensors.items()}
        else:
            loaded = torch.load(path, weights_only=True, map_location="meta")
            found = {name: (tuple(t.shape), t.dtype) for name, t in loaded.items() if name not in self._aliases[shard]}
        want = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
        if found != want:
            names = sorted({name for name in {*found, *want} if found.get(name) != want.get(name)})
            raise CheckpointError(
                f"was read back otherwise than it was written: {', '.join(names[:NAMES_SHOWN])}",
                where=path,
                fix="the disk or the file system is at fault: save elsewhere",
            )

    def _write_index(self) -> None:
        with_aliases = self._form.suffix != ".safetensors"
        weight_map = {}
        for name, entries, aliases in zip(self._names, self._entries, self._aliases, strict=True):
            weight_map.update(dict.fromkeys([*entries, *(aliases if with_aliases else ())], name))
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        with open(os.path.join(self.staging, self._index_name), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")

    @property
    def _index_name(self) -> str:
        return f"{self._form.stem}{self._form.suffix}.index.json"

    def _commit(self) -> None:
        if self._is_new:
            try:
                os.rename(self.staging, self.folder)  # also onto an empty folder
                sync_path(os.path.dirname(self.folder))
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        # The folder has other files. The files that a reader looks for first are removed first and moved in last, so
        # that they never lead to files of two models.
        single = f"{self._form.stem}{self._form.suffix}"
        entrances = [self._index_name, single]
        new = sorted(os.listdir(self.staging), key=lambda name: name in entrances)
        replaces_single = new[-1] == single and not os.path.exists(os.path.join(self.folder, self._index_name))
        if not replaces_single:
            for name in entrances:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.folder, name))
            sync_path(self.folder)
        for name in new:
            if name == new[-1]:
                sync_path(self.folder)
            os.replace(os.path.join(self.staging, name), os.path.join(self.folder, name))
        stale = re.compile(rf"{re.escape(self._form.stem)}-\d{{5}}-of-\d{{5}}{re.escape(self._form.suffix)}")
        for name in os.listdir(self.folder):
            if stale.fullmatch(name) and name not in self._names:
                os.unlink(os.path.join(self.folder, name))
        sync_path(self.folder)


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _is_finite(part: torch.Tensor) -> bool:
    if not (part.is_floating_point() or part.is_complex()) or part.numel() == 0:
        return True
    flat = part.detach().reshape(-1)
    # Eight-bit numbers have no test of their own.
    is_narrow = part.dtype.itemsize == 1
    step = CHECKED_BYTES // part.dtype.itemsize
    return all(bool(torch.isfinite(c.float() if is_narrow else c).all()) for c in flat.split(step))


def _has_files(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise CheckpointError("is a file", where=folder, fix="name a folder") from error


@contextlib.contextmanager
def _file_system_errors(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror}",
            where=error.filename or where,
            fix="save to a folder that you may write to and that has room",
        ) from error
