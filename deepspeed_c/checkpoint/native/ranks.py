"""The ranks that save one checkpoint, and the messages that they exchange about it.

They have a gloo group of their own: a writer thread may talk while the main thread trains, and the watchdog does not
take a slow disk for a hang.

[Note: orphaned] Collectives are called on the group object. The functions of ``torch.distributed`` look the group up
first, and many scripts call ``destroy_process_group()`` at their end. A save that is still under way would then find no
group on one rank, and another rank would wait for that one forever. The object, its threads and its connections live as
long as they are held here, so such a save completes.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepspeed_c.errors import CheckpointError

__all__ = ["Ranks"]

_T = TypeVar("_T")

# Timeout, longer than any disk takes. A rank that has died is noticed at once, by its closed connection.
TIMEOUT = datetime.timedelta(hours=12)


class Ranks:
    """``rank`` of ``world_size``; ``global_ranks`` are the ranks' numbers in ``torch.distributed``.

    The group is made at first use: collective.
    """

    def __init__(self, rank: int, global_ranks: list[int]) -> None:
        self.rank, self.world_size = rank, len(global_ranks)
        self._global_ranks = list(global_ranks)
        self._group: dist.ProcessGroup | None = None

    def connect(self) -> None:
        """Makes the group if there is more than one rank. To be called from the main thread, on all ranks."""
        if self.world_size > 1 and self._group is None:
            # Ranks outside of the group do not call this. (If there are no such ranks, the usual way is taken, because
            # the other way hangs on a FileStore.)
            is_part = self.world_size < dist.get_world_size()
            self._group = dist.new_group(
                self._global_ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=is_part
            )

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank."""
        if self.world_size == 1:
            return [value]
        return self._talk(lambda group: self._all_gather(group, value))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0, nothing elsewhere."""
        if self.world_size == 1:
            return [value]
        return self._talk(lambda group: self._gather(group, value))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value``."""
        if self.world_size == 1:
            return value
        return self._talk(lambda group: self._broadcast(group, value))

    def _all_gather(self, group: dist.ProcessGroup, value: Any) -> list[Any]:
        content = _packed(value)
        sizes = self._sizes(group, content)
        parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        group.allgather([parts], [_padded(content, max(sizes))]).wait()
        return [_unpacked(part, size) for part, size in zip(parts, sizes)]

    def _gather(self, group: dist.ProcessGroup, value: Any) -> list[Any]:
        content = _packed(value)
        sizes = self._sizes(group, content)
        parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        group.gather([parts] if parts else [], [_padded(content, max(sizes))], options).wait()
        return [_unpacked(part, size) for part, size in zip(parts, sizes)]

    def _broadcast(self, group: dist.ProcessGroup, value: Any) -> Any:
        content = _packed(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = self._sizes(group, content)[0]
        content = content if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group.broadcast([content], options).wait()
        return _unpacked(content, size)

    def _sizes(self, group: dist.ProcessGroup, content: torch.Tensor) -> list[int]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        group.allgather([sizes], [torch.tensor([content.numel()])]).wait()
        return [int(size) for size in sizes]

    def _talk(self, exchange: Callable[[dist.ProcessGroup], _T]) -> _T:
        if self._group is None:
            raise CheckpointError("the ranks have not been connected", where=f"rank {self.rank}")
        try:
            return exchange(self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"another rank stopped while the checkpoint was written or read ({str(error).splitlines()[0]})",
                where=f"rank {self.rank}",
                fix="look at the output of the other ranks; the checkpoints before this one are untouched",
            ) from error

    def close(self) -> None:
        """Ends the group."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            # torch does not know the group any more if all groups have been destroyed since. It then ends with its last
            # reference.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _padded(content: torch.Tensor, size: int) -> torch.Tensor:
    if content.numel() == size:
        return content
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: content.numel()] = content
    return padded


def _unpacked(content: torch.Tensor, size: int) -> Any:
    return pickle.loads(content[:size].numpy().tobytes())
