"""The ranks that save one checkpoint, and the few words that they exchange about it.

They have a gloo group of their own, so that a writer thread may talk while the main thread trains, and so that a slow disk is not taken for a hang.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from deepspeed_c.errors import CheckpointError

__all__ = ["Ranks"]

# Longer than any disk takes; a rank that has died is noticed at once, by its closed connection.
TIMEOUT = datetime.timedelta(hours=12)


class Ranks:
    """``rank`` of ``world_size``; ``global_ranks`` are those of ``torch.distributed``. The group is made at first use: collective."""

    def __init__(self, rank: int, global_ranks: list[int]) -> None:
        self.rank, self.world_size = rank, len(global_ranks)
        self._global_ranks = list(global_ranks)
        self._group: dist.ProcessGroup | None = None

    def connect(self) -> None:
        """Makes the group, if there is anybody to talk to. From the main thread, on all ranks."""
        if self.world_size > 1 and self._group is None:
            # Ranks outside of the group do not come here. (Where there are none, the usual way: the other one hangs on a FileStore.)
            is_part = self.world_size < dist.get_world_size()
            self._group = dist.new_group(
                self._global_ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=is_part
            )

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        self._talk(dist.all_gather_object, values, value)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0, nothing elsewhere."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.rank == 0 else None
        self._talk(dist.gather_object, value, values, dst=self._global_ranks[0])
        return values or []

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value``."""
        if self.world_size == 1:
            return value
        box = [value]
        self._talk(dist.broadcast_object_list, box, src=self._global_ranks[0])
        return box[0]

    def _talk(self, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, group=self._group, **kwargs)
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
            dist.destroy_process_group(group)
