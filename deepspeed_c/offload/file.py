"""The home "file". Masters and states, or weights, are read from the file before use and written back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch

from deepspeed_c.offload.swap import Swapper
from deepspeed_c.zero.states.home import Home, MakeZeros, Place, Tagged

__all__ = ["SWAP_ELEMS", "FileHome"]

# Most elements of masters and states that are read, updated and written at a time (16 MiB of fp32).
SWAP_ELEMS = 4 << 20


class FileHome(Home):
    """After ``move_in`` a bucket lives in a file, which several units may share. Before that it is in the host's
    memory."""

    label = "file"
    has_slices = True

    def __init__(self, place: Place, device: torch.device) -> None:
        super().__init__(place, device)
        self.store: Swapper | None = None
        self._away: set[int] = set()  # buckets that live in the file
        self._open: set[int] = set()  # buckets of these that are in memory now

    def attach(self, store: Swapper) -> None:
        """Sets the file. Called when it has been made."""
        self.store = store

    def move_in(self, bucket: int, make: Callable[[MakeZeros], None] = lambda make_zeros: None) -> None:
        make(self.store.new_zeros)
        self.store.send(self._tensors_of(bucket))
        self._away.add(bucket)
        self._on_move(bucket)

    def needs_open(self, bucket: int) -> bool:
        return bucket in self._away

    @contextmanager
    def open(self, bucket: int, *, reads: bool = True, writes: bool = True) -> Iterator[None]:
        if bucket not in self._away or bucket in self._open:
            yield
            return
        self.store.bring(self._tensors_of(bucket), reads=reads)
        self._on_move(bucket)
        self._open.add(bucket)
        try:
            yield
        finally:
            self._open.remove(bucket)
            tensors = self._tensors_of(bucket)
            if not writes:
                self.store.let_go(tensors)
                tensors = [tagged for tagged in tensors if not self.store.is_away(tagged.tensor)]  # new tensors
            if tensors:
                self.store.send(tensors)
            self._on_move(bucket)

    def in_memory(self, bucket: int) -> list[Tagged]:
        return [] if self.needs_open(bucket) else super().in_memory(bucket)

    def read_ahead(self, bucket: int) -> None:
        if bucket in self._away and bucket not in self._open and self.store.settings.pipeline_read:
            self.store.prefetch(self._tensors_of(bucket))

    def piece_elems(self, numel: int) -> int:
        return SWAP_ELEMS if numel > SWAP_ELEMS else 0

    def stream(self, tensors: Sequence[Tagged]) -> Generator[list[torch.Tensor], None, None]:
        return self.store.stream(tensors)

    def wait(self) -> None:
        if self.store is not None:
            self.store.wait()

    def end(self) -> None:
        self._away.clear()
        if self.store is not None:
            self.store.close()
