"""The kinds of search, on metrics that a formula gives."""

from __future__ import annotations

import math

import pytest

from deepspeed_c.autotuning.search import KINDS, is_better
from deepspeed_c.autotuning.space import MICRO_BATCH, make_space


def candidates():
    config = {
        MICRO_BATCH: [1, 2, 4, 8, 16, 32],
        "zero_optimization": {"stage": [0, 1, 2, 3], "reduce_bucket_size": [500, 70000]},
    }
    return make_space(config, 2, has_accelerator=False).candidates


def rate(candidate):
    """Samples per second with a peak at 8 samples, and a cost of each stage and of small buckets."""
    size, stage = candidate.micro_batch, candidate.choices["zero_optimization.stage"]
    small = candidate.choices["zero_optimization.reduce_bucket_size"] == 500
    return 100.0 * math.exp(-((math.log2(size) - 3) ** 2) / 4) * (1 - 0.1 * stage) * (0.8 if small else 1.0)


def search(kind, metric, most=1000, fails=lambda each: False):
    left, tried, values = candidates(), [], {}
    while left and len(tried) < most:
        each = KINDS[kind](left, tried, values, metric)
        left.remove(each)
        tried.append(each)
        if not fails(each):
            values[each.name] = rate(each) if metric == "throughput" else 1 / rate(each)
    return tried, values


def best_of(values, metric):
    best = None
    for name, value in values.items():
        if best is None or is_better(metric, value, values[best]):
            best = name
    return best


@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_kinds_agree_on_a_whole_space(metric):
    names = {each.name for each in candidates()}
    found = set()
    for kind in KINDS:
        tried, values = search(kind, metric)
        assert {each.name for each in tried} == names and len(tried) == len(names)
        found.add(best_of(values, metric))
    expected = max(candidates(), key=rate)
    assert found == {expected.name}


@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_model_finds_the_best_with_a_third(metric):
    most = len(candidates()) // 3
    _, values = search("model_based", metric, most)
    best = max(map(rate, candidates()))
    found = next(rate(each) for each in candidates() if each.name == best_of(values, metric))
    assert found >= 0.95 * best


def test_searches_repeat_and_random_is_no_grid():
    for kind in KINDS:
        assert [c.name for c in search(kind, "throughput")[0]] == [c.name for c in search(kind, "throughput")[0]]
    assert [c.name for c in search("random", "throughput")[0]] != [c.name for c in search("gridsearch", "throughput")[0]]


def test_model_survives_failures_alone():
    tried, values = search("model_based", "throughput", fails=lambda each: True)
    assert len(tried) == len(candidates()) and values == {}


@pytest.mark.parametrize(
    ("metric", "expected"), [("throughput", True), ("flops", True), ("latency", False), ("forward", False), ("step", False)]
)
def test_direction_of_each_metric(metric, expected):
    assert is_better(metric, 2.0, 1.0) == expected and is_better(metric, 1.0, 2.0) != expected
    assert is_better(metric, 1.0, None) and not is_better(metric, 1.0, 1.0)
