"""Makes autograd save the position of a gathered weight and not its data. The weight is gathered again when a backward
needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["WeightPacker"]


class _Reference:
    """The object that autograd keeps in place of a gathered weight, or of a view of it."""

    __slots__ = ("group", "offset", "shape", "stride")

    def __init__(self, group: GatherUnit, tensor: torch.Tensor) -> None:
        self.group = group
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class WeightPacker:
    """Takes tensors that lie in a gathered unit of one fetcher."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def pack(self, tensor: torch.Tensor) -> _Reference | None:
        try:
            # A tensor without elements says nothing of where it lies, and keeps its storage all the same.
            group = self._fetcher.places.find(tensor.data_ptr() or tensor.untyped_storage().data_ptr())
        except RuntimeError:  # sparse and wrapped tensors have no storage
            return None
        if group is None or tensor.dtype != group.unit.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return _Reference(group, tensor)

    def unpack(self, packed: _Reference) -> torch.Tensor:
        group = packed.group
        if not self._fetcher.is_in_use(group):
            self._fetcher.use(group.index)
        return group.buffer.as_strided(packed.shape, packed.stride, packed.offset)
