"""Writes a weight file of a whole model by tensors or parts of tensors, so that little is in memory at a time. The file
gets its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from deepspeed_c.checkpoint.formats.weight_file import FileEntry, plan_file
from deepspeed_c.errors import CheckpointError, StateError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TensorFileWriter"]

# Size of the pieces that are copied, checksummed and written: large enough for one system call to cost nothing, small
# enough to stay in the cache.
STAGING_BYTES = 8 << 20
# Names of tensors that a message lists before it only counts.
NAMES_SHOWN = 5
# The longest file name, in bytes, that common file systems take.
FILE_NAME_LIMIT_BYTES = 255

_FIX_OF_ERRNO = {
    errno.ENOSPC: "free some space there, or save elsewhere",
    errno.EDQUOT: "free some space within your quota, or save elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or save to a file system that holds larger files",
    errno.ENOENT: "make the folder first",
    errno.ENOTDIR: "a part of the path is a file: save elsewhere",
    errno.EACCES: "save to a folder that you may write to",
    errno.EPERM: "save to a folder that you may write to",
    errno.EROFS: "save to a file system that may be written to",
}


class TensorFileWriter:
    """Writes ``path`` from tensors that come one at a time, in any order.

    ``entries`` announces the tensors: name -> (shape, dtype), as a mapping or as pairs; names keep this order in the
    file of ``torch.load``. ``aliases`` are further names of a tensor among them, name -> first name, as tied weights
    have; they are not written again.

    The suffix chooses the format. ``.safetensors``: the safetensors format, where aliases are only noted (see
    :class:`deepspeed_c.checkpoint.formats.weight_file.SafetensorsPlan`). Anything else (``pytorch_model.bin``, ``.pt``,
    ``.pth``): a file that ``torch.load(path, weights_only=True)`` reads as a dictionary, aliases sharing storage.

    Use it as a context manager, from one thread and on one rank::

        with TensorFileWriter("model.safetensors", {"w": ((4, 3), torch.bfloat16)}) as file:
            file.write("w", tensor)

    When the block ends the file is complete and on disk. If it ends by an exception, or if tensors are missing, nothing
    of this file is left and a file that had the name before is as it was. The same holds after a crash, which may leave
    a hidden ``.NAME.*.tmp`` in the folder. The writer keeps nothing of a tensor after :meth:`write` or
    :meth:`write_part` returns.

    Attributes: ``path`` as given, ``total_bytes``, the size of the complete file.

    Raises CheckpointError for names that are given twice or cannot be stored, shapes below zero, and dtypes that the
    format does not have; on entering and leaving, for errors of the file system; on leaving, for tensors that were not
    written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, tuple[Sequence[int], torch.dtype]]
        | Iterable[tuple[str, tuple[Sequence[int], torch.dtype]]],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        # Through a link, so that the link stays one, and now, so that a later change of folder does not matter.
        self._target = os.path.realpath(self.path)
        self._aliases = dict(aliases or {})
        pairs = entries.items() if isinstance(entries, Mapping) else entries
        self._entries = self._checked(pairs)
        self._plan = plan_file(self.path, list(self._entries.values()), self._aliases)
        self.total_bytes = self._plan.total_bytes
        # Name of each written tensor -> CRC-32 of its payload, or 0 if the format has no checksums.
        self._written: dict[str, int] = {}
        # Name -> (elements written, CRC-32 of them) of a tensor that came in parts and is not whole yet.
        self._begun: dict[str, tuple[int, int]] = {}
        self._staging = bytearray()
        self._file = self._folder = -1
        self._temporary = ""
        self._is_used = False

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor of the announced shape and dtype; any device, any strides.

        It is only read.

        Besides the tensor, this takes a fixed buffer of 8 MiB, for every device and all strides.

        Raises CheckpointError for a name that is unknown, an alias or written already, for another shape or dtype, for
        a tensor without memory of its own (meta, sparse), and for errors of the file system, after which the same
        tensor may be written again. Raises StateError outside the ``with`` block.
        """
        entry = self._expected(name)
        where = f"{self.path}, {name}"
        if name in self._begun:
            raise CheckpointError("was begun in parts", where=where, fix="write the rest of it by write_part")
        if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            raise CheckpointError(
                f"is {tuple(tensor.shape)}, {tensor.dtype}, and {entry.shape}, {entry.dtype} was announced",
                where=where,
                fix="a sharded parameter is gathered before it is written, and converted to the announced dtype",
            )
        self._written[name] = self._append(entry, tensor, 0, 0)

    def write_part(self, name: str, part: torch.Tensor) -> None:
        """Writes the next ``part.numel()`` elements, in row-major order, of a tensor that need not be in memory as a
        whole.

        Parts of different tensors may alternate; a tensor of no elements is written by one empty part. ``part`` has the
        announced dtype, and its shape says nothing. Raises as :meth:`write` does, also for more elements than were
        announced; a part that was refused may be written again.
        """
        entry = self._expected(name)
        begin, crc32 = self._begun.get(name, (0, 0))
        end = begin + part.numel()
        if part.dtype != entry.dtype or end > entry.n_elems:
            raise CheckpointError(
                f"elements {begin} to {end} of {part.dtype} do not belong to it: {entry.shape}, {entry.dtype} was announced",
                where=f"{self.path}, {name}",
                fix="write parts in order, without overlap, converted to the announced dtype",
            )
        crc32 = self._append(entry, part, begin, crc32)
        if end < entry.n_elems:
            self._begun[name] = end, crc32
        else:
            self._begun.pop(name, None)
            self._written[name] = crc32

    def _append(self, entry: FileEntry, tensor: torch.Tensor, begin: int, crc32: int) -> int:
        """Writes ``tensor`` as the elements of ``entry`` from ``begin`` on; the checksum ``crc32`` carried on over
        them.
        """
        if tensor.is_meta or tensor.layout != torch.strided:
            raise CheckpointError(
                f"has no plain memory to be written (device {tensor.device}, layout {tensor.layout})",
                where=f"{self.path}, {entry.name}",
                fix="materialise the tensor first",
            )
        offset = self._plan.payload_offset[entry.name] + begin * entry.dtype.itemsize
        for payload in self._payload(tensor):
            if self._plan.needs_crc32:
                crc32 = zlib.crc32(payload, crc32)
            self._write_at(offset, payload)
            offset += len(payload)
        return crc32

    def __enter__(self) -> Self:
        if self._is_used:
            raise StateError("was entered before", where=self.path, fix="make a new TensorFileWriter for another file")
        self._is_used = True
        with self._file_system_errors():
            self._refuse_what_is_no_file()
            folder, name = os.path.split(self._target)
            # Cut by bytes, as the limit is; a character cut in two stays a valid name.
            head = os.fsencode(name)[: FILE_NAME_LIMIT_BYTES - len("..0123456789abcdef.tmp")]
            self._temporary = os.path.join(folder, f".{os.fsdecode(head)}.{secrets.token_hex(8)}.tmp")
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Not tempfile, because only the owner may read its files. Others must be able to read this file, as the
                # umask allows.
                self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except OSError:
                self._release()
                raise
        self._staging = bytearray(min(STAGING_BYTES, max((e.n_bytes for e in self._entries.values()), default=0)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            self._release()

    def _checked(self, pairs: Iterable[tuple[str, tuple[Sequence[int], torch.dtype]]]) -> dict[str, FileEntry]:
        entries: dict[str, FileEntry] = {}
        for name, (shape, dtype) in pairs:
            self._check_name(name, entries)
            if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
                raise CheckpointError(
                    f"{tuple(shape)}, {dtype!r} is no shape and dtype of a tensor", where=f"{self.path}, {name}"
                )
            entries[name] = FileEntry(name, tuple(int(size) for size in shape), dtype)
        for alias, first in self._aliases.items():
            self._check_name(alias, entries)
            if first not in entries:
                raise CheckpointError(
                    f"is an alias of {first!r}, which is not among the tensors of the file",
                    where=f"{self.path}, {alias}",
                    fix="let aliases point to the name under which the tensor is written",
                )
        return entries

    def _check_name(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        if name in entries:
            raise CheckpointError("this name is given twice", where=f"{self.path}, {name}", fix="name each tensor once")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"the name {name!r} is no text (a lone surrogate)", where=self.path, fix="rename it"
            ) from error

    def _expected(self, name: str) -> FileEntry:
        """The entry that was announced under ``name``, if it may be written now."""
        if self._file < 0:
            raise StateError("is not open", where=self.path, fix="write inside `with TensorFileWriter(...) as file:`")
        where = f"{self.path}, {name}"
        if name in self._aliases:
            raise CheckpointError(
                f"is an alias of {self._aliases[name]}", where=where, fix="write the tensor under that name, once"
            )
        if name not in self._entries:
            raise CheckpointError(
                "is not among the tensors that were announced", where=where, fix="name it in `entries`"
            )
        if name in self._written:
            raise CheckpointError("was written already", where=where, fix="write each tensor once")
        return self._entries[name]

    def _payload(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of ``tensor`` in row-major order, each piece valid until the next is asked for."""
        if tensor.numel() == 0:
            return
        # Made anew each time: a tensor made under torch.inference_mode could not be written to outside of it.
        staging = torch.frombuffer(self._staging, dtype=torch.uint8)
        for piece in _pieces(tensor.detach(), len(self._staging) // tensor.dtype.itemsize):
            n_bytes = piece.numel() * tensor.dtype.itemsize
            staging[:n_bytes].view(tensor.dtype).view(piece.shape).copy_(piece)
            yield memoryview(self._staging)[:n_bytes]

    def _complete(self) -> None:
        missing = [name for name in self._entries if name not in self._written]
        if missing:
            names = ", ".join(missing[:NAMES_SHOWN]) + (", ..." if len(missing) > NAMES_SHOWN else "")
            raise CheckpointError(
                f"{len(missing)} of {len(self._entries)} tensors were not written: {names}",
                where=self.path,
                fix="write all that was announced; nothing was saved",
            )
        for offset, content in self._plan.frame(self._written):
            self._write_at(offset, memoryview(content))
        with self._file_system_errors():
            # The order matters: the content is on disk before the name is, and the name is on disk before success is
            # reported.
            os.fsync(self._file)
            file, self._file = self._file, -1
            os.close(file)
            os.replace(self._temporary, self._target)
            self._temporary = ""
            self._sync_folder()

    def _sync_folder(self) -> None:
        try:
            os.fsync(self._folder)
        except OSError as error:
            # Some network file systems cannot do this for a folder and say so by EINVAL; the file is complete all the
            # same.
            if error.errno != errno.EINVAL:
                raise

    def _write_at(self, offset: int, content: memoryview) -> None:
        with self._file_system_errors():
            while content:
                # One call may write less than asked: on a signal, or when the disk is nearly full.
                n_bytes = os.pwrite(self._file, content, offset)
                content, offset = content[n_bytes:], offset + n_bytes

    def _release(self) -> None:
        """Closes the open files and removes the temporary file, if it has not become the file."""
        self._staging = bytearray()
        file, folder, temporary = self._file, self._folder, self._temporary
        self._file, self._folder, self._temporary = -1, -1, ""
        # Ignored, because an error here would hide the original error.
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if folder >= 0:
            os.close(folder)

    def _refuse_what_is_no_file(self) -> None:
        try:
            mode = os.stat(self._target).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            # Replacing the path would put a file in the place of a device, for example /dev/null.
            raise CheckpointError("exists and is no regular file", where=self.path, fix="save under another name")

    @contextlib.contextmanager
    def _file_system_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the file of {self.total_bytes} bytes cannot be written: {error.strerror}",
                where=self.path,
                fix=_FIX_OF_ERRNO.get(error.errno, "look at the file system there, or save elsewhere"),
            ) from error


def _pieces(tensor: torch.Tensor, limit_elems: int) -> Iterator[torch.Tensor]:
    """Views that make up ``tensor`` in row-major order, each of at most ``limit_elems`` elements. Nothing is copied,
    not even for strided tensors.
    """
    if tensor.numel() <= limit_elems:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(limit_elems)
    else:
        row_elems = tensor.numel() // tensor.shape[0]
        for rows in tensor.split(max(1, limit_elems // row_elems)):
            yield from _pieces(rows if row_elems <= limit_elems else rows[0], limit_elems)
