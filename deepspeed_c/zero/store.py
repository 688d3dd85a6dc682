"""The seam to where masters and moments live between steps, when that is not memory: what the sharded optimizer asks of such a place."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

__all__ = ["StateStore", "Tagged"]


class Tagged(NamedTuple):
    """A tensor under the name that a message calls it by."""

    tensor: torch.Tensor
    name: str
    piece_elems: int = 0
    """How many elements of it may be moved by themselves (``StateStore.stream``); 0: none but all."""


class StateStore(Protocol):
    """Where masters and moments live between steps, when that is not memory (``offload.swap.Swapper``)."""

    def new_zeros(self, shape: torch.Size, dtype: torch.dtype, name: str, piece_elems: int = 0) -> torch.Tensor: ...
    def prefetch(self, tensors: Iterable[Tagged]) -> None: ...
    def bring(self, tensors: Sequence[Tagged], *, reads: bool = True) -> None: ...
    def send(self, tensors: Sequence[Tagged]) -> None: ...
    def let_go(self, tensors: Sequence[Tagged]) -> None: ...
    def stream(self, tensors: Sequence[Tagged]) -> Generator[list[torch.Tensor], None, None]: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...
