"""The numbers of slots and buckets, against a search through all of them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.deepspeed_c.zero.gradients.slots import make_slots


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_in_the_order_in_which_backward_completes_them(seed: int) -> None:
    rng = random.Random(seed)
    params = [nn.Parameter(torch.zeros(rng.randint(0, 4))) for _ in range(17)]
    layout = [[[] for _ in range(rng.randint(1, 3))] for _ in range(3)]
    for k in range(len(params)):
        rng.choice(rng.choice(layout)).append(k)
    layout = [[bucket for bucket in unit if bucket] for unit in layout]
    slots = make_slots(params, layout)
    # Backward visits the parameters from the last to the first. A bucket is complete at its last visit.
    left = [set(bucket) for unit in layout for bucket in unit]
    done = []
    for k in reversed(range(len(params))):
        for bucket in left:
            if k in bucket:
                bucket.discard(k)
                if not bucket:
                    done.append(k)
    got = [min(slot.order for slot in unit.bucket_slots[b]) for unit, b in slots.buckets]
    assert got == done, (got, done)
    assert [slot.order for slot in slots.registered] == list(range(len(params)))
    assert [slot.tracker_index for slot in slots] == list(range(len(params))) == list(range(len(slots)))
    for slot in slots:
        unit, b = slots.buckets[slots.bucket_of(slot)]
        assert slot in unit.bucket_slots[b]
        assert slots.find(slot.param) is slot
    assert slots.find(torch.zeros(2)) is None


def test_the_path_knows_which_gradients_a_bucket_lacks() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 2, 4, 1)]
    slots = make_slots(params, [[[0, 2], [3]], [[1]]])
    path = slots.make_path()
    for number, (unit, b) in enumerate(slots.buckets):
        path.open(number, 0, 10, torch.float32)
        want = [slot.tracker_index for slot in unit.bucket_slots[b]]
        assert path.missing(number) == want, (path.missing(number), want)
    path.note(slots.find(params[2]).tracker_index)
    bucket = slots.bucket_of(slots.find(params[0]))
    assert path.missing(bucket) == [slots.find(params[0]).tracker_index]


def test_a_cleared_table_has_no_slots() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    slots = make_slots(params, [[[0]]])
    slots.clear()
    assert list(slots) == [] and slots.find(params[0]) is None
