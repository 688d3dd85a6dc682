"""The plan of a pipeline's batch: its many forwards and backwards are one pass, with one recorded order of use.

A rank of a pipeline runs a table of computations: forwards, backwards and halves of backwards, of several micro-batches
that are in flight at once. As one pass, a unit stays gathered from its first use in the batch to its last one, as far
as ``FetchLimits`` allow. It is gathered once a batch then, and not once a micro-batch.

The ranks that gather a stage's weights from each other are in different pipelines, which run the same table. If a stage
of one pipeline fails, the ranks of this pipeline compute no more, but the others go on, and need the shards of the
stopped ranks. Such a rank goes through the rest of its table as if it computed: for each computation it
announces the units that the same computation has used before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c import _C
from deepspeed_c.zero.weights.drivers.driver import Driver
from deepspeed_c.zero.weights.drivers.forwards import Forward
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["BatchPlan"]

# Computations whose first guess at the order of units is the reverse of the forward's. The second half of a split
# backward goes through the layers in the order of the forward.
_REVERSED = (_C.PIPE_BACKWARD, _C.PIPE_INPUT)


class BatchPlan(Driver):
    """Decides within ``running``. The plan itself is run by ``RecordedPlan``."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self._recorded = fetcher.drivers.of(RecordedPlan)
        self._orders: dict[tuple[int, int], list[int]] = {}  # by (kind of computation, stage)
        self._used: list[int] = []  # by the running computation, without repetitions

    @contextmanager
    def running(
        self, key: Any, computations: Sequence[tuple[int, int]], units: Mapping[int, Sequence[int]]
    ) -> Iterator[None]:
        """The context of one batch. Its end is collective over the ranks that gather from each other, unless an
        exception leaves it: then the links between ranks have failed.

        key: batches with equal keys have equal tables. computations: (kind, stage) of each, in order. units: of each
        stage, in the order of its layers.
        """
        fetcher = self.fetcher
        if not fetcher.groups:
            yield
            return
        for kind, stage in computations:
            forward = list(units[stage])
            self._orders.setdefault((kind, stage), forward[::-1] if kind in _REVERSED else forward)

        def first_steps() -> list[int]:
            steps: list[int] = []
            for computation in computations:
                for unit in self._orders[computation]:
                    if steps[-1:] != [unit]:
                        steps.append(unit)
            return steps

        self._recorded.begin_batch(("batch", key), first_steps)
        fetcher.drivers.put(self)
        try:
            yield
            self._recorded.end_batch()
        except BaseException:
            self._recorded.abort()
            raise
        finally:
            fetcher.drivers.take(self)

    @contextmanager
    def computing(self, kind: int, stage: int, *, saves: bool) -> Iterator[None]:
        """The context of one computation. saves: whether a backward will go through it."""
        self._used = []
        try:
            if saves and kind == _C.PIPE_FORWARD:
                with self.fetcher.saved.hooks_of(None, lambda _: None):
                    yield
            else:
                yield
        except Exception:
            self._announce(self._orders[kind, stage][len(self._used) :])
            raise
        self._orders[kind, stage], self._used = self._used, []

    def skip(self, kind: int, stage: int) -> None:
        """Takes part in the gathers of a computation that this rank does not do."""
        self._used = []
        self._announce(self._orders[kind, stage])

    def _announce(self, units: Sequence[int]) -> None:
        for unit in units:
            self.fetcher.use(self.fetcher.groups[unit])

    def use(self, group: GatherUnit) -> None:
        if self._used[-1:] != [group.index]:
            self._used.append(group.index)
        self.under.use(group)

    def begin_forward(self, name: str, root: int = 0, units: Callable[[], list[int]] | None = None) -> Forward | None:
        """A forward of the module within a layer is a part of the batch."""
        return None

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def begin_backward(self, starts: Sequence[Any] | None = None) -> None:
        self._recorded.turn(is_backward=True)

    def end_backward(self) -> None:
        self._recorded.turn(is_backward=False)

    def begin_reading(self) -> None:
        pass

    def abort(self) -> None:
        """Ends a backward that has raised. The plan of the batch goes on, because other ranks follow it."""
        self._recorded.turn(is_backward=False)
