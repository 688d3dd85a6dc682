"""A bar over all experiments of a search, redrawn on a terminal while an experiment runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["ProgressBar"]

_CELLS = 20
_CLEAR = "\r\x1b[K"


class ProgressBar:
    """One line of a terminal. On another stream it writes nothing."""

    def __init__(self, n_steps: int, stream: TextIO) -> None:
        """n_steps: of an experiment."""
        self._n_steps, self._stream = n_steps, stream
        self._begin = time.monotonic()
        self._shown = ""

    def watch(self, name: str, n_done: int, n_left: int, best: str) -> Callable[[int], None]:
        """Returns what draws the bar of the experiment ``name``, from its number of steps.

        n_left: the experiments that are to come at most, with this one.
        """

        begin = time.monotonic()

        def draw(n_steps: int) -> None:
            if not self._stream.isatty():
                return
            left = None
            if n_done:
                left = max((begin - self._begin) / n_done * n_left - (time.monotonic() - begin), 0.0)
            text = self.text(name, n_done, n_left, best, n_steps, left)
            text = text[: shutil.get_terminal_size().columns - 1]
            if text != self._shown:
                self._stream.write(f"{_CLEAR}{text}")
                self._stream.flush()
                self._shown = text

        return draw

    def text(self, name: str, n_done: int, n_left: int, best: str, n_steps: int, seconds: float | None) -> str:
        """The line. seconds: that are left; None before the first experiment has ended."""
        n_all = n_done + n_left
        full = (n_done * self._n_steps + min(n_steps, self._n_steps)) * _CELLS // (n_all * self._n_steps)
        left = "" if seconds is None else f", {seconds:.0f} s left"
        bar = "#" * full + "." * (_CELLS - full)
        return f"[{bar}] {n_done}/{n_all}{left}; {name}: step {n_steps}/{self._n_steps}; best: {best}"

    def clear(self) -> None:
        """Removes the line, so that another text can take its place."""
        if self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._shown = ""
