"""The end of a process waits until gloo's threads rest.

A thread of gloo takes Python's lock to give up a tensor. Where the interpreter has begun to end, Python before 3.14
ends that thread inside C++ instead, and the process aborts: a job that trained to its end leaves with SIGABRT. Torch's
own groups do so when a process ends right after a collective.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

__all__ = ["wait_at_exit"]

_THREAD = "pt_gloo_runloop"
_STEP_S = 1e-3
_N_AT_REST = 5  # looks in a row: a thread may rest for a moment, until another one has done its part
_MAX_STEPS = 2000  # a thread that waits for another rank rests too, so only a very loaded machine comes near


def wait_at_exit() -> None:
    """Makes the end of this process wait, however often it is called."""
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    before, n_equal = None, 0
    for _ in range(_MAX_STEPS):
        time.sleep(_STEP_S)  # without Python's lock, which a thread may be waiting for
        now = _at_rest()
        n_equal = n_equal + 1 if now is not None and now == before else 0
        if n_equal == _N_AT_REST or now == {}:
            return
        before = now


def _at_rest() -> dict[str, str] | None:
    """How often each thread of gloo has been scheduled; None when one of them runs."""
    counts = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if not (task / "comm").read_text().startswith(_THREAD):
                continue
            status = (task / "status").read_text()
        except OSError:  # the thread has ended
            continue
        if "\nState:\tS" not in status:
            return None
        counts[task.name] = status.partition("\nvoluntary_ctxt_switches")[2]  # some containers do not count
    return counts
