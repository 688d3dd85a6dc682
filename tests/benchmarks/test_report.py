"""benchmarks/report.py: lines become rows, and a goal without a result is shown.

The README keeps its text and has eight figures. The documents agree with the results, except for marks of age: numbers
of commits grow with each commit, and are right only when the documents are written.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import report, results, run
from benchmarks.areas import AREAS
from benchmarks.figures import FIGURES, N_MAIN
from benchmarks.results import Origin, Result

ORIGIN = Origin("0123456789abcdef", False, "2026-02-03T04:05:06+00:00", "a machine", 17)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def store(name, *lines, **origin):
        results.store(name, Result(ORIGIN._replace(**origin), list(lines)))

    return store


def pages(marks=None) -> dict[str, str]:
    """The text of each page by its name."""
    return {Path(path).stem: text for path, text in report.pages(run.BENCHMARKS, marks or {}).items()}


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ")[0]


def goals(area: str) -> str:
    return section(pages()[area], "Goals")


def test_a_plain_result_is_a_row_below_its_commit_date_and_machine(store):
    line = {"benchmark": "engine_step", "stage": 1, "ratio_to_bound": 1.2345, "machine": "a machine"}
    store("engine_step", line, {**line, "stage": 2, "extra": "x"}, is_dirty=True)
    text = section(pages()["training"], "engine_step")
    assert "| stage | ratio_to_bound | extra |" in text
    assert "| 1 | 1.23 | |" in text and "| 2 | 1.23 | x |" in text
    assert "Commit 0123456 and changes, 2026-02-03 04:05 UTC, 17 s, on a machine." in text
    assert text.count("a machine") == 1


def test_what_was_not_measured_is_shown_with_its_reason_and_its_goal(store):
    store("cuda_step", skipped="no CUDA device")
    found = pages()
    assert "Not measured: no CUDA device." in section(found["cores"], "cuda_step")
    assert "Not measured." in section(found["cores"], "cores")
    rows = "".join(goals(area.name) for area in AREAS)
    assert rows.count("| not measured |") == len(FIGURES)
    for figure in FIGURES:
        assert f"| {figure.what} | {figure.goal} | not measured |" in rows
    assert f"| all | 0 | 0 | {len(FIGURES)} |" in found["performance"]


def test_a_goal_has_median_spread_commit_and_date_and_says_whether_it_is_met(store):
    line = {"stage": 2, "ratio_to_bound": 1.1, "ratio_to_bound_min": 1.0, "ratio_to_bound_max": 1.2}
    store("engine_step", {**line, "stage": 1, "ratio_to_bound": 1.3}, line)
    rows, what = goals("training"), "over a C pass over the same memory | <= 1.25"
    assert f"stage 2: {what} | 1.1 | 1 to 1.2 | yes | 0123456 | 2026-02-03 |" in rows
    assert f"stage 1: {what} | 1.3 | 1 to 1.2 | no: {report.NO_REASON} | 0123456 | 2026-02-03 |" in rows


def test_a_peer_that_was_not_there_leaves_its_goal_not_measured(store):
    store("aio", {"contender": "deepspeed_c, ordinary", "direction": "read", "ratio_to_fio": 1.0})
    rows = goals("files")
    assert "speed over the best fio | >= 0.9 | 1 |" in rows
    assert "from an ordinary unaligned tensor: speed over DeepSpeed's | >= 4 | not measured |" in rows


def test_a_time_below_its_bound_is_flagged_in_its_row_and_at_its_goal(store):
    store("engine_step", {"stage": 2, "ratio_to_bound": 0.9, "note": "below its bound: the bound is wrong"})
    assert pages()["training"].count("below its bound: the bound is wrong") == 2
    kernel = {"kernel": "adam", "dtypes": "f32", "case": "flat", "isa": "avx2", "ns_per_elem": 1.0, "gbps": 5.0}
    store("cores", {**kernel, "bound_ratio": 1.02}, {**kernel, "case": "many", "bound_ratio": 1.2})
    text = section(pages()["cores"], "cores")
    assert "| 1.02 |" in text and "| 1.2 (above its bound) |" in text


def test_a_missed_goal_says_why_where_a_reason_is_known(store):
    figure = next(figure for figure in FIGURES if figure.why_not)
    line = {**figure.chosen, f"{figure.key}_min": 1.4, figure.key: 1.5, f"{figure.key}_max": 1.6}
    store(figure.benchmark, line)
    assert report.measured(figure).is_met is False
    assert report.measured(figure).reason == figure.why_not
    summary = pages()["performance"]
    assert f"- {figure.what}: 1.5 (1.4 to 1.6), goal {figure.goal}. Reason: {figure.why_not}.\n" in summary
    assert report.NO_REASON not in summary.partition("\n## Machines\n")[2]
    assert report.measured(figure._replace(why_not="")).reason == report.NO_REASON
    of_the_line = figure._replace(why_not=f"a peer takes `{figure.key}` of `time`")
    assert report.measured(of_the_line).reason == "a peer takes 1.5 of `time`"
    store(figure.benchmark, {**line, figure.key: 0.4, f"{figure.key}_min": 0.3, f"{figure.key}_max": 0.5})
    assert report.measured(figure).is_met is True
    assert figure.what not in pages()["performance"]


def test_a_missed_goal_does_not_look_met_by_rounding(store):
    store("engine_step", {"stage": 2, "ratio_to_bound": 1.2512}, {"stage": 1, "ratio_to_bound": 1.2488})
    rows = goals("training")
    assert "| <= 1.25 | 1.2512 | | no" in rows and "| <= 1.25 | 1.25 | | yes" in rows


def test_the_summary_has_the_most_important_of_the_goals_that_are_met(store):
    store("engine_step", {"stage": 2, "ratio_to_bound": 1.1}, {"stage": 1, "ratio_to_bound": 1.2})
    text = section(pages()["performance"], "The training step")
    assert "2 goals are met, 0 missed, " in text and "(performance/training.md)" in text
    assert "stage 2: over a C pass over the same memory | <= 1.25 | 1.1 |" in text
    assert "stage 1: over a C pass" not in text
    names = {benchmark.name: benchmark.area for benchmark in run.BENCHMARKS}
    important = Counter(names[figure.benchmark] for figure in FIGURES if figure.is_important or figure.is_main)
    assert set(important) == {area.name for area in AREAS} and max(important.values()) <= 5


def test_rounds_that_disagree_neither_meet_nor_miss_a_goal(store):
    line = {"stage": 2, "ratio_to_bound": 1.1, "ratio_to_bound_min": 0.7, "ratio_to_bound_max": 1.41}
    store("engine_step", line)
    assert "| <= 1.25 | 1.1 (rounds are too far apart) | 0.7 to 1.41 | | 0123456 |" in goals("training")
    store("engine_step", {**line, "ratio_to_bound_max": 1.39})
    assert "| <= 1.25 | 1.1 | 0.7 to 1.39 | yes | 0123456 |" in goals("training")


def test_kernels_stand_side_by_side_for_each_instruction_set(store):
    base = {"kernel": "adam", "dtypes": "f32", "case": "flat", "gbps": 5.0, "bound_ratio": 0.5}
    store(
        "cores",
        {**base, "isa": "scalar", "ns_per_elem": 4.0},
        {**base, "isa": "avx2", "ns_per_elem": 2.0, "gbps": 10.0, "bound_ratio": 0.97},
        {**base, "isa": "scalar", "ns_per_elem": 1.0, "case": "cached", "gbps": 7.0, "bound_ratio": None},
    )
    text = pages()["cores"]
    assert "| adam | f32 | flat | 4 | 2 | 10 | 0.97 |" in text
    assert "| adam | f32 | cached | 1 | | 7 | |" in text


def test_a_result_is_marked_with_the_commits_to_its_code_since(store):
    store("engine_step", {"stage": 2, "ratio_to_bound": 1.1})
    row = "over a C pass over the same memory | <= 1.25 | 1.1 | | yes | 0123456 | 2026-02-03 |"
    marked = {}
    for n_commits, cell, sentence, of_area in (
        (0, "", "on a machine.\n", "|"),
        (1, " *1 commit*", "on a machine. *1 commit older than its code*\n", " *1 of 1* |"),
        (84, " *84 commits*", "on a machine. *84 commits older than its code*\n", " *1 of 1* |"),
        (None, " *unknown*", "on a machine. *unknown older than its code*\n", " *1 of 1* |"),
    ):
        found = marked[n_commits] = pages({"engine_step": n_commits})
        assert f"{row}{cell} |\n" in found["training"] and sentence in found["training"]
        assert f"(performance/training.md) | 1 | 0 | 59 |{of_area.removeprefix('|') or ' |'}\n" in found["performance"]
        plain = {name: report.without_marks(text) for name, text in found.items()}
        assert plain == marked[0] == pages()


def test_marks_are_counted_by_git_and_need_no_history(store, monkeypatch, tmp_path):
    one = run.BENCHMARKS[0]
    assert report.marks_of([one]) == {}
    store(one.name, {"x": 1}, commit=results.commit_of() or "0" * 40)
    assert report.marks_of([one]) == {one.name: 0 if results.commit_of() else None}
    store(one.name, {"x": 1})
    assert report.marks_of([one]) == {one.name: None}
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert report.marks_of([one]) == {one.name: None}
    monkeypatch.setenv("PATH", "")
    assert report.marks_of([one]) == {one.name: None}
    store(one.name, skipped="no device")
    assert report.marks_of([one]) == {}


def test_the_readme_has_the_eight_main_figures_measured_or_not(store):
    readme = f"before\n{report.README_BEGIN}\nold\n{report.README_END}\nafter\n"
    empty = report.with_figures(readme)
    assert empty.startswith("before\n") and empty.endswith("after\n") and "old" not in empty
    assert empty.count("| not measured |") == N_MAIN == 8
    store("engine_step", {"stage": 2, "ratio_to_bound": 1.1, "ratio_to_bound_min": 1.0, "ratio_to_bound_max": 1.2})
    filled = report.with_figures(empty)
    assert "over a C pass over the same memory | <= 1.25 | 1.1 (1 to 1.2) | 0123456, 2026-02-03 |" in filled
    assert filled.count("| not measured |") == 7
    assert f"|\n\nMeasured on a machine.\n{report.README_END}" in filled
    assert report.with_figures(filled) == filled
    store("engine_step", {"stage": 2, "ratio_to_bound": 1.1}, machine="AMD EPYC, 2 cores, 24 GiB")
    assert "AMD EPYC, AVX-512 (avx512_bf16), 2 cores, 24 GiB" in report.with_figures(filled)


def test_the_documents_are_what_the_results_in_the_tree_say():
    written = report.pages(run.BENCHMARKS, {})
    for path, text in written.items():
        assert report.without_marks((report.ROOT / path).read_text()) == text, f"{path}: make docs writes it"
    folder = report.ROOT / report.FOLDER
    assert {f"{report.FOLDER}/{page.name}" for page in folder.iterdir()} == set(written) - {report.SUMMARY}
    readme = (report.ROOT / "README.md").read_text()
    assert readme == report.with_figures(readme)


def test_every_figure_names_a_benchmark_and_a_goal_that_can_be_compared():
    names = {benchmark.name for benchmark in run.BENCHMARKS}
    for figure in FIGURES:
        relation, limit = figure.goal.split()
        assert relation in ("<=", ">=") and float(limit) >= 0
        assert figure.benchmark in names
    assert len({figure.what for figure in FIGURES}) == len(FIGURES)
