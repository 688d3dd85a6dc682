"""Numbers that stand for collectives in calls of operators: operators of torch take tensors, numbers and text only."""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary, WeakValueDictionary

from deepspeed_c.comm.collectives import Collectives

__all__ = ["collectives_of", "number_of"]

_numbers: WeakKeyDictionary[Collectives, int] = WeakKeyDictionary()
_comms: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
_next = itertools.count(1)


def number_of(comm: Collectives) -> int:
    """Return the number that stands for ``comm``. It holds no reference to ``comm``."""
    if comm not in _numbers:
        _numbers[comm] = next(_next)
        _comms[_numbers[comm]] = comm
    return _numbers[comm]


def collectives_of(number: int) -> Collectives:
    """Return the collectives that ``number`` stands for. They must be alive."""
    return _comms[number]
