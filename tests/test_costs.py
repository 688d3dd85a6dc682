"""Tests of costs.py: the cells that run, the measurement, and that the table names tests of this tree."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.costs import CELL_SECONDS, FUNCTION_SECONDS, TOUCHED_SECONDS, chosen, near_changes, read, write
from tests.meter import Meter
from tests.processor_time import Descendants, clock, parts
from tests.ranks import stop_ranks, zygote_pids

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("n_cells", [1, 2, 7, 100])
@pytest.mark.parametrize("cost", [0.0, 0.01, 0.9, 3.0, CELL_SECONDS])
def test_cells_that_run_fit_the_limit_and_are_spread(n_cells: int, cost: float) -> None:
    cells = chosen("tests/test_a.py::test", n_cells, cost)
    print(n_cells, cost, cells)
    assert len(set(cells)) == len(cells) >= 1 and set(cells) <= set(range(n_cells))
    assert len(cells) == n_cells or len(cells) == max(1, int(FUNCTION_SECONDS / cost))
    gaps = [(b - a) % n_cells for a, b in zip(cells, cells[1:] + cells[:1], strict=True)] if len(cells) > 1 else [0]
    assert max(gaps) - min(gaps) <= 1, gaps


def test_a_cell_that_costs_too_much_runs_only_if_marked() -> None:
    assert chosen("t", 3, CELL_SECONDS * 1.01) == []
    assert [len(chosen("t", 3, CELL_SECONDS * 1.01, least)) for least in (1, 2, 9)] == [1, 2, 3]


def test_functions_with_equal_axes_run_different_cells() -> None:
    assert len({chosen(f"tests/test_a.py::test_{i}", 12, FUNCTION_SECONDS)[0] for i in range(40)}) > 6


def test_written_tables_are_read_and_other_lines_stay(tmp_path: Path) -> None:
    table = tmp_path / "costs.tsv"
    write(table, {"a::one": [FUNCTION_SECONDS, 4.0], "a::two": [0.1], "a::three": [7.0, 9.0]})
    write(table, {"a::one": [0.2, 0.2], "a::four": [8.25]})
    print(table.read_text())
    assert read(table) == {"a::three": 8.0, "a::four": 8.25} and read(tmp_path / "none") == {}


def test_functions_near_changes_run_as_far_as_the_limit_pays() -> None:
    dear = CELL_SECONDS + 1
    table = {f"tests/test_{file}.py::f{i}": dear for file in "abc" for i in range(20)}
    table |= {"tests/test_a.py::cheap": CELL_SECONDS, "tests/test_b.py::too_dear": TOUCHED_SECONDS + 1}
    near = near_changes(table, ["tests/test_c.py", "tests/test_none.py", "tests/test_b.py", "tests/test_a.py"])
    print(sorted(near))
    assert len(near) == int(TOUCHED_SECONDS / dear) == 40
    assert {name.split("::")[0] for name in near} == {"tests/test_c.py", "tests/test_b.py"}
    assert "tests/test_b.py::too_dear" not in near and near_changes(table, []) == set()


def test_the_table_names_tests_of_this_tree() -> None:
    texts: dict[str, str] = {}
    for function in read():
        file, _, name = function.partition("::")
        name = name.split("::")[-1]
        texts[file] = texts.get(file) or (ROOT / file).read_text()
        assert file.endswith(".c") or re.search(rf"^ *def {name}\(", texts[file], re.MULTILINE), (
            f"{function} is no test: remove its line"
        )


def with_our_plugins(pytester: pytest.Pytester, settings: str = "") -> None:
    """Lets the suite of ``pytester`` choose and measure tests as this one, by a table ``costs.tsv`` of its own."""
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nimport tests.costs, tests.meter\n"
        f"tests.costs.TABLE = Path('costs.tsv')\n{settings}\n"
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure"
    )


def test_costs_are_measured_and_costly_tests_left_out(pytester: pytest.Pytester) -> None:
    with_our_plugins(pytester, "tests.costs.FUNCTION_SECONDS = 0.3")
    pytester.makepyfile(
        "import subprocess, sys, pytest\nWORK = 'import time\\nwhile time.process_time() < 0.4: pass'\n"
        "@pytest.mark.parametrize('i', range(3))\ndef test_child(i): subprocess.run([sys.executable, '-c', WORK])\n"
        "def test_cheap(): pass\n"
    )
    arguments = ("-p", "no:cacheprovider")
    for processes in ("0", "2"):
        result = pytester.runpytest_subprocess(*arguments, "-n", processes, "--full", "--costs", "costs.tsv")
        result.assert_outcomes(passed=4)
        measured = read(pytester.path / "costs.tsv")
        print(processes, measured)
        assert list(measured) == ["test_costs_are_measured_and_costly_tests_left_out.py::test_child"]
        assert 0.4 <= next(iter(measured.values())) < 4
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=2, deselected=2)


def test_one_cell_of_a_function_too_dear_runs_if_a_change_reaches_it(pytester: pytest.Pytester) -> None:
    """Without workers and with two: the controller finds the changes for both."""
    with_our_plugins(pytester)
    body = "import pytest\n@pytest.mark.parametrize('i', range(3))\ndef test_dear(i): pass\ndef test_cheap(): pass\n"
    tests = pytester.mkdir("tests") / "some"
    tests.mkdir()
    for name in ("here", "far"):
        (tests / f"test_{name}.py").write_text(body)
    lines = [f"{CELL_SECONDS + 1}\ttests/some/test_{name}.py::test_dear" for name in ("here", "far")]
    (pytester.path / "costs.tsv").write_text("\n".join(lines))

    def git(*words: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        subprocess.run(command, cwd=pytester.path, check=True, timeout=300, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one commit without a parent says nothing")
    for processes in ("0", "2"):
        arguments = ("-p", "no:cacheprovider", "-n", processes)
        pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=2)
        (tests / "test_here.py").write_text(body + "\n")
        result = pytester.runpytest_subprocess(*arguments, "-v")
        result.assert_outcomes(passed=3)
        assert sum("PASSED" in line and "test_here.py::test_dear[" in line for line in result.outlines) == 1
        pytester.runpytest_subprocess(*arguments, "--full").assert_outcomes(passed=8)
        (tests / "test_here.py").write_text(body)


def test_a_function_without_a_line_is_named_and_fails_no_run(pytester, monkeypatch) -> None:
    monkeypatch.setenv("CI", "true")
    with_our_plugins(pytester, "tests.costs.FUNCTION_SECONDS, tests.meter.SHOWN_SECONDS = 0.1, 0.1")
    pytester.makepyfile(
        "import time\ndef test_dear():\n    end = time.process_time() + 1.0\n    while time.process_time() < end: pass\n"
        "def test_cheap(): pass\n"
    )
    dear = "test_a_function_without_a_line_is_named_and_fails_no_run.py::test_dear"
    for processes in ("0", "1"):
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", processes)
        result.assert_outcomes(passed=2)
        assert result.ret == 0
        result.stdout.re_match_lines([r".*add these lines to costs.tsv.*", rf"\d.*\t{dear}$"])
        result.stdout.fnmatch_lines(
            ["by kind:", "*in the test process", "by folder:", "*dearest functions:", f"*{dear}"]
        )
    (pytester.path / "costs.tsv").write_text(f"1.0\t{dear}\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*add these lines*")


@pytest.mark.parametrize("make", [clock, Descendants])
def test_clocks_count_children_that_run_and_that_have_ended(make) -> None:
    used = make()
    try:
        work = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
        with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            running = used.seconds()
            child.communicate(b"\n", timeout=300)
        ended = used.seconds()
    finally:
        used.close()
    print(running, ended)
    assert 0.35 <= running <= ended + 0.02 and ended < 4


def idle_rank(rank: int, world: int) -> None:
    """Does nothing."""


def busy_rank(rank: int, world: int) -> None:
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass


def test_a_fork_server_that_ends_does_not_count_twice(run_ranks) -> None:
    meter = Meter(is_exact=False)
    run_ranks(2, busy_rank)
    before = sum(meter._passed())
    stop_ranks()
    after = meter._passed()
    print(before, after)
    assert before > 0.75 and sum(after) < 0.5 + 0.02 * before  # /proc counts in ticks


def test_seconds_are_told_apart_by_process(run_ranks) -> None:
    """Of this process, of ranks, and of other programs: each works for 0.4 s or twice that."""
    run_ranks(2, idle_rank)  # the ranks are there before the measurement
    before = parts(zygote_pids())
    busy_rank(0, 1)
    own = parts(zygote_pids())
    run_ranks(2, busy_rank)
    ranks = parts(zygote_pids())
    work = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", work], check=True, timeout=300)
    programs = parts(zygote_pids())
    for i, (old, new, least) in enumerate([(before, own, 0.4), (own, ranks, 0.8), (ranks, programs, 0.4)]):
        passed = [b - a for a, b in zip(old, new, strict=True)]
        print(passed)
        assert passed[i] > least - 0.05 and sum(passed) - passed[i] < 0.25
