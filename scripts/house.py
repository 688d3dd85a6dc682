"""How heavy are the parts of the package that new capabilities would add to? The script prints a table of counts, with the
largest number that each may have. ``tests/test_house.py`` holds the table.

``python -m scripts.house``
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "deepspeed_c"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Questions about the place of a unit's weights or states. The unit answers them; other code should not have to ask.
PLACEMENT = {"is_apart", "is_joint", "is_on_host", "_is_on_host", "is_stored", "joint", "has_slices", "needs_open"}
# The unit, and the homes, places and sources that are the answers.
ANSWERS = (
    *("zero/layout/unit.py", "zero/states/home.py", "zero/weights/sources/", "offload/file.py", "offload/place.py"),
)
WHOLE_CONFIG = re.compile(r"\bConfig\b")


class Row(NamedTuple):
    """One count, and its limit."""

    what: str
    count: int
    most: int
    found: tuple[str, ...] = ()
    """The places that are counted, for messages."""


class Size(NamedTuple):
    """The size of a class: its lines, its functions, and the attributes that its functions set on ``self``."""

    lines: int
    methods: int
    attributes: int


def sources() -> Iterator[tuple[str, ast.Module]]:
    """(path within the package, syntax tree) of each module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def size_of(path: str, name: str) -> Size:
    tree = ast.parse((PACKAGE / path).read_text())
    node = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
    attributes = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return Size((node.end_lineno or 0) - node.lineno + 1, len(methods), len(attributes))


def late_imports() -> list[str]:
    """Imports of modules of the package within functions."""
    found = []
    for path, tree in sources():
        late = {
            node
            for function in ast.walk(tree)
            if isinstance(function, FUNCTIONS)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for node in late:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if any(name.partition(".")[0] == PACKAGE.name for name in names):
                found.append(f"{path}:{node.lineno} {', '.join(names)}")
    return sorted(found)


def takers_of_config() -> list[str]:
    """Functions outside of ``config/`` with a parameter annotated ``Config``. A named tuple or dataclass with such a field
    counts once: its fields are the parameters of its constructor."""
    found = []
    for path, tree in sources():
        if path.startswith("config/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                args = node.args
                given: list[Any] = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            elif isinstance(node, ast.ClassDef) and _has_fields(node):
                given = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            else:
                continue
            if any(each and each.annotation and WHOLE_CONFIG.search(ast.unparse(each.annotation)) for each in given):
                found.append(f"{path}:{node.lineno} {node.name}")
    return found


def _has_fields(node: ast.ClassDef) -> bool:
    told = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    return any("dataclass" in each or "NamedTuple" in each for each in told)


def placement_tests() -> list[str]:
    """Questions about the place of weights or states outside of the files that answer them."""
    return [
        f"{path}:{node.lineno} {node.attr}"
        for path, tree in sources()
        if not path.startswith(ANSWERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PLACEMENT and isinstance(node.ctx, ast.Load)
    ]


@contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Counts the calls that read a configuration from its source, and those that check its keys, from whatever module.
    ``read_source`` hands on a configuration that has been read already."""
    from deepspeed_c.config import read_config
    from deepspeed_c.config.source import GivenConfig, read_source

    counts = {"read": 0, "checked": 0}

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is read_source.__code__:
            counts["read"] += not isinstance(frame.f_locals["source"], GivenConfig)
        elif event == "call" and frame.f_code is read_config.__code__:
            counts["checked"] += 1

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield counts
    finally:
        sys.setprofile(before)


def _rows_of_class(path: str, name: str, most: Size) -> list[Row]:
    size = size_of(path, name)
    return [Row(f"{name}: {field}", got, limit) for field, got, limit in zip(Size._fields, size, most)]


def rows() -> list[Row]:
    """All counts that need no run of the package."""
    counted = [
        ("imports of own modules within functions", late_imports(), 20),
        ("functions that take the whole Config", takers_of_config(), 10),
        ("questions about places outside of the unit", placement_tests(), 15),
    ]
    return [
        *_rows_of_class("zero/weights/fetch.py", "Fetcher", Size(350, 35, 15)),
        *_rows_of_class("zero/gradients/reducer.py", "GradientReducer", Size(400, 35, 25)),
        *(Row(what, len(found), most, tuple(found)) for what, found, most in counted),
    ]


def initialize_reads() -> Row:
    """The count of ``tests/deepspeed_c/config/test_resolve.py``, for one rank."""
    import torch

    import deepspeed_c

    keys = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    with counted_reads() as counts:
        deepspeed_c.initialize(model=torch.nn.Linear(3, 5), config=keys)
    torch.distributed.destroy_process_group()
    return Row("times that initialize reads its configuration", counts["read"], 1)


def main() -> None:
    print(f"{'count':>6}{'most':>6}")
    for row in [*rows(), initialize_reads()]:
        print(f"{row.count:6}{row.most:6}  {row.what}")
    if "--places" in sys.argv:
        for row in rows():
            print(f"\n{row.what}", *row.found, sep="\n  ")


if __name__ == "__main__":
    main()
