"""The logs of a deployment's processes."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["tail"]

_LINES = 20
_BYTES = 64 * 1024


def tail(log: Path) -> str:
    """The last lines of a log, indented, below a line that says so."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_LINES:]
    except FileNotFoundError:
        lines = []
    return "\n".join(["Last lines of its log:", *(f"  {line}" for line in lines)]) if lines else "Its log is empty."
