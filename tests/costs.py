"""The time of `make test`: of a test function that costs much, it runs the cells that a few seconds of processor time pay.

`costs.tsv` holds the processor seconds of a mean cell of each function whose cells together cost more than
``FUNCTION_SECONDS``. `make test` runs as many cells of such a function as cost ``FUNCTION_SECONDS`` together, at least
one, spread evenly over all cells; the first one depends on the function's name, so that functions with equal axes run
different values. A function whose cell costs more than ``CELL_SECONDS`` runs with ``--full`` only. The mark
``always(n)`` makes n cells run (by default 1) whatever they cost. A function that is not in the table runs whole, so a new test needs no entry.

    .venv/bin/python -m pytest --full --costs tests/costs.tsv      (hours)

measures what it runs and writes the table anew; functions that it does not run keep their lines. It counts the
processor time of all processes that a test starts (processor_time.py).
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processor_time import clock

__all__ = ["CELL_SECONDS", "FUNCTION_SECONDS", "chosen", "leave_out", "read", "register", "write"]

TABLE = Path(__file__).with_name("costs.tsv")
FUNCTION_SECONDS = 5.0
CELL_SECONDS = 15.0


def function_of(nodeid: str) -> str:
    """The test function of an item. Each mode of a C program is a function."""
    return nodeid.split("[")[0]


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


class Meter:
    """Plugin of a process that runs tests: measures each test's processor seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._clock = clock()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self._clock.seconds()
        yield
        self.seconds[function_of(item.nodeid)].append(max(self._clock.seconds() - before, 0.0))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Stops the measurement, and sends what was measured to the parent process."""
        self._clock.close()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = dict(self.seconds)


class Table:
    """Plugin of the process that the user started: writes what it and its workers measured."""

    def __init__(self, path: Path, meter: Meter | None) -> None:
        self._path, self._meter = path, meter
        self._seconds: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(getattr(node, "workeroutput", {}).get("costs", {}))

    def _add(self, seconds: dict[str, list[float]]) -> None:
        for function, cells in seconds.items():
            self._seconds[function] += cells

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._add(self._meter.seconds if self._meter else {})
        write(self._path, self._seconds)


def register(config: pytest.Config, path: str) -> None:
    """Measures the tests of this session, and writes the table ``path`` when it ends."""
    if not config.getoption("--full"):
        raise pytest.UsageError("--costs measures all cells of a function: add --full")
    is_worker, has_workers = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    meter = Meter() if is_worker or not has_workers else None
    if meter is not None:
        config.pluginmanager.register(meter)
    if not is_worker:
        config.pluginmanager.register(Table(Path(path), meter))


def leave_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Removes from ``items`` those that cost too much, by the table, and returns them."""
    costs = read()
    cells: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cells[function_of(item.nodeid)].append(item)
    left_out = set()
    for function, all_of in cells.items():
        if function in costs:
            mark = all_of[0].get_closest_marker("always")
            least = 0 if mark is None else (*mark.args, 1)[0]
            kept = set(chosen(function, len(all_of), costs[function], least))
            left_out.update(item for i, item in enumerate(all_of) if i not in kept)
    items[:] = [item for item in items if item not in left_out]
    return list(left_out)
