"""Pretended ranks and files for the engine's objects in a plan. They take the memory of real ones, and move nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.backends import Backend
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.ledger import Ledger
from deepspeed_c.comm.work import Work
from deepspeed_c.offload.swap import SwapFile, SwapSettings

__all__ = ["IN_PLACE", "PretendedFile", "PretendedRanks"]


class _NoGroup:
    """A stand-in for the process group that ``torch.distributed`` hands transfers to. Its methods have had two names
    each."""

    def _transfer(self, *_: Any) -> _NoGroup:
        return self

    allreduce = broadcast = _transfer
    all_to_all_single = alltoall_base = _transfer
    reduce_scatter_single = _reduce_scatter_base = _transfer

    def wait(self) -> None:
        """Returns at once: the transfer is over."""


def _lie(*_: Any) -> Work:
    return Work([_NoGroup()])


# Over shared memory of ranks: peers read the sent bytes in place, until the wait.
IN_PLACE = Backend(
    "shm", reduce_scatter=_lie, all_gather=_lie, all_reduce=_lie, broadcast=_lie, add_up=_lie, all_to_all=_lie
)


class PretendedJoint:
    """Joint memory (``comm/joint.py``): the unit counts a rank's slices, and wholes take nothing."""

    def __init__(self, sizes: Sequence[int], n_ranks: int) -> None:
        self._sizes, self._n_ranks = sizes, n_ranks

    def slice(self, part: int) -> torch.Tensor:
        return torch.empty(self._sizes[part] // self._n_ranks, dtype=torch.uint8, device="meta")

    def whole(self, part: int) -> torch.Tensor:
        return torch.empty(self._sizes[part], dtype=torch.uint8, device="meta")

    def forget(self) -> None:
        """Nothing has been written."""


class PretendedRanks(Collectives):
    """The first of ``world_size`` ranks, as the engine's objects use it with tensors of the meta device.

    backend: how they exchange tensors. scratch: the pool that collectives receive into.
    """

    def __init__(self, world_size: int, scratch: BufferPool, backend: Backend) -> None:
        self.group: Any = _NoGroup()
        self.world_size, self.rank, self.global_rank = world_size, 0, 0
        self.global_ranks = list(range(world_size))
        self.ledger = Ledger("pretended", self.global_ranks)
        self._on_close = [lambda: _world.pg_group_ranks.pop(self.group, None)]
        _world.pg_group_ranks[self.group] = range(world_size)  # where torch looks up who sends a broadcast
        self.scratch = scratch
        self.reduce = lambda sources, scale, accumulate, out: None
        self._connection = None
        # Tensors that pretend to be on the host belong to a traced model.
        self._backends = {"meta": backend, "cpu": IN_PLACE}

    def along(self, ranks: Sequence[int], axes: Sequence[str]) -> PretendedRanks:
        """As many other ranks, with the same buffers: an axis of a mesh."""
        return PretendedRanks(len(ranks), self.scratch, self._backends["meta"])

    def all_gather(self, flat: torch.Tensor, *, use_broadcast: bool = False, label: str = "") -> Work:
        """Takes no memory on any backend, and would be one transfer a rank on some."""
        return Work.done()

    def why_not_joint(self, device: torch.device) -> str:
        return "" if self._backends["meta"] is IN_PLACE else "nobody knows yet which ranks will share memory"

    def join(self, sizes: Sequence[int]) -> Any:
        return PretendedJoint(sizes, self.world_size)

    def barrier(self, *, label: str = "") -> None:
        """All ranks have come."""

    def sum_numbers(self, numbers: Sequence[float], *, label: str = "") -> list[float]:
        """All ranks do the same."""
        return [float(number) * self.world_size for number in numbers]


class PretendedFile(SwapFile):
    """A file of tensors of the meta device. count: is told of the bytes of each new buffer."""

    device = torch.device("meta")
    has_given_up = False
    buffer_bytes = 0

    def __init__(self, settings: SwapSettings, count: Callable[[int], None]) -> None:
        self.settings, self.folder = settings._replace(checksum=False), ""
        self._count = count

    def new_buffer(self, n_bytes: int) -> torch.Tensor:
        self._count(n_bytes)
        self.buffer_bytes += n_bytes
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def start_read(self, offset: int, buffer: torch.Tensor, n_bytes: int) -> int:
        return n_bytes

    def start_write(self, offset: int, data: torch.Tensor, n_bytes: int, buffer: torch.Tensor) -> int:
        return n_bytes

    def wait(self, request: int) -> int:
        return request

    def close(self) -> None:
        """There is nothing to close."""
