"""``deepspeed_c report --hostfile FILE``: the reports of all hosts, with marks at what differs between them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from deepspeed_c.launcher.hostfile import hosts_of
from deepspeed_c.launcher.runners.pdsh import ssh_command
from deepspeed_c.launcher.runners.runner import python_path

__all__ = ["CLOCK", "SECONDS", "Answer", "as_json", "as_text", "gather_from", "report_of_hosts"]

CLOCK = "clock"
"""The section of a host's time in the JSON of its report: seconds since 1970, at the moment when it was written."""
SECONDS = "seconds"
CLOCK_SECONDS = 1.0
"""Clocks that differ by more are marked."""
ANSWER_SECONDS = 120.0
SAID_LINES = 5
N_AT_ONCE = 128
MARK = "!"
# Differences in them are of the moment, and no mistake.
VOLATILE = {("memory", "available"), ("memory", "/dev/shm free")}


class Answer(NamedTuple):
    """The report of one host."""

    report: Mapping[str, Mapping[str, Any]] | None  # None: the host did not answer
    offset: float  # seconds by which its clock is ahead of this host's
    is_whole: bool  # whether its package is complete
    said: str  # what it, or ssh, has said besides


def report_of_hosts(hostfile: str | None, port: int | None, is_json: bool) -> int:
    """Print the reports of all hosts. Returns 1 if a host does not answer, or lacks a part of the package; else 0."""
    hosts = hosts_of(hostfile)
    with ThreadPoolExecutor(min(len(hosts), N_AT_ONCE)) as pool:
        answers = dict(zip(hosts, pool.map(lambda host: gather_from(_command(host, port)), hosts), strict=True))
    print(json.dumps(as_json(answers), indent=2) if is_json else "\n".join(as_text(answers)))
    return 0 if all(answer.report is not None and answer.is_whole for answer in answers.values()) else 1


def _command(host: str, port: int | None) -> list[str]:
    """The command that prints the report of ``host``, with this interpreter in this folder, as a launch has them."""
    remote = f"export PYTHONPATH={shlex.quote(python_path())}; cd {shlex.quote(os.getcwd())} && exec " + shlex.join(
        [sys.executable, "-m", "deepspeed_c", "report", "--json"]
    )
    return [*ssh_command(port), host, f"exec sh -c {shlex.quote(remote)}"]


def gather_from(command: Sequence[str], seconds: float = ANSWER_SECONDS) -> Answer:
    """Run a command that prints a report as JSON, for at most ``seconds``."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
        except OSError as error:
            return Answer(None, 0.0, False, f"{command[0]} cannot be started: {error}")
        late = threading.Event()
        timer = threading.Timer(seconds, _end, (process, late))
        timer.start()
        with process:
            arrival, lines = 0.0, []
            for line in process.stdout or ():
                # Lines before are a greeting of the host's shell
                if lines or line == "{\n":
                    arrival = arrival or time.time()
                    lines.append(line)
        timer.cancel()
        errors.seek(0)
        said = "\n".join(errors.read().splitlines()[-SAID_LINES:])
    if late.is_set():
        return Answer(None, 0.0, False, f"no answer within {seconds:g} s" + (f": {said}" if said else ""))
    try:
        report = json.loads("".join(lines))
        offset = report.pop(CLOCK)[SECONDS] - arrival
    except (KeyError, TypeError, ValueError):
        how = f"exit code {process.returncode}, without a report"
        return Answer(None, 0.0, False, f"{said or 'no message'} ({how})")
    return Answer(report, offset, process.returncode == 0, said)


def _end(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    process.kill()


def as_json(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Host -> its report, or what was said in its place."""
    return {
        host: {"error": answer.said} if answer.report is None else {**answer.report, CLOCK: {"ahead_s": answer.offset}}
        for host, answer in answers.items()
    }


def as_text(answers: Mapping[str, Answer]) -> list[str]:
    """Lines: values that all hosts share once, others for each group of hosts with the same value, and marked."""
    reports = {host: answer.report for host, answer in answers.items() if answer.report is not None}
    lines = [f"{len(reports)} of {len(answers)} hosts answered; {MARK} marks what differs between them"]
    sections = _union(reports.values(), lambda report: report)
    width = max((len(name) for report in reports.values() for values in report.values() for name in values), default=0)
    for section in sections:
        lines += ["", section]
        for name in _union(reports.values(), lambda report, section=section: report.get(section, {})):
            values = {host: report.get(section, {}).get(name, "not there") for host, report in reports.items()}
            lines += _row(name, values, width, is_marked=(section, name) not in VOLATILE)
    lines += _clocks({host: answer.offset for host, answer in answers.items() if answer.report is not None})
    for host, answer in answers.items():
        if answer.report is None:
            lines += ["", f"{MARK} {host} does not answer:", *(f"    {line}" for line in answer.said.splitlines())]
        elif not answer.is_whole:
            lines += ["", f"{MARK} {host}: the package is not complete (see above)"]
    return lines


def _union(reports: Iterable[Mapping[str, Any]], keys: Callable[..., Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(key for report in reports for key in keys(report)))


def _row(name: str, values: Mapping[str, Any], width: int, *, is_marked: bool) -> list[str]:
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        shown = ("no", "yes")[value] if isinstance(value, bool) else str(value)
        groups.setdefault(shown, []).append(host)
    if len(groups) == 1:
        return [f"  {name:<{width}}  {next(iter(groups))}"]
    mark = MARK if is_marked else " "
    names = {shown: ", ".join(hosts) for shown, hosts in groups.items()}
    column = max(map(len, names.values()))
    return [f"{mark} {name}", *(f"      {hosts:<{column}}  {shown}" for shown, hosts in names.items())]


def _clocks(offsets: Mapping[str, float]) -> list[str]:
    if len(offsets) < 2:
        return []
    spread = max(offsets.values()) - min(offsets.values())
    if spread <= CLOCK_SECONDS:
        return ["", CLOCK, f"  all within {CLOCK_SECONDS:g} s"]
    first = min(offsets.values())
    width = max(map(len, offsets))
    return [
        *("", CLOCK, f"{MARK} up to {spread:.1f} s apart"),
        *(f"      {host:<{width}}  {offset - first:.1f} s ahead" for host, offset in offsets.items()),
    ]
