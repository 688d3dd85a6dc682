"""The settings that a call of ``checkpoint`` follows: its engine's, within an engine's forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_c.recompute.recomputer import Recomputer

__all__ = ["current", "entered"]


class _Active(threading.local):
    recomputer: Recomputer | None = None


_active = _Active()


def current() -> Recomputer | None:
    """None outside of the forwards of engines, where ``configure`` counts."""
    return _active.recomputer


@contextmanager
def entered(recomputer: Recomputer | None) -> Iterator[None]:
    """Calls within follow the settings of ``recomputer``."""
    before, _active.recomputer = _active.recomputer, recomputer
    try:
        yield
    finally:
        _active.recomputer = before
