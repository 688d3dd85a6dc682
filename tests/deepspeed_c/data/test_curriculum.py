"""data/curriculum.py: schedules against their formula in fractions, DeepSpeed's own class where it is there, and users'
mistakes."""

from __future__ import annotations

import json
import math
import os
import subprocess

import pytest

from deepspeed_c.data.curriculum import CurriculumScheduler
from deepspeed_c.errors import ConfigError, StateError

PEER = os.environ.get("DSC_PEER_PYTHON", "")
LINEAR = {"total_curriculum_step": 100, "difficulty_step": 8}


def section(kind, config, low=8, high=1024):
    return {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": config}


@pytest.mark.parametrize("low, high", [(8, 1024), (5, 5), (0, 7), (60, 999)])
@pytest.mark.parametrize("multiple", [1, 8])
def test_linear_is_the_formula_in_integers(low, high, multiple):
    scheduler = CurriculumScheduler(
        section("fixed_linear", {"total_curriculum_step": 100, "difficulty_step": multiple}, low, high)
    )
    for step in range(130):
        exact = low + (high - low) * step // 100
        wanted = min(high, max(low, exact - exact % multiple))
        assert abs(scheduler.get_difficulty(step) - wanted) in (0, multiple), step  # f64 may fall below a whole number
        assert low <= scheduler.get_difficulty(step) <= high


@pytest.mark.parametrize("degree", [1, 2, 3, 0.5])
def test_roots(degree):
    scheduler = CurriculumScheduler(section("fixed_root", {**LINEAR, "root_degree": degree}))
    for step in range(100):
        exact = math.floor((step / 100) ** (1 / degree) * (1024 - 8) + 8)
        assert scheduler.get_difficulty(step) == exact - exact % 8, step
    assert scheduler.get_difficulty(100) == scheduler.get_difficulty(10**15) == 1024


def test_the_maximum_comes_when_the_formula_reaches_it():
    """A maximum that is no multiple: DeepSpeed 0.19.6 gives these values too."""
    scheduler = CurriculumScheduler(
        section("fixed_linear", {"total_curriculum_step": 50, "difficulty_step": 8}, 8, 100)
    )
    found = [scheduler.get_difficulty(step) for step in (49, 50, 52, 53, 54, 10**15)]
    assert found == [96, 96, 96, 100, 100, 100]
    assert [scheduler.update_difficulty(step) for step in (50, 53, 60)] == [96, 100, 100]


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_difficulties_are_those_of_deepspeed():
    """But for a minimum that is no multiple, which DeepSpeed's first steps go below."""
    cases = [
        section(kind, {"total_curriculum_step": total, "difficulty_step": multiple, "root_degree": degree}, low, high)
        for kind, degree in (("fixed_linear", 1), ("fixed_root", 2), ("fixed_root", 3))
        for total, multiple in ((50, 8), (7, 1), (100, 16), (33, 5))
        for low, high in ((80, 100), (80, 999), (160, 161), (240, 240))
    ]
    code = (
        "import json, sys; from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler as S\n"
        "print('FOUND', json.dumps([[S(c).get_difficulty(i) for i in range(150)] for c in json.loads(sys.argv[1])]))"
    )
    done = subprocess.run(
        [PEER, "-c", code, json.dumps(cases)], capture_output=True, text=True, timeout=300, check=True
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    for case, theirs in zip(cases, json.loads(line.removeprefix("FOUND ")), strict=True):
        scheduler = CurriculumScheduler(case)
        ours = [scheduler.get_difficulty(step) for step in range(150)]
        assert ours == theirs, (case, ours, theirs)


def test_discrete():
    scheduler = CurriculumScheduler(section("fixed_discrete", {"difficulty": [1, 2, 3], "max_step": [5, 10]}))
    assert [scheduler.get_difficulty(step) for step in range(13)] == [1] * 6 + [2] * 5 + [3] * 2


def test_custom():
    scheduler = CurriculumScheduler(section("custom", {}))
    with pytest.raises(ConfigError, match="there is no function"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 2000 - step)
    assert scheduler.update_difficulty(1) == 1999 and scheduler.update_difficulty(2) == 1998


def test_the_state_goes_on():
    one, other = (CurriculumScheduler(section("fixed_linear", LINEAR)) for _ in range(2))
    assert one.get_current_difficulty() == 8 and one.update_difficulty(50) == one.get_current_difficulty() == 512
    other.set_state(one.get_state())
    assert other.get_current_difficulty() == 512
    other.set_current_difficulty(1024)
    assert other.update_difficulty(3) == 1024, "the maximum stays"
    with pytest.raises(StateError, match="max_difficulty 1024, this schedule has 512"):
        CurriculumScheduler(section("fixed_linear", LINEAR, high=512)).set_state(one.get_state())


@pytest.mark.parametrize(
    "kind, config, message",
    [
        ("fixed_linear", {}, "schedule_config.total_curriculum_step: is missing"),
        ("fixed_linear", {"total_curriculum_step": 0, "difficulty_step": 1}, "total_curriculum_step is 0"),
        ("fixed_linear", {"total_curriculum_step": 2.5, "difficulty_step": 1}, "total_curriculum_step: is 2.5"),
        ("fixed_root", LINEAR, "schedule_config.root_degree: is missing"),
        ("fixed_root", {**LINEAR, "root_degree": 0}, "root_degree is 0"),
        ("fixed_discrete", {"difficulty": [1, 2], "max_step": [1, 2]}, "2 of difficulty and 2 of max_step"),
        ("fixed_discrete", {"difficulty": [2, 1], "max_step": [1]}, "difficulty goes down, from 2 to 1"),
        ("fixed_discrete", {"difficulty": [1, 2]}, "schedule_config.max_step: is missing"),
        ("fixed_cubic", {}, "schedule_type: is 'fixed_cubic'"),
    ],
)
def test_mistakes(kind, config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        CurriculumScheduler(section(kind, config))
    assert caught.value.fix
    with pytest.raises(ConfigError, match="min_difficulty: is missing"):
        CurriculumScheduler({**section("fixed_linear", LINEAR), "min_difficulty": None})
    with pytest.raises(ConfigError, match="max_difficulty: is 4, below min_difficulty 8"):
        CurriculumScheduler(section("fixed_linear", LINEAR, high=4))
