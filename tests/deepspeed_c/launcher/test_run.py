"""Starting and ending ranks in this process: what the command line cannot cause by itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.plan import Plan, RankPlan, make_plan
from deepspeed_c.launcher.run import SIGNALS, launch


def plan_of(*commands):
    ranks = tuple(RankPlan(tuple(command), {"RANK": str(i)}) for i, command in enumerate(commands))
    return Plan(
        ranks=ranks,
        master_addr="127.0.0.1",
        master_port=None,
        log_dir=None,
        tag_output=False,
        grace=5.0,
        save_pid=False,
        log_level="warning",
    )


def processes_with(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_rank_that_cannot_be_started_takes_the_others_with_it():
    mark = f"1000.{os.getpid()}"
    ranks = [["sleep", mark], ["sleep", mark], ["sleep", "a\0b"]]
    with pytest.raises(LaunchError, match="cannot be started: embedded null byte"):
        launch(plan_of(*ranks))
    end = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []


def test_program_that_is_no_program():
    with pytest.raises(LaunchError, match="cannot be started"):
        launch(plan_of(["/proc/self/status"]))


def test_nothing_is_left_behind_in_the_callers_process(tmp_path):
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    files = set(os.listdir("/proc/self/fd"))
    script = tmp_path / "t.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    for code in (0, 3):
        assert launch(make_plan(parse_options(["--no_local_rank", str(script), str(code)]))) == code
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
    assert len(os.listdir("/proc/self/fd")) <= len(files) + 2, "the store's own descriptors may close a little later"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_first_failure_is_reported_not_the_lowest_rank(capfd):
    code = "import sys, time; time.sleep({}); sys.exit({})"
    python = [sys.executable, "-c"]
    assert launch(plan_of([*python, code.format(0.7, 4)], [*python, code.format(0, 5)])) == 5
    assert "rank 1" in capfd.readouterr().err
