"""A child process that ends with its context, also if this process is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["ended"]

_GUARD = str(Path(__file__).with_name("guard.py"))


@contextmanager
def ended(process: subprocess.Popen[Any], limit_s: float) -> Iterator[None]:
    """Ends a process that leads a process group (``start_new_session``) when this context ends: by SIGTERM, and after
    ``limit_s`` seconds by SIGKILL. The rest of its group is killed then. If this process is killed within the
    context, ``guard.py`` kills the group."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", _GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        with suppress(BrokenPipeError):
            guard.stdin.write(f"{process.pid}\n")
            guard.stdin.flush()
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with suppress(BrokenPipeError):
            guard.communicate("end\n")
