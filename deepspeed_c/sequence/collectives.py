"""The collectives of the ranks that share a sequence, found by their process group: attention is made before the engine
is, and is used without one as well."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives

__all__ = ["lend", "ranks_of"]

# Those of an engine, which knows whether shared memory is wanted; else our own.
_lent: weakref.WeakKeyDictionary[dist.ProcessGroup, Collectives] = weakref.WeakKeyDictionary()


def lend(comm: Collectives) -> None:
    """From now on attention over the group of ``comm`` talks through it."""
    group = dist.group.WORLD if comm.group is None else comm.group
    if comm.world_size == dist.get_world_size(group):
        _lent[group] = comm


def ranks_of(group: Any) -> Collectives:
    """The collectives over a process group of ``torch.distributed``; None: all ranks. Collective at the first call."""
    group = dist.group.WORLD if group is None else group
    found = _lent.get(group)
    if found is None:
        found = _lent[group] = Collectives(group)
        found.use_shared_memory("auto")
    return found
