"""Numbers of ``bench inference`` against brute force, and the sentences about them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from deepspeed_c.bench.inference import RequestOutcome
from deepspeed_c.bench.load import Lengths, Load
from deepspeed_c.bench.summary import as_table, notes_of, percentile, spread_of, summary_of

LOAD = Load(rate=2, n_requests=3, prompt_tokens=Lengths(1, 4), new_tokens=Lengths(4, 4), seed=0, n_words=9)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 99, 100, 101, 200])
def test_a_percentile_is_the_nearest_rank(n):
    values = sorted(random.Random(n).choices(range(n), k=n))
    for percent in (1, 10, 50, 90, 99, 99.9, 100):
        brute = min(v for v in values if sum(w <= v for w in values) * 1000 >= round(percent * 10) * n)
        assert percentile(values, percent) == brute, (percent, values)


def test_a_spread_of_nothing():
    assert spread_of([]) is None
    one = spread_of([0.25])
    assert (one.n, one.mean, one.p50, one.p99, one.max) == (1, 0.25, 0.25, 0.25, 0.25)


def outcome(number, at_s, sent_s, piece_s, end_s, **more):
    defaults = {"n_prompt": 3, "n_wanted": len(piece_s), "usage_prompt": 3, "usage_new": len(piece_s)}
    return RequestOutcome(number=number, at_s=at_s, sent_s=sent_s, piece_s=piece_s, end_s=end_s, **(defaults | more))


def test_each_number_is_what_its_name_says():
    outcomes = [
        outcome(0, 0.5, 0.5, [1.0, 1.25, 2.0, 2.5], 2.75),
        outcome(1, 2.0, 2.0, [4.0, 4.5], 5.0),
        outcome(2, 9.0, 9.0, [9.5], 10.0),
        outcome(3, 9.5, 9.75, [9.8, 9.9], 12.5, error="cut", message="in the middle"),
    ]
    found = summary_of(outcomes, 0.1, is_text=False)
    firsts, gaps, wholes = [0.5, 2.0, 0.5], [0.25, 0.75, 0.5, 0.5], [2.25, 3.0, 1.0]
    for spread, values in (
        (found.first_token_s, firsts),
        (found.between_tokens_s, gaps),
        (found.per_token_s, [0.5, 0.5]),
        (found.whole_s, wholes),
        (found.late_s, [0, 0, 0, 0.25]),
    ):
        assert (spread.n, spread.max) == (len(values), max(values))
        assert math.isclose(spread.mean, sum(values) / len(values), abs_tol=1e-12)
    assert (found.n_requests, found.n_answered, found.errors) == (4, 3, {"cut": 1})
    assert (found.seconds, found.busy_s) == (12.0, 4.5 + 3.5)
    assert (found.n_new_tokens, found.n_prompt_tokens) == (7, 9)
    assert (found.tokens_per_s, found.requests_per_s) == (7 / 12, 3 / 12)
    assert (found.busy_tokens_per_s, found.busy_requests_per_s) == (7 / 8, 3 / 8)
    assert (found.n_late, found.n_short, found.n_without_usage) == (1, 0, 0)


def test_busy_time_is_the_union_of_requests():
    draws = random.Random(3)
    for _ in range(200):
        spans = [(a, a + draws.randrange(6)) for a in draws.choices(range(20), k=draws.randrange(1, 8))]
        found = summary_of([outcome(i, a, a, [b], b) for i, (a, b) in enumerate(spans)], 0, is_text=False)
        brute = sum(any(a <= t < b for a, b in spans) for t in range(30))
        assert found.busy_s == brute, spans


def test_a_load_without_answers():
    failed = [
        outcome(0, 0, 0, [], 1, error="timeout", message="a"),
        outcome(1, 0, 0, [], 1, error="timeout", message="b"),
    ]
    found = summary_of(failed, 0, is_text=False)
    assert found.first_token_s is None and found.tokens_per_s == 0.0 and found.errors == {"timeout": 2}
    table = as_table(LOAD, found, concurrency=None)
    assert "answered 0 of 2; failed: timeout: 2" in table and "note: timeout, for example: a" in table


def test_each_doubt_is_a_note():
    outcomes = [
        outcome(0, 0.0, 0.5, [1.0, 2.0], 3.0, usage_new=None, usage_prompt=None),
        outcome(1, 0.0, 0.0, [1.0, 2.0], 3.0, usage_new=3, n_wanted=3),
        outcome(2, 0.0, 0.0, [1.0], 3.0, usage_prompt=4, n_wanted=2),
    ]
    found = summary_of(outcomes, 0, is_text=False)
    assert found.n_new_tokens == 2 + 3 + 1
    expected = [
        "1 of 3 requests were sent more than 10 ms late, at most 500.0 ms: the client fell behind",
        "1 answers came without usage",
        "1 answers had another number of pieces than tokens",
        "the server counts other tokens in 1 prompts",
        "1 answers have fewer tokens than were asked for",
    ]
    notes = notes_of(found, concurrency=None)
    assert [note.startswith(text) for note, text in zip(notes, expected, strict=True)] == [True] * 5, notes
    assert "waited for one of 2 places" in notes_of(found, concurrency=2)[0]
    assert summary_of(outcomes, 0, is_text=True).n_other_prompt == 0
    right = summary_of([outcome(0, 0, 0, [1.0], 2.0)], 0, is_text=False)
    assert notes_of(right, concurrency=None) == []


def test_the_table_has_a_row_for_each_time():
    found = summary_of([outcome(i, i, i, [i + 0.1, i + 0.3], i + 0.4) for i in range(3)], 0, is_text=False)
    lines = as_table(LOAD, found, concurrency=None).splitlines()
    assert lines[0] == "3 requests, 2 a second (Poisson, seed 0), prompts of 1 to 4 tokens, answers of 4 tokens"
    rows = {line.rsplit(maxsplit=5)[0].strip(): line.split()[-5:] for line in lines[3:8]}
    assert rows["time to first token, ms"] == ["100.00"] * 5
    assert rows["between tokens, each gap, ms"] == ["200.00"] * 5
    assert rows["sent behind schedule, ms"] == ["0.00"] * 5
    assert len(set(map(len, itertools.islice(lines, 2, 8)))) == 1, lines
