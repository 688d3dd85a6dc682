"""The import lines of projects work under the name deepspeed.

A call of a name that is not implemented raises an error that names an alternative, as listed in imports.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c.compat.alias.unbuilt import unbuilt
from deepspeed_c.compat.alias.upstream import upstream
from deepspeed_c.errors import FeatureError
from tests.corpus.imports import IMPORTS

ROOT = Path(__file__).resolve().parents[2]

# Executes the lines one by one in one process. Modules that earlier lines load must not make missing names importable.
EXECUTE = """
import json, sys
errors = []
for line in json.load(sys.stdin):
    try:
        exec(line, {})
        errors.append("")
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
print("ERRORS " + json.dumps(errors))
"""


def errors_of(*python: str) -> list[str]:
    """The error that each line raises; "" if it raises none."""
    given = json.dumps([row.line for row in IMPORTS])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*python, "-c", EXECUTE]
    done = subprocess.run(
        command, input=given, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("ERRORS ")[2])


def test_there_are_enough_and_no_line_twice():
    lines = [row.line for row in IMPORTS]
    assert len(lines) >= 80 and len(set(lines)) == len(lines)
    assert all(row.projects for row in IMPORTS) and sum(bool(row.words) for row in IMPORTS) >= 8


def test_each_line_works_or_says_what_to_do():
    wrong = []
    for row, error in zip(IMPORTS, errors_of(sys.executable, "-m", "deepspeed_c", "run", sys.executable), strict=True):
        if error:
            wrong.append(f"{row.line} ({row.projects}): {error}")
    assert not wrong, "\n".join(wrong)


def test_a_call_of_what_is_not_built_says_what_to_do():
    for row in IMPORTS:
        if row.words:
            module, names = row.line.removeprefix("from ").split(" import ")
            # The definition of the name, whatever module the line imports it from
            defined = upstream().find(module, names.split(",")[0])
            with pytest.raises(FeatureError) as raised:
                unbuilt(defined.module, defined.name)()
            assert row.words in raised.value.fix, (row.line, raised.value.fix)


def test_each_line_is_one_that_deepspeed_knows():
    python = os.environ.get("DSC_PEER_PYTHON")
    if not python:
        pytest.skip("DSC_PEER_PYTHON does not name a Python that has DeepSpeed")
    wrong = [f"{row.line}: {error}" for row, error in zip(IMPORTS, errors_of(python), strict=True) if error]
    assert not wrong, "\n".join(wrong)
