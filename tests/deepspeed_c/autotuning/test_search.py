"""The kinds of search, on metrics that a formula gives."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec

import pytest

from deepspeed_c.autotuning import search as module
from deepspeed_c.autotuning.search import KINDS, is_better
from deepspeed_c.autotuning.space import MICRO_BATCH, make_space
from deepspeed_c.errors import ConfigError
from tests.deepspeed_c.autotuning.test_tune import Pretended
from tests.deepspeed_c.autotuning.test_tune import search as tune_in

needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="the extra [tuning] is not installed")
EVERY_KIND = ["gridsearch", "random", pytest.param("model_based", marks=needs_optuna)]
# Samples per second of the benchmark tuning, by stage and bf16, at micro-batches of 1, 4 and 16.
RECORDED = {
    (0, True): (2.867, 9.725, 21.32),
    (2, True): (2.05, 9.692, 21.52),
    (3, True): (2.7, 9.25, 20.89),
    (0, False): (1.525, 5.467, 12.06),
    (2, False): (1.533, 5.525, 12.14),
    (3, False): (1.442, 5.242, 11.86),
}


def candidates(sizes=(1, 2, 4, 8, 16, 32), stages=(0, 1, 2, 3)):
    config = {
        MICRO_BATCH: list(sizes),
        "zero_optimization": {"stage": list(stages), "reduce_bucket_size": [500, 70000]},
    }
    return make_space(config, 2, has_accelerator=False).candidates


def rate(candidate):
    """Samples per second with a peak at 8 samples, and a cost of each stage and of small buckets."""
    size, stage = candidate.micro_batch, candidate.choices["zero_optimization.stage"]
    small = candidate.choices["zero_optimization.reduce_bucket_size"] == 500
    return 100.0 * math.exp(-((math.log2(size) - 3) ** 2) / 4) * (1 - 0.1 * stage) * (0.8 if small else 1.0)


def search(kind, metric, space, most=1000, fails=lambda each: False, of=rate):
    left, tried, values = list(space), [], {}
    while left and len(tried) < most:
        # The tuner's first one is the smallest.
        each = KINDS[kind](left, tried, values, metric) if tried else left[0]
        left.remove(each)
        tried.append(each)
        if not fails(each):
            values[each.name] = of(each) if metric == "throughput" else 1 / of(each)
    return tried, values


def best_of(values, metric):
    best = None
    for name, value in values.items():
        if best is None or is_better(metric, value, values[best]):
            best = name
    return best


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_kinds_agree_on_a_whole_space(kind, metric):
    space = candidates([1, 8, 32], [0, 3])
    tried, values = search(kind, metric, space)
    names = sorted(each.name for each in space)
    assert sorted(each.name for each in tried) == names and tried[0] is space[0]
    assert best_of(values, metric) == max(space, key=rate).name


@needs_optuna
@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_model_finds_the_best_with_a_third(metric):
    space = candidates(stages=[0, 3])
    _, values = search("model_based", metric, space, len(space) // 3)
    best = max(map(rate, space))
    found = next(rate(each) for each in space if each.name == best_of(values, metric))
    assert found >= 0.95 * best, (found, best)


@needs_optuna
@pytest.mark.parametrize("seed", range(0, 500, 100))
def test_six_of_eighteen_recorded_experiments_find_the_best(monkeypatch, seed):
    """The best of six is within 5 % of the grid's best, from any seed."""
    monkeypatch.setattr(module, "_SEED", seed)
    config = {MICRO_BATCH: [1, 4, 16], "bf16": {"enabled": [True, False]}, "zero_optimization": {"stage": [0, 2, 3]}}
    space = make_space(config, 2, has_accelerator=False).candidates

    def recorded(each):
        stage, is_bf16 = each.choices["zero_optimization.stage"], each.choices["bf16.enabled"]
        return RECORDED[stage, is_bf16][[1, 4, 16].index(each.micro_batch)]

    tried, values = search("model_based", "throughput", space, 6, of=recorded)
    found, best = max(values.values()), max(map(max, RECORDED.values()))
    assert len(tried) == 6 and found >= 0.95 * best, (found, best, [each.name for each in tried])


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_searches_repeat_and_go_on_where_they_were(kind):
    """A search that is interrupted asks for the same candidates again, and has their results."""
    space = candidates([1, 4, 32], [0])
    names = [each.name for each in search(kind, "throughput", space)[0]]
    assert len(set(names)) == len(space) == 6
    tried, values = search(kind, "throughput", space, 3)
    rest = [each for each in space if each not in tried]
    while rest:
        tried.append(KINDS[kind](rest, tried, values, "throughput"))
        rest.remove(tried[-1])
        values[tried[-1].name] = rate(tried[-1])
    assert [each.name for each in tried] == names


def test_random_is_no_grid():
    space = candidates()
    orders = [[each.name for each in search(kind, "throughput", space)[0]] for kind in ("random", "gridsearch")]
    assert orders[0] != orders[1]


@needs_optuna
@pytest.mark.parametrize("works", [set(), {1}, {4}])
def test_model_survives_failures(works):
    """Candidates fail unless ``works`` has their micro-batch."""
    space = candidates([1, 4, 32], [0])
    tried, values = search("model_based", "throughput", space, fails=lambda each: each.micro_batch not in works)
    assert len(tried) == len(space) and len(values) == len(space) // 3 * len(works)


@needs_optuna
def test_model_survives_a_metric_without_differences():
    space = candidates([1, 4], [0, 2])
    tried, _ = search("model_based", "latency", space, of=lambda each: 2.5)
    assert len(tried) == len(space)


@needs_optuna
def test_a_suggestion_that_was_pruned_is_replaced():
    """The only candidate left is the neighbour of any suggestion."""
    space = candidates([1, 4, 32], [0, 2])
    tried, values = search("model_based", "throughput", space, 3)
    last = space[-1] if space[-1] not in tried else space[-2]
    assert KINDS["model_based"]([last], tried, values, "throughput") is last


@needs_optuna
def test_model_says_nothing(capfd, recwarn):
    search("model_based", "throughput", candidates([1, 4], [0, 2]))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and not [str(each.message) for each in recwarn]


@pytest.mark.parametrize("package", ["optuna", "scipy.optimize"])
def test_absent_packages_are_a_typed_error_before_anything_starts(tmp_path, monkeypatch, package):
    made = Pretended(monkeypatch, lambda each: 1.0)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="needs optuna and scipy") as caught:
        tune_in(tmp_path, monkeypatch, tuner_type="model_based")
    assert caught.value.where == "autotuning.tuner_type" and "deepspeed_c[tuning]" in caught.value.fix
    assert made.ran == [] and made.shapes == [] and [file.name for file in tmp_path.iterdir()] == ["ds.json"]
    tune_in(tmp_path, monkeypatch)  # the default needs neither
    assert len(made.ran) == 2


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("throughput", True), ("flops", True), ("latency", False), ("forward", False), ("step", False)],
)
def test_direction_of_each_metric(metric, expected):
    assert is_better(metric, 2.0, 1.0) == expected and is_better(metric, 1.0, 2.0) != expected
    assert is_better(metric, 1.0, None) and not is_better(metric, 1.0, 1.0)
