"""Reductions in flight: their number is limited, and the oldest is waited for first."""

from __future__ import annotations

import logging

import pytest

from deepspeed_c.errors import CommError
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.flight import MAX_IN_FLIGHT, Flight


class Reduction:
    def __init__(self, log: list[int], number: int, fails: bool = False) -> None:
        self.log, self.number, self.fails = log, number, fails

    def wait(self) -> None:
        self.log.append(self.number)
        if self.fails:
            raise CommError(f"reduction {self.number} failed", where="test", fix="none")


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_oldest_makes_room(overlaps: bool) -> None:
    flight, log = Flight(overlaps=overlaps), []
    depth = MAX_IN_FLIGHT if overlaps else 0
    for i in range(7):
        flight.make_room()
        want = list(range(max(0, i - depth + 1) if overlaps else i))
        assert log == want, (log, want)
        flight.add(Reduction(log, i))
        assert i + 1 - len(log) <= depth, log
    flight.wait()
    assert log == list(range(7)), log
    flight.wait()
    assert len(log) == 7


def test_a_dropped_window_waits_for_all_and_logs_failures() -> None:
    flight, log, messages = Flight(overlaps=True), [], []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    flight.add(Reduction(log, 0, fails=True))
    flight.add(Reduction(log, 1))
    logger.addHandler(handler)
    try:
        flight.drop()
    finally:
        logger.removeHandler(handler)
    assert log == [0, 1], log
    assert len(messages) == 1 and "reduction 0 failed" in messages[0], messages


def test_forgotten_reductions_are_not_waited_for() -> None:
    flight, log = Flight(overlaps=True), []
    flight.add(Reduction(log, 0))
    flight.clear()
    flight.wait()
    assert log == []
