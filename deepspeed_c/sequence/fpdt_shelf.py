"""Holds chunks of a long sequence in page-locked host memory or in a file while they are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from deepspeed_c.config.offload import Aio
from deepspeed_c.offload.swap import SwapSettings
from deepspeed_c.recompute.stash import StashFile, copies_between

__all__ = ["Shelf", "ShelvedChunk"]


class ShelvedChunk:
    """One tensor on a shelf."""

    __slots__ = ("__weakref__", "_release", "away", "coming", "dtype", "here", "leaving", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.here: torch.Tensor | None = tensor  # the tensor before it is moved out, and after it is back
        self.away: Any = None  # the buffer in host memory, or the range of the file
        self.leaving: Any = None  # the transfer out, while it is under way
        self.coming: Any = None  # the transfer back, while it is under way
        self._release: Callable[[], None] | None = None

    def goes_by(self, release: Callable[[], None]) -> None:
        """release: called when the chunk is freed."""
        self._release = release

    def __del__(self) -> None:
        if self._release is not None:
            self._release()


class Shelf:
    """Holds the chunks of one call while they wait. If chunks are asked for in order, each is brought back before it is
    used. The device then holds two: the chunk in use and the next chunk.

    folder: the folder of the file; None: chunks wait in host memory. Nothing moves if the host computes and there is no
    file. copies_of: makes the object for copies between a device and the host. Raises ConfigError where the folder
    cannot be used, OffloadError where the device is full, AioError where the device fails.
    """

    def __init__(
        self,
        device: torch.device,
        folder: str | None = None,
        copies_of: Callable[[torch.device], Any] = copies_between,
    ) -> None:
        self._copies = copies_of(device)
        self._file = None if folder is None else StashFile(folder, SwapSettings.of(Aio()))
        self._device = device
        self._last: ShelvedChunk | None = None

    @property
    def _moves(self) -> bool:
        return self._copies is not None or self._file is not None

    def put(self, tensor: torch.Tensor) -> ShelvedChunk:
        """Keep ``tensor``, which must not change. It is moved out while the next chunk is computed."""
        chunk = ShelvedChunk(tensor)
        if self._moves:
            self._finish_leaving()
            self._start_leaving(chunk)
            self._last = chunk
        return chunk

    def _finish_leaving(self) -> None:
        chunk, self._last = self._last, None
        if chunk is not None:
            self._has_gone(chunk)

    def _start_leaving(self, chunk: ShelvedChunk) -> None:
        tensor = chunk.here
        n_bytes = tensor.numel() * tensor.element_size()
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        if self._file is None:
            chunk.away = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
            chunk.leaving = self._copies.down(flat, chunk.away)
            return
        offset = self._file.take(n_bytes, "a chunk of attention")
        chunk.goes_by(_GivesBack(self._file, offset, n_bytes))
        buffer = self._file.new_buffer(n_bytes, self._device)
        buffer[:n_bytes].copy_(flat)
        chunk.away = offset
        chunk.leaving = self._file.write(offset, buffer)

    def _has_gone(self, chunk: ShelvedChunk) -> None:
        leaving, chunk.leaving = chunk.leaving, None
        if leaving is None:
            return
        if self._file is None:
            leaving.synchronize()
        else:
            self._file.wait(leaving)
        chunk.here = None

    def _start_coming(self, chunk: ShelvedChunk) -> None:
        if not self._moves or chunk.coming is not None or chunk.leaving is not None or chunk.here is not None:
            return
        if self._file is None:
            chunk.coming = self._copies.up(chunk.away)
        else:
            n_bytes = chunk.shape.numel() * chunk.dtype.itemsize
            chunk.coming = self._file.read(chunk.away, self._file.new_buffer(n_bytes, self._device))

    def get(self, chunk: ShelvedChunk) -> torch.Tensor:
        """The chunk, on its original device. It stays on the shelf, and may be asked for again."""
        if chunk.here is not None:
            return chunk.here
        self._start_coming(chunk)
        coming, chunk.coming = chunk.coming, None
        if self._file is None:
            return self._copies.arrive(coming).view(chunk.dtype).view(chunk.shape)
        n_bytes = chunk.shape.numel() * chunk.dtype.itemsize
        self._file.wait(coming)
        return coming.buffer[:n_bytes].view(chunk.dtype).view(chunk.shape).to(self._device)

    def walk(self, rows: Iterable[tuple[ShelvedChunk, ...]]) -> Iterator[list[torch.Tensor]]:
        """Yield the chunks of each row. The chunks of the next row are brought back meanwhile."""
        todo = iter(rows)
        row = next(todo, None)
        while row is not None:
            found = [self.get(chunk) for chunk in row]
            row = next(todo, None)
            for chunk in row or ():
                self._start_coming(chunk)
            yield found
            del found


class _GivesBack:
    """Frees a chunk's range of the file."""

    def __init__(self, file: StashFile, offset: int, n_bytes: int) -> None:
        self._file, self._offset, self._n_bytes = file, offset, n_bytes

    def __call__(self) -> None:
        self._file.give(self._offset, self._n_bytes)
