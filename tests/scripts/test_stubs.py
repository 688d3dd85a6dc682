"""scripts/stubs.py: deepspeed_c/_C.pyi matches the built module."""

from __future__ import annotations

import ast
from pathlib import Path

from deepspeed_c import _C
from scripts.stubs import stubs

FILE = Path(__file__).resolve().parents[2] / "deepspeed_c" / "_C.pyi"


def test_the_stubs_are_those_of_the_built_module():
    assert FILE.read_text() == stubs(), "run: python -m scripts.stubs deepspeed_c/_C.pyi (make docs does)"


def test_every_name_and_member_is_there_and_nothing_else():
    """Python's parser reads the stub file back."""
    tree = ast.parse(FILE.read_text())
    names: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {
                getattr(part, "name", "") or ast.unparse(part.target)
                for part in node.body
                if not isinstance(part, ast.Expr)
            }
        elif isinstance(node, (ast.FunctionDef, ast.AnnAssign)):
            names[getattr(node, "name", "") or ast.unparse(node.target)] = set()
    assert set(names) == {name for name in vars(_C) if not name.startswith("__")}
    for name, members in names.items():
        kind = getattr(_C, name)
        if isinstance(kind, type) and not issubclass(kind, Exception):
            assert members - {"__init__"} == {member for member in vars(kind) if not member.startswith("_")}, name
