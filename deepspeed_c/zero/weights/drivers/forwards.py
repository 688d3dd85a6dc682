"""Finds from the graph the forwards in flight that a backward goes through, the same on all ranks.

A forward is one run of the root module (or of a chunk of it) on one micro-batch. Several forwards may run before the
first backward, and their backwards may come in any order, as in pipelines, contrastive losses and evaluations with
gradients. Autograd numbers nodes in the order of creation, so the numbers of a forward's nodes form an interval. A walk
from the loss through the graph therefore recognises each forward by the numbers of its nodes, however the module's
outputs are used.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives

__all__ = ["Forward", "ForwardsInFlight", "Route"]

# Number of forwards without a backward after which ranks compare which graphs are still alive.
FORWARDS_BEFORE_ASKING = 16


def _n_nodes() -> int:
    """The number of graph nodes that this thread has made so far."""
    return torch._C._autograd._get_sequence_nr()


class Forward:
    """One forward with gradients. Its saved tensors and the nodes of its outputs hold this object, so it lives as long
    as the graph."""

    __slots__ = ("__weakref__", "first_node", "is_entered")

    def __init__(self) -> None:
        self.first_node = _n_nodes()
        self.is_entered = False

    def enter(self) -> None:
        """Called when a backward asks for a tensor that this forward has saved."""
        self.is_entered = True

    def leave(self) -> bool:
        """Called when a pass has ended. Returns whether the pass has used this forward's saved tensors."""
        is_entered, self.is_entered = self.is_entered, False
        return is_entered


class _ForwardRecord:
    """Facts of a forward. The record does not keep the forward's graph alive."""

    def __init__(self, forward: Forward, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self._forward = weakref.ref(forward)
        self.first_node, self.last_node = forward.first_node, _n_nodes()
        self.thread = threading.get_ident()
        self.is_done = False  # a backward of this rank has gone through the forward

    def lives(self) -> bool:
        return self._forward() is not None and not self.is_done

    def leave(self, *, is_done: bool) -> None:
        forward = self._forward()
        if forward is not None and forward.leave() and is_done:
            self.is_done = True


class Route(NamedTuple):
    """The forwards that a pass goes through. The route is the same on all ranks."""

    records: list[_ForwardRecord]
    """The forwards that the pass may go through, oldest first. The plan of the pass is made from them."""
    certain: list[_ForwardRecord]
    """The forwards among ``records`` that the pass is known to go through on some rank."""

    @property
    def key(self) -> tuple:
        """A key for the plan: passes with equal keys use the same plan."""
        certain = set(map(id, self.certain))
        which = [i for i, record in enumerate(self.records) if id(record) in certain]
        return (*(record.steps for record in self.records), *([tuple(which)] if len(which) < len(self.records) else []))


class ForwardsInFlight:
    """The forwards that are still waiting for their backward. The list is the same on all ranks."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._records: list[_ForwardRecord] = []
        self._max = FORWARDS_BEFORE_ASKING

    def __len__(self) -> int:
        return len(self._records)

    def add(self, forward: Forward, steps: Sequence[int], outputs: Sequence[torch.Tensor]) -> None:
        """Called when ``forward`` has ended. Some calls are collective: the ranks then compare which graphs are still
        alive."""
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.metadata[forward] = None
        self._records.append(_ForwardRecord(forward, tuple(steps)))
        if len(self._records) >= self._max:
            self._keep(self._comm.sum_numbers(self._lives(), label="forwards whose graph lives"))
            self._max = max(FORWARDS_BEFORE_ASKING, 2 * len(self._records))

    def route(self, starts: Sequence[Any] | None, within: Any = None) -> Route:
        """The forwards that a pass goes through. Collective if several forwards are in flight, and free of cost
        otherwise.

        starts: the first nodes of the pass; None if the pass is running already and its first nodes are not known.
        ``within`` is then the running node, if there is one. If the pass goes through a forward on some rank, all ranks
        include the forward.
        """
        if len(self._records) < 2:
            return Route(list(self._records), list(self._records))
        known = self._walk(([] if within is None else [within]) if starts is None else starts)
        # Each thread numbers its own nodes, so numbers of several threads do not identify forwards.
        is_partial = starts is None or len({record.thread for record in self._records}) > 1
        n = len(self._records)
        numbers = [*self._lives(), *map(float, known), float(is_partial)]
        numbers = self._comm.sum_numbers(numbers, label="forwards that a backward goes through")
        certain = [record for record, n_ranks in zip(self._records, numbers[n:]) if n_ranks]
        self._keep([a + b for a, b in zip(numbers[:n], numbers[n:])])
        return Route(list(self._records) if numbers[-1] else certain, certain)

    def _lives(self) -> list[float]:
        return [float(record.lives()) for record in self._records]

    def _keep(self, n_ranks: Sequence[float]) -> None:
        """Removes forwards that are not alive on any rank. Ranks may differ, for instance if one rank keeps its losses.
        A forward that is alive on one rank stays on all."""
        # No forward may be left, for instance if the graph saves no tensors and its outputs cannot be found. Then the
        # last forward is assumed.
        self._records = [r for r, n in zip(self._records, n_ranks) if n] or self._records[-1:]

    def _walk(self, starts: Sequence[Any]) -> list[bool]:
        """For each forward whether any of its nodes can be reached from ``starts``."""
        firsts, found = [record.first_node for record in self._records], [False] * len(self._records)
        todo: list[Any] = list(starts)
        seen: set[Any] = {None}
        while todo and not all(found):
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            i = bisect_right(firsts, number) - 1
            if i >= 0 and number < self._records[i].last_node:
                found[i] = True
                # The inputs of a node were made before the node, so later forwards cannot be reached from here.
                if all(found[:i]):
                    continue
            todo += [follower for follower, _ in node.next_functions]
        return found

    def end(self, route: Route) -> None:
        """Called when the backward along ``route`` has ended: removes its forwards."""
        for record in self._records:
            record.leave(is_done=True)
        gone = set(map(id, route.certain))
        self._records = [record for record in self._records if id(record) not in gone]
        if not self._records:
            self._max = FORWARDS_BEFORE_ASKING

    def leave(self) -> None:
        """Called when a pass that only read weights has ended. Its forwards stay, because their backward may still
        come."""
        for record in self._records:
            record.leave(is_done=False)

    def forget(self) -> None:
        self._records.clear()
        self._max = FORWARDS_BEFORE_ASKING


def reversed_steps(route: Route) -> Iterator[int]:
    """The expected order of units in a backward before its first pass: the reverse of its forwards' order."""
    last = None
    for record in reversed(route.records):
        for unit in reversed(record.steps):
            if unit != last:
                yield unit
            last = unit
