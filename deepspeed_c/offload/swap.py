"""Tensors that live in a file while they are not in use. They are read ahead of their use and written back while the
computation goes on (ZeRO-Infinity, arXiv 2104.07857, section 5.2).

A tensor is *away* while its values are only in the file. It stays the same object with the same shape and dtype, but
all its elements are NaN, so that an unplanned use is visible. ``bring`` reads a tensor into a buffer before its use,
and ``send`` writes it to the file afterwards. Buffers are reused, so that no new pages of memory are needed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.config.offload import Aio
from deepspeed_c.errors import AioError, ConfigError, OffloadError
from deepspeed_c.logging import logger
from deepspeed_c.ops import flat
from deepspeed_c.ops.aio import PinnedPool, as_aio_error, unnamed_file
from deepspeed_c.zero.states.home import Tagged

__all__ = ["PAGE_BYTES", "SwapFile", "SwapSettings", "Swapper", "reserve", "whole_pages"]

PAGE_BYTES = _C.aio_alignment()


def whole_pages(n_bytes: int) -> int:
    """The bytes that ``n_bytes`` take in the file and in a buffer: whole pages."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class SwapSettings(NamedTuple):
    """Settings of transfers. The fields are the configuration keys of these names."""

    backend: str = "auto"
    block_size: int = 1 << 20
    queue_depth: int = 32
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    checksum: bool = False
    pipeline_read: bool = True
    pipeline_write: bool = True

    @classmethod
    def of(cls, aio: Aio) -> SwapSettings:
        """The settings of transfers from the section ``aio`` of a configuration."""
        return cls(**{name: getattr(aio, name) for name in cls._fields if hasattr(aio, name)})


class _Extent:
    """A tensor's place in the file. ``buffer`` holds the tensor's values while it is in memory."""

    __slots__ = ("buffer", "crcs", "dtype", "is_away", "n_bytes", "name", "offset", "piece_bytes", "read", "shape")

    def __init__(self, tagged: Tagged, offset: int, n_bytes: int) -> None:
        tensor = tagged.tensor
        self.name, self.offset, self.n_bytes = tagged.name, offset, n_bytes
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.piece_bytes = tagged.piece_elems * tensor.element_size() or n_bytes
        self.crcs: dict[int, int] = {}  # CRC of each piece by the piece's first byte
        self.buffer: torch.Tensor | None = None
        self.read: _Read | None = None  # a running read of the whole extent
        self.is_away = False

    @property
    def n_pieces(self) -> int:
        return -(-self.n_bytes // self.piece_bytes)

    def in_file(self, at: int, n_bytes: int) -> int:
        """The bytes to transfer for ``n_bytes`` from ``at`` on. The last transfer of an extent includes the rest of its
        page, because a direct transfer needs whole pages. The rest of the page belongs to the extent."""
        is_last = at % PAGE_BYTES == 0 and at + n_bytes == self.n_bytes
        return whole_pages(n_bytes) if is_last else n_bytes

    def pieces(self, begin: int = 0, n_bytes: int | None = None) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of each piece that begins in the given range."""
        end = self.n_bytes if n_bytes is None else begin + n_bytes
        return ((at, min(self.piece_bytes, self.n_bytes - at)) for at in range(begin, end, self.piece_bytes))


class _Write(NamedTuple):
    request: int
    extent: _Extent
    tensor: weakref.ref[torch.Tensor] | None  # None: the request writes one piece of a tensor
    data: torch.Tensor  # the bytes to write; the tensor was a view of them
    buffer: torch.Tensor  # from the pool; the data is at its beginning
    group: int  # number of the ``send`` that the request belongs to


@dataclass
class _Read:
    """A read of bytes of an extent. ``request`` is None after the read has ended, and ``buffer`` is None if it has
    failed."""

    extent: _Extent
    at: int  # first byte within the extent
    n_bytes: int
    buffer: torch.Tensor | None
    request: int | None


def reserve(folder: str, n_bytes: int, where: str) -> int:
    """Makes a file of ``n_bytes`` without a name in ``folder`` and returns its descriptor. The space is freed when this
    process ends, however it ends.

    Raises ConfigError if the folder cannot be written to or has too little space.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be used: {error.strerror}", where=where, fix="name a folder on the NVMe device"
        ) from error
    try:
        return unnamed_file(folder, n_bytes)
    except AioError as error:
        fix = "free space there, or name another folder; every rank of a node needs as much"
        raise ConfigError(f"{folder}: {error.what}", where=where, fix=fix) from error


def _crc(tensor: torch.Tensor, begin: int, n_bytes: int) -> int:
    """The CRC of ``n_bytes`` bytes of a tensor's memory from byte ``begin`` on."""
    return _C.crc32c((ctypes.c_char * n_bytes).from_address(tensor.data_ptr() + begin))


class SwapFile:
    """A file, the I/O handle that moves bytes to and from it, and the pool of buffers in memory.

    descriptor: the file's descriptor (see ``reserve``), which this object closes. folder: the file's folder, for
    messages.
    """

    device = torch.device("cpu")

    def __init__(self, descriptor: int, settings: SwapSettings, folder: str = "") -> None:
        self.settings, self.folder = settings, folder
        try:
            with as_aio_error():
                self._file = _C.AioFile(f"/proc/self/fd/{descriptor}", _C.AIO_READ | _C.AIO_WRITE)
                self._engine = _C.AioEngine(
                    settings.backend,
                    settings.block_size,
                    settings.queue_depth,
                    settings.intra_op_parallelism,
                    settings.single_submit,
                    settings.overlap_events,
                    True,
                )
        finally:
            os.close(descriptor)  # the file is open a second time by now, in an object that always closes it
        self._pool = PinnedPool((1 << 63) - 1)

    @property
    def buffer_bytes(self) -> int:
        """Host memory that buffers take."""
        return self._pool.held_bytes

    @property
    def has_given_up(self) -> bool:
        """Whether the I/O engine no longer knows when the kernel has finished with a buffer."""
        return self._engine.has_given_up

    def new_buffer(self, n_bytes: int) -> torch.Tensor:
        """A buffer uint8 [n_bytes] that begins at a page boundary and has undefined contents."""
        return self._pool.new_tensor(n_bytes, torch.uint8)

    def start_read(self, offset: int, buffer: torch.Tensor, n_bytes: int) -> int:
        """Starts to read into the beginning of ``buffer``. Returns a request number for ``wait``."""
        return self._engine.submit_read(self._file, offset, buffer.data_ptr(), n_bytes, buffer)

    def start_write(self, offset: int, data: torch.Tensor, n_bytes: int, buffer: torch.Tensor) -> int:
        """Starts to write ``n_bytes`` from the beginning of ``data``, which lies in ``buffer``. Returns a request
        number for ``wait``."""
        return self._engine.submit_write(self._file, offset, data.data_ptr(), n_bytes, buffer)

    def wait(self, request: int) -> int:
        """Waits for a request and returns the number of bytes that were moved."""
        return self._engine.wait(request)

    def is_done(self, request: int) -> bool:
        """Whether ``wait`` would return or raise without waiting."""
        return self._engine.poll(request)

    def trim(self, idle_bytes: int) -> None:
        """Frees all buffers that are not in use, if they take more than ``idle_bytes``."""
        if self._pool.held_bytes - self._pool.used_bytes > idle_bytes:
            self._pool = PinnedPool((1 << 63) - 1)  # buffers in use hold the old pool

    def close(self) -> None:
        self._engine.close()
        try:
            self._file.close()
        except (OSError, RuntimeError) as error:  # the file has no name: nothing can be lost
            logger.warning("the swap file in %s: %s", self.folder, error)


class Swapper:
    """Moves tensors between one file and host memory.

    Args:
        file: the file, which this object closes. It grows beyond the reserved size if needed.
        n_buffers: the most groups of tensors that have buffers at a time (a group is the argument of ``bring``). One
        group is in use, one is being read, and the others are being written.

    Raises AioError if a transfer fails, and OffloadError if the checksum of read bytes is wrong. If the write of a
    tensor fails, the tensor stays in memory.
    """

    def __init__(self, file: SwapFile, *, n_buffers: int = 4) -> None:
        self.folder, self.settings, self._file = file.folder, file.settings, file
        self._is_closed = False
        self._free_buffers: list[torch.Tensor] = []
        self._extents: dict[int, _Extent] = {}  # by id of the tensor, while the tensor exists
        self._finalizers: dict[int, weakref.finalize] = {}
        self._free_space: dict[int, list[int]] = {}  # offsets by size
        self._end = 0
        self._writes: deque[_Write] = deque()  # in the order of their starts
        self._group = 0  # groups that were sent
        self._n_buffers = n_buffers
        self._max_groups_out = max(n_buffers - 2, 1) if self.settings.pipeline_write else 0
        self._ahead: list[list[_Extent]] = []  # groups that are being read
        self._nan: dict[torch.dtype, torch.Tensor] = {}

    def is_away(self, tensor: torch.Tensor) -> bool:
        extent = self._extents.get(id(tensor))
        return extent is not None and extent.is_away

    @property
    def buffer_bytes(self) -> int:
        """Host memory that buffers take."""
        return self._file.buffer_bytes

    def _stand_in(self, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        one = self._nan.get(dtype)
        if one is None:
            # Integer dtypes (codes of quantised states) have no NaN, so their largest number is used.
            value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
            one = self._nan[dtype] = torch.full((), value, dtype=dtype, device=self._file.device)
        return one.expand(shape)

    def _extent_of(self, tagged: Tagged) -> _Extent:
        tensor = tagged.tensor
        extent = self._extents.get(id(tensor))
        if extent is None:
            n_bytes = tensor.numel() * tensor.element_size()
            size = whole_pages(n_bytes)
            spare = self._free_space.get(size)
            if spare:
                offset = spare.pop()
            else:
                offset, self._end = self._end, self._end + size
            extent = self._extents[id(tensor)] = _Extent(tagged, offset, n_bytes)
            self._finalizers[id(tensor)] = weakref.finalize(tensor, self._forget, id(tensor))
        return extent

    def new_zeros(self, shape: torch.Size, dtype: torch.dtype, name: str, piece_elems: int = 0) -> torch.Tensor:
        """A tensor of zeros. It has a buffer until it is sent. A tensor of several pieces is away from the beginning,
        so that the whole of it is never in memory."""
        n_bytes = shape.numel() * dtype.itemsize
        if n_bytes == 0:
            return torch.zeros(shape, dtype=dtype, device=self._file.device)
        if 0 < piece_elems < shape.numel():
            return self._new_zeros_away(shape, dtype, name, piece_elems)
        buffer = self._take_buffer(n_bytes)
        tensor = buffer.narrow(0, 0, n_bytes).view(dtype).view(shape)
        flat.zero_([tensor])
        self._extent_of(Tagged(tensor, name)).buffer = buffer
        return tensor

    def _new_zeros_away(self, shape: torch.Size, dtype: torch.dtype, name: str, piece_elems: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._file.device)
        tensor.data = self._stand_in(dtype, shape)
        extent = self._extent_of(Tagged(tensor, name, piece_elems))
        extent.is_away = True
        self._settle(extent)
        for at, n_bytes in extent.pieces():
            buffer = self._take_buffer(n_bytes)
            flat.zero_([buffer])
            self._start_write(extent, at, n_bytes, buffer, buffer)
            self._group += 1
            self._limit_writes()
        return tensor

    def _forget(self, key: int) -> None:
        """Called when a tensor has been freed: its place in the file may be used again. A running write to this place
        still ends before another one begins (``_settle``)."""
        extent = self._extents.pop(key, None)
        self._finalizers.pop(key, None)
        if extent is not None:
            self._free_space.setdefault(whole_pages(extent.n_bytes), []).append(extent.offset)

    def _take_buffer(self, n_bytes: int) -> torch.Tensor:
        size = whole_pages(max(n_bytes, 1))
        fitting = [b for b in self._free_buffers if size <= b.numel() <= 2 * size]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free_buffers = [b for b in self._free_buffers if b is not best]
            return best
        return self._file.new_buffer(size)

    def _give_buffer(self, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            self._free_buffers.append(buffer)

    def prefetch(self, tensors: Iterable[Tagged]) -> None:
        """Starts to read the ``tensors`` of a group that are away. If there are too few buffers, it waits for writes of
        earlier groups."""
        extents = [self._extents.get(id(tagged.tensor)) for tagged in tensors]
        extents = [extent for extent in extents if extent is not None and extent.is_away and extent.read is None]
        if not extents:
            return
        self._ahead = [group for group in self._ahead if any(extent.read is not None for extent in group)]
        self._ahead.append(extents)
        is_in_use = any(extent.buffer is not None for extent in self._extents.values())
        self._limit_writes(self._n_buffers - is_in_use - len(self._ahead))
        for extent in extents:
            self._settle(extent)
            extent.read = self._start_read(extent, 0, extent.n_bytes)

    def bring(self, tensors: Sequence[Tagged], *, reads: bool = True) -> None:
        """Gives ``tensors`` buffers. On return they hold the values that were sent; without ``reads`` their values are
        undefined."""
        extents = [self._extents.get(id(tagged.tensor)) for tagged in tensors]
        started = [extent is not None and extent.read is not None for extent in extents]
        if reads:
            self.prefetch(tensors)
        for tagged, extent, was_ahead in zip(tensors, extents, started):
            if extent is not None and extent.is_away:
                if extent.read is not None:
                    try:
                        self._finish_read(extent)
                    except (AioError, OffloadError) as error:
                        # Without ``reads`` the result of a read ahead does not matter. With ``reads`` a failed read
                        # ahead is tried again, because the cause may have been removed since.
                        if reads and not was_ahead:
                            raise
                        if reads:
                            logger.warning("a read ahead failed and is tried again: %s", error)
                            self.prefetch([tagged])
                            self._finish_read(extent)
                if extent.buffer is None:
                    extent.buffer = self._take_buffer(extent.n_bytes)
                tagged.tensor.data = self._view(extent.buffer, extent)
                extent.is_away = False

    def _finish_read(self, extent: _Extent) -> None:
        read, extent.read = extent.read, None
        self._wait_for(read)
        extent.buffer = read.buffer

    def _start_read(self, extent: _Extent, at: int, n_bytes: int) -> _Read:
        buffer = self._take_buffer(n_bytes)
        with as_aio_error():
            request = self._file.start_read(extent.offset + at, buffer, extent.in_file(at, n_bytes))
        return _Read(extent, at, n_bytes, buffer, request)

    def _wait_for(self, read: _Read) -> None:
        if read.request is None:
            return
        request, read.request = read.request, None
        try:
            with as_aio_error():
                n_done = self._file.wait(request)
            self._check(read.extent, read.at, read.n_bytes, n_done, read.buffer)
        except (AioError, OffloadError):
            # If the kernel may still write to the buffer, the buffer is not used again.
            if not self._file.has_given_up:
                self._give_buffer(read.buffer)
            read.buffer = None
            raise

    def _give_up(self, read: _Read) -> None:
        """Drops a read ahead that is no longer needed. Waits for the transfer to end, and then frees its buffer."""
        try:
            self._wait_for(read)
        except (AioError, OffloadError) as error:
            logger.warning("a read ahead that is of no use any more failed: %s", error)
        self._give_buffer(read.buffer)

    def _check(self, extent: _Extent, begin: int, n_bytes: int, n_done: int, buffer: torch.Tensor) -> None:
        """Raises OffloadError if ``buffer`` does not hold the bytes that were written to the extent from byte ``begin``
        on (whole pieces)."""
        if n_done < n_bytes:
            raise OffloadError(
                f"{extent.name}: the swap file ends after {n_done} of its {n_bytes} bytes at offset {extent.offset + begin}",
                where=self.folder,
                fix="something has made the file shorter; load a checkpoint",
            )
        for at, n in extent.pieces(begin, n_bytes) if extent.crcs else ():
            if extent.crcs[at] != _crc(buffer, at - begin, n):
                raise OffloadError(
                    f"{extent.name}: its {n} bytes at offset {extent.offset + at} are not those that were written",
                    where=self.folder,
                    fix="the device or its memory is failing: load a checkpoint, and use another device",
                )

    @staticmethod
    def _view(buffer: torch.Tensor, extent: _Extent) -> torch.Tensor:
        return buffer.narrow(0, 0, extent.n_bytes).view(extent.dtype).view(extent.shape)

    def stream(self, tensors: Sequence[Tagged]) -> Generator[list[torch.Tensor], None, None]:
        """Yields the pieces of tensors that are away: a list of the first piece of each tensor, then a list of the
        second pieces, and so on. Pieces are flat and in memory. When the next pieces are asked for, the present ones
        are written back with their changes. Meanwhile later pieces are read and earlier pieces are written. The tensors
        stay away, and must have equally many pieces.

        Close the generator if it is not exhausted. The pieces that it yielded last are not written then.
        """
        self.send(tensors)  # some may be in memory after a failed write
        extents = [self._extents[id(tagged.tensor)] for tagged in tensors]
        for extent in extents:
            if extent.read is not None:
                self._give_up(extent.read)
                extent.read = None
            self._settle(extent)
        n_pieces = extents[0].n_pieces
        to_read = [extent.pieces() for extent in extents]
        reads: deque[list[_Read]] = deque()
        n_asked = 0
        try:
            for index in range(n_pieces):
                while n_asked < min(index + 1 + self.settings.pipeline_read, n_pieces):
                    reads.append([self._start_read(extent, *next(pieces)) for extent, pieces in zip(extents, to_read)])
                    n_asked += 1
                for read in reads[0]:
                    self._wait_for(read)
                yield [read.buffer.narrow(0, 0, read.n_bytes).view(read.extent.dtype) for read in reads[0]]
                self._group += 1
                for read in reads.popleft():
                    self._start_write(read.extent, read.at, read.n_bytes, read.buffer, read.buffer)
                self._limit_writes()
        finally:
            for read in (read for group in reads for read in group):
                self._give_up(read)

    def send(self, tensors: Sequence[Tagged]) -> None:
        """Starts to write ``tensors``, which are away from now on. If more groups are being written than the limit
        allows, it waits for the oldest."""
        self._group += 1
        for tagged in tensors:
            tensor = tagged.tensor
            if tensor.numel() == 0:
                continue
            extent = self._extent_of(tagged)
            if extent.is_away:
                continue
            data, buffer = tensor.data, extent.buffer
            if buffer is not None and data.data_ptr() != buffer.data_ptr():
                self._give_buffer(buffer)  # the tensor's data was replaced
                buffer = None
            self._settle(extent)
            if buffer is None and extent.n_pieces > 1:
                self._send_pieces(extent, data)
                tensor.data, extent.is_away = self._stand_in(extent.dtype, extent.shape), True
                continue
            if buffer is None:
                # The data is copied to a buffer that begins at a page boundary. Otherwise the I/O engine would copy it
                # to memory of its own, which it keeps.
                buffer = self._take_buffer(extent.n_bytes)
                data = self._view(buffer, extent).copy_(data)
            self._start_write(extent, 0, extent.n_bytes, data, buffer, tensor)
            tensor.data = self._stand_in(extent.dtype, extent.shape)
            extent.buffer, extent.is_away = None, True
        self._limit_writes()

    def _send_pieces(self, extent: _Extent, data: torch.Tensor) -> None:
        """Writes a whole extent from memory that is not a buffer, and waits for the write. If it fails, ``data`` is
        still there."""
        data = data.reshape(-1).view(torch.uint8)
        for at, n_bytes in extent.pieces():
            buffer = self._take_buffer(n_bytes)
            buffer.narrow(0, 0, n_bytes).copy_(data.narrow(0, at, n_bytes))
            self._start_write(extent, at, n_bytes, buffer, buffer)
            self._group += 1
            self._limit_writes()
        self._settle(extent)

    def _start_write(
        self,
        extent: _Extent,
        at: int,
        n_bytes: int,
        data: torch.Tensor,
        buffer: torch.Tensor,
        tensor: torch.Tensor | None = None,
    ) -> None:
        """Starts to write ``data`` to whole pieces of an extent, from byte ``at`` on. ``tensor``: given if ``data`` is
        all of the tensor."""
        if self.settings.checksum:
            extent.crcs |= {first: _crc(data, first - at, n) for first, n in extent.pieces(at, n_bytes)}
        with as_aio_error():
            request = self._file.start_write(extent.offset + at, data, extent.in_file(at, n_bytes), buffer)
        whole = None if tensor is None else weakref.ref(tensor)
        self._writes.append(_Write(request, extent, whole, data, buffer, self._group))

    def _limit_writes(self, n_out: int | None = None) -> None:
        """Waits for the oldest writes until at most ``n_out`` groups are being written. The default leaves buffers for
        a group in use and a group that is being read."""
        n_out = self._max_groups_out if n_out is None else min(max(n_out, 0), self._max_groups_out)
        while self._writes and self._group - self._writes[0].group >= n_out:
            self._finish_write(self._writes.popleft())

    def let_go(self, tensors: Sequence[Tagged]) -> None:
        """Frees the buffers of ``tensors`` without writing, for tensors that were only read. They are away afterwards."""
        for tagged in tensors:
            extent = self._extents.get(id(tagged.tensor))
            if extent is None or extent.is_away or extent.buffer is None:
                continue
            self._give_buffer(extent.buffer)
            tagged.tensor.data = self._stand_in(extent.dtype, extent.shape)
            extent.buffer, extent.is_away = None, True

    def _finish_write(self, write: _Write) -> None:
        try:
            with as_aio_error():
                self._file.wait(write.request)
        except AioError as error:
            tensor, extent = write.tensor and write.tensor(), write.extent
            if tensor is not None and extent.is_away and extent.read is None:
                # The bytes of the failed write are still in memory, so nothing is lost.
                tensor.data, extent.buffer, extent.is_away = write.data, write.buffer, False
            raise OffloadError(
                f"{extent.name} could not be written: {error.what}", where=self.folder, fix=error.fix
            ) from error
        self._give_buffer(write.buffer)

    def _settle(self, extent: _Extent) -> None:
        """Waits for running writes to the extent's place in the file."""
        while any(write.extent.offset == extent.offset for write in self._writes):
            self._finish_write(self._writes.popleft())

    def wait(self) -> None:
        """Waits until everything that was sent is in the file."""
        while self._writes:
            self._finish_write(self._writes.popleft())

    def close(self) -> None:
        """Stops all transfers and closes the file. Tensors that are away are lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._file.close()
        self._writes.clear()
        for finalizer in list(self._finalizers.values()):
            finalizer.detach()
        self._extents.clear()
        self._finalizers.clear()
        self._free_buffers.clear()
