"""The schedule of a server in Python: plans as lists of numbers, and a typed error for each wrong call."""

from __future__ import annotations

import re

import pytest

from deepspeed_c import _C


def test_requests_run_to_their_ends() -> None:
    """By hand: a pool of 4 blocks, where the second request goes back for the first one."""
    schedule = _C.Schedule(4, most_rows=8)
    first, second = schedule.add(30, 50), schedule.add(20, 40, n_found=16)
    assert (schedule.n_waiting, schedule.n_running, schedule.n_free_blocks) == (2, 0, 4)
    assert schedule.plan(25) == ([(first, 0, 25)], [])
    assert schedule.commit() == []
    # Blocks for 49 tokens are the first request's, which leaves none for the second.
    assert schedule.plan(25) == ([(first, 25, 5)], [])
    assert schedule.commit() == [first]
    schedule.end(first)
    assert schedule.plan(3) == ([(second, 0, 19)], [])
    schedule.abort()
    third = schedule.add(1, 17)
    assert third == first  # the number of a request that has ended
    assert schedule.plan(6) == ([(second, 0, 20), (third, 0, 1)], [])
    assert schedule.commit() == [second, third]
    for known in range(21, 33):
        assert schedule.plan(6) == ([(second, known - 1, 1), (third, known - 20, 1)], [])
        assert schedule.commit() == [second, third]
    assert (schedule.n_free_blocks, schedule.n_put_back) == (1, 0)
    schedule.end(second)
    schedule.end(third)
    assert (schedule.n_waiting, schedule.n_running, schedule.n_free_blocks) == (0, 0, 4)


def test_the_youngest_goes_back() -> None:
    schedule = _C.Schedule(4, most_rows=8)
    old, young = schedule.add(16, 34), schedule.add(15, 30)
    assert schedule.plan(100) == ([(old, 0, 16), (young, 0, 15)], [])
    assert schedule.commit() == [old, young]
    assert schedule.plan(100) == ([(old, 16, 1), (young, 15, 1)], [])
    assert schedule.commit() == [old, young]
    # The fourth block is the older request's, although it does not use it yet.
    assert schedule.plan(100) == ([(old, 17, 1)], [young])
    assert (schedule.n_put_back, schedule.n_running, schedule.n_waiting) == (1, 1, 1)
    assert schedule.commit() == [old]
    schedule.end(old)
    assert schedule.plan(100) == ([(young, 0, 17)], [])


def test_wrong_calls() -> None:
    for arguments, text in {(-1, 1): "n_blocks is -1", (1, 0): "most_rows is 0"}.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            _C.Schedule(*arguments)
    schedule = _C.Schedule(2, 1)
    for arguments, text in {(0, 5): "n_tokens is 0", (5, 5): "most_tokens is 5", (5, 6, 5): "n_found is 5"}.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            schedule.add(*arguments)
    with pytest.raises(MemoryError, match=r"Schedule\.add: .* needs 3 blocks of 16 tokens, and there are 2"):
        schedule.add(1, 34)
    with pytest.raises(ValueError, match="number is 0, which is no request"):
        schedule.end(0)
    with pytest.raises(ValueError, match="budget is -1"):
        schedule.plan(-1)
    with pytest.raises(RuntimeError, match="there is no plan"):
        schedule.commit()
    number = schedule.add(1, 2)
    assert schedule.plan(1) == ([(number, 0, 1)], [])
    for call in (lambda: schedule.plan(1), lambda: schedule.end(number)):
        with pytest.raises(RuntimeError, match="commit or abort"):
            call()
    assert schedule.commit() == [number]
    with pytest.raises(RuntimeError, match=f"request {number} has all its tokens"):
        schedule.plan(1)
    schedule.end(number)
    assert schedule.plan(1) == ([], [])
