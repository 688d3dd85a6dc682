"""The factors of a mean over ranks, against the quotient that they stand for."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspeed_c.config.stages import STAGES
from deepspeed_c.zero.gradients.summing import ReduceSettings, Summing


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_the_factors_make_a_mean_of_a_sum(n: int, stage: int) -> None:
    for prescale, predivide, is_mean in itertools.product((False, True), (1.0, 2.0, 3.0), (False, True)):
        settings = ReduceSettings(prescale_gradients=prescale, gradient_predivide_factor=predivide, is_mean=is_mean)
        summing = Summing.make(settings, STAGES[stage], n)
        got = summing.pre_factor * summing.post_factor * summing.step_factor
        want = 1 / n if is_mean else 1.0
        assert got == pytest.approx(want, rel=1e-15), (settings, got, want)
        if n > 1:
            pre = 1 / n if prescale else 1 / predivide
            assert summing.pre_factor == pre, (settings, summing.pre_factor, pre)
        # Callers read whole gradients, so nothing is left to the step.
        left_to_step = summing.post_factor if stage else summing.step_factor
        assert left_to_step == 1.0, (settings, summing)


def test_sums_have_the_dtype_that_the_settings_name() -> None:
    unit = type("Unit", (), {"dtype": torch.bfloat16})()
    for named, want in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        got = Summing(ReduceSettings(accum_dtype=named), 1.0).dtype_of(unit)
        assert got == want, (got, want)
