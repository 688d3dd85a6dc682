"""The collectives of the ranks that share a sequence, found by their process group: attention is made before the engine
is, and is used without one as well."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives

__all__ = ["TokenOrder", "lend", "order_of", "ranks_of"]


class TokenOrder(NamedTuple):
    """The arguments of a ``SequenceCut`` that say so."""

    order: str
    n_inner: int


# Those of an engine, which knows whether shared memory is wanted; else our own.
_lent: weakref.WeakKeyDictionary[dist.ProcessGroup, Collectives] = weakref.WeakKeyDictionary()


_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, TokenOrder] = weakref.WeakKeyDictionary()


def lend(comm: Collectives, order: TokenOrder) -> None:
    """From now on attention over the group of ``comm`` talks through it, and batches are cut in ``order``."""
    group = dist.group.WORLD if comm.group is None else comm.group
    _lent[group], _orders[group] = comm, order


def order_of(group: Any) -> TokenOrder:
    """In which order the tokens of a sequence lie over the ranks of ``group``; None: over all."""
    return _orders.get(dist.group.WORLD if group is None else group, TokenOrder("contiguous", 1))


def ranks_of(group: Any) -> Collectives:
    """The collectives over a process group of ``torch.distributed``; None: all ranks. Collective at the first call."""
    group = dist.group.WORLD if group is None else group
    found = _lent.get(group)
    if found is None:
        found = _lent[group] = Collectives(group)
        found.use_shared_memory("auto")
    return found
