"""Messages about a skipped step."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_c.zero.states.skips import WindowLosses


class FourRanks:
    """Four ranks. The second and the last have a bad loss."""

    def gather_numbers(self, mine: int) -> list[str]:
        assert mine == 1
        return ["0", "1", "0", str(mine)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_loss_of_a_window_is_remembered(bad: float) -> None:
    losses = WindowLosses()
    assert not losses.has_bad
    for value in (1.0, torch.finfo(torch.float32).max, -0.0):
        losses.note(torch.tensor(value), 0.5)
        assert not losses.has_bad
    losses.note(torch.tensor(bad), 0.5)
    losses.note(torch.tensor(3.0), 0.5)
    assert losses.has_bad
    assert "rank 1, 3" in str(losses.error(FourRanks()))
    losses.forget()
    assert not losses.has_bad


def test_losses_are_kept_with_their_weights() -> None:
    losses = WindowLosses()
    assert not losses.terms
    value = torch.tensor(3.0)
    losses.note(value, 0.25)
    value *= 100.0  # the caller changes its value after backward
    losses.note(torch.tensor([[5.0]], requires_grad=True), 0.75)
    assert losses.terms == [(3.0, 0.25), (5.0, 0.75)] and not losses.has_bad
    losses.forget()
    assert not losses.terms
