"""The step file of a rank: how far its training has come, for the process that started it.

A file of three whole numbers, mapped into memory. The launcher makes one for each rank of an elastic launch, and its
path is in DSC_STEP_FILE; the engine writes it. A write costs nanoseconds, and the numbers outlive a killed rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from typing import final

from deepspeed_c.env import read_env
from deepspeed_c.errors import LaunchError

__all__ = ["StepFile", "StepNotes"]

_NUMBERS = struct.Struct("<3q")
_ONE = struct.Struct("<q")
# Engines of one process have one file, and each counts its saves in a thread of its own.
_lock = threading.Lock()


@final
class StepFile:
    """A step file that this process has mapped. Each number has one writer, and is read and written at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map an existing file. Raises LaunchError where there is none of the right size."""
        try:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _NUMBERS.size)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"the step file cannot be used: {error}",
                where=str(path),
                fix="unset DSC_STEP_FILE: the launcher sets it for the ranks that it starts",
            ) from error

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> StepFile:
        """Make the file, with zeros, and map it. An earlier one is replaced."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(bytes(_NUMBERS.size))
        return cls(path)

    @property
    def step(self) -> int:
        """Optimizer steps that the run has done, from its very beginning; 0 in a program that has no engine."""
        return self._get(0)

    @step.setter
    def step(self, value: int) -> None:
        self._put(0, value)

    @property
    def n_saves(self) -> int:
        """Checkpoints that this process has seen committed."""
        return self._get(1)

    @n_saves.setter
    def n_saves(self, value: int) -> None:
        self._put(1, value)

    @property
    def min_seconds(self) -> int:
        """Seconds that a round lasts at least before a host that has come back is taken in."""
        return self._get(2)

    @min_seconds.setter
    def min_seconds(self, value: int) -> None:
        self._put(2, value)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()

    def _get(self, index: int) -> int:
        return int(_ONE.unpack_from(self._memory, _ONE.size * index)[0])

    def _put(self, index: int, value: int) -> None:
        _ONE.pack_into(self._memory, _ONE.size * index, value)


@final
class StepNotes:
    """An engine's notes in the file of DSC_STEP_FILE. Without this variable there are none."""

    def __init__(self, min_seconds: int) -> None:
        """min_seconds: see ``StepFile.min_seconds``. Raises LaunchError if there is no such file."""
        path = read_env().step_file
        self._file = None if path is None else StepFile(path)
        if self._file is not None:
            self._file.min_seconds = min_seconds

    def note_step(self, step: int) -> None:
        """Notes that the run has done ``step`` steps. The last step of any engine of the process counts."""
        if self._file is not None:
            self._file.step = step

    def note_save(self) -> None:
        """Counts a checkpoint that has been committed. Any thread may call it."""
        if self._file is not None:
            with _lock:
                self._file.n_saves += 1

    def close(self) -> None:
        """Ends the notes. Later calls write nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
