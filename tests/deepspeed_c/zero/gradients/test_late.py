"""Late buckets, against the states of all ranks one by one. ``test_reducer.py`` has the reductions of whole runs."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from deepspeed_c._C import GradientPath
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.late import LateBuckets
from tests.deepspeed_c.zero.gradients.slots import make_slots

N_RANKS = 3
ALL_STATES = list(itertools.product(range(8), repeat=N_RANKS))  # a parameter, all ranks


class Path:
    """A path whose parameters have the states that the test gives them."""

    def __init__(self, states: list[int]) -> None:
        self.states, self.waiting = bytes(states), set()

    def seen(self) -> bytes:
        return self.states

    def set_waiting(self, bucket: int, waits: bool) -> None:
        (self.waiting.add if waits else self.waiting.remove)(bucket)


class Stage:
    world_size = N_RANKS


def of_ranks(states: list[tuple[int, ...]], per_bucket: int) -> list[tuple[LateBuckets, Path]]:
    """The late buckets of each rank. states: of each parameter on all ranks, in order of registration."""
    found = []
    for rank in range(N_RANKS):
        params = [nn.Parameter(torch.zeros(1)) for _ in states]
        layout = [[list(range(i, min(i + per_bucket, len(states)))) for i in range(0, len(states), per_bucket)]]
        slots = make_slots(params, layout)
        path = Path([states[slot.order][rank] for slot in slots])
        found.append((LateBuckets(slots, path, Stage()), path))
    return found


@pytest.mark.parametrize("per_bucket", [1, 5])
def test_each_combination_of_states(per_bucket: int) -> None:
    ranks = of_ranks(ALL_STATES, per_bucket)
    flags = [sum(each) for each in zip(*(late.flags() for late, _ in ranks))]
    for late, path in ranks:
        slots = late._slots

        def having(bits: int, slots=slots) -> set[int]:
            return {slots.bucket_of(s) for s in slots if any(state & bits for state in ALL_STATES[s.order])}

        got, want = late.buckets(flags), sorted(having(GradientPath.SEEN_LATE))
        assert got == want, (got, want)
        unused, never = [s.order for s in late.unused(flags)], [i for i, s in enumerate(ALL_STATES) if not any(s)]
        assert unused == never, (unused, never)
        late.plan(flags)
        want_waiting = having(GradientPath.SEEN_AFTER | GradientPath.SEEN_LATE)
        assert late.waiting == path.waiting == want_waiting, (late.waiting, path.waiting, want_waiting)
        assert late.may_come


def test_a_window_without_late_gradients_ends_the_waiting() -> None:
    (late, path), *_ = of_ranks([(1, 1, 1), (GradientPath.SEEN_LATE, 1, 1)], 1)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        assert late.may_come  # until a window has shown otherwise
        for _ in range(2):
            late.plan([3.0, late.flags()[1] + 2.0])
            assert path.waiting == {0} and late.may_come
            late.plan([3.0, 3.0])  # the same window, after an edit
            assert path.waiting == {0} and late.may_come
            late.begin_window()
            late.plan([3.0, 3.0])
            assert path.waiting == set() and not late.may_come
            late.begin_window()
        late.plan([3.0, late.flags()[1] + 2.0])
        late.begin_window()
        late.forget()
        assert path.waiting == set() == late.waiting
        late.plan([3.0, 3.0])
        assert late.may_come  # these flags are of the order before
        late.begin_window()
        late.plan([3.0, 3.0])
        assert not late.may_come
    finally:
        logger.removeHandler(handler)
    assert len(messages) == 1 and "gradients of p1 came again" in messages[0], messages
