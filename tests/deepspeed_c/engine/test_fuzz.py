"""Twenty cases of the fuzzer, and whether it notices planted bugs. ``fuzz.py`` runs any number of cases by hand."""

from __future__ import annotations

import pytest

from tests.deepspeed_c.engine.fuzz import ADAMW, CHOICES, check_case, draw, settled, shrink, told

DEFAULT = {name: values[0] for name, values in CHOICES.items()}


@pytest.mark.parametrize("seed", range(1, 21))
def test_a_random_run_is_the_reference(seed: int) -> None:
    case = draw(seed)
    problem = check_case(case)
    assert not problem, f"{problem}\npython -m tests.deepspeed_c.engine.fuzz --case '{told(case)}'"


# Bugs that the fuzzer has found.
FOUND = {
    "the master of a frozen parameter that never had a gradient was lost by a load": {
        "precision": "bf16", "unused": True, "trainable": True, "load": "full",
    },
}  # fmt: skip


@pytest.mark.parametrize("what", list(FOUND))
def test_what_was_found_stays_mended(what: str) -> None:
    assert check_case(settled({**DEFAULT, **FOUND[what]})) == ""


PLANTED = {
    "no weight decay": {"weight_decay": 0.0}, "learning rate 1 % lower": {"lr": 0.99 * ADAMW["lr"]},
    "beta1": {"betas": (0.81, 0.95)}, "beta2": {"betas": (0.8, 0.96)}, "eps": {"eps": 1.1e-3},
    "no bias correction": {"bias_correction": False},
}  # fmt: skip
KINDS = {
    "fp32": {"world": 3, "stage": 0},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "stage": 2},
    "bf16_masters": {"precision": "bf16_masters", "world": 2, "stage": 3},
    "nvme": {"precision": "bf16", "stage": 2, "offload": "nvme", "clip": 0.1},
    "ahead": {"precision": "fp16", "stage": 2, "offload": "super", "apart": True},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_wrong_optimizer_is_noticed(kind: str) -> None:
    case = settled({**DEFAULT, **KINDS[kind]})
    assert check_case(case) == ""
    passed = [name for name, planted in PLANTED.items() if not check_case(case, planted=planted)]
    assert not passed, f"{kind}: these pass: {passed}"


def test_a_seed_is_a_case_and_every_choice_is_drawn() -> None:
    assert [draw(seed) for seed in range(5)] == [draw(seed) for seed in range(5)]
    cases = [draw(seed) for seed in range(300)]
    for name, values in CHOICES.items():
        assert {case[name] for case in cases} == set(values), name


def test_shrinking_keeps_what_the_failure_needs() -> None:
    def fails(case: dict) -> bool:
        return case["stage"] >= 2 and case["load"] != "none" and case["moment"] == "within"

    failing = next(case for case in map(draw, range(1000)) if fails(case))
    small = shrink(failing, fails)
    odd = {name: value for name, value in small.items() if value != DEFAULT[name]}
    assert odd == {"stage": 2, "gas": 2, "load": "full", "moment": "within"}, odd
