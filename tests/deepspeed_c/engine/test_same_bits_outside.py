"""Programs as users write them, with ``same_bits``: their own loops, optimizers, schedules and models."""

from __future__ import annotations

from typing import Any

from tests.deepspeed_c.engine.test_same_bits import GRAIN, config_of, train
from tests.ranks import run_ranks


def one_micro_batch(rank: int, world: int) -> Any:
    return train({}, config_of(3, "fp32", train_batch_size=2 * GRAIN), 4)


def test_a_tied_weight_at_stage_3_with_one_micro_batch_in_a_step() -> None:
    """The order of backward changes at the end of the first window, whose gradients all came in time."""
    (one,), (two, _) = run_ranks(1, one_micro_batch), run_ranks(2, one_micro_batch)
    assert one == two, (one, two)
