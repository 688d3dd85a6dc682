"""Compiled graphs say themselves when they read weights and when they have read them, within the passes that hooks
begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepspeed_c.zero.weights.drivers.driver import Driver
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["Graphs"]


class Graphs(Driver):
    """Operators of ``torch.compile``'s graphs start, finish and release gather units by their numbers. When other units
    are gathered and released is decided by the driver under it."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self._held: list[GatherUnit] = []

    def compile(self, has_graphs: bool) -> None:
        """Sets whether the model has graphs. Call it between passes."""
        if has_graphs != (self.under is not None):
            (self.fetcher.drivers.put if has_graphs else self.fetcher.drivers.take)(self)
        self.fetcher.phase.compile(has_graphs)

    def drop(self) -> None:
        self.compile(False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for a run of a forward graph. Within it autograd saves parameters as they are, and backward graphs
        gather them again."""
        with self.fetcher.packer.keeping_params():
            try:
                yield
            except BaseException:
                self._let_go()
                raise

    def start(self, index: int) -> None:
        """Called by a graph before its reads of a gather unit. Starts the gathers that are due."""
        fetcher = self.fetcher
        group = fetcher.groups[index]
        with fetcher.lock:
            if not fetcher.is_in_use(group):
                fetcher.start_use(group)
            group.hold()
            self._held.append(group)

    def finish(self, index: int) -> None:
        """Called by a graph before its reads of a gather unit, after ``start``. Makes the unit available."""
        group = self.fetcher.groups[index]
        if not group.is_ready:
            with self.fetcher.lock:
                group.finish()

    def release(self, index: int) -> None:
        """Called by a graph after its reads of a gather unit."""
        group = self.fetcher.groups[index]
        if group in self._held:
            self._held.remove(group)
            self.fetcher.unhold(group)

    def abort(self) -> None:
        self._let_go()
        self.under.abort()

    def _let_go(self) -> None:
        """Called when a graph has raised between its gathers and releases."""
        while self._held:
            self.fetcher.unhold(self._held.pop())
