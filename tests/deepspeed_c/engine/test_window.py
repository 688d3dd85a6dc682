"""Which micro-batches end a window, compared with a count by hand."""

from __future__ import annotations

import pytest

from deepspeed_c.config.batch import Batch
from deepspeed_c.engine.window import Window


def make(gas: int, *, is_managed: bool = True) -> Window:
    return Window(Batch(4 * gas * 3, 4, gas, 3), is_managed=is_managed)


@pytest.mark.parametrize("gas", [1, 2, 7])
def test_every_window_of_a_managed_run_ends_with_its_last_micro_batch(gas):
    window = make(gas)
    for step in range(3):
        for micro in range(gas):
            where = f"step {step}, micro-batch {micro} of {gas}"
            assert window.is_boundary() == (micro == gas - 1), where
            assert window.n_micro_steps == micro and window.begin == step * gas, (where, window.n_micro_steps)
            window.place(window.micro_steps + 1)
    assert window.factor() == 1 / gas and window.factor(scale_wrt_gas=False) == 1.0


def test_sums_that_are_divided_at_their_end_take_losses_as_if_the_caller_had_not_divided():
    window = Window(Batch(36, 4, 3, 3), is_managed=True, divides_sums=True)
    assert (window.factor(), window.factor(scale_wrt_gas=False), window.divisor()) == (1.0, 3.0, 3)


def test_a_caller_who_steers_says_what_is_a_boundary():
    window = make(4)
    window.place(6)
    assert not window.is_boundary() and window.begin == 4
    for is_boundary in (True, False, True):
        window.steer(is_boundary)
        assert window.is_boundary() is is_boundary
        assert window.begin == 6  # calls of step() no longer count for windows
    assert make(4, is_managed=False).is_boundary()


def test_a_new_size_counts_from_the_next_window_on():
    window = make(2)
    window.place(2)
    window.resize(train_batch_size=36, accumulation_steps=3)
    assert window.batch == Batch(36, 4, 3, 3)
    assert [(window.place(n), window.is_boundary())[1] for n in (3, 4, 5, 6)] == [False, False, True, False]


def test_forwards_are_numbered_within_their_micro_batch():
    window = make(3)
    found = []
    for step in range(2):
        for micro in range(3):
            found += [window.note_forward(n_backwards) for n_backwards in (micro, micro, micro + 1)]
            window.place(window.micro_steps + 1)
    assert found == [(micro, n) for _ in range(2) for micro in range(3) for n in range(3)], found
    window.note_forward(0)
    window.place(window.begin)  # a window that begins again
    assert window.note_forward(0) == (0, 0)


def test_backwards_number_the_micro_batches_of_a_caller_who_steers():
    for window in (make(2, is_managed=False), make(2)):
        window.steer(False)
        found = [window.note_forward(n_backwards) for n_backwards in (0, 1, 1, 2)]
        assert found == [(0, 0), (1, 0), (1, 1), (2, 0)], found
