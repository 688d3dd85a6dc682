"""Maps the elements of a cut parameter to their places in the whole parameter. A cut parameter carries its ``Cut`` as
``param.tp_cut``. A parameter without ``tp_cut`` and without ``tensor_model_parallel`` is whole on all ranks of the
group, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Cut", "CutBox", "keep_part", "view_part"]


class CutBox(NamedTuple):
    """A block of a parameter: ``local_offset`` is its place in the rank's tensor, ``logical_offset`` its place in the
    whole parameter.
    """

    local_offset: tuple[int, ...]
    logical_offset: tuple[int, ...]
    size: tuple[int, ...]

    def of_local(self) -> tuple[slice, ...]:
        """The block in the rank's tensor, as an index."""
        return _index(self.local_offset, self.size)

    def of_logical(self) -> tuple[slice, ...]:
        """The block in the whole tensor, as an index."""
        return _index(self.logical_offset, self.size)


@dataclass(frozen=True)
class Cut:
    """The part of one parameter that one rank of a tensor-parallel group holds, and its place in the whole parameter."""

    logical_shape: torch.Size
    """Shape of the whole parameter."""
    boxes: tuple[CutBox, ...]
    """This rank's blocks, in the order of the local tensor. There is at least one: a rank without elements has one
    block of size 0.
    """
    n_copies: int
    """Number of ranks of the group with the very same elements, including this rank. It is more than 1 for shared key
    heads.
    """
    rank: int
    """This rank's number in the group."""
    n_ranks: int
    """Number of ranks of the group."""
    copies: tuple[int, ...]
    """The ranks with the same elements, in order: ``n_copies`` ranks, including this one."""

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's tensor."""
        return torch.Size(
            max(box.local_offset[dim] + box.size[dim] for box in self.boxes) for dim in range(len(self.logical_shape))
        )

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of ``whole`` [logical_shape], as a new contiguous tensor [local_shape]."""
        self._check("whole", whole.shape, self.logical_shape)
        local = whole.new_empty(self.local_shape)
        for box in self.boxes:
            local[box.of_local()] = whole[box.of_logical()]
        return local

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's elements, ``local`` [local_shape], to their places in ``whole`` [logical_shape]."""
        self._check("local", local.shape, self.local_shape)
        self._check("whole", whole.shape, self.logical_shape)
        for box in self.boxes:
            whole[box.of_logical()] = local[box.of_local()]

    def _check(self, what: str, shape: Iterable[int], expected: torch.Size) -> None:
        if tuple(shape) != tuple(expected):
            raise ValueError(f"{what} has shape {tuple(shape)}, the cut is of {tuple(expected)}")


def keep_part(param: torch.nn.Parameter, cut: Cut | None, dim: int = -1) -> None:
    """Replaces the whole values of ``param`` by this rank's part of them, cut along ``dim``, and marks ``param`` as
    cut.

    cut: None for a parameter that stays whole; ``param`` is then marked as whole.
    """
    if cut is not None:
        with torch.no_grad():
            param.data = cut.take(param.data)
        param.tp_cut = cut
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = cut is not None, dim, 1


def view_part(part: torch.nn.Parameter, whole: torch.Tensor, *, copies: bool) -> torch.nn.Parameter:
    """A parameter with the marks of ``part``, which may be on the meta device, and with this rank's elements of
    ``whole``. It needs no gradient. It is a view of ``whole``, unless ``copies`` or the elements lie in several blocks.
    """
    cut: Cut | None = getattr(part, "tp_cut", None)
    if cut is None:
        values = whole.clone() if copies else whole
    elif copies or len(cut.boxes) > 1:
        values = cut.take(whole)
    else:
        values = whole[cut.boxes[0].of_logical()]
    made = torch.nn.Parameter(values, requires_grad=False)
    vars(made).update(vars(part))
    return made


def _index(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))
