"""Products of parameters: `make test` runs a covering part of them, `make test-full` all.

    @pytest.mark.parametrize(("stage", "dtype", "world"), cells((0, 1, 2, 3), ("fp32", "bf16"), (1, 2)))

Most defects that depend on a combination depend on two values (Kuhn et al., "Software fault interactions and
implications for software testing", IEEE TSE 2004). So the part has each pair of values of each two axes at least once. For
tests that take long it has each value at least once (``at_once=1``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["cells", "covering", "every", "full"]

full = pytest.mark.full
"""Marks a test that `make test` leaves out, because a cheaper one of its kind runs."""


def covering(axes: Sequence[Sequence[Any]], at_once: int = 2) -> list[tuple[int, ...]]:
    """Indices of cells of the product, such that each combination of values of each ``at_once`` axes occurs. The same on
    every call."""
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    wanted = {choice for cell in every for choice in _choices(cell, at_once)}
    chosen = []
    while wanted:
        best = max(every, key=lambda cell: len(wanted & _choices(cell, at_once)))  # the first of equal ones
        chosen.append(best)
        wanted -= _choices(best, at_once)
    return chosen


def _choices(cell: tuple[int, ...], at_once: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(cell), min(at_once, len(cell))))


def every(nth: int, values: Iterable[Any]) -> list[Any]:
    """The values, for ``parametrize``. All but each n-th, from the first one, are marked ``full``. A tuple is the values
    of several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=full if i % nth else ())
        for i, value in enumerate(values)
    ]


def cells(*axes: Iterable[Any], at_once: int = 2) -> list[Any]:
    """The product of the axes, for ``parametrize``. Cells that are not in its covering part are marked ``full``."""
    values = [list(axis) for axis in axes]
    chosen = set(covering(values, at_once))
    found = []
    for index in itertools.product(*(range(len(axis)) for axis in values)):
        cell = [axis[i] for axis, i in zip(values, index, strict=True)]
        found.append(pytest.param(*cell, marks=() if index in chosen else full))
    return found
