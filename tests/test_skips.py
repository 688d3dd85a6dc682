"""tests/skips.py and conftest.py's summary: every skip is listed at the end of a run with its reason and a way to run
it."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from tests import skips
from tests.waits import ran

ROOT = Path(__file__).resolve().parents[1]

SESSION = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_device(i):
    pytest.skip("no CUDA device")

@pytest.mark.skipif(True, reason="fewer than two CUDA devices")
def test_two(): ...

@pytest.mark.skipif(True, reason={reason!r})
def test_other(): ...

def test_runs(): ...
"""


def run(tmp_path: Path, reason: str, *options: str, ci: str = "") -> tuple[int, list[str]]:
    (tmp_path / "test_session.py").write_text(SESSION.format(reason=reason))
    done = ran(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-c",
            str(ROOT / "pyproject.toml"),
            "--rootdir",
            str(tmp_path),
        ]
        + ["-p", "tests.conftest", *options, str(tmp_path / "test_session.py")],
        cwd=ROOT,
        env=os.environ | {"CI": ci},
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("options", [["-n", "0"], ["-n", "2"]], ids=["one process", "two processes"])
def test_a_run_ends_with_the_skips_by_what_they_need(tmp_path, options):
    code, lines = run(tmp_path, "fio is not installed", *options)
    assert code == 0, lines
    begin = next(i for i, line in enumerate(lines) if "skipped tests, and how to run them" in line)
    said = lines[begin + 1 :]
    assert said[0].startswith("    4 need a CUDA device: make test, on a machine"), said
    assert said[1:3] == ["          3 no CUDA device", "          1 fewer than two CUDA devices"], said
    assert said[3:5] == ["    1 need fio: apt-get install fio, then make test", "          1 fio is not installed"], (
        said
    )
    assert re.search("1 passed, 5 skipped in ", lines[-1]), "pytest's closing line is the last"


def test_a_skip_that_nobody_can_undo_fails_the_run(tmp_path):
    code, lines = run(tmp_path, "I do not feel like it", "-n", "0")
    assert code == pytest.ExitCode.TESTS_FAILED, lines
    assert "    1 with no way to run them in tests/skips.py: I do not feel like it" in lines, lines
    assert "5 skipped" in lines[-1]


def test_continuous_integration_may_not_skip_the_tests_of_several_hosts(tmp_path):
    reason = "no network namespace can be made here: unshare: Operation not permitted"
    code, lines = run(tmp_path, reason, "-n", "0")
    assert code == 0, lines
    code, lines = run(tmp_path, reason, "-n", "0", ci="true")
    assert code == pytest.ExitCode.TESTS_FAILED, lines
    assert f"    1 that continuous integration must run, so this run failed: {reason}" in lines, lines
    assert "5 skipped" in lines[-1]


def reasons_in_the_tree() -> set[tuple[str, str]]:
    """(file, reason) of the skips whose reason is a string in the source."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name in ("test_skips.py", "skips.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("skip", "skipif"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                given += node.args[:1] if node.func.attr == "skip" else []
                found |= {(path.name, text) for value in given if (text := text_of(value))}
    return found


def text_of(value: ast.expr) -> str:
    """A string of the source, with the fields of an f-string as they stand there; "" for another expression."""
    if isinstance(value, ast.JoinedStr):
        return ast.unparse(value)[2:-1]
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def test_every_skip_of_this_tree_has_its_way():
    reasons = reasons_in_the_tree()
    assert len(reasons) > 20, reasons
    assert [found for found in sorted(reasons) if skips.way_of(found[1].replace("{tool}", "cc")) is None] == []


def test_what_a_way_needs_is_said_once():
    assert len({way.needs for way in skips.WAYS}) == len(skips.WAYS) == len({way.how for way in skips.WAYS})
