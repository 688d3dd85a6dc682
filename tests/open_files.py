"""What this process has open, for tests that nothing is left open."""

from __future__ import annotations

import gc
import os

__all__ = ["open_files"]


def open_files() -> list[str]:
    """Descriptors of this process, sorted. What only the garbage collector still knows, of this test or of one before it, is closed first."""
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))
