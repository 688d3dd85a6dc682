"""The Python interface of FetchPlan, Fetch and the trace functions, against a simulation with sets.

Covers ranks that use different steps, and typed errors.
"""

from __future__ import annotations

import gc
import random

import pytest

from deepspeed_c import _C
from deepspeed_c._C import Fetch, FetchPlan

UNLIMITED = 2**63 - 1


def plan_of(steps, unit_elems, max_live=UNLIMITED, ahead=UNLIMITED, max_reuse=UNLIMITED):
    return FetchPlan(steps, unit_elems, max_live_elems=max_live, ahead_elems=ahead, max_reuse_elems=max_reuse)


def simulate(plan, unit_elems):
    """Simulates a pass that uses every step.

    Returns (gathers in order, the most live elements, the most elements gathered ahead).
    """
    live, ahead, gathers, peak, most_ahead = set(), set(), [], 0, 0
    issued = 0
    for i, unit in enumerate(plan.steps):
        if i > 0 and not plan.keep[i - 1]:
            live.remove(plan.steps[i - 1])
        for other in plan.steps[issued : plan.until[i]]:
            if other not in live:
                gathers.append(other)
                live.add(other)
                ahead.add(other)
        issued = plan.until[i]
        ahead.discard(unit)
        assert unit in live
        peak = max(peak, sum(unit_elems[u] for u in live))
        most_ahead = max(most_ahead, sum(unit_elems[u] for u in ahead))
    return gathers, peak, most_ahead


class Book:
    """Carries out the actions of a runner, and fails on an impossible action."""

    def __init__(self, live=()):
        self.live = set(live)
        self.gathers = []

    def take(self, actions):
        for kind, unit in actions:
            if kind == Fetch.GATHER:
                assert unit not in self.live
                self.live.add(unit)
                self.gathers.append(unit)
            elif kind == Fetch.STEP:
                assert unit in self.live
                self.gathers.append(~unit)
            else:
                assert kind == Fetch.RELEASE
                self.live.remove(unit)


def there_and_back(n_units):
    return [*range(n_units), *reversed(range(n_units))]


@pytest.mark.parametrize("max_live", [0, 150, 400, UNLIMITED])
@pytest.mark.parametrize("ahead", [0, 100, UNLIMITED])
@pytest.mark.parametrize("max_reuse", [0, 90, UNLIMITED])
def test_plans_keep_their_limits(max_live, ahead, max_reuse):
    rng = random.Random(f"{max_live} {ahead} {max_reuse}")
    for _ in range(20):
        n_units = rng.randint(1, 9)
        unit_elems = [rng.choice([0, 1, 50, 120]) for _ in range(n_units)]
        steps = rng.choice([there_and_back(n_units), [rng.randrange(n_units) for _ in range(rng.randint(0, 40))]])
        plan = plan_of(steps, unit_elems, max_live, ahead, max_reuse)
        assert plan.steps == steps and plan.n_steps == len(steps) == len(plan.until) == len(plan.keep)
        assert all(i < until <= len(steps) for i, until in enumerate(plan.until)) and plan.until == sorted(plan.until)
        assert not any(keep and steps[i] not in steps[i + 1 :] for i, keep in enumerate(plan.keep))
        gathers, peak, most_ahead = simulate(plan, unit_elems)
        assert plan.peak_elems == peak <= max([max_live, *unit_elems])
        assert most_ahead <= ahead
        if UNLIMITED == max_live == ahead == max_reuse:
            assert gathers == list(dict.fromkeys(steps))  # each unit once


def test_ranks_gather_the_same_whatever_they_use():
    rng = random.Random(41)
    for _ in range(200):
        n_units = rng.randint(1, 8)
        unit_elems = [rng.choice([0, 10, 30]) for _ in range(n_units)]
        steps = [rng.randrange(n_units) for _ in range(rng.randint(0, 30))]
        live = [u for u in range(n_units) if rng.random() < 0.2]
        plan = plan_of(steps, unit_elems, *(rng.choice([0, 40, 100, UNLIMITED]) for _ in range(3)))
        sequences = []
        for share in (1, 0, 0.5, 0.8):
            fetch, book = Fetch(unit_elems), Book(live)
            fetch.begin(plan, live)
            for unit in steps:
                if rng.random() < share:
                    book.take(fetch.use(unit))
                    assert unit in book.live
                    assert fetch.live == sorted(book.live)
                    assert fetch.live_elems == sum(unit_elems[u] for u in book.live) <= fetch.peak_elems
            keep_unit = rng.randrange(-1, n_units)
            book.take(fetch.end(keep_unit))
            assert book.live <= {keep_unit} and fetch.live == sorted(book.live)
            assert fetch.n_unexpected == 0 and fetch.record[0] == steps
            sequences.append(book.gathers)
        assert all(sequence == sequences[0] for sequence in sequences), sequences


def test_a_pass_by_eye():
    fetch = Fetch([10, 10, 10, 10])
    assert (Fetch.GATHER, Fetch.RELEASE, Fetch.STEP) == (0, 1, 2)
    assert not fetch.is_active
    fetch.begin(plan_of([0, 1, 2], [10] * 4, ahead=10, max_reuse=0), live=[])
    assert fetch.is_active and fetch.live == []
    assert fetch.use(0) == [(0, 0), (0, 1), (2, 0)]
    assert fetch.use(0) is fetch.use(0) == ()  # nothing to do: no list is made
    assert (fetch.live, fetch.live_elems) == ([0, 1], 20)
    assert fetch.use(3) == [(0, 3)]
    assert fetch.n_unexpected == 1
    assert fetch.use(2) == [(1, 0), (1, 3), (0, 2), (2, 1), (1, 1), (2, 2)]
    assert fetch.end(keep_unit=2) == ()
    assert fetch.live == [2] and fetch.peak_elems == 30
    assert fetch.record == ([0, 3, 1, 2], [True, True, False, True])
    fetch.begin(plan_of([2, 1], [10] * 4, ahead=0), live=[2])
    assert fetch.record == ([], [])
    assert fetch.use(2) == [(2, 2)]
    assert fetch.use(1) == [(1, 2), (0, 1), (2, 1)]
    assert fetch.abort() == [(1, 1)]
    assert fetch.abort() == ()
    assert fetch.record == ([], []) and fetch.live == [] and not fetch.is_active


def test_the_order_is_learned():
    uses, unit_elems, may_drop = [0, 1, 1, 2, 3, 2, 1, 0], [10] * 4, [True] * 4
    fetch, plan = Fetch(unit_elems), plan_of([], [10] * 4)
    expected = [0, 1, 2, 3, 2, 1, 0]
    for n_unexpected in (7, 0, 0):
        fetch.begin(plan)
        for unit in uses:
            fetch.use(unit)
        fetch.end()
        assert fetch.n_unexpected == n_unexpected
        steps = _C.trace_prune(*fetch.record, may_drop)
        assert steps == expected
        plan = plan_of(steps, unit_elems, ahead=10, max_reuse=15)


def test_a_pass_keeps_its_plan_alive():
    fetch = Fetch([1, 2, 3])
    fetch.begin(plan_of([0, 1, 2] * 1000, [1, 2, 3], ahead=0, max_reuse=0))
    gc.collect()
    filler = [plan_of([2, 1, 0] * 1000, [1, 2, 3]) for _ in range(10)]
    assert fetch.use(0) == [(0, 0), (2, 0)]
    assert fetch.use(1) == [(1, 0), (0, 1), (2, 1)]
    assert fetch.use(0) == [(1, 1), (0, 2), (2, 2), (1, 2), (0, 0), (2, 0)]
    fetch.end()
    assert fetch.record[0] == [0, 1, 2] * 1000
    del filler


def test_the_record_grows_with_what_was_not_planned():
    fetch = Fetch([1, 2, 3])
    fetch.begin(plan_of([2], [1, 2, 3]))
    for i in range(5001):
        fetch.use(i % 2)
    assert fetch.n_unexpected == 5001
    fetch.end()
    assert fetch.record == ([i % 2 for i in range(5001)] + [2], [True] * 5001 + [False])


def test_long_plans():
    n_units = 300
    steps = there_and_back(n_units) * 170
    fetch = Fetch([5] * n_units)
    fetch.begin(plan_of(steps, [5] * n_units, max_live=500, ahead=100, max_reuse=200))
    for unit in steps:
        fetch.use(unit)
    fetch.end()
    assert fetch.n_unexpected == 0 and fetch.peak_elems <= 500


def test_nothing_at_all():
    fetch = Fetch([])
    fetch.begin(plan_of([], []))
    assert fetch.end() == () and fetch.record == ([], [])
    assert plan_of([], []).peak_elems == 0
    with pytest.raises(ValueError, match="unit is 0"):
        fetch.begin(plan_of([], []))
        fetch.use(0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([2], [1, 1], 1, 1, 1), r"steps\[0\] is 2"),
        (([0, -1], [1], 1, 1, 1), r"steps\[1\] is -1"),
        (([0], [-1], 1, 1, 1), r"unit_elems\[0\] is -1"),
        (([0], [2**63 - 1, 1], 1, 1, 1), "int64"),
        (([0], [1], -1, 1, 1), "max_live_elems is -1"),
        (([0], [1], 1, -1, 1), "ahead_elems -1"),
        (([0], [1], 1, 1, -1), "max_reuse_elems -1"),
    ],
)
def test_bad_plans(arguments, word):
    with pytest.raises(ValueError, match=f"^FetchPlan: .*{word}"):
        FetchPlan(*arguments)


def test_bad_calls():
    fetch = Fetch([1, 2])
    plan = plan_of([0, 1], [1, 2], ahead=0)
    for call in (lambda: fetch.use(0), fetch.end):
        with pytest.raises(RuntimeError, match="begin one first"):
            call()
    for live in ([2], [-1]):
        with pytest.raises(ValueError, match="live unit"):
            fetch.begin(plan, live)
    for other in (plan_of([0], [1]), plan_of([0], [1, 3])):
        with pytest.raises(ValueError, match="other units"):
            fetch.begin(other)
    with pytest.raises(TypeError):
        fetch.begin(None)
    fetch.begin(plan)
    with pytest.raises(RuntimeError, match="end or abort it first"):
        fetch.begin(plan_of([1], [1, 2]))
    for unit in (-1, 2):
        with pytest.raises(ValueError, match=f"unit is {unit}, must be 0 to 1"):
            fetch.use(unit)
    for unit in (-2, 2):
        with pytest.raises(ValueError, match=f"keep_unit is {unit}"):
            fetch.end(unit)
    for unit in (2**31, 0.5, None):
        with pytest.raises(TypeError):
            fetch.use(unit)
    assert fetch.use(0) == [(0, 0), (2, 0)]  # the refused calls have changed nothing
    assert fetch.end() == [(1, 0), (0, 1), (2, 1), (1, 1)]
    with pytest.raises(RuntimeError, match="begin one first"):
        fetch.use(0)
    for elems in ([-1], [2**62, 2**62]):
        with pytest.raises(ValueError, match="^Fetch: "):
            Fetch(elems)


def test_pruning_by_eye():
    keep, drop = False, True
    assert _C.trace_prune([], [], []) == []
    # Neither unit 1 nor unit 2 was used, but only unit 2 may be dropped.
    assert _C.trace_prune([0, 1, 2], [True, False, False], [keep, keep, drop]) == [0, 1]
    assert _C.trace_prune([0, 1, 0], [False, True, True], [keep, keep]) == [1, 0]
    assert _C.trace_prune([0, 1, 0], [True, False, True], [keep, drop]) == [0]  # side by side: one
    assert _C.trace_prune([0, 1, 0], [False, True, False], [keep, keep]) == [0, 1, 0]  # used nowhere, and must stay
    for arguments, word in ((([0], [], [True]), "1 units and 0"), (([1], [True], [True]), "step 0 is 1")):
        with pytest.raises(ValueError, match=f"trace_prune: .*{word}"):
            _C.trace_prune(*arguments)
