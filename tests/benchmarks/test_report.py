"""benchmarks/report.py: lines become rows, nothing is invented for what was not measured, the README keeps its text."""

from __future__ import annotations

import json

import pytest

from benchmarks import report, run


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)

    def store(name, *lines):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return store


def test_a_plain_result_is_a_row_and_its_machine_is_in_the_text(results):
    line = {"benchmark": "engine_step", "stage": 1, "ratio_to_bound": 1.2345, "machine": "a machine"}
    results("engine_step", line, {**line, "stage": 2, "extra": "x"})
    text = report.performance(run.BENCHMARKS)
    assert "| stage | ratio_to_bound | extra |" in text
    assert "| 1 | 1.23 |  |" in text and "| 2 | 1.23 | x |" in text
    assert text.count("a machine") == 1
    assert "## engine_step" in text and "## cores" not in text


def test_kernels_stand_side_by_side_for_each_instruction_set(results):
    base = {"kernel": "adam", "dtypes": "f32", "case": "flat", "gbps": 5.0, "bound_ratio": 0.5}
    results(
        "cores",
        {**base, "isa": "scalar", "ns_per_elem": 4.0},
        {**base, "isa": "avx2", "ns_per_elem": 2.0, "gbps": 10.0, "bound_ratio": 0.97},
        {**base, "isa": "scalar", "ns_per_elem": 1.0, "case": "cached", "gbps": 7.0, "bound_ratio": None},
    )
    text = report.performance(run.BENCHMARKS)
    assert "| adam | f32 | flat | 4 | 2 | 10 | 0.97 |" in text
    assert "| adam | f32 | cached | 1 |  | 7 |  |" in text


def test_the_readme_gets_the_measured_figures_only(results):
    readme = f"before\n{report.README_BEGIN}\nold\n{report.README_END}\nafter\n"
    empty = report.with_figures(readme)
    assert empty == f"before\n{report.README_BEGIN}\n{report.README_END}\nafter\n"
    results("engine_step", {"stage": 2, "ratio_to_bound": 1.1, "ratio_min": 1.0, "ratio_max": 1.2})
    filled = report.with_figures(empty)
    assert filled.startswith("before\n") and filled.endswith("after\n")
    assert "stage 2: over the memory bound | <= 1.25 | 1.1 (1 to 1.2) |" in filled
    assert "stage 1" not in filled and "old" not in filled
    assert report.with_figures(filled) == filled


def test_every_benchmark_names_a_source_that_asks_a_question():
    for benchmark in run.BENCHMARKS:
        assert "?" in report.question(report.ROOT / benchmark.source), benchmark.name
    names = [benchmark.name for benchmark in run.BENCHMARKS]
    assert len(set(names)) == len(names)
    assert {name for _, _, name, _, _ in report.FIGURES} <= set(names)


def test_a_failed_benchmark_leaves_the_earlier_result(results, capfd):
    results("x", {"old": 1})
    command = [run.PYTHON, "-c", "print('{\"new\": 1}'); raise SystemExit(3)"]
    assert not run.run(run.Benchmark("x", "", command))
    assert report.load("x") == [{"old": 1}]
    assert "exit code 3" in capfd.readouterr().err
    assert run.run(run.Benchmark("x", "", command[:-1] + ["print('noise'); print('{\"new\": 1}')"]))
    assert report.load("x") == [{"new": 1}]
