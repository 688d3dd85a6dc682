"""The tensors that a unit's home holds for each bucket: the base optimizer's states, and masters that are not the
parameters themselves."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial

import torch

from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.states.entries import Entry
from deepspeed_c.zero.states.home import MakeZeros, Tagged
from deepspeed_c.zero.states.pieces import Pieces

__all__ = ["StoredBuckets"]

Key = tuple[Unit, int]


def _read(keys: Iterable[Key]) -> Iterator[Key]:
    """The buckets among ``keys`` whose masters and states are read before use."""
    return (key for key in keys if key[0].states.needs_open(key[1]))


class StoredBuckets:
    """Moves the buckets of ``units`` into their homes, and opens them in ``order``, one after the other.

    This class reads states without undoing an update that ran ahead of the step. Homes call ``settle``, which undoes
    it, before they give out a tensor."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Pieces,
        units: Sequence[Unit],
        *,
        order: Sequence[Key],
        settle: Callable[[], None],
    ) -> None:
        self._base, self._pieces, self._order = base, pieces, order
        for unit in units:
            unit.states.keep(partial(self.tensors, unit), partial(self._point_entries, unit), settle)
        for unit, bucket in order:
            unit.states.move_in(bucket, partial(self._make_states, unit, bucket))
        for unit in units:
            unit.states.wait()

    def tensors(self, unit: Unit, bucket: int) -> list[Tagged]:
        """A bucket's states, and its masters if they are not the parameters themselves."""
        found = unit.masters(bucket)
        for entry in self._pieces.entries_of(unit, bucket):
            for key, value in self._base.state.get(entry.param, {}).items():
                if torch.is_tensor(value) and value.dim() > 0:
                    found.append(self._tagged(entry, key, value))
        return found

    def _tagged(self, entry: Entry, key: str, value: torch.Tensor) -> Tagged:
        what = entry.unit.label(entry.bucket) if entry.fragment is None else entry.fragment.slot.name
        return Tagged(value, f"{key} of {what}", self._piece_of(entry, key))

    def _piece_of(self, entry: Entry, key: str) -> int:
        return self._pieces.codec.piece_elems(key, entry.unit.piece_elems(entry.bucket))

    def _make_states(self, unit: Unit, bucket: int, make_zeros: MakeZeros) -> None:
        """Makes the states of a bucket that do not exist yet. Otherwise the first step would make the states of all
        buckets at once, and memory may not hold them."""
        for entry in self._pieces.entries_of(unit, bucket):
            state = self._base.state[entry.param]
            state.setdefault("step", torch.tensor(0.0))
            for name, (dtype, numel) in self._base.layout_of_state(unit.group, entry.param).items():
                if name not in state:
                    shape = entry.param.shape if numel == entry.param.numel() else torch.Size([numel])
                    what = f"{name} of {unit.label(bucket)}"
                    state[name] = make_zeros(shape, dtype, what, self._piece_of(entry, name))

    def _point_entries(self, unit: Unit, bucket: int) -> None:
        """Points the base's parameters to the present memory of a bucket's masters."""
        for entry in self._pieces.entries_of(unit, bucket):
            entry.param.data = entry.part_of(unit.master)

    def is_streamed(self, unit: Unit, bucket: int) -> bool:
        """Whether a step updates a bucket piece by piece, so that the whole bucket is never in memory at once."""
        entries = self._pieces.entries_of(unit, bucket)
        return (
            unit.piece_elems(bucket) > 0
            and self._base.scope == "element"
            and len(entries) == 1
            and entries[0].fragment is None
            and bool(self.tensors(unit, bucket))
        )

    def stream(self, entry: Entry, states: Sequence[str]) -> Generator[list[torch.Tensor], None, None]:
        """Yields the pieces of a streamed bucket. The order of tensors: masters if they are not the parameters
        themselves, then ``states``, then further tensors of the states' format (``Codec.tensor_names``)."""
        unit, state = entry.unit, self._base.state[entry.param]
        keys = self._pieces.codec.tensor_names(states)
        stored = unit.masters(entry.bucket) + [self._tagged(entry, key, state[key]) for key in keys]
        return unit.states.stream(stored)

    def read_first(self) -> None:
        """Starts to read the first tensors of an update while the norm of the gradients is computed. If the step is
        skipped, the tensors stay in memory for the next step."""
        for unit, bucket in itertools.islice(_read(self._order), 2):
            if self.is_streamed(unit, bucket):
                break
            unit.states.read_ahead(bucket)

    def visit(self, keys: Sequence[Key]) -> Iterator[Key]:
        """Yields one bucket after the other, each opened, while the next one is being read. A streamed bucket is not
        opened."""
        read = deque(key for key in _read(keys) if not self.is_streamed(*key))
        for key in keys:
            unit, bucket = key
            if self.is_streamed(unit, bucket):
                yield key
                continue
            if read and read[0] == key:
                read.popleft()
                for follower, index in itertools.islice(read, 1):
                    # The read of the next bucket is requested before this bucket is waited for, so that the storage
                    # device is never idle.
                    follower.states.read_ahead(index)
            with unit.states.open(bucket):
                yield key
