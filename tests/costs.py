"""The time of `make test`: of a test function that costs much, it runs the cells that a few seconds of processor time pay.

`costs.tsv` holds the processor seconds of a mean cell of each function whose cells together cost more than
``FUNCTION_SECONDS``. `make test` runs as many cells of such a function as cost ``FUNCTION_SECONDS`` together, at least
one, spread evenly over all cells; the first one depends on the function's name, so that functions with equal axes run
different values. Tests of the tree and of the tests themselves (``tests/test_*.py``) run whole. The mark ``always(n)`` makes n cells run (by default 1) whatever they cost.

A function with cells over ``CELL_SECONDS`` runs with ``--full``, and in `make test` only near recent changes
(touched.py): one cell each, nearest functions first, ``TOUCHED_SECONDS`` together.

    .venv/bin/python -m pytest --full --costs tests/costs.tsv      (hours)

measures all tests and writes the table anew; other functions keep their lines. At the end of each run, meter.py names
functions without a line that need one.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = [
    "CELL_SECONDS", "FUNCTION_SECONDS", "chosen", "function_of", "is_of_the_tree", "leave_out", "near_changes", "read",
    "write",
]  # fmt: skip

TABLE = Path(__file__).with_name("costs.tsv")
FUNCTION_SECONDS = 5.0
CELL_SECONDS = 5.0
TOUCHED_SECONDS = 240.0


def function_of(nodeid: str) -> str:
    """The test function of an item. Each mode of a C program is a function."""
    return nodeid.split("[")[0]


def is_of_the_tree(function: str) -> bool:
    """Whether the function lies in a file directly below ``tests``."""
    return function.split("::")[0].rpartition("/")[0] == "tests"


def chosen(function: str, n_cells: int, cost: float, least: int = 0) -> list[int]:
    """Indices of the cells that `make test` runs, ``least`` or more, of a function whose mean cell costs ``cost``
    seconds."""
    affordable = n_cells if cost <= 0 else max(int(FUNCTION_SECONDS / cost), int(cost <= CELL_SECONDS))
    if not (keep := min(n_cells, max(affordable, least))):
        return []
    first = zlib.crc32(function.encode()) % n_cells
    return sorted((first + i * n_cells // keep) % n_cells for i in range(keep))


def read(path: Path | None = None) -> dict[str, float]:
    """The processor seconds of a mean cell, by function; without ``path`` from ``TABLE``."""
    with contextlib.suppress(FileNotFoundError):
        lines = (line.split("\t") for line in (path or TABLE).read_text().splitlines() if not line.startswith("#"))
        return {function: float(seconds) for seconds, function in lines}
    return {}


def write(path: Path, seconds: dict[str, Sequence[float]]) -> None:
    """Writes the table with the given seconds of each cell, by function; other functions keep their lines."""
    costs = read(path)
    for function, cells in seconds.items():
        costs.pop(function, None)
        if sum(cells) > FUNCTION_SECONDS:
            costs[function] = sum(cells) / len(cells)
    head = "# Processor seconds of a mean cell of each test function that costs much: see costs.py.\n"
    path.write_text(head + "".join(f"{costs[name]:.3g}\t{name}\n" for name in sorted(costs)))


def near_changes(costs: dict[str, float], files: Sequence[str]) -> set[str]:
    """The functions of ``costs`` with costly cells that run because changes reach their files: as many as
    ``TOUCHED_SECONDS`` pay, in the order of ``files``.
    """
    by_file: dict[str, list[str]] = defaultdict(list)
    for function, cost in costs.items():
        if cost > CELL_SECONDS:
            by_file[function.split("::")[0]].append(function)
    near, left = set(), TOUCHED_SECONDS
    for function in (function for file in files for function in by_file[file]):
        if costs[function] <= left:
            near.add(function)
            left -= costs[function]
    return near


def leave_out(items: list[pytest.Item], touched: Sequence[str]) -> list[pytest.Item]:
    """Removes from ``items`` those that cost too much, by the table, and returns them. touched: test files that changes
    reach, nearest first.
    """
    costs = read()
    near = near_changes(costs, touched)
    cells: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cells[function_of(item.nodeid)].append(item)
    left_out = set()
    for function, all_of in cells.items():
        if function in costs and not is_of_the_tree(function):
            mark = all_of[0].get_closest_marker("always")
            least = int(function in near) if mark is None else (*mark.args, 1)[0]
            kept = set(chosen(function, len(all_of), costs[function], least))
            left_out.update(item for i, item in enumerate(all_of) if i not in kept)
    items[:] = [item for item in items if item not in left_out]
    return list(left_out)
