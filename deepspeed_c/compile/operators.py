"""Operators of compiled graphs: ``zero_gather``, ``zero_wait``, ``zero_release`` and ``zero_reduce``.

A weight is an input of its graph, and stays the same tensor. ``zero_gather`` begins to gather, ``zero_wait`` puts the
whole weight's memory behind the tensor, and ``zero_release`` takes the memory away. They are declared to write to the
weights, so a compiler keeps each read of a weight in its place. ``zero_release`` also takes the results of these reads:
Inductor may otherwise compute an elementwise read later than the write that follows it. All operators of a graph write
to one small tensor, ``order``, so a compiler keeps their order too. Otherwise it may gather everything first and
release everything last.

The operators only pass their call on to the graphs' *host*, by a number, because an operator's arguments are tensors
and numbers. The host acts through the engine's own fetcher and reducer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["ZERO_GATHER", "ZERO_REDUCE", "ZERO_RELEASE", "ZERO_WAIT", "GraphHost", "register_host"]


class GraphHost(Protocol):
    """What the operators of one engine's graphs act on.

    unit: the index of a gather unit. weights: the tensors of the graph that stand for parameters of the unit; after a
    forward they may be other objects than the parameters. places: by weight, the place of the parameter in the unit.
    """

    def gather(self, unit: int) -> None: ...

    def wait(self, unit: int, weights: Sequence[torch.Tensor], places: Sequence[int]) -> None: ...

    def release(self, unit: int, weights: Sequence[torch.Tensor], places: Sequence[int]) -> None: ...

    def reduce(self, gradient: torch.Tensor, slot: int) -> None: ...


_numbers = itertools.count()
_hosts: weakref.WeakValueDictionary[int, GraphHost] = weakref.WeakValueDictionary()


def register_host(host: GraphHost) -> int:
    """Returns the number by which the operators find ``host`` as long as it lives."""
    number = next(_numbers)
    _hosts[number] = host
    return number


_library = torch.library.Library("deepspeed_c", "FRAGMENT")
_UNIT = "Tensor(b!) order, int host, int unit, int[] places"
_library.define(f"zero_gather(Tensor(a!)[] weights, {_UNIT}) -> ()")
_library.define(f"zero_wait(Tensor(a!)[] weights, {_UNIT}) -> ()")
_library.define(f"zero_release(Tensor(a!)[] weights, Tensor[] after, {_UNIT}) -> ()")
_library.define("zero_reduce(Tensor(a!) gradient, Tensor(b!) order, int host, int slot) -> ()")

Tensors = Sequence[torch.Tensor]


def _gather(weights: Tensors, order: torch.Tensor, host: int, unit: int, places: Sequence[int]) -> None:
    _hosts[host].gather(unit)


def _wait(weights: Tensors, order: torch.Tensor, host: int, unit: int, places: Sequence[int]) -> None:
    _hosts[host].wait(unit, weights, places)


def _release(
    weights: Tensors, after: Tensors, order: torch.Tensor, host: int, unit: int, places: Sequence[int]
) -> None:
    _hosts[host].release(unit, weights, places)


def _reduce(gradient: torch.Tensor, order: torch.Tensor, host: int, slot: int) -> None:
    _hosts[host].reduce(gradient, slot)


def _nothing(*_: object) -> None:
    """The fake kernel: the operators return nothing, and change no shape."""


for _name, _kernel in (
    ("zero_gather", _gather),
    ("zero_wait", _wait),
    ("zero_release", _release),
    ("zero_reduce", _reduce),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(_name, _nothing, "Meta")

ZERO_GATHER = torch.ops.deepspeed_c.zero_gather.default
ZERO_WAIT = torch.ops.deepspeed_c.zero_wait.default
ZERO_RELEASE = torch.ops.deepspeed_c.zero_release.default
ZERO_REDUCE = torch.ops.deepspeed_c.zero_reduce.default
