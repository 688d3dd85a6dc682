"""Ends the connections among some ranks, so that none of them waits for another one any longer."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist

from deepspeed_c.comm.transports import table
from deepspeed_c.comm.transports.described import close_connections

__all__ = ["close_groups_within"]


def close_groups_within(ranks: Collection[int]) -> None:
    """Closes this rank's connections of every process group whose ranks are all among ``ranks`` (numbers in the world).
    Collectives of the other ranks in these groups end at once with an error, and so do later ones.

    Groups that users have made are among them: layers that were cut by hand use such groups. Connections of NCCL stay
    open, because only its own time limit ends a kernel that waits on another device.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() < 2 or not set(dist.get_process_group_ranks(group)) <= set(ranks):
            continue
        transport = table.connected(group)
        if transport is not None:
            transport.close()
        if table.cpu_backend(group) == "gloo":
            close_connections(group)
