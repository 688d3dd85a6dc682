"""The list of tests that failed and passed when they ran again (``--reruns``).

Such a test has found a defect of itself or of the package. The run shows each with both outcomes and its stack, and adds
them to ``out/defects.md``, so that a defect that was seen once is mended and not forgotten.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

__all__ = ["register"]

LIST = Path("out", "defects.md")


def register(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Defects(config.rootpath), "defects")


class Defects:
    """Collects the reports of tests that ran again, in the process that the user started."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._failures: dict[str, list[str]] = {}  # by test
        self._outcomes: dict[str, str] = {}  # of all tests, the last one

    @pytest.hookimpl(trylast=True)  # a killed worker's report is called a rerun late
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            text = report.longreprtext or "failed without a text"
            self._failures.setdefault(report.nodeid, []).append(f"failed ({report.when}):\n{text}")
            self._outcomes.pop(report.nodeid, None)
        elif report.when == "call" or report.failed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._failures:
            return
        terminalreporter.section("defects: these tests failed, and were run again")
        entries = [
            f"{nodeid}\n" + "\n".join(failures) + f"\nthen: {self._outcomes.get(nodeid, 'no outcome')}"
            for nodeid, failures in self._failures.items()
        ]
        for entry in entries:
            terminalreporter.line(entry)
        path = self._root / LIST
        path.parent.mkdir(exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            for entry in entries:
                file.write(
                    f"## {time.strftime('%Y-%m-%d %H:%M')}, commit {_commit(self._root)}\n\n```\n{entry}\n```\n\n"
                )
        terminalreporter.line(f"added to {LIST}")


def _commit(root: Path) -> str:
    """The checked-out commit, or "unknown" without git."""
    try:
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
