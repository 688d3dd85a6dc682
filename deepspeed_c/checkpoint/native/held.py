"""A checkpoint's folder held open: every read sees the same save, even if another folder gets the name meanwhile."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TypeVar

from deepspeed_c.errors import CheckpointError

__all__ = ["OPEN_ATTEMPTS", "hold", "read_held", "was_replaced"]

# How often opening is repeated for a folder that is replaced while it is being opened.
OPEN_ATTEMPTS = 10

Found = TypeVar("Found")


def hold(path: str) -> int:
    """A descriptor of the folder; the caller closes it. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def was_replaced(path: str, held: int) -> bool:
    """Whether the name under which a folder was opened now belongs to another folder or to none, because a save has
    replaced the folder or retention has deleted it.
    """
    try:
        there = os.stat(path)
    except OSError:
        return True
    here = os.fstat(held)
    return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)


def read_held(path: str, read: Callable[[int], Found]) -> Found:
    """The result of ``read`` for a descriptor of the folder ``path``.

    A folder that has been replaced is emptied under its readers. So where ``read`` finds None, or raises OSError or
    CheckpointError, and the name leads elsewhere by now, the folder that has the name is read. Raises the errors of
    ``read``, and OSError where no folder has the name.
    """
    for attempt in itertools.count(1):
        folder = hold(path)
        try:
            found = read(folder)
            if found is not None or attempt == OPEN_ATTEMPTS or not was_replaced(path, folder):
                return found
        except (OSError, CheckpointError):
            if attempt == OPEN_ATTEMPTS or not was_replaced(path, folder):
                raise
        finally:
            os.close(folder)
