"""Makes autograd save a reference to a gathered weight and not its data. The weight is gathered again when a backward
needs it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspeed_c.zero.weights.gather_unit import GatherUnit, PlacedShard
from deepspeed_c.zero.weights.param import state_of

__all__ = ["WeightPacker"]


class _Reference:
    """The object that autograd saves instead of a gathered weight, or instead of a view of it."""

    __slots__ = ("group", "offset", "shape", "stride")

    def __init__(self, group: GatherUnit, tensor: torch.Tensor) -> None:
        self.group = group
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class WeightPacker:
    """Packs tensors whose memory lies in a gathered unit. ``use``: makes a unit available."""

    def __init__(self, use: Callable[[GatherUnit], None]) -> None:
        self._use = use
        self._keeps_params = False
        # The gathered units and their memory, sorted by address, so that the unit at an address can be found.
        self._units: list[GatherUnit] = []
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: GatherUnit) -> None:
        """Called when ``unit`` has got a buffer."""
        begin = unit.buffer.data_ptr()
        i = bisect_right(self._begins, begin)
        self._begins.insert(i, begin)
        self._ends.insert(i, begin + unit.buffer.nbytes)
        self._units.insert(i, unit)

    def remove(self, unit: GatherUnit) -> None:
        """Called before ``unit`` gives up its buffer."""
        i = self._units.index(unit, bisect_left(self._begins, unit.buffer.data_ptr()))
        del self._begins[i], self._ends[i], self._units[i]

    @contextmanager
    def keeping_params(self) -> Iterator[None]:
        """Context within which autograd saves parameters as they are, because the backward makes them available before
        it reads them."""
        before, self._keeps_params = self._keeps_params, True
        try:
            yield
        finally:
            self._keeps_params = before

    def pack(self, tensor: torch.Tensor) -> _Reference | torch.Tensor | None:
        if self._keeps_params:
            state = state_of(tensor)
            return tensor if type(state) is PlacedShard and state.fetcher.packer is self else None
        try:
            # A tensor without elements has no data address, but it keeps its storage alive, so the storage's address is
            # used.
            address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()
        except RuntimeError:  # sparse and wrapped tensors have no storage
            return None
        # Each saved tensor comes here, so nothing is called to find its unit.
        i = bisect_right(self._begins, address) - 1
        if i < 0 or address >= self._ends[i]:
            return None
        group = self._units[i]
        if tensor.dtype != group.unit.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return _Reference(group, tensor)

    def unpack(self, packed: _Reference | torch.Tensor) -> torch.Tensor:
        if not isinstance(packed, _Reference):
            return packed
        group = packed.group
        self._use(group)
        return group.buffer.as_strided(packed.shape, packed.stride, packed.offset)
