"""Keeps the inputs of recomputed layers in host memory and in a file until the backward.

In the forward, each call passes its inputs in. The inputs of the newest call stay in place, because the backward begins
there. When the next call passes its inputs in, earlier inputs move *out* during the computation: the first
``max_in_cpu`` bytes to host memory, and the rest to the file. On a machine that computes in host memory, inputs that
count for ``max_in_cpu`` stay where they are. The backward needs the inputs in reverse order, so inputs of earlier calls
are read ahead.

At any time the inputs of at most one call are on their way out, and the inputs of one to three calls on their way in.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.errors import AioError, OffloadError
from deepspeed_c.logging import logger
from deepspeed_c.offload.swap import SwapFile, SwapSettings, reserve, whole_pages
from deepspeed_c.ops.aio import as_aio_error, reserve_space
from deepspeed_c.recompute.counters import Counters, LayerCalls, LayerFigures

__all__ = ["NVME_PATH", "Stash", "StashFile", "Stashed"]

NVME_PATH = "activation_checkpointing.offload.nvme_path"
MAX_AHEAD = 3
# The I/O engine starts transfers only when it is called, so its queue must hold all transfers under way.
_QUEUE_DEPTH = 1024
_FIRST_BYTES = 64 << 20
_MOST_GROWTH = 1 << 30


class _Space:
    """The free ranges of the file. Takes the first range that fits; adjacent free ranges are merged."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, bytes), in order
        self.end = 0

    def take(self, size: int) -> int | None:
        """The offset of ``size`` free bytes; None where no free range has as many."""
        for i, (offset, n_bytes) in enumerate(self._free):
            if n_bytes >= size:
                self._free[i : i + 1] = [(offset + size, n_bytes - size)] if n_bytes > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        i = bisect.bisect(self._free, (offset, size))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset, before = self._free.pop(i - 1)
            size, i = size + before, i - 1
        self._free.insert(i, (offset, size))

    def grow(self, n_bytes: int) -> None:
        self.end += n_bytes
        self.give(self.end - n_bytes, n_bytes)

    def missing(self, size: int) -> int:
        """The number of bytes by which the file has to grow to have room for ``size`` bytes in one range."""
        return size - (self._free[-1][1] if self._free and sum(self._free[-1]) == self.end else 0)


class _Transfer(NamedTuple):
    request: int
    buffer: torch.Tensor
    begin_ns: int


class StashFile:
    """A file without a name in ``folder``: its free ranges, its transfers, and the memory of these transfers.

    most_ahead: number of calls whose inputs are read before they are asked for. Raises ConfigError where the folder
    cannot be used, or has no room at the start.
    """

    def __init__(self, folder: str, settings: SwapSettings, most_ahead: int = MAX_AHEAD) -> None:
        self.folder, self.checksum, self._n_buffers = folder, settings.checksum, most_ahead + 2
        descriptor = reserve(folder, _FIRST_BYTES, NVME_PATH)
        self._descriptor = os.dup(descriptor)  # for growing the file
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)
        self._swap = SwapFile(descriptor, settings._replace(queue_depth=_QUEUE_DEPTH), folder)
        self._space = _Space()
        self._space.grow(_FIRST_BYTES)
        self.used_bytes = self._largest = 0

    @property
    def n_bytes(self) -> int:
        """Bytes that the file takes on the device."""
        return self._space.end

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory for transfers."""
        return self._swap.buffer_bytes

    def take(self, n_bytes: int, label: str) -> int:
        """The offset of ``n_bytes`` free bytes. Raises OffloadError with both numbers of bytes where the device is
        full.
        """
        size = whole_pages(n_bytes)
        offset = self._space.take(size)
        if offset is None:
            self._grow_for(size, n_bytes, label)
            offset = self._space.take(size)
        self.used_bytes += size
        return offset

    def _grow_for(self, size: int, n_bytes: int, label: str) -> None:
        missing = self._space.missing(size)
        generous = max(missing, min(self._space.end, _MOST_GROWTH))
        problem: AioError | None = None
        try:
            for wanted in dict.fromkeys((generous, missing)):
                try:
                    reserve_space(self._descriptor, self._space.end, wanted, self.folder)
                except AioError as error:
                    problem = error
                else:
                    self._space.grow(wanted)
                    return
            raise OffloadError(
                f"no room for the inputs of {label} ({n_bytes} bytes) beside the {self.used_bytes} that wait there:"
                f" {problem.what}",
                where=f"{NVME_PATH}: {self.folder}",
                fix='free space there, name another folder, or keep more in memory by "max_in_cpu"',
            ) from problem
        finally:
            # The error and the stack frame that names it refer to each other. Without this line the forward's tensors,
            # and their ranges of the file, would wait for the garbage collector.
            del problem

    def give(self, offset: int, n_bytes: int) -> None:
        self.used_bytes -= whole_pages(n_bytes)
        self._space.give(offset, whole_pages(n_bytes))

    def new_buffer(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor of whole pages. For an accelerator, its copies reach this memory directly (page-locked
        memory).
        """
        if device.type != "cpu":
            return torch.empty(whole_pages(n_bytes), dtype=torch.uint8, pin_memory=True)
        self._largest = max(self._largest, whole_pages(n_bytes))
        self._swap.trim(self._n_buffers * self._largest)
        return self._swap.new_buffer(whole_pages(n_bytes))

    def write(self, offset: int, buffer: torch.Tensor) -> _Transfer:
        with as_aio_error():
            return _Transfer(
                self._swap.start_write(offset, buffer, buffer.numel(), buffer), buffer, time.perf_counter_ns()
            )

    def read(self, offset: int, buffer: torch.Tensor) -> _Transfer:
        with as_aio_error():
            return _Transfer(self._swap.start_read(offset, buffer, buffer.numel()), buffer, time.perf_counter_ns())

    def is_done(self, transfer: _Transfer) -> bool:
        with as_aio_error():
            return self._swap.is_done(transfer.request)

    def wait(self, transfer: _Transfer) -> int:
        """Waits for ``transfer``, and returns the number of bytes moved."""
        with as_aio_error():
            return self._swap.wait(transfer.request)

    def trim(self) -> None:
        """Frees memory that no transfer uses."""
        self._swap.trim(0)

    def close(self) -> None:
        self._swap.close()
        self._close_descriptor()


def _crc(buffer: torch.Tensor, n_bytes: int) -> int:
    return _C.crc32c((ctypes.c_char * n_bytes).from_address(buffer.data_ptr()))


class Stashed:
    """Some elements of one tensor, in memory or in the file. Their memory and their range of the file are released with
    this object.
    """

    __slots__ = (
        "__weakref__",
        "_stash",
        "call",
        "coming",
        "copy",
        "crc",
        "device",
        "dtype",
        "host",
        "is_counted",
        "is_shared",
        "label",
        "n_bytes",
        "number",
        "offset",
        "read",
        "values",
        "write",
    )

    def __init__(self, stash: Stash, number: int, call: int, label: str, values: torch.Tensor) -> None:
        self._stash, self.number, self.call, self.label = stash, number, call, label
        self.dtype, self.device, self.n_bytes = values.dtype, values.device, values.nbytes
        self.values: torch.Tensor | None = values
        self.host: torch.Tensor | None = None  # copy of the values in host memory, uint8
        self.copy: Any = None  # the transfer to ``host``, while it is under way
        self.is_counted = False  # whether the bytes count for host memory
        self.is_shared = False  # whether several calls have these inputs; ``call`` is the newest of them
        self.offset: int | None = None  # of the range in the file
        self.crc: int | None = None
        self.write: _Transfer | None = None
        self.read: _Transfer | None = None
        self.coming: Any = None  # the transfer from ``host`` to the device

    @property
    def is_in_file(self) -> bool:
        """Whether the values have to be read from the file before they can be used."""
        return self.values is None and self.host is None

    def __del__(self) -> None:
        # This may run anywhere, even within a method of the stash. So it only leaves a note for the stash's next
        # method.
        self._stash.forget(self)


class _Left(NamedTuple):
    """The remains of a freed tensor."""

    number: int
    n_counted: int
    offset: int | None
    n_bytes: int
    transfers: tuple[_Transfer, ...]


class Stash:
    """Keeps inputs of layers between forward and backward.

    calls: gives the numbers of calls. file: None where all inputs go to host memory. max_in_cpu: bytes that stay in
    host memory before the file is used. counters: count the copies and the waits. copies_of: makes the object for
    copies between a device and the host. most_ahead: number of calls whose inputs are read before they are asked for.

    Any thread may call the methods. They raise OffloadError, which names the layer, where a transfer fails or a
    checksum of read bytes is wrong. Afterwards stashed inputs can still be dropped, and the next forward works.
    """

    def __init__(
        self,
        calls: LayerCalls,
        file: StashFile | None,
        max_in_cpu: int = 0,
        counters: Counters | None = None,
        copies_of: Callable[[torch.device], Any] | None = None,
        most_ahead: int = MAX_AHEAD,
    ) -> None:
        self._most_ahead = most_ahead
        self._calls, self._file, self._max_in_cpu, self._counters = calls, file, max_in_cpu, counters
        self._copies_of, self._copies = copies_of or copies_between, {}
        self._lock = threading.RLock()  # for autograd's threads, and for destructors that run within a method
        self._n = self._n_counted = 0
        self._alive: dict[int, weakref.ref[Stashed]] = {}
        self._out: list[int] = []  # numbers of the inputs to bring back, in order
        self._newest: dict[int, weakref.ref[Stashed]] = {}  # inputs in place; a later call sends them out
        self._leaving: list[weakref.ref[Stashed]] = []  # inputs that are being copied or written
        self._left: deque[_Left] = deque()
        self._busy: list[_Left] = []
        self._n_ahead = 1
        self.written_bytes = self.read_bytes = 0

    def takes(self, device: torch.device) -> bool:
        """Whether the stash keeps tensors of ``device`` in another place than their own."""
        return device.type != "meta" and (self._file is not None or self._copies_for(device) is not None)

    @property
    def file_bytes(self) -> int:
        """Bytes of inputs that wait in the file now."""
        with self._lock:
            self._settle()
            return 0 if self._file is None else self._file.used_bytes

    @property
    def in_cpu_bytes(self) -> int:
        """Bytes that count for host memory."""
        with self._lock:
            self._settle()
            return self._n_counted

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory for transfers."""
        return 0 if self._file is None else self._file.buffer_bytes

    def _copies_for(self, device: torch.device) -> Any:
        if device not in self._copies:
            self._copies[device] = self._copies_of(device)
        return self._copies[device]

    def _figures(self, stashed: Stashed) -> LayerFigures:
        return LayerFigures() if self._counters is None else self._counters.of(stashed.label)

    def put(self, values: torch.Tensor) -> Stashed:
        """Keeps ``values`` (flat, dense) as an input of the call that this thread is in. ``values`` must not change
        afterwards.
        """
        with self._lock:
            self._settle()
            self._n += 1
            stashed = Stashed(self, self._n, self._calls.number, self._calls.label, values)
            self._alive[stashed.number] = weakref.ref(stashed)
            self._make_newest(stashed)
        return stashed

    def touch(self, stashed: Stashed, values: torch.Tensor | None) -> None:
        """Makes ``stashed`` an input of this thread's current call as well. values: its values, if the caller has them."""
        with self._lock:
            self._settle()
            stashed.is_shared |= stashed.call != self._calls.number
            stashed.call = self._calls.number
            if stashed.values is None and values is not None:
                stashed.values = values
            if stashed.values is not None:
                self._make_newest(stashed)

    def _make_newest(self, stashed: Stashed) -> None:
        self._newest.pop(stashed.number, None)
        self._newest[stashed.number] = weakref.ref(stashed)
        self._send_older(stashed.call)

    def _send_older(self, call: int) -> None:
        """Sends out the inputs of all calls except ``call``."""
        older = [each for ref in self._newest.values() if (each := ref()) is not None and each.call != call]
        if older:
            self._finish_leaving()  # transfers that are under way have had the time of a whole layer
        for each in older:
            del self._newest[each.number]
            self._send_out(each)
        self._newest = {number: ref for number, ref in self._newest.items() if ref() is not None}

    def pass_by(self) -> None:
        """Notes that this thread is in a call whose inputs do not go to the stash. Earlier inputs are then sent out
        without waiting for further inputs.
        """
        with self._lock:
            self._settle()
            if not self._newest:
                self._finish_leaving()
            self._send_older(self._calls.number)

    def probe(self, n_bytes: int, device: torch.device) -> tuple[int, int]:
        """Moves ``n_bytes`` bytes of ``device`` out and back. Returns (average nanoseconds of one way, nanoseconds of
        copying by the computing thread). Raises OffloadError where a transfer fails.
        """
        with self._lock:
            self._settle()
            copies = self._copies_for(device)
            values = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
            if self._file is None:
                buffer = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
            else:
                buffer = self._file.new_buffer(n_bytes, device)
            begin = time.perf_counter_ns()
            here = buffer.narrow(0, 0, n_bytes)
            if copies is None:
                here.copy_(values)
            else:
                copies.down(values, here).synchronize()
            copied = time.perf_counter_ns()
            if self._file is not None:
                self._probe_file(buffer, n_bytes)
            if copies is not None:
                copies.arrive(copies.up(here))[-1:].cpu()  # waits for the copy
            end = time.perf_counter_ns()
        spent = copied - begin if copies is None else 0
        return (end - begin - spent) // 2, spent

    def _probe_file(self, buffer: torch.Tensor, n_bytes: int) -> None:
        offset = self._file.take(n_bytes, "the budget's probe")
        try:
            self._file.wait(self._file.write(offset, buffer))
            self._file.wait(self._file.read(offset, buffer))
        except AioError as error:
            raise OffloadError(
                f"{n_bytes} bytes could not be written and read: {error.what}",
                where=f"{NVME_PATH}: {self._file.folder}",
                fix=error.fix or 'mend the device, name another folder, or set "device" to "none"',
            ) from error
        finally:
            self._file.give(offset, n_bytes)

    def _send_out(self, stashed: Stashed) -> None:
        if stashed.offset is not None or stashed.host is not None:
            stashed.values = None  # a copy is out already
            return
        if stashed.is_counted:
            return
        copies = self._copies_for(stashed.device)
        stays = self._file is None or self._n_counted + stashed.n_bytes <= self._max_in_cpu
        if stays:
            self._n_counted += stashed.n_bytes
            stashed.is_counted = True
            if copies is None:
                return
        figures, begin = self._figures(stashed), time.perf_counter_ns()
        n_bytes = stashed.n_bytes
        if self._file is None:
            buffer = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=stashed.device.type != "cpu")
        else:
            offset = None if stays else self._file.take(n_bytes, stashed.label)
            buffer = self._file.new_buffer(n_bytes, stashed.device)
            stashed.offset = offset
        source = stashed.values.view(torch.uint8)
        if copies is None:
            buffer.narrow(0, 0, n_bytes).copy_(source)
        else:
            stashed.copy = copies.down(source, buffer.narrow(0, 0, n_bytes))
        stashed.host, stashed.values = buffer, None
        figures.move(n_bytes, time.perf_counter_ns() - begin)
        if stashed.offset is None:
            bisect.insort(self._out, stashed.number)
        elif stashed.copy is None:
            self._start_write(stashed)
        if stashed.copy is not None or stashed.write is not None:
            self._leaving.append(weakref.ref(stashed))

    def _start_write(self, stashed: Stashed) -> None:
        if self._file.checksum:
            stashed.crc = _crc(stashed.host, stashed.n_bytes)
        try:
            stashed.write = self._file.write(stashed.offset, stashed.host)
        except AioError as error:
            raise self._not_written(stashed, error) from error
        self.written_bytes += stashed.n_bytes

    def _not_written(self, stashed: Stashed, error: AioError) -> OffloadError:
        """Frees the range of the file for ``stashed``, which is still in memory, and returns the error to raise."""
        self._give_place(stashed)
        return OffloadError(
            f"the inputs of {stashed.label} could not be written: {error.what}",
            where=f"{NVME_PATH}: {self._file.folder}",
            fix=error.fix or 'mend the device, name another folder, or set "device" to "none"',
        )

    def _give_place(self, stashed: Stashed) -> None:
        if stashed.offset is not None:
            self._file.give(stashed.offset, stashed.n_bytes)
            stashed.offset = None

    def _end_copy(self, stashed: Stashed) -> None:
        """Waits until the bytes are in host memory. If they have a range of the file, starts to write them there."""
        if stashed.copy is not None:
            begin = time.perf_counter_ns()
            stashed.copy.synchronize()
            stashed.copy = None
            self._figures(stashed).wait(time.perf_counter_ns() - begin)
            if stashed.offset is not None:
                self._start_write(stashed)

    def _end_write(self, stashed: Stashed) -> None:
        transfer, stashed.write = stashed.write, None
        if transfer is None:
            return
        begin = time.perf_counter_ns()
        try:
            self._file.wait(transfer)
        except AioError as error:
            raise self._not_written(stashed, error) from error
        finally:
            self._figures(stashed).wait(time.perf_counter_ns() - begin)

    def _finish_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for i, ref in enumerate(leaving):
            stashed = ref()
            if stashed is None:
                continue
            try:
                if stashed.copy is not None:
                    self._end_copy(stashed)
                    if stashed.write is not None:
                        self._leaving.append(ref)
                    continue
                self._end_write(stashed)
            except OffloadError:
                self._leaving += leaving[i + 1 :]
                raise
            self._is_in_file_now(stashed)

    def _is_in_file_now(self, stashed: Stashed) -> None:
        if stashed.offset is not None and stashed.host is not None:
            stashed.host = None
            bisect.insort(self._out, stashed.number)

    def get(self, stashed: Stashed) -> torch.Tensor:
        """The values of ``stashed``, flat, on their device. The inputs of earlier calls are read ahead.

        The caller may change the result if ``stashed.values`` is None afterwards.
        """
        with self._lock:
            self._settle()
            if stashed.is_in_file and stashed.read is None:
                self._start_read(stashed)
            if not stashed.is_shared:
                self._read_ahead(stashed.call, stashed.number)
            if stashed.values is not None:
                return stashed.values
            if stashed.host is None:
                return self._up(stashed, self._finish_read(stashed))
            self._end_copy(stashed)
            self._end_write(stashed)
            buffer = stashed.host
            self._is_in_file_now(stashed)
            return self._up(stashed, buffer)

    def _up(self, stashed: Stashed, buffer: torch.Tensor) -> torch.Tensor:
        copies = self._copies_for(stashed.device)
        if copies is None:
            return buffer.narrow(0, 0, stashed.n_bytes).view(stashed.dtype)
        coming, stashed.coming = stashed.coming, None
        return copies.arrive(coming or copies.up(buffer.narrow(0, 0, stashed.n_bytes))).view(stashed.dtype)

    def _start_read(self, stashed: Stashed) -> None:
        buffer = self._file.new_buffer(stashed.n_bytes, stashed.device)
        try:
            stashed.read = self._file.read(stashed.offset, buffer)
        except AioError as error:
            raise self._not_read(stashed, error.what, error.fix) from error
        self.read_bytes += stashed.n_bytes

    def _read_ahead(self, call: int, number: int) -> None:
        """Starts to bring back the inputs of the ``_n_ahead`` calls before ``call``."""
        seen: set[int] = set()
        for i in range(bisect.bisect_left(self._out, number) - 1, -1, -1):
            ref = self._alive.get(self._out[i])
            stashed = None if ref is None else ref()
            if stashed is None or stashed.call >= call:
                continue
            seen.add(stashed.call)
            if len(seen) > self._n_ahead:
                return
            if not stashed.is_in_file:
                self._come_up(stashed)
            elif stashed.read is None:
                self._start_read(stashed)

    def _come_up(self, stashed: Stashed) -> None:
        """Starts the copy of ``stashed`` from host memory to its device."""
        copies = self._copies_for(stashed.device)
        if copies is not None and stashed.copy is None and stashed.coming is None and stashed.values is None:
            stashed.coming = copies.up(stashed.host.narrow(0, 0, stashed.n_bytes))

    def _finish_read(self, stashed: Stashed) -> torch.Tensor:
        figures, begin = self._figures(stashed), time.perf_counter_ns()
        try:
            is_late = not self._file.is_done(stashed.read)
            if is_late:
                self._n_ahead = min(self._n_ahead + 1, self._most_ahead)
            transfer, stashed.read = stashed.read, None
            n_done = self._file.wait(transfer)
        except AioError as error:
            stashed.read = None
            raise self._not_read(stashed, error.what, error.fix) from error
        finally:
            figures.wait(time.perf_counter_ns() - begin)
        if n_done < stashed.n_bytes:
            raise self._not_read(
                stashed, f"the file ends after {n_done} of {stashed.n_bytes} bytes at offset {stashed.offset}", ""
            )
        if stashed.crc is not None and (found := _crc(transfer.buffer, stashed.n_bytes)) != stashed.crc:
            raise self._not_read(
                stashed,
                f"the {stashed.n_bytes} bytes at offset {stashed.offset} have checksum {found:#010x}, and had"
                f" {stashed.crc:#010x} when they were written",
                "the device or its memory is failing: use another one",
            )
        return transfer.buffer

    def _not_read(self, stashed: Stashed, what: str, fix: str) -> OffloadError:
        return OffloadError(
            f"the inputs of {stashed.label} could not be read: {what}",
            where=f"{NVME_PATH}: {self._file.folder}",
            fix=fix or 'mend the device, name another folder, or set "device" to "none"',
        )

    def forget(self, stashed: Stashed) -> None:
        """Notes the remains of ``stashed``, which is being freed."""
        transfers = tuple(each for each in (stashed.write, stashed.read) if each is not None)
        n_counted = stashed.n_bytes if stashed.is_counted else 0
        self._left.append(_Left(stashed.number, n_counted, stashed.offset, stashed.n_bytes, transfers))

    def _settle(self) -> None:
        """Frees the ranges of freed tensors in the file, as soon as no transfer uses them."""
        while self._left:
            left = self._left.popleft()
            self._alive.pop(left.number, None)
            self._n_counted -= left.n_counted
            i = bisect.bisect_left(self._out, left.number)
            if i < len(self._out) and self._out[i] == left.number:
                self._out.pop(i)
            if left.offset is not None:
                self._busy.append(left)
        if self._busy:
            self._busy = [left for left in self._busy if not self._is_free_now(left)]

    def _is_free_now(self, left: _Left) -> bool:
        if not all(self._file.is_done(transfer) for transfer in left.transfers):
            return False
        for transfer in left.transfers:
            try:
                self._file.wait(transfer)
            except AioError as error:
                logger.warning("a transfer of activations that nobody needs any more failed: %s", error)
        self._file.give(left.offset, left.n_bytes)
        return True

    def clear(self) -> None:
        """Frees memory that no transfer uses."""
        if self._file is not None:
            self._file.trim()

    def close(self) -> None:
        """Closes the file if no inputs are left. Otherwise the file goes with the last of them."""
        with self._lock:
            self._settle()
            if self._file is not None and not any(ref() is not None for ref in self._alive.values()):
                self._file.close()
                self._file = None
                self._busy = []


class _SideCopies:
    """Copies between an accelerator and page-locked memory, on a separate stream beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Starts a copy to the host. Returns an event; the host must wait for it before it reads ``target``."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        return self._stream.record_event()

    def up(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Starts to copy bytes to the device; ``arrive`` takes the result."""
        with self._module.stream(self._stream):
            return source.to(self._device, non_blocking=True), self._stream.record_event()

    def arrive(self, coming: tuple[torch.Tensor, Any]) -> torch.Tensor:
        """The bytes on the device. All computation from now on may use them."""
        found, event = coming
        current = self._module.current_stream(self._device)
        current.wait_event(event)
        found.record_stream(current)
        return found


def copies_between(device: torch.device) -> _SideCopies | None:
    """The object for copies between ``device`` and the host; None where the host computes."""
    return None if device.type == "cpu" else _SideCopies(device)
