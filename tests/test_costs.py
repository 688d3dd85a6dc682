"""Tests of costs.py: the cells that run, the measurement, and that the table names tests of this tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.costs import CELL_SECONDS, FUNCTION_SECONDS, chosen, read, write
from tests.processor_time import Descendants, clock

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


def test_the_table_names_tests_of_this_tree() -> None:
    texts: dict[str, str] = {}
    for function in read():
        file, _, name = function.partition("::")
        name = name.split("::")[-1]
        texts[file] = texts.get(file) or (ROOT / file).read_text()
        assert file.endswith(".c") or re.search(rf"^ *def {name}\(", texts[file], re.MULTILINE), (
            f"{function} is no test: remove its line"
        )


def test_costs_are_measured_and_costly_tests_left_out(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nimport tests.costs\n"
        "tests.costs.FUNCTION_SECONDS = 0.3\ntests.costs.TABLE = Path('costs.tsv')\n"
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure"
    )
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
