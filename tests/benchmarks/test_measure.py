"""benchmarks/measure.py: ratios of each round, lower bounds that report when a measurement undercuts them, a fair order
of contenders, and checks that end a benchmark.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from benchmarks.measure import (
    bound,
    calls_of_a_round,
    in_turn,
    instructions,
    machine,
    ratio_text,
    ratios,
    require,
    require_equal,
)
from deepspeed_c import _C


def test_a_ratio_is_the_median_of_rounds_and_not_of_medians():
    assert ratios("r", [1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == {"r": 2.0, "r_min": 1.0, "r_max": 3.0}
    with pytest.raises(ValueError):
        ratios("r", [1.0], [1.0, 2.0])


def test_one_disturbed_round_changes_no_figure_of_a_ratio_in_words():
    mine = [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4]
    assert ratio_text(mine, [1.0] * 7) == "1.10 (0.90 to 1.30)"
    assert ratio_text([*mine[:-1], 90.0], [1.0] * 7) == "1.10 (0.90 to 1.30)"
    with pytest.raises(ValueError):
        ratio_text([1.0, 2.0], [1.0])


def test_a_bound_that_is_undercut_says_so_and_noise_does_not():
    assert "note" not in bound("r", [1.0, 0.5, 1.5], [1.0, 1.0, 1.0])
    assert "note" not in bound("r", [0.98], [1.0])
    assert "bound is wrong" in bound("r", [0.9, 0.9, 1.5], [1.0, 1.0, 1.0])["note"]


def test_a_round_has_as_many_calls_as_fill_it_and_the_first_call_does_not_count():
    durations = [0.2, *[0.01] * 100]
    called = []

    def step() -> None:
        called.append(durations[len(called)])
        time.sleep(called[-1])

    n_calls = calls_of_a_round(step, 0.1)
    assert 1 <= n_calls <= 10 and called == [0.2, 0.01]
    assert calls_of_a_round(lambda: time.sleep(0.02), 0.001) == 1


def test_each_contender_is_first_equally_often():
    names = ["a", "b", "c"]
    firsts = Counter(in_turn(names, round_)[0] for round_ in range(9))
    assert firsts == {"a": 3, "b": 3, "c": 3}
    assert all(sorted(in_turn(names, round_)) == names for round_ in range(5))
    behind_a = Counter(order[order.index("a") + 1] for r in range(6) if (order := in_turn(names, r))[-1] != "a")
    assert behind_a == {"b": 2, "c": 2}


def test_a_benchmark_that_does_not_measure_what_it_says_ends():
    require(True, "it holds")
    with pytest.raises(SystemExit, match="0 gathers"):
        require(False, "0 gathers")
    require_equal("losses", {"a": 1.0, "b": 1.00001}, 1e-4)
    with pytest.raises(SystemExit, match="losses"):
        require_equal("losses", {"a": 1.0, "b": 1.1}, 1e-4)
    with pytest.raises(SystemExit, match="nan"):
        require_equal("losses", {"a": 1.0, "b": float("nan")}, 1e-4)


def test_a_machine_is_named_with_its_instruction_set():
    assert instructions("avx512", ["avx512f", "amx_bf16", "avx512_bf16"]) == "AVX-512 (avx512_bf16, amx_bf16)"
    assert instructions("avx512", ["avx512f"]) == "AVX-512"
    assert instructions("avx2", ["avx512_bf16"]) == "AVX2"
    assert instructions("neon", []) == "neon"
    assert instructions(_C.cpu_isa(), []) in machine()
