"""Tests of cells.py: a part of a product has each pair of values, by a search over all pairs; `full` works."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cells import cells, covering, every

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("sizes", [(1,), (5,), (2, 3), (4, 2, 2), (3, 3, 3, 3), (2, 1, 5), (0, 2)])
def test_each_pair_of_values_occurs(sizes: tuple[int, ...]) -> None:
    chosen = covering([range(size) for size in sizes])
    missing = [
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for a, b in itertools.product(range(sizes[i]), range(sizes[j]))
        if 0 not in sizes and not any(cell[i] == a and cell[j] == b for cell in chosen)
    ]
    n_cells = len(list(itertools.product(*map(range, sizes))))
    print(sizes, len(chosen), "of", n_cells)
    assert not missing and len(set(chosen)) == len(chosen) <= n_cells
    assert len(sizes) > 1 or len(chosen) == n_cells


def test_each_value_occurs() -> None:
    chosen = covering([range(3), range(2), range(5)], at_once=1)
    print(chosen)
    assert len(chosen) == 5 and [len({cell[axis] for cell in chosen}) for axis in range(3)] == [3, 2, 5]


def test_each_third_value_runs_always() -> None:
    marked = every(3, [(1, "a"), (2, "b"), (3, "c"), (4, "d")])
    assert [(cell.values, bool(cell.marks)) for cell in marked] == [
        ((1, "a"), False), ((2, "b"), True), ((3, "c"), True), ((4, "d"), False)
    ]  # fmt: skip


def test_81_cells_of_four_axes_have_a_small_covering_part() -> None:
    marked = cells(*[range(3)] * 4)
    assert len(marked) == 81 and 9 <= sum(not cell.marks for cell in marked) <= 15


def test_cells_marked_full_run_with_full_only(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure"
    )
    pytester.makeini("[pytest]\nmarkers = full")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('i', [0, pytest.param(1, marks=pytest.mark.full)])\ndef test(i): pass"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, deselected=1)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--full").assert_outcomes(passed=2)
