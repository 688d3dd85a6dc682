"""The collectives of the ranks that share a sequence, by their process group. So attention may be made before the
engine, or used without an engine."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import StateError

__all__ = ["ModelOrder", "TokenOrder", "bind_collectives", "order_of", "ranks_of"]


class TokenOrder(NamedTuple):
    """The order of tokens over ranks, as arguments of a ``SequenceCut``."""

    order: str
    n_inner: int


# Collectives of engines, which know whether shared memory is wanted. Groups without an engine get new collectives.
_bound: weakref.WeakKeyDictionary[dist.ProcessGroup, Collectives] = weakref.WeakKeyDictionary()


class ModelOrder:
    """The token order of one engine's model, for sequences cut over the ranks of ``group``, until ``close``."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup, order: TokenOrder) -> None:
        self.model_name, self.order = type(model).__name__, order
        self._group, self._model = weakref.ref(group), weakref.ref(model)
        _orders[model] = self

    def is_over(self, group: dist.ProcessGroup) -> bool:
        """Whether the model's sequences are cut over the ranks of ``group``."""
        return self._group() is group

    def close(self) -> None:
        """Withdraw the order, unless another engine has been made over the model meanwhile."""
        model = self._model()
        if model is not None and _orders.get(model) is self:
            del _orders[model]


_orders: weakref.WeakKeyDictionary[torch.nn.Module, ModelOrder] = weakref.WeakKeyDictionary()


def bind_collectives(comm: Collectives) -> None:
    """From now on attention over the group of ``comm`` uses ``comm``."""
    _bound[_process_group(comm.group)] = comm


def order_of(group: Any, model: torch.nn.Module | None = None) -> TokenOrder:
    """Return the token order of ``model`` (or of the engine's model, if it is an engine) for sequences over the ranks
    of ``group`` (None: all ranks). Without ``model``: the order of all engines over the group, or contiguous if there
    are none.

    Raises StateError where the engines have several orders, and for a model without an engine.
    """
    group = _process_group(group)
    if model is not None:
        # An engine has its model as ``module``; torch's wrappers do the same.
        found = _orders.get(model) or _orders.get(getattr(model, "module", model))
        if found is None or not found.is_over(group):
            raise StateError(
                f"the {type(model).__name__} is of no open engine whose sequences are cut over these ranks",
                where="UlyssesSPDataLoaderAdapter(model=...)",
                fix="make the engine before the first batch is taken, and pass it, or its model",
            )
        return found.order
    given = [each for each in _orders.values() if each.is_over(group)]
    if len({each.order for each in given}) > 1:
        names = ", ".join(sorted(f"{each.model_name} ({_in_words(each.order)})" for each in given))
        raise StateError(
            f"the models of these ranks want their sequences cut in different orders: {names}",
            where="UlyssesSPDataLoaderAdapter",
            fix="say whose batches they are: UlyssesSPDataLoaderAdapter(..., model=engine); or close engines that are no"
            ' longer used; or give all models one order ("sequence_parallel": {"order": "contiguous"})',
        )
    return given[0].order if given else TokenOrder("contiguous", 1)


def _in_words(order: TokenOrder) -> str:
    return order.order if order.n_inner == 1 else f"{order.order}, rows of {order.n_inner} ranks"


def _process_group(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def ranks_of(group: Any) -> Collectives:
    """The collectives over a process group of ``torch.distributed``; None: all ranks. Collective at the first call."""
    group = _process_group(group)
    found = _bound.get(group)
    if found is None:
        found = _bound[group] = Collectives(group)
        found.use_shared_memory("auto")
    return found
