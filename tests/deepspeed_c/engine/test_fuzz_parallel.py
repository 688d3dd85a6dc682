"""Fifty cases of the fuzzer of parallel runs, and whether it notices a wrong scale. ``fuzz_parallel.py`` runs any
number of cases by hand."""

from __future__ import annotations

import pytest

from tests.cells import every
from tests.deepspeed_c.engine import fuzz_parallel
from tests.deepspeed_c.engine.fuzz_parallel import (
    CHOICES,
    TOKENS,
    Outcome,
    check_case,
    draw,
    forwards_of,
    settled,
    told,
)

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
        "tp": 2, "data": 2, "stage": 3, "gas": 2, "bucket": 3000,
    },
    "adapters in a pipeline whose weights are cut, and norms beside an MLP without a module, had no rule": {
        "family": "opt", "tp": 2, "pp": 2, "pipeline_of": "transformers", "peft": "all",
    },
}  # fmt: skip


@pytest.mark.parametrize("what", list(FOUND))
def test_what_was_found_stays_mended(what: str) -> None:
    assert check_case(settled({**DEFAULT, **FOUND[what]})) == ""


@pytest.mark.parametrize(
    "case",
    [
        {"data": 2, "dropout": "own"}, {"tp": 2, "dropout": "keyed"}, {"sp": 2, "dropout": "keyed"},
        {"pp": 2, "dropout": "keyed"}, {"data": 2, "precision": "bf16"}, {"tp": 2, "precision": "autocast"},
        {"sp": 2, "precision": "autocast", "attention": "ring"},
        {"pp": 2, "precision": "bf16", "pipeline_of": "transformers", "peft": "attention"},
    ],
    ids=str,
)  # fmt: skip
def test_a_rate_that_is_off_by_a_half_is_noticed(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain run gets 1.5 times the learning rate. Each case must fail then."""
    plain, rate = fuzz_parallel.plain, fuzz_parallel.RATE

    def with_another_rate(case: dict, outcomes: list[Outcome]):
        with monkeypatch.context() as patch:
            patch.setattr(fuzz_parallel, "RATE", 1.5 * rate)
            return plain(case, outcomes)

    monkeypatch.setattr(fuzz_parallel, "plain", with_another_rate)
    assert "moved 0." in check_case(settled({**DEFAULT, **case}))


def outcome(keys: list[int], positions: list[int]) -> Outcome:
    return Outcome({}, 0, {"norm": keys}, [positions] * 2)


ALL, FIRST, LAST = list(range(TOKENS)), list(range(TOKENS // 2)), list(range(TOKENS // 2, TOKENS))


def test_keys_of_parts_are_put_together() -> None:
    outcomes = [outcome([1, 2], FIRST), outcome([1, 2], FIRST), outcome([3, 4], LAST)]
    assert forwards_of(DEFAULT, outcomes) == {"norm": [[(1, FIRST), (3, LAST)], [(2, FIRST), (4, LAST)]]}


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [
        ([outcome([1, 2, 5], ALL)], "rank 0: norm drew 3 keys in 2 forwards"),
        ([outcome([1, 2], ALL), outcome([1, 5], ALL)], "have other keys of norm"),
    ],
)
def test_keys_that_are_not_those_of_one_run_are_noticed(outcomes: list[Outcome], problem: str) -> None:
    """A layer was computed again with other random numbers, or tensor-parallel ranks dropped other elements."""
    with pytest.raises(AssertionError, match=problem):
        forwards_of(DEFAULT, outcomes)
