"""The settings that a call of ``checkpoint`` follows. Within an engine's forward they are that engine's."""

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
    """The recomputer of the engine whose forward runs. None outside the forwards of engines, where the settings of
    ``configure`` count.
    """
    return _active.recomputer


@contextmanager
def entered(recomputer: Recomputer | None) -> Iterator[None]:
    """Calls of ``checkpoint`` within follow the settings of ``recomputer``."""
    before, _active.recomputer = _active.recomputer, recomputer
    try:
        yield
    finally:
        _active.recomputer = before
