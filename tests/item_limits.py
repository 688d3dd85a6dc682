"""A limit in seconds for each item, for the import of each test file, for the end of a session, and for a whole run.

    .venv/bin/python -m pytest --item-seconds 30 tests/deepspeed_c/zero        (120 by default)

    @pytest.mark.limit(300, reason="builds a wheel")

The limit of an item covers its set-up, its call and its tear-down together, and holds anew when the item runs again
(``--reruns``). At the limit a process of its own (`limit_process.py`) prints the stacks of all threads of the test
process and of its ranks, and kills the test process with everything that it has started. Under pytest-xdist the item
fails with these stacks, a new worker takes over, and the run goes on; without it the run ends.

``--run-ends-at TIME`` (seconds since 1970) ends the whole run, with the names of the running items and pytest's summary.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["ITEM_SECONDS", "Limits", "add_options", "register"]

ITEM_SECONDS = 120.0
DUMP_SIGNAL = signal.SIGRTMAX - 3  # no test uses it


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--item-seconds",
        type=float,
        default=ITEM_SECONDS,
        help="limit of a test without a mark `limit` (item_limits.py)",
    )
    parser.addoption(
        "--run-ends-at", type=float, default=0.0, metavar="TIME", help="end the run at this time, in seconds since 1970"
    )


def register(config: pytest.Config) -> None:
    config.pluginmanager.register(Limits(config), "item_limits")


class Limits:
    """Tells the limiting process beside this test process of all that begins and ends, and shows its reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds = config.getoption("--item-seconds")
        self._item_seconds = self._seconds
        self._is_worker = hasattr(config, "workerinput")
        self._session: pytest.Session | None = None
        self._running: dict[str, None] = {}  # names of items, in the order of their start
        self._outside: list[str] = []  # reports of hangs outside items
        if self._is_worker:
            self._folder = config.workerinput["limits_folder"]
            # The controller's group would otherwise be killed along with the worker. ^C reaches the worker through it.
            with contextlib.suppress(PermissionError):
                os.setpgid(0, 0)
        else:
            self._folder = tempfile.mkdtemp(prefix="dsc_limits_")
            config.add_cleanup(lambda: shutil.rmtree(self._folder, ignore_errors=True))
        self._pid = os.getpid()
        self._stacks = open(Path(self._folder, f"stacks_{self._pid}"), "a")  # noqa: SIM115  faulthandler needs it for good
        faulthandler.register(DUMP_SIGNAL, self._stacks, all_threads=True)
        end = 0.0 if self._is_worker else config.getoption("--run-ends-at")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-ISu", str(Path(__file__).with_name("limit_process.py"))),
                *(str(self._pid), str(int(DUMP_SIGNAL)), self._folder, str(int(self._is_worker)), str(end)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _begin(self, what: str, kind: str, seconds: float | None = None) -> None:
        self._send({"what": what, "kind": kind, "seconds": self._seconds if seconds is None else seconds})

    def _send(self, message: dict[str, Any] | None) -> None:
        if os.getpid() == self._pid:  # a forked child has no limit of its own
            with contextlib.suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    # ---- in a process that runs tests ------------------------------------------------------------------------------

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        self._begin(f"collecting {collector.nodeid or 'the tests'}", "collection")
        try:
            return (yield)
        finally:
            # Files of configuration are imported between two reports.
            self._begin(f"collecting what follows {collector.nodeid or 'the tests'}", "collection")

    def pytest_collection_finish(self) -> None:
        self._send(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        mark = item.get_closest_marker("limit")
        # An option that lowers the limit lowers marked ones by as much.
        self._item_seconds = (
            self._seconds if mark is None else max(mark.args[0] * min(self._seconds / ITEM_SECONDS, 1.0), self._seconds)
        )
        self._begin(item.nodeid, "item", self._item_seconds)
        try:
            return (yield)
        finally:
            self._send(None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The controller is told of the start of each worker's items; in the worker, a second run begins with this."""
        self._running[nodeid] = None
        if not self._has_workers():
            self._begin(nodeid, "item", self._item_seconds)

    @pytest.hookimpl(tryfirst=True)
    def pytest_enter_pdb(self) -> None:
        """A person who debugs has no limit until the item ends."""
        self._send(None)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        # The controller waits for its workers, and kills them after 10 s.
        self._begin("the end of the session", "end", max(self._seconds, 30) if self._has_workers() else None)
        if self._outside and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_unconfigure(self) -> None:
        # A worker waits for its controller now, which kills it after 10 s. Any other process has a limit for its exit
        # handlers and threads too.
        if self._is_worker:
            self._send(None)
        else:
            self._begin("the exit of the test process", "end")

    # ---- in the controller -----------------------------------------------------------------------------------------

    def _has_workers(self) -> bool:
        return self._session is not None and self._session.config.pluginmanager.has_plugin("dsession")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["limits_folder"] = self._folder

    def _reports(self, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """The reports of these kinds, each once."""
        for path in sorted(Path(self._folder).glob("limit_*.json")):
            report = json.loads(path.read_text())
            if report["kind"] in kinds:
                path.unlink()
                yield report

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        for path in Path(self._folder).glob("limit_*.json"):
            found = json.loads(path.read_text())
            if found["what"] == crashitem:
                path.unlink()
                report.longrepr = f"{report.longrepr}\n{found['text']}"
        self._running.pop(crashitem, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """A worker that hangs in an import or at its end is not replaced, for the next one would hang too."""
        for report in self._reports(("collection", "end")):
            self._outside.append(report["text"])
            node.config.pluginmanager.getplugin("dsession")._max_worker_restart = 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for text in self._outside:
            terminalreporter.section("ended at its limit", red=True)
            terminalreporter.line(text)
        if Path(self._folder, "run_limit").exists():
            terminalreporter.section("the run reached its limit; running then", red=True)
            for nodeid in self._running:
                terminalreporter.line(nodeid)
