"""A compiled engine at stage 3 computes the same as plain torch in many uses of weights: the scenarios of the hooks."""

from __future__ import annotations

import pytest
import torch

from tests.cells import every
from tests.deepspeed_c.zero.weights.test_hooks import LIMITS, SCENARIOS, compare
from tests.ranks import RanksFailed


def scenario_body(rank: int, world: int, name: str) -> None:
    kind, micro = SCENARIOS[name]
    for limits in LIMITS:
        torch._dynamo.reset()
        compare(rank, world, kind, micro, limits, name, backend="eager")


# torch.compile cannot differentiate a backward, and says so.
DOUBLE_BACKWARD = ("penalty", "penalty_parent_reads")


# Without a compiler all of them run always (zero/weights/test_hooks.py).
NAMES = [name for name in SCENARIOS if name not in DOUBLE_BACKWARD]


@pytest.mark.parametrize("name", every(2, NAMES))
def test_scenario(run_ranks, name: str) -> None:
    run_ranks(2, scenario_body, name, preload="torch._dynamo")


def test_a_second_derivative_is_refused_by_torch(run_ranks) -> None:
    with pytest.raises(RanksFailed, match="does not currently support double backward"):
        run_ranks(2, scenario_body, "penalty", preload="torch._dynamo")
