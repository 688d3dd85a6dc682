"""The name of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["processor_name"]


def processor_name() -> str:
    """The name that the system gives to the processor's model."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
