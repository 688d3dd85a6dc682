"""The files this process has open, for tests that nothing is left open."""

from __future__ import annotations

import gc
import os

__all__ = ["open_files"]


def open_files() -> list[str]:
    """The open files of this process, sorted.

    Files that only uncollected garbage holds, from this test or an earlier one, are closed first.
    """
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))
