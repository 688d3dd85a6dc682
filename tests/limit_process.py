"""The process that ends a stuck test process: `item_limits.py` starts one beside each.

The test process sends a JSON line at the start and at the end of everything that has a limit. This process imports
nothing but a few modules of the standard library, and needs nothing of the test process: neither its interpreter lock,
nor its threads, nor its signal handlers. At the limit it collects the stacks of the test process and of its ranks,
writes a report, and kills the test process with all its descendants: a living descendant would keep the worker's pipe to
the controller of pytest-xdist open, and the controller waits for the end of that pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

LOOK_SECONDS = 1.0  # between looks at whether the test process still lives
STACK_SECONDS = 5.0  # for the processes to write their stacks
STOP_SECONDS = 60.0  # for the test process to end after SIGINT at the limit of the run


def parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(root: int, parent_of: dict[int, int] | None = None) -> list[int]:
    """The processes that ``root`` and its descendants have started, without this process. parent_of: a result of
    ``parents``, for several calls.
    """
    by_parent: dict[int, list[int]] = {}
    for pid, parent in (parents() if parent_of is None else parent_of).items():
        by_parent.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        children = [pid for pid in by_parent.get(todo.pop(), ()) if pid != os.getpid()]
        found += children
        todo += children
    return found


def orphans(test_process: int) -> list[int]:
    """The rest of the test process's group if it leads one, without descendants of its parent: in a shell's pipeline
    ``pytest | tee log``, ``tee`` is in this group too, and must write the end.
    """
    parent_of = parents()
    others = {test_process, *descendants(parent_of.get(test_process, 0), parent_of)}
    return [pid for pid in parent_of if pid not in others and _group_of(pid) == test_process]


def _group_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return 0


def stacks(test_process: int, dump_signal: int) -> str:
    """The stacks of all threads of the test process and its ranks, and the command lines of other descendants.

    A process that writes its stacks at a signal has the file open, and the file's name begins with ``stacks_``.
    """
    pids = [test_process, *descendants(test_process)]
    files: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    path = os.readlink(f"/proc/{pid}/fd/{fd}")
                    # A forked child that has not opened a file of its own still has its parent's.
                    if os.path.basename(path).startswith("stacks_") and path not in files.values():
                        files[pid] = path
    for pid, path in files.items():
        with contextlib.suppress(OSError):
            open(path, "w").close()
            os.kill(pid, dump_signal if pid == test_process else signal.SIGUSR1)
    end, before = time.monotonic() + STACK_SECONDS, None
    while time.monotonic() < end:
        texts = {pid: _read(path) for pid, path in files.items()}
        if texts == before and all(texts.values()):
            break
        before = texts
        time.sleep(0.2)
    lines = []
    for pid in pids:
        words = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        lines.append(f"--- process {pid}: {words[:300]}")
        if pid in files:
            lines.append(_read(files[pid]).rstrip() or "(no stacks: the process did not answer)")
    return "\n".join(lines)


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def kill(test_process: int) -> None:
    """Kills the test process, its descendants, and its orphans.

    All are stopped before the first is killed, so that none starts another process or takes part in the end of one.
    """
    stopped: set[int] = set()
    while new := {test_process, *descendants(test_process), *orphans(test_process)} - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def kill_group(test_process: int) -> None:
    """Kills the process group that the test process leads, if it leads one. This process is in a session of its own."""
    with contextlib.suppress(OSError):
        os.killpg(test_process, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def report(message: dict[str, Any], stacks: str, test_process: int, folder: str, is_worker: bool) -> None:
    """Writes the report for the controller, or to the terminal where there is none."""
    text = f"{message['what']}: not ended after its limit of {message['seconds']:g} s, so its processes were killed"
    details = f"{text}\n{stacks}\n"
    path = Path(folder, f"limit_{test_process}.json")
    path.with_suffix(".new").write_text(json.dumps({**message, "text": details}))
    path.with_suffix(".new").rename(path)
    print(f"\n{text}" if is_worker else f"\n{details}", file=sys.stderr, flush=True)


def main() -> None:
    test_process, dump_signal, folder, is_worker, end = (
        int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1", float(sys.argv[5]),
    )  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the test process
    message: dict[str, Any] | None = None
    deadline, pending = 0.0, b""
    end_sent = 0.0
    while os.getppid() == test_process:
        now = time.monotonic()
        if message is not None and now >= deadline:
            shown = stacks(test_process, dump_signal)
            if not select.select([0], [], [], 0)[0]:  # otherwise it has ended meanwhile: the signal may end a wait
                report(message, shown, test_process, folder, is_worker)
                kill(test_process)
                return
        if end and time.time() >= end and not end_sent:
            print("\nthe run has reached its limit: it ends now", file=sys.stderr, flush=True)
            Path(folder, "run_limit").touch()
            _signal(test_process, signal.SIGINT)
            end_sent = now
        if end_sent and now >= end_sent + STOP_SECONDS:
            print(
                f"\nthe run did not end within {STOP_SECONDS:g} s after SIGINT, and is killed",
                file=sys.stderr,
                flush=True,
            )
            kill(test_process)
            return
        wait = LOOK_SECONDS if message is None else min(LOOK_SECONDS, deadline - now)
        if not select.select([0], [], [], max(wait, 0))[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        if lines:
            message = json.loads(lines[-1])  # earlier ones have ended
            deadline = time.monotonic() + message["seconds"] if message else 0.0
    if is_worker:
        kill_group(test_process)


if __name__ == "__main__":
    main()
