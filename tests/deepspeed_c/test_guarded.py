"""A guarded child ends with its context, with its own children, and with a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from deepspeed_c.guarded import ended
from tests import waits

# Prints its process id and its child's, which is in the same group; neither obeys SIGTERM.
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
time.sleep(600)
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(each) for each in waits.first_line(process).split()]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_gone(pids: list[int]) -> None:
    end = time.monotonic() + waits.LIMIT_SECONDS
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(waits.LOOK_SECONDS)


def test_a_deaf_child_and_its_own_are_killed() -> None:
    process = start(DEAF)
    with ended(process, 0.1):
        pids = pids_of(process)
        assert all(is_running(pid) for pid in pids) and len(pids) == 2
    assert process.returncode == -signal.SIGKILL
    until_gone(pids)
    waits.output_of(process)


def test_a_child_that_obeys_is_not_killed() -> None:
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1, flush=True); time.sleep(600)"
    )
    process = start(program)
    with pytest.raises(KeyError), ended(process, waits.LIMIT_SECONDS):
        waits.first_line(process)
        raise KeyError
    assert process.returncode == 7
    waits.output_of(process)


def test_a_child_that_has_ended_keeps_its_code() -> None:
    process = start("raise SystemExit(5)")
    with ended(process, 0.1):
        waits.ended(process)
    assert process.returncode == 5
    waits.output_of(process)


def test_a_parent_that_is_killed_leaves_nothing() -> None:
    program = (
        "import subprocess, sys, time\n"
        "from deepspeed_c.guarded import ended\n"
        f"child = subprocess.Popen([sys.executable, '-c', {DEAF!r}], stdout=subprocess.PIPE, text=True,"
        " start_new_session=True)\n"
        "with ended(child, 600):\n"
        "    print(child.stdout.readline(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = start(program)
    pids = pids_of(parent)
    assert all(is_running(pid) for pid in pids)
    os.kill(parent.pid, signal.SIGKILL)
    waits.ended(parent)
    until_gone(pids)
    waits.output_of(parent)
