"""The load of ``bench inference``: times, lengths and words are functions of the seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepspeed_c.bench.load import Lengths, Load, parse_lengths
from deepspeed_c.errors import ConfigError


def load(**settings) -> Load:
    defaults = {
        "rate": 2.5,
        "n_requests": 400,
        "prompt_tokens": Lengths(3, 7),
        "new_tokens": Lengths(5, 5),
        "seed": 11,
        "n_words": 50,
    }
    return Load(**(defaults | settings))


def test_arrivals_are_a_poisson_process_of_the_seed():
    plan = load().plan()
    gaps = np.random.default_rng([11, 0]).exponential(1 / 2.5, 400)
    assert [each.at_s for each in plan] == np.cumsum(gaps).tolist()
    assert [each.number for each in plan] == list(range(400))
    # Mean and variance of an exponential distribution, to five standard errors.
    found = np.diff([0.0, *(each.at_s for each in plan)])
    assert abs(found.mean() - 0.4) < 5 * 0.4 / 20, found.mean()
    assert abs(found.var() - 0.16) < 5 * 0.16 * math.sqrt(8) / 20, found.var()


def test_all_requests_at_once():
    assert {each.at_s for each in load(rate=math.inf).plan()} == {0.0}


def test_lengths_are_uniform_with_both_ends():
    plan = load().plan()
    counts = np.bincount([each.n_prompt for each in plan], minlength=9)
    assert counts[[0, 1, 2, 8]].tolist() == [0] * 4
    assert (abs(counts[3:8] - 80) < 5 * math.sqrt(80)).all(), counts
    assert {each.n_new for each in plan} == {5}


def test_the_rate_changes_nothing_but_times():
    slow, fast = load(), load(rate=25)
    for one, other in zip(slow.plan(), fast.plan(), strict=True):
        assert one[2:] == other[2:] and math.isclose(one.at_s, other.at_s * 10)
        assert slow.prompt(one) == fast.prompt(other)


def test_prompts_have_their_length_and_are_within_the_vocabulary():
    ids = load(prompt_tokens=Lengths(200, 210))
    plan = ids.plan()[:50]
    prompts = [ids.prompt(each) for each in plan]
    assert [len(each) for each in prompts] == [each.n_prompt for each in plan]
    assert {word for each in prompts for word in each} == set(range(50))
    assert len({tuple(each[:8]) for each in [*prompts, ids.probe()]}) == 51
    assert prompts == [ids.prompt(each) for each in plan], "a function of seed and number"
    assert prompts[0] != load(prompt_tokens=Lengths(200, 210), seed=12).prompt(plan[0])


def test_prompts_of_words():
    text = load(is_text=True)
    for each in text.plan()[:20]:
        assert len(text.prompt(each).split(" ")) == each.n_prompt


@pytest.mark.parametrize("text, expected", [("32:512", (32, 512)), ("7", (7, 7)), ("1:1", (1, 1))])
def test_ranges(text, expected):
    assert parse_lengths(text, "x") == expected


@pytest.mark.parametrize("text", ["", "0", "0:3", "4:3", "a", "1:", ":1", "-1", "1:2:3", "1.5", "²"])
def test_wrong_ranges_are_refused(text):
    with pytest.raises(ConfigError, match="--new-tokens") as error:
        parse_lengths(text, "--new-tokens")
    assert repr(text) in str(error.value)
