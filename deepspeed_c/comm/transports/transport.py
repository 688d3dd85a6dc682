"""The interface of every transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed_c.buffers import ordinary_memory
from deepspeed_c.comm.work import Handle, Work

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = ["Transport"]


class Transport(ABC):
    """How the tensors of one kind of device travel among the ranks of one process group.

    ``Collectives`` sends tensors by these functions only. Lengths are above 0 unless a function says otherwise, and
    there are at least 2 ranks. Ranks are numbered within the group. ``label`` names the data; ranks compare it where
    that costs no further message. Work and handles leave their tensors in use until they have been waited for.
    """

    name: str
    """The path of a collective in ledgers."""

    @abstractmethod
    def reduce_scatter(
        self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
    ) -> Work:
        """Leaves this rank's slice of the sum of every rank's ``flat`` [n * s] in ``out`` [s]."""

    @abstractmethod
    def all_gather(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        """Sends each rank's slice of ``flat`` [n * s] to all ranks, in place."""

    def broadcast_slices(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        """``all_gather`` made of one broadcast for each slice, all of them at once."""
        handles = [self.broadcast(comm, part, r, label) for r, part in enumerate(flat.view(comm.world_size, -1))]
        return Work(handles, kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")

    @abstractmethod
    def all_reduce(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        """Sums every rank's ``flat``, in place, and multiplies by ``scale``."""

    @abstractmethod
    def broadcast(self, comm: Collectives, tensor: torch.Tensor, src: int, label: str) -> Handle:
        """Rank ``src`` sends its contiguous ``tensor`` to all ranks."""

    @abstractmethod
    def add_up(self, comm: Collectives, tensor: torch.Tensor, label: str) -> Handle:
        """Sums a few numbers over ranks, in place: float64 or integers, contiguous."""

    @abstractmethod
    def all_to_all(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        label: str,
    ) -> Handle:
        """Sends block i of ``flat`` to rank i and receives block i of ``out`` from it. The splits are lengths of
        blocks, which may be 0.
        """

    @abstractmethod
    def shift(
        self, comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
    ) -> list[Handle]:
        """Sends a flat tensor to one rank and receives another from one rank. Either may have length 0."""

    @abstractmethod
    def message(
        self, comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str
    ) -> Handle | None:
        """Sends a contiguous tensor, or receives it. It may have length 0; None: nothing is under way then."""

    def message_name(self, peer: int) -> str:
        """The path, in ledgers, of a message to or from ``peer``."""
        return self.name

    def in_words(self) -> str:
        """How the ranks talk, for the log."""
        return self.name

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Uninitialised bytes, in the memory from which this transport sends fastest."""
        return ordinary_memory(n_bytes, device)

    def close(self) -> None:
        """Ends the connections that the ranks have made in addition to those of the process group, for this rank, and
        tells the other ranks.
        """

    def why_not_joint(self) -> str:
        """Why the ranks cannot hold memory together (``joint_memory.py``); "" where they can."""
        return "the ranks share no memory"
