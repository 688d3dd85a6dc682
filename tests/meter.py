"""The table of processor seconds at the end of a run, and the list of functions without a line in `costs.tsv`.

After each test, a test process reads the processor seconds of itself and of all processes below it. The controller (the
process of the command line) adds them up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests import costs, ranks
from tests.processor_time import clock, parts
from tests.touched import touched

__all__ = ["register", "touched_files"]

SHOWN_SECONDS = 60.0
"""Runs below it end without a table."""
N_DEAREST = 10
LISTED = 2.0
"""A function without a line is listed if it costs ``LISTED * costs.FUNCTION_SECONDS``. No cost fails a run: processors
differ, and a function of 41 s on one whose limit was 40 s once failed a run with 12,777 passed tests.
"""
N_FUNCTIONS = 20
"""With fewer measured functions of `costs.tsv`, the speed of this processor is not known."""

COLLECTION, COMPILATION = "collection: imports of tests and packages", "compilation of C programs"
KINDS = ("in the test process", "ranks and forked programs", "interpreters and other programs")
C_KINDS = {"": "C programs", "asan-ubsan": "C programs under sanitizers", "tsan": "C programs under sanitizers"}


def register(config: pytest.Config) -> None:
    is_worker, has_workers = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    table = config.getoption("--costs")
    if table and not config.getoption("--full"):
        raise pytest.UsageError("--costs measures all cells of a function: add --full")
    meter = Meter(is_exact=bool(table)) if is_worker or not has_workers else None
    if meter is not None:
        config.pluginmanager.register(meter)
    if not is_worker:
        config.pluginmanager.register(Report(config, meter, Path(table) if table else None), "costs")


def touched_files(config: pytest.Config) -> list[str]:
    """Test files that recent changes reach. The controller finds them once for all workers: a file written in between must
    not make them collect different tests.
    """
    if hasattr(config, "workerinput"):
        return config.workerinput["touched"]
    return config.pluginmanager.get_plugin("costs").touched


class Meter:
    """Measures the tests of one process. is_exact: counts orphans too, with a control group."""

    def __init__(self, is_exact: bool) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)  # of each cell, by function
        self.kinds: Counter[str] = Counter()
        self._clock = clock() if is_exact else None
        self._exact = 0.0
        self._parts = (0.0, 0.0, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.kinds[COLLECTION] += sum(self._passed())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield
        if ".c::" in item.nodeid:
            self.kinds[COMPILATION] += sum(self._passed())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        yield
        function, passed = costs.function_of(item.nodeid), self._passed()
        mode = C_KINDS.get(function.rpartition("::")[2], C_KINDS[""]) if ".c::" in function else None
        for kind, seconds in zip(KINDS, passed, strict=True):
            self.kinds[mode if mode is not None and kind == KINDS[2] else kind] += seconds
        n_runs = getattr(item, "execution_count", 1)  # of pytest-rerunfailures
        self.seconds[function].append(sum(passed) / n_runs)

    def _passed(self) -> tuple[float, ...]:
        """Seconds since the last call, in the order of ``KINDS``."""
        now = parts(ranks.zygote_pids())
        own, served, others = (new - old for new, old in zip(now, self._parts, strict=True))
        if served < 0:  # a fork server has ended: its seconds are those of an ended child now
            served, others = 0.0, others + served
        passed = [max(seconds, 0.0) for seconds in (own, served, others)]
        self._parts = now
        if self._clock is not None:
            exact = self._clock.seconds()
            passed[2] += max(exact - self._exact - sum(passed), 0.0)
            self._exact = exact
        return tuple(passed)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Stops the measurement, and sends the seconds to the controller."""
        if self._clock is not None:
            self._clock.close()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = (dict(self.seconds), dict(self.kinds))


class Report:
    """Adds up the seconds of all test processes, in the controller. table: the file for ``--costs``."""

    def __init__(self, config: pytest.Config, meter: Meter | None, table: Path | None) -> None:
        self._config, self._meter, self._table = config, meter, table
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._kinds: Counter[str] = Counter()
        self._missing: list[tuple[float, str]] = []

    @cached_property
    def touched(self) -> list[str]:
        return touched(self._config.rootpath)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["touched"] = self.touched

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(*getattr(node, "workeroutput", {}).get("costs", ({}, {})))

    def _add(self, seconds: dict[str, list[float]], kinds: dict[str, float]) -> None:
        for function, cells in seconds.items():
            self._seconds[function] += cells
        self._kinds.update(kinds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the table of ``--costs``, or finds the functions without a line."""
        if self._meter is not None:
            self._add(self._meter.seconds, self._meter.kinds)
        if self._table is not None:
            costs.write(self._table, self._seconds)
        elif not self._config.getoption("--full"):
            self._missing = missing(self._seconds, costs.read())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._missing:
            terminalreporter.section(f"functions that cost much: add these lines to {costs.TABLE.name}")
            for _, line in self._missing:
                terminalreporter.line(line)
        if sum(self._kinds.values()) < SHOWN_SECONDS:
            return
        terminalreporter.section("processor seconds")
        for line in lines(self._seconds, self._kinds):
            terminalreporter.line(line)
        if self._config.getoption("--full"):
            return
        table = costs.read()
        costly = {function: cost for function, cost in table.items() if cost > costs.CELL_SECONDS}
        out = {function: cost for function, cost in costly.items() if function not in self._seconds}
        near = costs.near_changes(table, self.touched) & set(self._seconds)
        terminalreporter.line(
            f"{len(out)} functions with cells over {costs.CELL_SECONDS:g} s did not run ({sum(out.values()):.0f} s a cell"
            f" each, by {costs.TABLE.name}); `make test-full` runs them. Of {len(near)} functions one cell ran because"
            " changes of the last days reach it."
        )


def missing(seconds: dict[str, Sequence[float]], table: dict[str, float]) -> list[tuple[float, str]]:
    """(cost, line) of each new line for ``table``: functions without a line that cost much. Seconds are those of the
    table's machine: functions with a line tell how fast this machine is.
    """
    ratios = [sum(cells) / len(cells) / table[name] for name, cells in seconds.items() if name in table]
    speed = median(ratios) if len(ratios) >= N_FUNCTIONS else 1.0
    return [
        (sum(cells) / speed, f"{sum(cells) / len(cells) / speed:.3g}\t{name}")
        for name, cells in sorted(seconds.items())
        if name not in table and not costs.is_of_the_tree(name) and sum(cells) / speed > LISTED * costs.FUNCTION_SECONDS
    ]


def lines(seconds: dict[str, Sequence[float]], kinds: dict[str, float]) -> Iterator[str]:
    """The table: seconds by kind, by folder of tests, and of the dearest functions."""
    by_folder: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for function, cells in seconds.items():
        functions[function] += sum(cells)
        by_folder["/".join(function.split("::")[0].split("/")[:-1][:3]) or "."] += sum(cells)
    total = sum(kinds.values())
    yield from _rows("by kind", sorted(kinds.items(), key=lambda row: -row[1]), total)
    yield from _rows("by folder", by_folder.most_common(), total)
    yield from _rows(f"the {N_DEAREST} dearest functions", functions.most_common(N_DEAREST), total)


def _rows(title: str, rows: Iterable[tuple[str, float]], total: float) -> Iterator[str]:
    yield f"{title}:"
    yield from (f"{seconds:8.1f} s {100 * seconds / total:4.1f} %  {name}" for name, seconds in rows)
