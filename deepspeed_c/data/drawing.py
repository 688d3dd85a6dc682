"""Random numbers of a batch that follow the batch's place in the order of samples, not the process that makes it.

Masks of a ``collate_fn`` and the noise of a data set are drawn from the generators of the program, or of a worker
process. With these wrappers a batch is the same on any number of ranks and workers.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["PlacedBatch", "PlacedCollate", "PlacedSamples"]


class PlacedBatch(list):
    """The indices of a batch, or its samples, and the ``place`` of the batch: samples of the order before it."""

    def __init__(self, items: Iterable[Any], place: int) -> None:
        super().__init__(items)
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacedBatch, (list(self), self.place)


@contextmanager
def _numbers_of(seed: int, place: int, what: str) -> Iterator[None]:
    """Within this context torch's generator of the CPU, Python's ``random`` and numpy's global generator draw numbers
    that are a function of the arguments. Afterwards they go on from their states before it."""
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()
    words = hashlib.blake2b(repr((seed, place, what)).encode(), digest_size=16).digest()
    try:
        torch.default_generator.manual_seed(int.from_bytes(words[:8], "little") >> 1)
        random.seed(words)
        if numpy is not None:
            numpy.random.seed(int.from_bytes(words[8:12], "little"))
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])


class PlacedSamples(torch.utils.data.Dataset):
    """``dataset``, whose samples of a ``PlacedBatch`` of indices draw the numbers of the batch's place."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, indices: PlacedBatch) -> PlacedBatch:
        with _numbers_of(self._seed, indices.place, "samples"):
            several = getattr(self._dataset, "__getitems__", None)
            samples = [self._dataset[i] for i in indices] if several is None else several(list(indices))
        return PlacedBatch(samples, indices.place)


class PlacedCollate:
    """``function``, which makes a batch of samples, with the numbers of the batch's place."""

    def __init__(self, function: Callable[[list[Any]], Any], seed: int) -> None:
        self._function, self._seed = function, seed

    def __call__(self, samples: PlacedBatch) -> Any:
        with _numbers_of(self._seed, samples.place, "batch"):
            return self._function(list(samples))
