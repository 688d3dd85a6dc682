"""benchmarks/run.py and results.py: results carry their origin, failures and skips keep earlier results, and results
older than their code are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report, results, run
from benchmarks.areas import AREAS
from benchmarks.results import Origin, Result
from tests.waits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
OLD = Result(Origin("c" * 40, False, "2026-01-01T00:00:00+00:00", "m", 1), [{"old": 1}])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path


def benchmark(program: str, **more) -> run.Benchmark:
    return run.Benchmark("x", "cores", "source.py", [run.PYTHON, "-c", program], ("code",), 1, **more)


def test_every_benchmark_asks_a_question_and_names_code_that_is_there():
    for one in run.BENCHMARKS:
        assert "?" in report.question(report.ROOT / one.source), one.name
        assert one.seconds > 0 and one.code, one.name
        for path in one.paths:
            assert (report.ROOT / path).exists(), (one.name, path)
    names = [one.name for one in run.BENCHMARKS]
    assert len(set(names)) == len(names)


def test_every_benchmark_is_in_one_area_and_every_area_has_benchmarks():
    names = [area.name for area in AREAS]
    assert len(set(names)) == len(names) == len({area.title for area in AREAS})
    assert {one.area for one in run.BENCHMARKS} == set(names)
    assert all(area.against.endswith(".") for area in AREAS)


def test_what_a_script_imports_from_its_neighbours_is_its_code_too():
    found = {one.name: set(one.paths) for one in run.BENCHMARKS}
    assert {"csrc/optim", "benchmarks/engines.py", "benchmarks/csrc/stream.c"} <= found["engine_step"]
    assert {"benchmarks/deepspeed_c/train_step.py", "benchmarks/measure.py"} <= found["stage3_step_small"]
    assert "benchmarks/fio.py" in found["aio"] and "benchmarks/fio.py" not in found["adam_step"]
    # The constant that it imports from run.py does not make the list of benchmarks its code.
    assert "benchmarks/hosts.py" in found["overlap"] and "benchmarks/run.py" not in found["overlap"]


def test_no_script_is_left_out_of_the_list():
    listed = {one.source for one in run.BENCHMARKS}
    shared = {
        "areas.py",
        "engines.py",
        "figures.py",
        "fio.py",
        "hosts.py",
        "llama_cpp.py",
        "measure.py",
        "report.py",
        "resident.py",
        "results.py",
        "run.py",
        "served.py",
        "stream.py",
        "vllm_cpu.py",
    }
    found = {path for path in (report.ROOT / "benchmarks").rglob("*") if path.suffix in (".py", ".c")}
    scripts = {str(path.relative_to(report.ROOT)) for path in found if path.name not in {*shared, "__init__.py"}}
    assert scripts - listed == {"benchmarks/csrc/stream.c"}


def test_a_failed_benchmark_leaves_the_earlier_result(folder, capfd):
    results.store("x", OLD)
    assert not run.run(benchmark("print('{\"new\": 1}'); raise SystemExit(3)"))
    assert results.load("x") == OLD
    assert "exit code 3" in capfd.readouterr().err
    assert run.run(benchmark("print('noise'); print('{\"new\": 1}')"))
    found = results.load("x")
    assert found.lines == [{"new": 1}]
    assert found.origin.commit == results.commit_of() and found.origin.machine and found.origin.date > OLD.origin.date


def test_what_cannot_be_measured_here_is_skipped_with_its_reason(folder, capfd):
    skipping = benchmark("import sys; print('no such device', file=sys.stderr); sys.exit(77)")
    assert run.run(skipping)
    assert results.load("x").origin.skipped == "no such device"
    results.store("x", OLD)
    assert run.run(skipping)
    assert results.load("x") == OLD
    assert "skipped: no such device" in capfd.readouterr().out


def test_a_smoke_run_is_short_and_keeps_nothing(folder):
    assert run.run(benchmark("import sys; print('{\"n\": %s}' % sys.argv[1])", smoke=("7",)), is_smoke=True)
    assert results.load("x") is None


@pytest.mark.parametrize("ignored", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
def test_one_that_hangs_ends_with_all_its_processes(folder, monkeypatch, capfd, ignored):
    monkeypatch.setattr(run, "TIMEOUT_SECONDS", 2)
    monkeypatch.setattr(run, "GRACE_SECONDS", 1)
    child = f"{ignored}import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert not run.run(benchmark(child))  # returns only if the grandchild, which holds the pipe, has ended
    assert "not done after 2 s" in capfd.readouterr().err


@pytest.fixture
def repository(folder, monkeypatch):
    """A repository of one commit for benchmarks to inspect."""

    def git(*args: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.invalid"]
        done = subprocess.run(
            ["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        return done.stdout.strip()

    def commit(path: str, text: str) -> str:
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", "m")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    monkeypatch.setattr(results, "ROOT", folder)
    return commit


def test_results_are_old_when_the_code_that_they_measure_has_changed(folder, repository):
    first = repository("code/a.py", "1")
    origin = OLD.origin._replace(commit=first)
    assert results.age(origin, ("code",)) == ""
    repository("other/b.py", "1")
    assert results.age(origin, ("code",)) == ""
    repository("code/a.py", "2")
    assert results.age(origin, ("code",)) == f"1 commits since {first[:7]}"
    assert results.commits_since(origin, ("code",)) == 1 and results.commits_since(origin, ("other",)) == 1
    assert results.commits_since(origin._replace(commit="0" * 40), ("code",)) is None
    (folder / "code" / "a.py").write_text("3")
    assert "changes that are not committed" in results.age(origin, ("code",))
    assert results.age(origin._replace(commit="0" * 40), ("code",)) == "0000000 is not in this history"
    assert "not committed" in results.age(origin._replace(is_dirty=True), ("other",))


def test_a_tree_is_dirty_by_anything_but_what_benchmarks_write(folder, repository):
    repository("README.md", "1")
    repository("code/a.py", "1")
    assert not results.is_dirty()
    (folder / "README.md").write_text("figures")
    (folder / "benchmarks" / "results").mkdir(parents=True)
    (folder / "benchmarks" / "results" / "x.jsonl").write_text("{}")
    assert not results.is_dirty()
    (folder / "code" / "new.py").write_text("1")
    assert results.is_dirty()


def test_what_is_old_or_missing_is_listed(folder, repository):
    one = benchmark("")._replace(source="code/a.py")
    assert run.old([one]) == ["x: never measured"]
    results.store("x", OLD._replace(origin=OLD.origin._replace(commit=repository("code/a.py", "1"))))
    assert run.old([one]) == []
    repository("code/a.py", "2")
    assert len(run.old([one])) == 1 and "1 commits since" in run.old([one])[0]
    results.store("x", Result(OLD.origin._replace(skipped="no device"), []))
    assert run.old([one]) == ["x: skipped: no device"]


def test_every_benchmark_can_be_imported():
    """CI runs no benchmark, so a renamed import would go unnoticed until the next measurement."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(ROOT.glob("benchmarks/**/*.py"))]
    assert len(names) > 20
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
