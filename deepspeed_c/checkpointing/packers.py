"""How the inputs of a recomputed layer are kept: cut over tensor-parallel ranks, in host memory, in one arena."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_c.checkpointing.compare import digest
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.logging import logger

__all__ = ["Arena", "HostPacker", "ShardPacker", "is_activation"]

_ALIGNMENT_BYTES = 64


def is_activation(item: Any, n_ranks: int = 1) -> bool:
    """Whether ``item`` is a tensor that may be kept in another form: of floating point, with an element for each rank,
    and without the mark ``no_checkpointing``.
    """
    return (
        torch.is_tensor(item)
        and item.is_floating_point()
        and item.numel() >= max(n_ranks, 1)
        and not getattr(item, "no_checkpointing", False)
    )


def slice_elems(numel: int, n_ranks: int) -> int:
    """Elements of each rank's slice; the last ones may have fewer."""
    return math.ceil(numel / n_ranks)


def own_range(numel: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """(begin, number) of the elements that a rank keeps."""
    size = slice_elems(numel, n_ranks)
    begin = min(rank * size, numel)
    return begin, min(size, numel - begin)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Arena:
    """One piece of memory for all that is kept between a forward and its backward, as large as the first of them was
    found to need.

    What it has no room for (another forward is in flight, or a longer one) lies on its own, and counts for the next
    plan. It is used anew when everything has been given back.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._used_bytes = self._wanted_bytes = self._n_lent = 0
        self._lock = threading.Lock()  # graphs die in any thread
        self.n_outside = 0
        """How often there was no room, since the process began."""

    @property
    def n_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        n_bytes = math.ceil(numel * dtype.itemsize / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        with self._lock:
            self._n_lent += 1
            self._wanted_bytes += n_bytes
            begin = self._used_bytes
            if self._buffer is not None and self._buffer.device == device and begin + n_bytes <= self.n_bytes:
                self._used_bytes += n_bytes
                return self._buffer[begin : begin + numel * dtype.itemsize].view(dtype)
            self.n_outside += 1
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, device: torch.device) -> None:
        with self._lock:
            self._n_lent -= 1
            if self._n_lent:
                return
            if self._wanted_bytes > self.n_bytes:
                self._buffer = None  # before its successor
                self._buffer = torch.empty(self._wanted_bytes, dtype=torch.uint8, device=device)
            self._used_bytes = self._wanted_bytes = 0

    def clear(self) -> None:
        """Frees it, unless something lies in it."""
        with self._lock:
            if not self._n_lent:
                self._buffer = None


class _Kept:
    """What is kept of one tensor, and how to have it again."""

    __slots__ = ("__weakref__", "_arena", "device", "flat", "numel", "shape", "source", "stride", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.source, self.version = weakref.ref(tensor), tensor._version
        self.shape, self.numel, self.device = tensor.shape, tensor.numel(), tensor.device
        self.stride = tensor.stride() if _is_dense(tensor) else None
        self.flat: torch.Tensor | None = None
        self._arena: Arena | None = None

    def elements_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """All elements in the order of their memory."""
        if self.stride is None:
            return tensor.detach().reshape(-1)
        return tensor.detach().as_strided((self.numel,), (1,))

    def keep(self, values: torch.Tensor, *, arena: Arena | None, on_host: bool) -> None:
        """Copies ``values``."""
        device = torch.device("cpu") if on_host else values.device
        if on_host and values.device.type != "cpu":
            self.flat = torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
        elif arena is None:
            self.flat = torch.empty(values.numel(), dtype=values.dtype, device=device)
        else:
            self.flat = arena.take(values.numel(), values.dtype, device)
            self._arena = arena
        # The caching allocators of the device and of page-locked memory both know of copies under way on this stream.
        self.flat.copy_(values, non_blocking=True)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)

    def __del__(self) -> None:
        if self._arena is not None:
            self._arena.give_back(self.flat.device)


class _KeptBefore:
    """What a packer has kept and somebody still holds: a tensor that many layers get is kept once."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()

    def find(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], _Kept]) -> _Kept:
        kept = self._kept.get(id(tensor))
        if kept is None or kept.source() is not tensor or kept.version != tensor._version:
            self._kept[id(tensor)] = kept = make(tensor)
        return kept


class ShardPacker:
    """Keeps this rank's part of each activation. Tensor-parallel ranks hold the same ones, and gather them again."""

    def __init__(self, comm: Collectives | None, *, arena: Arena | None, on_host: bool) -> None:
        self._comm, self._arena, self._on_host = comm, arena, on_host
        self._n_ranks = 1 if comm is None else comm.world_size
        self._rank = 0 if comm is None else comm.rank
        self._memory = _KeptBefore()
        self._has_gathered = False

    def pack(self, tensor: torch.Tensor) -> _Kept | None:
        if not is_activation(tensor, self._n_ranks) or isinstance(tensor, torch.nn.Parameter):
            return None
        return self._memory.find(tensor, self._cut)

    def _cut(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        flat = kept.elements_of(tensor)
        if not self._has_gathered:
            self._check(tensor, flat)
        kept.keep(
            flat.narrow(0, *own_range(kept.numel, self._rank, self._n_ranks)), arena=self._arena, on_host=self._on_host
        )
        return kept

    def _check(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        """In the first forward: ranks have the same values. Collective."""
        if self._comm is None or self._n_ranks == 1:
            return
        digests = self._comm.gather_numbers(digest(flat), label="checksums of partitioned activations")
        if len(set(digests)) > 1:
            raise RankMismatchError(
                f"an activation of shape {tuple(tensor.shape)} has checksums {digests} on the ranks"
                f" {self._comm.global_ranks}",
                where='"partition_activations"',
                fix="give tensor-parallel ranks the same inputs and random numbers, mark what differs with"
                " tensor.no_checkpointing = True, or set partition_activations to false",
            )

    def unpack(self, kept: _Kept) -> torch.Tensor:
        self._has_gathered = True
        size = slice_elems(kept.numel, self._n_ranks)
        flat = torch.empty(size * self._n_ranks, dtype=kept.flat.dtype, device=kept.device)
        begin, numel = own_range(kept.numel, self._rank, self._n_ranks)
        flat.narrow(0, begin, numel).copy_(kept.flat, non_blocking=True)
        if self._n_ranks > 1:
            self._comm.all_gather(flat, label="partitioned activations").wait()
        return kept.shaped(flat[: kept.numel])


class HostPacker:
    """Keeps activations of an accelerator in page-locked host memory."""

    def __init__(self) -> None:
        self._memory = _KeptBefore()
        self._has_said = False

    def pack(self, tensor: torch.Tensor) -> _Kept | None:
        if tensor.device.type == "cpu":
            if not self._has_said:
                self._has_said = True
                logger.info('"cpu_checkpointing": the activations are in host memory already; nothing is moved')
            return None
        if not is_activation(tensor) or isinstance(tensor, torch.nn.Parameter):
            return None
        return self._memory.find(tensor, self._move)

    @staticmethod
    def _move(tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        kept.keep(kept.elements_of(tensor), arena=None, on_host=True)
        return kept

    def unpack(self, kept: _Kept) -> torch.Tensor:
        return kept.shaped(kept.flat.to(kept.device, non_blocking=True))
