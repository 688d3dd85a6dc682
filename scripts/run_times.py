"""Write what a whole run of the tests takes into CONTRIBUTING.md.

    bash .ci/run 2>&1 | tee ci.log              (in a fresh clone, on a quiet machine)
    python -m scripts.run_times ci.log ...

Each log is the output of `.ci/run` on this machine. The figures are seconds of the whole run, of pytest, and of its
processes (tests/meter.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import machine
from scripts.missing import put_between_marks

__all__ = ["Run", "main", "read_run", "table"]

DOCUMENT = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
BEGIN, END = "<!-- run times: written by scripts/run_times.py -->", "<!-- /run times -->"
_WHOLE = re.compile(r"^continuous integration: (\d+) s at commit (\w+)$", re.MULTILINE)
_CLOSING = re.compile(r"^=+ (.*?(\d+) passed.*?) in ([\d.]+)s .*=+$", re.MULTILINE)
_KIND = re.compile(r"^ *([\d.]+) s +[\d.]+ %  (.+)$")


class Run(NamedTuple):
    commit: str
    seconds: int
    tests: str
    """pytest's counts"""
    test_seconds: float
    kinds: dict[str, float]
    """Processor seconds by kind of process."""


def read_run(log: str, where: str) -> Run:
    """The figures of one log. Raises ValueError if the log is not of a whole run."""
    whole, closings = _WHOLE.search(log), list(_CLOSING.finditer(log))
    lines = log.splitlines()
    if whole is None or not closings or "by kind:" not in lines:
        raise ValueError(f"{where} is no log of a whole run of .ci/run; run it in a fresh clone to its end")
    kinds = {}
    for line in lines[lines.index("by kind:") + 1 :]:
        if not (row := _KIND.match(line)):
            break
        kinds[row[2]] = float(row[1])
    return Run(whole[2], int(whole[1]), closings[-1][1], float(closings[-1][3]), kinds)


def table(runs: Sequence[Run]) -> str:
    """The runs, and the processor seconds of the last one, in Markdown."""
    total = sum(runs[-1].kinds.values())
    return "\n".join(
        [
            f"Fresh clones on {machine()}:",
            "",
            "| commit | `.ci/run` | pytest | tests |",
            "| --- | --- | --- | --- |",
            *(
                f"| {run.commit} | {_minutes(run.seconds)} | {_minutes(run.test_seconds)} | {run.tests} |"
                for run in runs
            ),
            "",
            f"Processor seconds of the last one, {total:.0f} together: "
            + ", ".join(f"{kind} {100 * seconds / total:.0f} %" for kind, seconds in runs[-1].kinds.items())
            + ".",
        ]
    )


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"


def main(paths: Sequence[str]) -> int:
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        runs = [read_run(Path(path).read_text(errors="replace"), path) for path in paths]
    except (OSError, ValueError) as error:
        print(f"run_times: {error}", file=sys.stderr)
        return 1
    DOCUMENT.write_text(put_between_marks(DOCUMENT.read_text(), table(runs), BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
