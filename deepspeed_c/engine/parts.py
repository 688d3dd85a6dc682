"""Puts whole tensors together from the parts of tensor-parallel ranks, and takes parts from whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.inject.cut import Cut
from deepspeed_c.zero.layout.cuts import cut_of
from deepspeed_c.zero.weights.param import shape_of

__all__ = ["Parts", "take_parts"]


class Parts:
    """The cuts of ``tensors`` by name, on all ranks of ``tp``, which hold one model together. The constructor is
    collective."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], tp: Collectives) -> None:
        self._tp = tp
        mine = {name: cut for name, tensor in tensors.items() if (cut := cut_of(tensor)) is not None}
        everyone = tp.gather_objects(mine, label="cuts of parameters")
        self._cuts: dict[str, list[Cut]] = {name: [cuts[name] for cuts in everyone] for name in mine}

    def shape(self, name: str, tensor: torch.Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        cuts = self._cuts.get(name)
        return torch.Size(shape_of(tensor)) if cuts is None else cuts[0].logical_shape

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor that this rank's ``part`` belongs to, in the part's dtype; ``part`` itself if it is whole.
        Collective over the ranks that hold the model together."""
        cuts = self._cuts.get(name)
        if cuts is None:
            return part
        sent = part.new_zeros(max(cut.local_shape.numel() for cut in cuts))
        sent.narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        whole = part.new_empty(cuts[0].logical_shape)
        for cut, flat in zip(cuts, self._tp.all_gather_list(sent, label=f"parts of {name}")):
            cut.put(flat.narrow(0, 0, cut.local_shape.numel()).view(cut.local_shape), whole)
        return whole


def take_parts(module: torch.nn.Module, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of the state dict ``whole``, in which this rank's part replaces each tensor that ``module`` holds only a
    part of. A tensor that has the part's shape already stays as it is."""
    cuts = {
        name: cut for name, tensor in module.state_dict(keep_vars=True).items() if (cut := cut_of(tensor)) is not None
    }
    if not cuts:
        return whole
    return {
        name: cuts[name].take(value)
        if name in cuts and torch.is_tensor(value) and value.shape == cuts[name].logical_shape
        else value
        for name, value in whole.items()
    }
