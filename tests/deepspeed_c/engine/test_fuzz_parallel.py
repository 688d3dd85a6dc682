"""Fifty cases of the fuzzer of parallel runs, and whether it notices a wrong scale. ``fuzz_parallel.py`` runs any
number of cases by hand."""

from __future__ import annotations

import pytest

from tests.cells import every
from tests.deepspeed_c.engine import fuzz_parallel
from tests.deepspeed_c.engine.fuzz_parallel import CHOICES, check_case, draw, settled, told

DEFAULT = {name: values[0] for name, values in CHOICES.items()}


@pytest.mark.parametrize("seed", every(2, range(1, 51)))
def test_a_random_parallel_run_is_one_process(seed: int) -> None:
    case = draw(seed)
    problem = check_case(case)
    assert not problem, f"{problem}\npython -m tests.deepspeed_c.engine.fuzz_parallel --case '{told(case)}'"


# Bugs that the fuzzer has found.
FOUND = {
    "a kept product that a sum over ranks had overwritten was summed again": {"tp": 2, "recompute": "budget"},
    "gradients that were late on some tensor-parallel ranks were added in another order there": {
        "tp": 2,
        "data": 2,
        "stage": 3,
        "gas": 2,
        "bucket": 3000,
    },
}


@pytest.mark.parametrize("what", list(FOUND))
def test_what_was_found_stays_mended(what: str) -> None:
    assert check_case(settled({**DEFAULT, **FOUND[what]})) == ""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", [{"data": 2}, {"tp": 2}, {"sp": 2}, {"pp": 2}], ids=str)
def test_a_rate_that_is_off_by_a_half_is_noticed(case: dict, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain run gets 1.5 times the learning rate. Each case must fail then."""
    plain, rate = fuzz_parallel.plain, fuzz_parallel.RATE

    def with_another_rate(case: dict):
        with monkeypatch.context() as patch:
            patch.setattr(fuzz_parallel, "RATE", 1.5 * rate)
            return plain(case)

    monkeypatch.setattr(fuzz_parallel, "plain", with_another_rate)
    assert "moved 0." in check_case(settled({**DEFAULT, **case, "precision": precision}))
