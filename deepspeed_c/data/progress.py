"""A progress bar for readers of many samples."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress_bar"]

DELAY_SECONDS = 2.0
"""Shorter work shows nothing."""
# Seconds between two drawings: a terminal's line is drawn over, and in a file each drawing is a line.
_ON_TERMINAL, _IN_FILE = 0.5, 10.0


def progress_bar(n: int, what: str, unit: str, *, is_shown: bool = True) -> tqdm:
    """A bar on stderr for ``n`` items. ``update(k)`` counts k more; use it as a context manager."""
    from tqdm import tqdm  # takes a while, and most programs draw nothing

    seconds = _ON_TERMINAL if sys.stderr.isatty() else _IN_FILE
    return tqdm(
        total=n, desc=what, unit=unit, disable=not is_shown, delay=DELAY_SECONDS, mininterval=seconds, file=sys.stderr
    )
