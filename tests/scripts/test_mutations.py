"""scripts/mutations.py: draws equal mutations for equal seeds, changes nothing but code, and counts mutations by selection."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutations import (
    KINDS,
    Mutation,
    Searcher,
    candidates,
    counts,
    draw,
    main,
    measure,
    nearest_tests,
    read_texts,
)

ROOT = Path(__file__).resolve().parents[2]

PYTHON = '''"""a - b < 3"""
import torch

def f(a: int = 1, *b: "x < 1") -> "c + d":
    """a < b"""
    é = "ö"; total = a - len(b)
    if total < 3 and not isinstance(a, str):
        raise ValueError(f"{a + 1} < {total - 1}", a - 1)
    total += g(a, total)
    send(total)
    receive(total)
    return torch.zeros(total, dtype=torch.int64) + [1][0]
'''

C = """#define MORE(a) \\
    a + 1
/* a + b */
static int64_t f(const float *x, int64_t n) {
    int64_t total = n - 1; // n < 2
    if (n < 4)
        return fail(n - 1, "a < b, c");
    char c = '+';
    total += count(x, n);
    first(total);
    second(total);
    return total;
}
"""


def edits_of(file: str, text: str) -> list[tuple[int, str, str]]:
    return sorted((each.line, each.kind, each.edit.text) for each in candidates(file, text))


def test_python_code_changes_but_no_texts_annotations_or_errors() -> None:
    found = edits_of("deepspeed_c/a.py", PYTHON)
    print(found)
    assert found == [
        (4, "bound", "2"),
        (6, "sign", "+"),
        (7, "bound", "4"),
        (7, "bound", "<="),
        (9, "order", "total, a"),
        (9, "sign", "-"),
        (10, "order", "receive(total)\n    send(total)"),
        (12, "bound", "1"),
        (12, "bound", "2"),
        (12, "dtype", "torch.int32"),
        (12, "sign", "-"),
    ]


def test_c_code_changes_but_no_comments_strings_macros_or_errors() -> None:
    found = edits_of("csrc/a.c", C)
    print(found)
    assert found == [
        (5, "bound", "2"),
        (5, "dtype", "int32_t"),
        (5, "sign", "+"),
        (6, "bound", "5"),
        (6, "bound", "<="),
        (9, "order", "    first(total);\n    total += count(x, n);"),
        (9, "order", "n, x"),
        (9, "sign", "-"),
        (10, "order", "    second(total);\n    first(total);"),
    ]


def test_drawing_depends_on_the_seed_only_and_takes_the_kinds_in_turn() -> None:
    texts = read_texts(ROOT)
    for is_c in (False, True):
        one, two, other = (list(itertools.islice(draw(texts, seed, is_c=is_c), 24)) for seed in (5, 5, 6))
        assert one == two
        assert len(set(one) & set(other)) < 3
        assert [each.kind for each in one] == list(KINDS) * 6
        assert all(each.is_c == is_c for each in one)


def test_a_mutation_of_a_file_of_the_package_is_another_program() -> None:
    texts = read_texts(ROOT)
    for each in itertools.islice(draw(texts, 3, is_c=False), 80):
        before, after = texts[each.file], each.applied(texts[each.file])
        assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after)), each
    for each in itertools.islice(draw(texts, 3, is_c=True), 80):
        before, after = texts[each.file], each.applied(texts[each.file])
        differ = [one for one, other in zip(before.splitlines(), after.splitlines(), strict=True) if one != other]
        print(each.name, differ)
        assert 1 <= len(differ) <= 2
        assert not any(re.match(r"\s*(?://|#|\*)", line) for line in differ)


def test_the_test_at_the_path_comes_first() -> None:
    texts = read_texts(ROOT)
    assert nearest_tests("deepspeed_c/config/coerce.py", texts)[0] == ("tests/deepspeed_c/config/test_coerce.py")
    folders = [Path(each).parent.as_posix() for each in nearest_tests("csrc/optim/adam.c", texts)]
    n_own = sum(path.parent.name == "optim" for path in (ROOT / "tests" / "csrc").glob("*/test_*.c"))
    assert folders[:n_own] == ["tests/csrc/optim"] * n_own
    assert len(folders) == len(set(nearest_tests("csrc/optim/adam.c", texts)))


MODULE = """def add(a, b):
    return a + b


def less(a, b):
    return a < b


def unused(a):
    return a - 1


def crash(a):
    return a > 3
"""

TESTS = """import os

import pytest

from deepspeed_c.a import add, crash, less


def test_fails_always():
    assert os.environ.get("NEVER")


def test_add():
    assert add(2, 3) == 5


@pytest.mark.parametrize("a", range(3))
def test_costly(a):
    assert not less(a, a)


def test_crash():
    if crash(3):
        os.abort()
"""

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone with one module. The tree has a test that fails always, and another one in the old selection alone."""
    for file, text in {
        "deepspeed_c/__init__.py": "",
        "deepspeed_c/a.py": MODULE,
        "tests/__init__.py": "",
        "tests/conftest.py": CONFTEST,
        "tests/deepspeed_c/test_a.py": TESTS,
        "tests/costs.tsv": "10\ttests/deepspeed_c/test_a.py::test_costly\n",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\nmarkers = ["full", "always"]\n',
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "tests" / "costs.py", tmp_path / "tests")
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*name, "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=300)
    return tmp_path


def of_line(line: int, text: str) -> Mutation:
    return next(each for each in candidates("deepspeed_c/a.py", MODULE) if (each.line, each.edit.text) == (line, text))


def test_each_mutation_counts_for_the_selection_that_finds_it(tree: Path) -> None:
    searcher = Searcher(tree, Path(sys.executable))
    found = [
        measure(searcher, of_line(line, text), read_texts(tree), 5.0, 15.0, 200.0)
        for line, text in ((2, "-"), (6, "<="), (10, "+"), (14, ">="))
    ]
    print(found)
    file = "tests/deepspeed_c/test_a.py::"
    assert [each["found"] for each in found] == ["new", "old only", "none", "new"]
    tests = [each["test"].split("[")[0].removeprefix(file) for each in found]
    assert tests == ["test_add", "test_costly", "", "test_crash"]  # the last one killed the process
    assert searcher.broken == {f"{file}test_fails_always"}
    assert (tree / "deepspeed_c" / "a.py").read_text() == MODULE
    assert counts(found) == "4 mutations: the new selection finds 2, the old one 3, none 1"


def test_a_run_goes_on_where_it_ended_and_prints_the_counts(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tree / "out.jsonl"
    arguments = ["--tree", str(tree), "--out", str(out), "--python", sys.executable, "--mutations", "5"]
    assert main(arguments) == 0
    first = [json.loads(line) for line in out.read_text().splitlines()]
    said = capsys.readouterr().out.splitlines()
    assert len(first) == 3  # the share of Python, as the tree has no C file
    assert said[-1].startswith("3 mutations: the new selection finds ")
    assert main([*arguments, "--mutations", "6"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[:3] == first
    assert len(lines) == len({line["mutation"] for line in lines}) == 4


def test_a_tree_that_is_changed_or_this_checkout_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, text in ((ROOT, "this checkout"), (tree, "checkout -- deepspeed_c")):
        (tree / "deepspeed_c" / "a.py").write_text("")
        with pytest.raises(SystemExit):
            main(["--tree", str(path), "--out", str(tree / "out")])
        assert text in capsys.readouterr().err
