"""Memory shared by the ranks of a group: each rank writes its own slices, and all ranks read the whole in place.

[Note: fences] Reads and writes are not collectives, so the ranks have to agree on the time of writes. Before writing, a
rank waits until all ranks have come (``Fetcher.begin_writes``), so that no rank still reads the old content. After
writing it waits again (``Fetcher.end_writes``), and then all ranks read the new content. No rank reads between the two
waits.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import torch

from deepspeed_c import _C
from deepspeed_c.buffers import ordinary_memory
from deepspeed_c.comm.transports.blocks import as_tensor
from deepspeed_c.comm.transports.hosts import GroupRanks, NotConnectedError, agree
from deepspeed_c.logging import logger

__all__ = ["JointMemory", "join"]


class JointMemory:
    """Parts of memory with the given numbers of bytes, each cut into equal slices, one for each rank."""

    def __init__(self, memory: _C.ShmJoint, begins: Sequence[int], sizes: Sequence[int], ranks: GroupRanks) -> None:
        self._memory, self._begins, self._sizes, self._ranks = memory, begins, sizes, ranks

    def slice(self, part: int) -> torch.Tensor:
        """This rank's slice of a part, uint8. All ranks see the bytes written to it."""
        begin, n_bytes = self._slice(part)
        return as_tensor(self._memory.part(begin, n_bytes)) if n_bytes else ordinary_memory(0, torch.device("cpu"))

    def whole(self, part: int) -> torch.Tensor:
        """A whole part, uint8, to read. Bytes that are written here are visible to this rank only, until ``forget``."""
        n_bytes = self._sizes[part]
        if not n_bytes:
            return ordinary_memory(0, torch.device("cpu"))
        return as_tensor(self._memory.view(self._begins[part], n_bytes))

    def forget(self) -> None:
        """Drops this rank's own writes to ``whole``, which shows the slices of all ranks afterwards."""
        self._memory.forget()

    def find_write(self) -> int | None:
        """The first part whose ``whole`` this rank has changed; None if there is none. Looks at page tables, and at no
        bytes but those of pages that have been written."""
        at = self._memory.find_write()
        return None if at is None else bisect_right(self._begins, at) - 1

    def commit(self) -> None:
        """Takes memory from the system for this rank's slices. Raises MemoryError with both numbers of bytes."""
        for part in range(len(self._sizes)):
            self._memory.commit(*self._slice(part))

    def _slice(self, part: int) -> tuple[int, int]:
        n_bytes = self._sizes[part] // self._ranks.world_size
        return self._begins[part] + self._ranks.rank * n_bytes, n_bytes


def join(ranks: GroupRanks, sizes: Sequence[int]) -> JointMemory | None:
    """Zeroed memory with parts of ``sizes`` bytes, multiples of the number of ranks. The ranks must have been found to
    share memory. Collective. None on all ranks where the memory cannot be had; rank 0 then logs the reason.
    """
    begins: list[int] = []
    n_bytes = 0
    for size in sizes:
        begins.append(n_bytes)
        n_bytes += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # so that ``forget`` of one part spares the other parts
    opened: list[_C.ShmJoint] = []
    joint: list[JointMemory] = []

    def make() -> str:
        if ranks.rank == 0:
            opened.append(_C.ShmJoint(max(n_bytes, 1)))
        return opened[0].address if opened else ""

    try:
        address = agree(ranks, make, "joint memory")[0]

        def open_() -> None:
            joint.append(JointMemory(opened[0] if opened else _C.ShmJoint(0, address), begins, sizes, ranks))
            joint[0].commit()

        # Rank 0 keeps the memory until all ranks have opened it.
        agree(ranks, open_, "joint memory")
    except NotConnectedError as error:
        if ranks.rank == 0:
            logger.warning("gathers copy the weights: ranks have no joint memory: %s", error.reason)
        return None
    return joint[0]
