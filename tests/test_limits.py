"""Time limits of tests only end runs that hang, so they must be long.

Several test sessions may share two cores, and there the start of a process that imports torch has taken half a minute.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LEAST_SECONDS = 200
CALLS = ("run_ranks", "run", "call", "check_output", "check_call", "communicate", "join")


def short_limits(text: str) -> list[str]:
    """``LINE: call(timeout=SECONDS)`` of each call that gives processes or threads fewer seconds."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in CALLS:
            continue
        limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if name == "join":
            limits += node.args
        for limit in limits:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value < LEAST_SECONDS:
                found.append(f"{node.lineno}: {name}(timeout={limit.value:g})")
    return found


def test_no_test_gives_a_process_less_time_than_a_busy_machine_takes() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        found += [f"{path.relative_to(TESTS)}:{line}" for line in short_limits(path.read_text(encoding="utf-8"))]
    assert found == [], "\n".join(found)


def test_short_limits_are_found() -> None:
    text = "run_ranks(2, f, timeout=60)\nsubprocess.run(x, timeout=300)\np.communicate(timeout=20)\nt.join(5)\n', '.join(5 * x)"
    assert short_limits(text) == ["1: run_ranks(timeout=60)", "3: communicate(timeout=20)", "4: join(timeout=5)"]
