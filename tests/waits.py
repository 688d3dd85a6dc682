"""Waits for processes, threads and events that end at a limit: a stuck one fails its test and never hangs the run.

    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert waits.ended(process) == 0

    pid = waits.fork_with_alarm()
    if pid == 0:
        os._exit(0)
    assert waits.exit_status(pid) == 0

tests/test_limits.py refuses waits of other kinds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import IO, Any, Protocol

__all__ = [
    "LIMIT_SECONDS", "ended", "exit_status", "first_line", "fork_with_alarm", "joined", "output_of", "ran",
    "set_within", "zombie",
]  # fmt: skip

# The limit only ends stuck waits, so it is long: several test sessions may share two cores.
LIMIT_SECONDS = 300.0
# After a kill: processes that were started by the killed one may hold its pipes open.
PIPE_SECONDS = 10.0
LOOK_SECONDS = 0.002


class _Waitable(Protocol):
    """``multiprocessing.Process`` of any start method."""

    pid: int | None
    exitcode: int | None

    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


def ended(process: subprocess.Popen[Any], limit: float = LIMIT_SECONDS) -> int:
    """The exit code of ``process``, as ``wait`` returns it. At the limit the process is killed, with its group if it
    leads one, and the ``AssertionError`` has its command and output."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        raise _stuck(process, limit) from None


def output_of(process: subprocess.Popen[Any], limit: float = LIMIT_SECONDS) -> tuple[Any, Any]:
    """The output and the errors of ``process``, as ``communicate`` returns them. The limit works as in ``ended``."""
    try:
        return process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise _stuck(process, limit) from None


def ran(command: Any, *, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program's run to its end, with its output as text. ``options``: as for ``subprocess.run``."""
    defaults = {"capture_output": True, "text": True, "timeout": LIMIT_SECONDS}
    return subprocess.run(command, check=check, **(defaults | options))


def first_line(process: subprocess.Popen[Any], limit: float = LIMIT_SECONDS) -> Any:
    """The first line of the output of ``process``, before anything else has read it; "" if the process ended without
    output. The limit works as in ``ended``."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit)[0]:
        raise _stuck(process, limit)
    return process.stdout.readline()


def joined(thing: threading.Thread | _Waitable, limit: float = LIMIT_SECONDS) -> None:
    """The thread or the process of ``multiprocessing`` has ended. At the limit a process is killed; the stack of a
    thread is in the ``AssertionError``, because nothing can end a thread."""
    thing.join(limit)
    if isinstance(thing, threading.Thread):
        if thing.is_alive():
            frame = sys._current_frames().get(thing.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            raise AssertionError(f"{thing.name} had not ended after {limit:g} s:\n{stack}")
    elif thing.exitcode is None:
        thing.kill()
        thing.join(limit)
        raise AssertionError(f"{thing} had not ended after {limit:g} s, and was killed")


def set_within(event: threading.Event, limit: float = LIMIT_SECONDS) -> None:
    """The event of ``threading`` or ``multiprocessing`` is set."""
    assert event.wait(limit), f"the event was not set within {limit:g} s"


def fork_with_alarm(limit: float = LIMIT_SECONDS) -> int:
    """``os.fork``, with a child that SIGALRM ends at the limit. The child first writes the stacks of its threads to
    standard error. Pipes of a stuck child close then, so that reading them ends too."""
    pid = os.fork()
    if pid == 0:
        # The parent's handler may belong to the time limit of its test, and would raise in the child.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        signal.setitimer(signal.ITIMER_REAL, limit)
    return pid


def exit_status(pid: int, limit: float = LIMIT_SECONDS) -> int:
    """The exit code of the child ``pid``, -n for signal n. At the limit the child is killed."""
    status = _polled(pid, limit)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        _polled(pid, LIMIT_SECONDS)
        raise AssertionError(f"child {pid} had not ended after {limit:g} s, and was killed")
    return os.waitstatus_to_exitcode(status)


def zombie(pid: int, limit: float = LIMIT_SECONDS) -> None:
    """The child ``pid`` has ended, and is left for its parent to wait for."""
    deadline = time.monotonic() + limit
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < deadline, f"child {pid} had not ended after {limit:g} s"
        time.sleep(LOOK_SECONDS)


def _polled(pid: int, limit: float) -> int | None:
    deadline = time.monotonic() + limit
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK_SECONDS)


def _stuck(process: subprocess.Popen[Any], limit: float) -> AssertionError:
    """Kills the process. The error names its command and shows its output so far."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    out, err = _rest(process)
    command = process.args if isinstance(process.args, str | bytes) else " ".join(map(str, process.args))
    shown = "".join(f"\n--- {name}\n{text}" for name, text in (("output", out), ("errors", err)) if text)
    return AssertionError(f"had not ended after {limit:g} s, and was killed: {command}{shown}")


def _rest(process: subprocess.Popen[Any]) -> tuple[str, str]:
    if process.stdin is not None and process.stdin.closed:
        process.stdin = None  # communicate would flush it
    for name in ("stdout", "stderr"):
        stream: IO[Any] | None = getattr(process, name)
        if stream is not None and stream.closed:
            setattr(process, name, None)
    try:
        found = process.communicate(timeout=PIPE_SECONDS)
    except subprocess.TimeoutExpired as error:
        found = error.output, error.stderr
    out, err = (text.decode(errors="replace") if isinstance(text, bytes) else text or "" for text in found)
    return out, err
