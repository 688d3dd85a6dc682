"""tests/waits.py: a process, thread, child or event that is stuck fails its test at the limit, and is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import waits

# Long enough for a child to have written its line, as the tests wait for that line first.
SHORT = 0.2
STUCK = "echo said; echo complaint >&2; exec sleep 1000"


def stuck(**options):
    """A process that has written its output and goes on."""
    process = subprocess.Popen(
        ["sh", "-c", STUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    deadline = time.monotonic() + waits.LIMIT_SECONDS
    while "sleep" not in Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[0]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


@pytest.mark.parametrize("wait", [waits.ended, waits.output_of])
def test_a_stuck_process_is_killed_and_its_output_is_shown(wait):
    process = stuck()
    with pytest.raises(AssertionError, match=r"had not ended after 0.2 s, and was killed: sh -c echo said") as caught:
        wait(process, SHORT)
    assert str(caught.value).endswith("--- output\nsaid\n\n--- errors\ncomplaint\n")
    assert process.returncode == -signal.SIGKILL


def test_the_group_of_a_stuck_process_is_killed_too():
    process = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(waits.first_line(process))
    with pytest.raises(AssertionError, match="was killed"):
        waits.ended(process, SHORT)
    deadline = time.monotonic() + waits.LIMIT_SECONDS
    while True:  # until it is gone, or a zombie of a process that reaps late
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except OSError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_that_writes_no_line_is_killed():
    process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.close()
    with pytest.raises(AssertionError, match="was killed: sleep 1000$"):
        waits.first_line(process, SHORT)
    assert process.returncode == -signal.SIGKILL


def test_ends_are_returned():
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "print('x'); raise SystemExit(3)"], stdout=subprocess.PIPE, text=True
    )
    assert waits.first_line(process) == "x\n"
    assert (waits.output_of(process), waits.ended(process)) == (("", None), 3)


def test_a_stuck_child_is_killed():
    pid = waits.fork_with_alarm()
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    with pytest.raises(AssertionError, match=f"child {pid} had not ended after 0.2 s, and was killed"):
        waits.exit_status(pid, SHORT)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_an_alarm_ends_a_child_and_shows_its_stack(capfd):
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the parent's handler does not reach the child
    try:
        pid = waits.fork_with_alarm(SHORT)
        if pid == 0:
            while True:
                pass
        assert waits.exit_status(pid) == -signal.SIGALRM
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "in test_an_alarm_ends_a_child_and_shows_its_stack" in capfd.readouterr().err


def test_a_zombie_is_left_for_its_parent():
    process = subprocess.Popen(["sleep", "1000"])
    with pytest.raises(AssertionError, match="had not ended"):
        waits.zombie(process.pid, SHORT)
    process.kill()
    waits.zombie(process.pid)
    assert waits.ended(process) == -signal.SIGKILL


def test_a_stuck_thread_is_shown():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="the stuck one")
    thread.start()
    with pytest.raises(AssertionError, match="the stuck one had not ended after 0.2 s:\n") as caught:
        waits.joined(thread, SHORT)
    assert "in wait" in str(caught.value)
    with pytest.raises(AssertionError, match="not set within 0.2 s"):
        waits.set_within(event, SHORT)
    event.set()
    waits.set_within(event)
    waits.joined(thread)


def test_a_stuck_process_of_multiprocessing_is_killed():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    process.start()
    with pytest.raises(AssertionError, match="and was killed"):
        waits.joined(process, SHORT)
    assert process.exitcode == -signal.SIGKILL
