"""Reads tensors from files and writes tensors to files asynchronously: DeepSpeed's ``aio_handle`` over the engine of
``dsc/aio.h``, and a pool of locked buffers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.errors import AioError, FeatureError, StateError
from deepspeed_c.ops.build_questions import BuildQuestions

__all__ = ["AsyncIOBuilder", "PinnedPool", "aio_handle", "as_aio_error", "backends", "reserve_space", "unnamed_file"]

_NO_BUDGET = (1 << 63) - 1
_VALIDATE_BYTES = 16 << 20
_FIXES = {
    errno.ENOSPC: "free space there, or name another folder",
    errno.EDQUOT: "free space there, or name another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name another folder",
    errno.ENODATA: "read no more than was written; the file may be incomplete",
    errno.EIO: "the device failed; the kernel's log says how",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


class AioBackend(NamedTuple):
    """An I/O backend of this build."""

    name: str
    is_usable: bool  # whether this kernel allows it now
    reason: str  # why it is not usable; "" if it is


def backends() -> list[AioBackend]:
    """The backends in the order that "auto" tries them."""
    return [AioBackend(*entry) for entry in _C.aio_backends()]


def unnamed_file(folder: str, n_bytes: int) -> int:
    """Creates a file without a name in ``folder``, reserves ``n_bytes`` for it, and returns its descriptor. However the
    process ends, the file's space is freed.

    Raises `AioError`, with the errno and the numbers, if ``folder`` cannot be written to or has too little free space.
    """
    try:
        descriptor = _open_unnamed(folder)
    except OSError as error:
        fix = "name a folder that exists and that you may write to"
        raise _error(f"no file can be made there: {error.strerror}", folder, None, None, error.errno, fix) from error
    try:
        reserve_space(descriptor, 0, n_bytes, folder)
    except AioError:
        os.close(descriptor)
        raise
    return descriptor


def reserve_space(descriptor: int, begin: int, n_bytes: int, folder: str) -> None:
    """Reserves ``n_bytes`` from ``begin`` on for an open file in ``folder``.

    Raises `AioError`, with the errno and both numbers, if not enough space is free.
    """
    # The free space is checked first, because filling the device, even for a moment, can hurt other programs.
    room = os.fstatvfs(descriptor)
    n_free = room.f_bavail * room.f_frsize
    try:
        if n_bytes > n_free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if n_bytes:
            os.posix_fallocate(descriptor, begin, n_bytes)
    except OSError as error:
        numbers = f"{n_bytes} bytes ({n_bytes / 2**30:.2f} GiB) cannot be reserved, {n_free} ({n_free / 2**30:.2f} GiB) are free"
        fix = "free space there, name another folder, or ask for less"
        raise _error(f"{numbers}: {error.strerror}", folder, None, n_bytes, error.errno, fix) from error


def _open_unnamed(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # A kernel without unnamed files gives EISDIR, a file system without them EOPNOTSUPP.
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise error from None
    descriptor, path = tempfile.mkstemp(prefix=".deepspeed_c.", dir=folder)
    os.unlink(path)
    return descriptor


class PinnedPool:
    """Gives out host tensors on page-aligned, locked memory (never swapped out), of exact sizes and within a budget.

    When the last view of a tensor is gone, its memory returns to the pool and is kept for the next tensor of the same
    size. If ``RLIMIT_MEMLOCK`` does not allow locking, the memory is aligned but not locked.

    Args:
        budget_bytes: the most that the pool holds at once, in bytes.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._pool = _C.PinnedPool(budget_bytes)
        self._buffers: weakref.WeakValueDictionary[int, _C.PinnedBuffer] = weakref.WeakValueDictionary()

    def new_tensor(self, n_elems: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of shape ``[n_elems]`` with undefined contents.

        Raises MemoryError, with the numbers, if the tensor does not fit the budget.
        """
        if n_elems < 0:
            raise ValueError(f"n_elems is {n_elems}, must not be negative")
        if n_elems == 0:
            return torch.empty(0, dtype=dtype)
        buffer = self._pool.take(n_elems * dtype.itemsize)
        tensor = torch.frombuffer(buffer, dtype=dtype, count=n_elems)
        self._buffers[tensor.data_ptr()] = buffer
        return tensor

    def forget(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` starts a buffer of this pool; if so, the pool treats it as an ordinary tensor from now."""
        return self._buffers.pop(tensor.data_ptr(), None) is not None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` starts a buffer of this pool."""
        return tensor.data_ptr() in self._buffers

    @property
    def used_bytes(self) -> int:
        """Bytes that tensors use, in whole pages."""
        return self._pool.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes in use or kept for the next tensor of their size."""
        return self._pool.held_bytes


class _Memory(NamedTuple):
    """The memory that a tensor had when its transfer was submitted, even if the tensor later gets other memory
    (``tensor.data = other``).
    """

    storage: torch.UntypedStorage  # keeps the memory alive as long as this object
    storage_address: int  # address of the first byte, until the storage is resized
    offset: int  # bytes
    n_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        offset, n_bytes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
        return cls(storage, storage.data_ptr(), offset, n_bytes)

    @property
    def address(self) -> int:
        return self.storage_address + self.offset

    def is_where_it_was(self) -> bool:
        storage = self.storage
        return storage.data_ptr() == self.storage_address and storage.nbytes() >= self.offset + self.n_bytes

    def flat(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return empty.set_(self.storage, self.offset, (self.n_bytes,))


class _Pending(NamedTuple):
    id: int
    memory: _Memory
    verb: str
    path: str
    file_offset: int
    validate: bool


class aio_handle:
    """Reads tensors from files and writes tensors to files at the disk's speed. Each transfer is complete and checked.
    The interface is DeepSpeed's.

    Tensors are contiguous and on the CPU, of any dtype, alignment and size; a file may be larger than its tensor, and
    is never truncated. A tensor belongs to the handle from an ``async_`` call until ``wait``. Any thread may call the
    handle, which serves one thread at a time.

    The handle keeps a tensor's memory until ``wait``. So the tensor may be dropped or pointed at other memory
    (``tensor.data = other``, ``set_``): the transfer goes on with the old memory. The handle cannot keep the memory if
    the storage itself is resized, by ``tensor.resize_`` to more bytes or ``untyped_storage().resize_``: a read then
    writes to memory that may belong to another object. ``wait`` raises `StateError` if it detects such a resize.

    A handle belongs to the process that made it. In a child of ``fork`` (a worker of a DataLoader) every method that
    transfers or waits raises `StateError`; make another handle there. In the child, dropping or closing the parent's
    handle does nothing, and transfers in flight go on in the parent.

    Every method that transfers raises `AioError` when the transfer, or opening the file, fails, and ValueError or
    `FeatureError` for a tensor that it cannot take. No transfer is short: a read beyond the end of the file raises
    `AioError`.

    Args:
        block_size: bytes of the longest single transfer.
        queue_depth: transfers in flight.
        single_submit: hand transfers to the kernel one by one.
        overlap_events: start new transfers while others are in flight, not batch by batch.
        intra_op_parallelism: scales the workers of the backend "threads"; the kernel's queues need none.
        backend: "uring", "libaio", "threads", "sync", or "auto": the first of these that the kernel allows.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        backend: str = "auto",
    ) -> None:
        self._engine = _C.AioEngine(
            backend, block_size, queue_depth, intra_op_parallelism, single_submit, overlap_events, True
        )
        self._block_size, self._queue_depth, self._intra_op_parallelism = block_size, queue_depth, intra_op_parallelism
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._pending: list[_Pending] = []
        self._pinned = PinnedPool(_NO_BUDGET)

    @property
    def backend(self) -> str:
        """The backend in use; never "auto"."""
        return self._engine.backend

    def get_block_size(self) -> int:
        """Bytes."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Transfers in flight."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Whether transfers are handed to the kernel one by one."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Whether new transfers are started while others are in flight."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """The value that the constructor got."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Alignment in bytes: tensors and file offsets that are multiples of it are transferred without a copy.

        Other tensors and offsets may need a copy.
        """
        return _C.aio_alignment()

    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Fills ``buffer`` from ``filename`` at ``file_offset`` bytes; returns 1."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Writes ``buffer`` to ``filename`` at ``file_offset`` bytes; returns 1."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Starts to fill ``buffer`` from ``filename`` at ``file_offset`` bytes; returns 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str] | int, file_offset: int = 0) -> int:
        """Starts to write ``buffer`` to ``filename`` (a path, or the descriptor of an open file) at ``file_offset``
        bytes; returns 0.
        """
        return self.pwrite(buffer, filename, False, True, file_offset)

    def read(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool = False, file_offset: int = 0
    ) -> int:
        """Like `sync_pread`. With ``validate`` the tensor is also compared with the result of a plain read."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool = False, file_offset: int = 0
    ) -> int:
        """Like `sync_pwrite`. With ``validate`` the tensor is also compared with the result of a plain read."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike[str],
        validate: bool = False,
        async_: bool = False,
        file_offset: int = 0,
        **options: bool,
    ) -> int:
        """Reads: at once (returns 1), or with ``async_`` until `wait` (returns 0).

        DeepSpeed's keyword ``async`` is taken too.
        """
        return self._transfer("read", buffer, filename, validate, _async_of(async_, options), file_offset)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike[str] | int,
        validate: bool = False,
        async_: bool = False,
        file_offset: int = 0,
        **options: bool,
    ) -> int:
        """Writes: at once (returns 1), or with ``async_`` until `wait` (returns 0).

        DeepSpeed's keyword ``async`` is taken too.
        """
        return self._transfer("write", buffer, filename, validate, _async_of(async_, options), file_offset)

    def wait(self) -> int:
        """Waits for all transfers that were started with ``async`` and returns their number.

        If some fail, it still waits for all of them, and then raises the error of the failed transfer that was started
        first.
        """
        with as_aio_error():
            self._engine.check_process()
        pending, self._pending = self._pending, []
        errors: list[AioError] = []
        misuses: list[StateError] = []
        for request in pending:
            try:
                self._finish(request)
            except AioError as error:
                errors.append(error)
            except StateError as error:
                misuses.append(error)
        if misuses:  # raised first, because it is the worst error: a read may have written to other objects' memory
            raise misuses[0]
        if len(errors) > 1:
            first = errors[0]
            what = f"{first.what}; {len(errors) - 1} other transfers failed too"
            raise _error(what, first.filename, first.offset, first.n_bytes, first.errno) from first
        if errors:
            raise errors[0]
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of shape ``[num_elem]`` and of the example's dtype on page-aligned, locked memory."""
        return self._pinned.new_tensor(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was made by `new_cpu_locked_tensor`.

        Its memory is freed when the last view of it is gone.
        """
        return self._pinned.forget(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the memory is locked, by `new_cpu_locked_tensor` or by torch."""
        return self._pinned.has(buffer) or buffer.is_pinned()

    def close(self) -> None:
        """Cancels transfers that have not been started, and waits for the rest.

        Deleting the handle does the same. Does nothing in a forked process.
        """
        self._engine.close()
        self._pending = []

    def _transfer(
        self,
        verb: str,
        tensor: torch.Tensor,
        filename: str | os.PathLike[str] | int,
        validate: bool,
        is_async: bool,
        file_offset: int,
    ) -> int:
        _check_tensor(verb, tensor)
        path = f"/proc/self/fd/{filename}" if isinstance(filename, int) else os.fspath(filename)
        flags = _C.AIO_READ if verb == "read" else _C.AIO_WRITE | _C.AIO_CREATE
        with as_aio_error():
            file = _C.AioFile(path, flags)
            submit = self._engine.submit_read if verb == "read" else self._engine.submit_write
            memory = _Memory.of(tensor)
            request_id = submit(file, file_offset, memory.address, memory.n_bytes, memory.storage)
        request = _Pending(request_id, memory, verb, path, file_offset, validate)
        if is_async:
            self._pending.append(request)
            return 0
        self._finish(request)
        return 1

    def _finish(self, request: _Pending) -> None:
        n_bytes = request.memory.n_bytes
        with as_aio_error():
            n_done = self._engine.wait(request.id)
        if not request.memory.is_where_it_was():
            where_to = (
                "memory that may be somebody else's by now was written"
                if request.verb == "read"
                else "the file may hold any bytes"
            )
            raise StateError(
                f"the storage of a tensor was resized while a {request.verb} of {n_bytes} bytes at offset {request.file_offset} was on its way: {where_to}",
                where=request.path,
                fix="wait() before tensor.resize_() and untyped_storage().resize_()",
            )
        if n_done != n_bytes:
            raise _error(
                f"the file ends {n_bytes - n_done} bytes short of a read of {n_bytes} bytes at offset {request.file_offset}",
                request.path,
                request.file_offset,
                n_bytes,
                errno.ENODATA,
            )
        if request.validate:
            _compare_with_file(request, n_bytes)


class AsyncIOBuilder(BuildQuestions):
    """Replaces DeepSpeed's builder of this operator, which is compiled already."""

    NAME = "async_io"

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name

    def load(self, verbose: bool = True) -> type[AsyncIOBuilder]:
        """The class itself, which has ``aio_handle`` as an attribute."""
        return type(self)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Always True: the backends "threads" and "sync" need no kernel feature."""
        return True

    aio_handle = aio_handle


def _async_of(async_: bool, options: dict[str, bool]) -> bool:
    is_async = options.pop("async", async_)
    if options:
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(options))}")
    return is_async


def _check_tensor(verb: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise FeatureError(
            f"a tensor on {tensor.device} cannot be transferred",
            where=f"aio_handle.{verb}",
            fix="copy through a CPU tensor (new_cpu_locked_tensor makes one that is fast to copy)",
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"aio_handle.{verb}: a tensor of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride()) if tensor.layout == torch.strided else tensor.layout} is not contiguous; "
            f"{verb} tensor.contiguous()"
        )


def _error(
    what: str, path: str, offset: int | None, n_bytes: int | None, number: int, fix: str | None = None
) -> AioError:
    fix = _FIXES.get(number, "") if fix is None else fix
    return AioError(what, where=path, fix=fix, path=path, offset=offset, n_bytes=n_bytes, errno=number)


@contextlib.contextmanager
def as_aio_error() -> Iterator[None]:
    """Turns exceptions of ``_C``'s files and engines into an `AioError` that says which transfer failed and why, or a
    `StateError` (closed, forked).
    """
    try:
        yield
    except OSError as error:
        failure = _C.aio_last_failure()
        offset, n_bytes = (failure[name] if failure[name] >= 0 else None for name in ("offset", "n_bytes"))
        span = "" if offset is None else f" of {n_bytes} bytes at offset {offset}"
        reason = f"{os.strerror(failure['errno'])} (errno {failure['errno']})"
        what = f"{failure['verb']}{span} failed: {reason}"
        raise _error(what, failure["path"], offset, n_bytes, failure["errno"]) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # NotImplementedError is a subclass
            raise
        raise StateError(str(error)) from error


def _compare_with_file(request: _Pending, n_bytes: int) -> None:
    flat = request.memory.flat()
    with open(request.path, "rb") as file:
        file.seek(request.file_offset)
        for begin in range(0, n_bytes, _VALIDATE_BYTES):
            part = flat[begin : begin + _VALIDATE_BYTES]
            found = bytearray(file.read(part.numel()))
            if len(found) != part.numel() or not torch.equal(part, torch.frombuffer(found, dtype=torch.uint8)):
                raise _error(
                    f"the {part.numel()} bytes at offset {request.file_offset + begin} are not those of the tensor",
                    request.path,
                    request.file_offset,
                    n_bytes,
                    errno.EIO,
                )
