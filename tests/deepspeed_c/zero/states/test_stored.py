"""The walk through buckets that lie in a file: the order in which it reads ahead, opens and closes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from deepspeed_c.zero.states.codec import Codec
from deepspeed_c.zero.states.entries import Entry
from deepspeed_c.zero.states.home import Home, Place, Tagged
from deepspeed_c.zero.states.stored import StoredBuckets

Event = tuple[str, int]


class NotingHome(Home):
    """Notes the calls that it gets. ``away``: the buckets that must be opened. ``piece``: the elements that move at
    once."""

    def __init__(self, events: list[Event], away: set[int], piece: int) -> None:
        super().__init__(Place(), torch.device("cpu"))
        self.events, self.away, self.piece = events, away, piece

    def needs_open(self, bucket: int) -> bool:
        return bucket in self.away

    def move_in(self, bucket: int, make=lambda make_zeros: None) -> None:
        self.events.append(("move in", bucket))
        make(lambda shape, dtype, what, piece: torch.zeros(shape, dtype=dtype))

    def read_ahead(self, bucket: int) -> None:
        self.events.append(("read ahead", bucket))

    @contextmanager
    def open(self, bucket: int, *, reads: bool = True, writes: bool = True) -> Iterator[None]:
        self.events.append(("open", bucket))
        yield
        self.events.append(("close", bucket))


class FourBuckets:
    """A unit of four buckets of ten elements."""

    group = 0

    def __init__(self, home: Home) -> None:
        self.states = home
        self.master = [torch.full((10,), float(bucket)) for bucket in range(4)]

    def masters(self, bucket: int) -> list[Tagged]:
        return [Tagged(self.master[bucket], f"masters {bucket}", self.piece_elems(bucket), is_master=True)]

    def piece_elems(self, bucket: int) -> int:
        return self.states.piece

    def label(self, bucket: int) -> str:
        return f"bucket {bucket}"


class OneMoment(torch.optim.SGD):
    scope = "element"

    def layout_of_state(self, group: int, param: torch.Tensor) -> dict[str, tuple[torch.dtype, int]]:
        return {"moment": (torch.bfloat16, param.numel())}


class OneEntryEach:
    def __init__(self, base: torch.optim.Optimizer, unit: FourBuckets) -> None:
        self.codec = Codec(base)
        params = [torch.nn.Parameter(master) for master in unit.master]
        self.entries = [Entry(param, unit, bucket, None) for bucket, param in enumerate(params)]

    def entries_of(self, unit: FourBuckets, bucket: int) -> list[Entry]:
        return [self.entries[bucket]]


def make(away: set[int], piece: int = 0) -> tuple[StoredBuckets, FourBuckets, list[Event]]:
    events: list[Event] = []
    unit = FourBuckets(NotingHome(events, away, piece))
    base = OneMoment([torch.nn.Parameter(torch.zeros(1))])
    order = [(unit, bucket) for bucket in reversed(range(4))]
    stored = StoredBuckets(base, OneEntryEach(base, unit), [unit], order=order, settle=lambda: None)
    assert events == [("move in", bucket) for bucket in reversed(range(4))]
    events.clear()
    return stored, unit, events


def walk(stored: StoredBuckets, unit: FourBuckets, events: list[Event]) -> list[Event]:
    keys = [(unit, bucket) for bucket in range(4)]
    for key, (found, bucket) in zip(keys, stored.visit(keys), strict=True):
        assert key == (found, bucket)
        events.append(("use", bucket))
    return events


def test_the_next_one_is_asked_for_before_this_one_is_waited_for() -> None:
    assert walk(*make(away={0, 1, 3})) == [
        ("read ahead", 1), ("open", 0), ("use", 0), ("close", 0), ("read ahead", 3), ("open", 1), ("use", 1),
        ("close", 1), ("open", 2), ("use", 2), ("close", 2), ("open", 3), ("use", 3), ("close", 3),
    ]  # fmt: skip


def test_a_streamed_bucket_is_neither_asked_for_nor_opened() -> None:
    stored, unit, events = make(away={0, 1, 2, 3}, piece=4)
    assert all(stored.is_streamed(unit, bucket) for bucket in range(4))
    assert walk(stored, unit, events) == [("use", bucket) for bucket in range(4)]


@pytest.mark.parametrize("away, first", [(set(), []), ({0}, [0]), ({0, 1, 3}, [3, 1])])
def test_what_an_update_begins_with_is_read_first(away: set[int], first: list[int]) -> None:
    stored, _, events = make(away)
    stored.read_first()
    assert events == [("read ahead", bucket) for bucket in first]


def test_masters_and_states_live_in_the_home() -> None:
    stored, unit, _ = make(set())
    names = [(tagged.name, tagged.tensor.dtype, tagged.is_master) for tagged in stored.tensors(unit, 2)]
    assert names == [("masters 2", torch.float32, True), ("moment of bucket 2", torch.bfloat16, False)]
    assert unit.states.in_memory(2)[1].tensor.numel() == 10
