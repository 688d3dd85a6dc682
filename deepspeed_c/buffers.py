"""A pool of buffers that are lent repeatedly, so that a step allocates no memory."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["Allocate", "BufferPool", "ordinary_memory"]

Allocate = Callable[[int, torch.device], torch.Tensor]
"""(bytes, device) -> an uninitialised tensor of this many bytes (torch.uint8), with its own storage."""

# Requests of nearly equal size share a buffer.
GRANULE_BYTES = 4096
# Time to wait for gloo's threads, which hold a buffer for some microseconds after they have reported the end of a
# transfer.
PATIENCE_SECONDS = 0.002
# Attribute of a lent tensor: the tensor of the whole buffer. Making it again from the storage would take longer than
# all else that a loan needs.
_WHOLE = "_dsc_whole"
# Attribute of the tensor of a whole buffer: (weak reference to their owner, views, references to the storage that they
# hold).
_VIEWS = "_dsc_views"


def ordinary_memory(n_bytes: int, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor from torch's allocator."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


class BufferPool:
    """Lends one-dimensional tensors of any dtype. A tensor is a view of the smallest free buffer that is large enough.

    The pool keeps as many buffers as were lent at the same time, each as large as the largest request that it served.
    If no free buffer is large enough, the largest free buffer is replaced by a larger buffer. The pool is not
    thread-safe.

    keeps: returns False for a device whose allocator itself caches memory. Buffers of such a device are freed when they
        are returned. By default the pool keeps all buffers.
    waits: views of a buffer may outlive the loan (held by autograd, or by a user). The pool then gives up the buffer to
        their holders.
    poison: fills lent memory with NaN, so that a test notices reads before the first write.
    count: called with the number of bytes by which the pool's memory has grown or shrunk.
    allocate: the source of its memory.
    """

    def __init__(
        self,
        *,
        keeps: Callable[[torch.device], bool] = lambda device: True,
        waits: bool = False,
        poison: bool = False,
        count: Callable[[int], None] | None = None,
        allocate: Allocate = ordinary_memory,
    ) -> None:
        # Free buffers by device and length, because most requests repeat an earlier length.
        self._free: dict[tuple[torch.device, int], deque[torch.Tensor]] = {}
        self._keeps, self._waits, self._poison, self._count = keeps, waits, poison, count
        self._allocate = allocate
        self._alone = _use_count(torch.empty(1)) if waits and hasattr(torch._C, "_storage_Use_Count") else None
        self.n_bytes = 0

    @property
    def n_free(self) -> int:
        """Number of buffers that are kept and not lent."""
        return sum(map(len, self._free.values()))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor [numel]; ``give`` takes back this object."""
        n_bytes = numel * dtype.itemsize
        size = -(-max(n_bytes, 1) // GRANULE_BYTES) * GRANULE_BYTES
        buffer = self._find_exact(size, device)
        if buffer is None:
            buffer = self._find(n_bytes, device)
        if buffer is None or buffer.dtype != dtype:
            # The next borrower may record a graph, even if this borrower is in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                if buffer is None:
                    buffer = self._allocate(size, device)
                    self._grow(size)
                buffer = buffer.view(dtype)
        if self._poison:
            buffer.view(torch.uint8).fill_(0xFF)  # all bits 1 is a NaN in every floating-point dtype
        lent = buffer.as_strided((numel,), (1,))
        lent.__dict__[_WHOLE] = buffer
        return lent

    def views(
        self, lent: torch.Tensor, owner: object, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return ``make(lent)``, which makes views of ``lent``. An ``owner`` that is lent the same bytes again, with no
        other owner between, gets the same views again: hundreds of them take longer than a gather of small weights.

        The views stay with the buffer, and do not count as views that outlive a loan.
        """
        whole: torch.Tensor = lent.__dict__[_WHOLE]
        kept = whole.__dict__.get(_VIEWS)
        if kept is None or kept[0]() is not owner:
            whole.__dict__.pop(_VIEWS, None)
            n_before = _use_count(whole)
            # Views of ``lent`` itself would hold it, and it holds this attribute: the memory would never be freed.
            with torch.inference_mode(False):
                made = make(lent.data)
            kept = whole.__dict__[_VIEWS] = weakref.ref(owner), made, _use_count(whole) - n_before
        return kept[1]

    def _find_exact(self, size: int, device: torch.device) -> torch.Tensor | None:
        """The first free buffer of exactly this length that no view holds."""
        free = self._free.get((device, size), ())
        for i, buffer in enumerate(free):
            if not self._is_held(buffer):
                del free[i]
                return buffer
        return None

    def _find(self, n_bytes: int, device: torch.device) -> torch.Tensor | None:
        mine = [buffer for (where, _), free in self._free.items() if where == device for buffer in free]
        fitting = sorted(
            (buffer for buffer in mine if buffer.nbytes >= n_bytes),
            key=lambda buffer: (self._is_held(buffer), buffer.nbytes),
        )
        for buffer in fitting:
            self._remove(buffer)
            if self._becomes_free(buffer):
                return buffer
            self._grow(-buffer.nbytes)
        if mine and not fitting:
            largest = max(mine, key=lambda buffer: buffer.nbytes)
            self._remove(largest)
            self._grow(-largest.nbytes)
        return None

    def _is_held(self, buffer: torch.Tensor) -> bool:
        if self._alone is None:
            return False
        kept = buffer.__dict__.get(_VIEWS)
        return _use_count(buffer) != self._alone + (0 if kept is None else kept[2])

    def _becomes_free(self, buffer: torch.Tensor) -> bool:
        until = time.monotonic() + PATIENCE_SECONDS
        while (is_held := self._is_held(buffer)) and time.monotonic() < until:
            time.sleep(0)
        return not is_held

    def _remove(self, buffer: torch.Tensor) -> None:
        key = buffer.device, buffer.nbytes
        self._free[key] = deque(other for other in self._free[key] if other is not buffer)

    def _grow(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if self._count is not None:
            self._count(n_bytes)

    def give(self, tensor: torch.Tensor) -> None:
        """Takes back a tensor that ``take`` has lent."""
        whole: torch.Tensor = tensor.__dict__[_WHOLE]
        n_bytes, device = whole.nbytes, whole.device
        if not self._keeps(device) or (self._waits and self._alone is None):
            self._grow(-n_bytes)
            return
        free = self._free.get((device, n_bytes))
        if free is None:
            free = self._free[device, n_bytes] = deque()
        free.append(whole)

    def clear(self) -> None:
        """Frees the buffers that are not lent."""
        free, self._free = self._free, {}
        self._grow(-sum(size * len(buffers) for (_, size), buffers in free.items()))


def _use_count(tensor: torch.Tensor) -> int:
    """Number of references to the storage of ``tensor``; 0 in a torch that does not tell."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return 0
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
