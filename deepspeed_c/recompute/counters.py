"""The costs of recomputed layers: calls, times and bytes of each layer, for the profile and for plans."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Counters", "LayerCalls", "LayerFigures"]


class _Here(threading.local):
    """The layer's call that a thread is in: the number of the call and the label of the layer."""

    call: tuple[int, str] = (0, "")


class LayerCalls:
    """Numbers the calls of layers, and knows the call that the current thread is in."""

    def __init__(self) -> None:
        # Each layer's call takes a number, also for kept layers. Taking the next number needs no lock.
        self._numbers = itertools.count(1)
        self._here = _Here()

    def begin(self, label: str) -> None:
        """A call of the layer ``label`` begins: from now on this thread keeps tensors for it."""
        self._here.call = (next(self._numbers), label)

    @property
    def number(self) -> int:
        """Number of the newest call in this thread; 0 if there is none."""
        return self._here.call[0]

    @property
    def label(self) -> str:
        return self._here.call[1]


@dataclass
class LayerFigures:
    """The costs of one layer since the counters were cleared."""

    n: int = 0
    """Number of forwards."""
    forward_ns: int = 0
    recompute_ns: int = 0
    """Time of running the layer again. Times of a layer include the layers within it."""
    copy_ns: int = 0
    """Time of copying the layer's inputs on the computing thread."""
    wait_ns: int = 0
    """Time of waiting for inputs that had not arrived when they were needed, or had not left when their memory was
    needed.
    """
    bytes_kept: int = 0
    """Bytes of inputs that stayed in the computing device's memory, over all forwards."""
    bytes_moved: int = 0
    """Bytes of inputs that went to host memory or to a file, over all forwards."""

    def count(self, is_recomputed: bool, spent_ns: int) -> None:
        """Counts one run of the layer."""
        if is_recomputed:
            self.recompute_ns += spent_ns
        else:
            self.n += 1
            self.forward_ns += spent_ns

    def keep(self, n_bytes: int) -> None:
        self.bytes_kept += n_bytes

    def move(self, n_bytes: int, copy_ns: int) -> None:
        """Counts inputs as moved elsewhere that were counted as kept."""
        self.bytes_kept -= n_bytes
        self.bytes_moved += n_bytes
        self.copy_ns += copy_ns

    def wait(self, spent_ns: int) -> None:
        self.wait_ns += spent_ns


class Counters:
    """Figures of layers, by their labels in the order of their first calls.

    Times are measured on the calling thread. They are exact on the CPU, and on an accelerator with
    ``"synchronize_checkpoint_boundary"``.
    """

    def __init__(self) -> None:
        self._figures: dict[str, LayerFigures] = {}

    def of(self, label: str) -> LayerFigures:
        found = self._figures.get(label)
        if found is None:
            found = self._figures.setdefault(label, LayerFigures())
        return found

    def timed(self, label: str, function: Callable) -> Callable:
        """A form of ``function`` whose first call counts as the layer's forward, and whose later calls count as
        recomputations.
        """
        return functools.partial(_Timed(self.of(label)), function)

    def clear(self) -> None:
        self._figures.clear()

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {label: asdict(figures) for label, figures in list(self._figures.items())}


class _Timed:
    __slots__ = ("_figures", "_has_run")

    def __init__(self, figures: LayerFigures) -> None:
        self._figures, self._has_run = figures, False

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        was_run, self._has_run = self._has_run, True
        begin = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self._figures.count(was_run, time.perf_counter_ns() - begin)
