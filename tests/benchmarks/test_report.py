"""benchmarks/report.py: lines become rows, and a goal without a result is shown.

The README keeps its text and has eight figures. The documents agree with the results.
"""

from __future__ import annotations

import pytest

from benchmarks import report, results, run
from benchmarks.figures import FIGURES, N_MAIN
from benchmarks.results import Origin, Result

ORIGIN = Origin("0123456789abcdef", False, "2026-02-03T04:05:06+00:00", "a machine", 17)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def store(name, *lines, **origin):
        results.store(name, Result(ORIGIN._replace(**origin), list(lines)))

    return store


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_a_plain_result_is_a_row_below_its_commit_date_and_machine(store):
    line = {"benchmark": "engine_step", "stage": 1, "ratio_to_bound": 1.2345, "machine": "a machine"}
    store("engine_step", line, {**line, "stage": 2, "extra": "x"}, is_dirty=True)
    text = section(report.performance(run.BENCHMARKS), "engine_step")
    assert "| stage | ratio_to_bound | extra |" in text
    assert "| 1 | 1.23 |  |" in text and "| 2 | 1.23 | x |" in text
    assert "Commit 0123456 and changes, 2026-02-03 04:05 UTC, 17 s, on a machine." in text
    assert text.count("a machine") == 1


def test_what_was_not_measured_is_shown_with_its_reason_and_its_goal(store):
    store("cuda_step", skipped="no CUDA device")
    text = report.performance(run.BENCHMARKS)
    assert "Not measured: no CUDA device." in section(text, "cuda_step")
    assert "Not measured." in section(text, "cores")
    goals = section(text, "Goals")
    assert goals.count("| not measured |") == len(FIGURES)
    for figure in FIGURES:
        assert f"| {figure.what} | {figure.goal} | not measured |" in goals


def test_a_goal_has_median_spread_commit_and_date_and_says_whether_it_is_met(store):
    line = {"stage": 2, "ratio_to_bound": 1.1, "ratio_to_bound_min": 1.0, "ratio_to_bound_max": 1.2}
    store("engine_step", {**line, "stage": 1, "ratio_to_bound": 1.3}, line)
    goals = section(report.performance(run.BENCHMARKS), "Goals")
    assert (
        "stage 2: over a C pass over the same memory | <= 1.25 | 1.1 | 1 to 1.2 | yes | 0123456 | 2026-02-03 |" in goals
    )
    assert (
        "stage 1: over a C pass over the same memory | <= 1.25 | 1.3 | 1 to 1.2 | no | 0123456 | 2026-02-03 |" in goals
    )


def test_a_peer_that_was_not_there_leaves_its_goal_not_measured(store):
    store("aio", {"contender": "deepspeed_c, ordinary", "direction": "read", "ratio_to_fio": 1.0})
    goals = section(report.performance(run.BENCHMARKS), "Goals")
    assert "speed over the best fio | >= 0.9 | 1 |" in goals
    assert "from an ordinary unaligned tensor: speed over DeepSpeed's | >= 4 | not measured |" in goals


def test_a_time_below_its_bound_is_flagged_in_its_row_and_at_its_goal(store):
    store("engine_step", {"stage": 2, "ratio_to_bound": 0.9, "note": "below its bound: the bound is wrong"})
    text = report.performance(run.BENCHMARKS)
    assert text.count("below its bound: the bound is wrong") == 2
    kernel = {"kernel": "adam", "dtypes": "f32", "case": "flat", "isa": "avx2", "ns_per_elem": 1.0, "gbps": 5.0}
    store("cores", {**kernel, "bound_ratio": 1.02}, {**kernel, "case": "many", "bound_ratio": 1.2})
    text = section(report.performance(run.BENCHMARKS), "cores")
    assert "| 1.02 |" in text and "| 1.2 (above its bound) |" in text


def test_a_missed_goal_says_why_where_a_reason_is_known(store):
    figure = next(figure for figure in FIGURES if figure.why_not)
    line = {**figure.chosen, f"{figure.key}_min": 1.4, figure.key: 1.5, f"{figure.key}_max": 1.6}
    store(figure.benchmark, line)
    assert report.measured(figure).is_met == f"no: {figure.why_not}"
    assert report.measured(figure._replace(why_not="")).is_met == "no"
    store(figure.benchmark, {**line, figure.key: 0.4, f"{figure.key}_min": 0.3, f"{figure.key}_max": 0.5})
    assert report.measured(figure).is_met == "yes"


def test_rounds_that_disagree_neither_meet_nor_miss_a_goal(store):
    line = {"stage": 2, "ratio_to_bound": 1.1, "ratio_to_bound_min": 0.7, "ratio_to_bound_max": 1.41}
    store("engine_step", line)
    goals = section(report.performance(run.BENCHMARKS), "Goals")
    assert "| <= 1.25 | 1.1 (rounds are too far apart) | 0.7 to 1.41 |  | 0123456 |" in goals
    store("engine_step", {**line, "ratio_to_bound_max": 1.39})
    goals = section(report.performance(run.BENCHMARKS), "Goals")
    assert "| <= 1.25 | 1.1 | 0.7 to 1.39 | yes | 0123456 |" in goals


def test_kernels_stand_side_by_side_for_each_instruction_set(store):
    base = {"kernel": "adam", "dtypes": "f32", "case": "flat", "gbps": 5.0, "bound_ratio": 0.5}
    store(
        "cores",
        {**base, "isa": "scalar", "ns_per_elem": 4.0},
        {**base, "isa": "avx2", "ns_per_elem": 2.0, "gbps": 10.0, "bound_ratio": 0.97},
        {**base, "isa": "scalar", "ns_per_elem": 1.0, "case": "cached", "gbps": 7.0, "bound_ratio": None},
    )
    text = report.performance(run.BENCHMARKS)
    assert "| adam | f32 | flat | 4 | 2 | 10 | 0.97 |" in text
    assert "| adam | f32 | cached | 1 |  | 7 |  |" in text


def test_the_readme_has_the_eight_main_figures_measured_or_not(store):
    readme = f"before\n{report.README_BEGIN}\nold\n{report.README_END}\nafter\n"
    empty = report.with_figures(readme)
    assert empty.startswith("before\n") and empty.endswith("after\n") and "old" not in empty
    assert empty.count("| not measured |") == N_MAIN == 8
    store("engine_step", {"stage": 2, "ratio_to_bound": 1.1, "ratio_to_bound_min": 1.0, "ratio_to_bound_max": 1.2})
    filled = report.with_figures(empty)
    assert "over a C pass over the same memory | <= 1.25 | 1.1 (1 to 1.2) | 0123456, 2026-02-03 |" in filled
    assert filled.count("| not measured |") == 7
    assert report.with_figures(filled) == filled


def test_the_documents_are_what_the_results_in_the_tree_say():
    assert (report.ROOT / "docs" / "performance.md").read_text() == report.performance(run.BENCHMARKS)
    readme = (report.ROOT / "README.md").read_text()
    assert readme == report.with_figures(readme)


def test_every_figure_names_a_benchmark_and_a_goal_that_can_be_compared():
    names = {benchmark.name for benchmark in run.BENCHMARKS}
    for figure in FIGURES:
        relation, limit = figure.goal.split()
        assert relation in ("<=", ">=") and float(limit) >= 0
        assert figure.benchmark in names
    assert len({figure.what for figure in FIGURES}) == len(FIGURES)
