"""Results that a layer asks for once, although it is run again: messages between ranks, say.

A message that only some ranks repeat would wait for ever, and one that all repeat takes their time twice. So a call of
a layer keeps such results from its forward until its graph is gone, and gives them back in the second run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from deepspeed_c.errors import RecomputeError

__all__ = ["OnceResults", "once"]

Result = TypeVar("Result")


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Run] = []  # of layers that run on this thread, the outermost first


class _Run:
    """One run of a layer's call, which keeps results or gives them back."""

    def __init__(self, results: OnceResults, is_again: bool) -> None:
        self.results, self.is_again, self.n = results, is_again, 0


_running = _Running()


class OnceResults:
    """The kept results of one call of a layer. label: the layer's name in errors."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._kept: list[tuple[Any, int]] = []  # with the version of a tensor

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the layer's forward."""
        with self._within(is_again=False):
            yield

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """The context of a second run."""
        with self._within(is_again=True):
            yield

    @contextmanager
    def _within(self, *, is_again: bool) -> Iterator[None]:
        _running.calls.append(_Run(self, is_again))
        try:
            yield
        finally:
            _running.calls.pop()

    def keep(self, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        self._kept.append((value.detach() if is_tensor else value, value._version if is_tensor else 0))

    def take(self, n: int) -> Any:
        """Result number ``n``. Raises RecomputeError if there is none, or if somebody has written to it."""
        fix = "let it do the same for the same inputs, and leave what it got as it is (x + 1, not x.add_(1))"
        where = f"recomputation of {self._label}"
        if n >= len(self._kept):
            raise RecomputeError(
                f"exchanged tokens {len(self._kept)} times in forward, and more often when it was run again",
                where=where,
                fix=fix,
            )
        value, version = self._kept[n]
        if isinstance(value, torch.Tensor):
            if value._version != version:
                raise RecomputeError(f"result {n} of an exchange, which is kept, was overwritten", where=where, fix=fix)
            return value.detach()
        return value


def once(compute: Callable[[], Result]) -> Result:
    """The result of ``compute``, a tensor without a graph or a value that nobody changes. If a layer that runs now will
    be run again, the result is kept, and ``compute`` is not called then."""
    if not _running.calls or torch.compiler.is_compiling():
        return compute()
    again = [run for run in _running.calls if run.is_again]
    values = []
    for run in again:
        values.append(run.results.take(run.n))
        run.n += 1
    # A layer within a layer that is run again runs for the first time within it.
    value = values[0] if values else compute()
    for run in _running.calls:
        if not run.is_again:
            run.results.keep(value)
    return value
