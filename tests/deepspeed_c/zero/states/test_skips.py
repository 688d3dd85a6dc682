"""Messages about a skipped step."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_c.zero.states.skips import WindowLosses


class FourRanks:
    """The second and the last have a bad loss."""

    def gather_numbers(self, mine: int) -> list[str]:
        assert mine == 1
        return ["0", "1", "0", str(mine)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_loss_of_a_window_is_remembered(bad: float) -> None:
    losses = WindowLosses()
    assert not losses.has_bad
    for value in (1.0, torch.finfo(torch.float32).max, -0.0):
        losses.note(torch.tensor(value))
        assert not losses.has_bad
    losses.note(torch.tensor([1.0, bad, 2.0]))
    losses.note(torch.tensor(3.0))
    assert losses.has_bad
    assert "rank 1, 3" in str(losses.error(FourRanks()))
    losses.forget()
    assert not losses.has_bad
