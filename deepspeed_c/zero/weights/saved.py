"""Makes autograd save a reference to a gathered weight and not its data. The weight is gathered again when a backward
needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed_c.zero.weights.gather_unit import GatherUnit, PlacedShard
from deepspeed_c.zero.weights.param import state_of

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["WeightPacker"]


class _Reference:
    """The object that autograd saves instead of a gathered weight, or instead of a view of it."""

    __slots__ = ("group", "offset", "shape", "stride")

    def __init__(self, group: GatherUnit, tensor: torch.Tensor) -> None:
        self.group = group
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class WeightPacker:
    """Packs tensors whose memory lies in a gathered unit of ``fetcher``."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def pack(self, tensor: torch.Tensor) -> _Reference | torch.Tensor | None:
        if self._fetcher.is_in_graph:
            # A backward graph gathers the parameter itself, just before it reads it.
            state = state_of(tensor)
            return tensor if type(state) is PlacedShard and state.fetcher is self._fetcher else None
        try:
            # A tensor without elements has no data address, but it keeps its storage alive, so the storage's address is
            # used.
            group = self._fetcher.places.find(tensor.data_ptr() or tensor.untyped_storage().data_ptr())
        except RuntimeError:  # sparse and wrapped tensors have no storage
            return None
        if group is None or tensor.dtype != group.unit.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return _Reference(group, tensor)

    def unpack(self, packed: _Reference | torch.Tensor) -> torch.Tensor:
        if not isinstance(packed, _Reference):
            return packed
        group = packed.group
        if not self._fetcher.is_in_use(group):
            self._fetcher.use(group.index)
        return group.buffer.as_strided(packed.shape, packed.stride, packed.offset)
