"""Words: the glossary of docs/architecture.md has only existing names, each class name is unique, and prose keeps to
the glossary's terms."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "architecture.md"
TERMS = {
    *(
        "rank", "mesh", "axis", "group", "optimizer group", "unit", "bucket", "slice", "shard", "twin", "piece",
        "fragment", "slot",
    ),
    *(
        "gather unit", "master", "state", "window", "micro-batch", "pass", "boundary", "plan", "source of weights",
        "driver", "lease", "ledger", "verdict", "home", "cut", "agent", "chair", "round of a launch",
    ),
}  # fmt: skip

# Classes that must share their name with another class, each with the reason (for example, a name that DeepSpeed
# publishes twice).
SAME_NAME: dict[str, str] = {
    "DtypeEnum": "DeepSpeed has one in runtime.config and another in inference.config",
    "BackwardPass": "DeepSpeed has an instruction of this name in runtime.pipe.schedule",
}

# Synonym of a glossary word -> the glossary's word.
OTHER_WORDS = {
    r"\bmicro ?batch(es)?\b": "micro-batch",
    r"\bgather(ed|ing)? groups?\b": "gather unit",
    r"\bmesh dimensions?\b|\bdimensions? of (a|the) mesh\b": "axis",
    r"\bworld groups?\b": "mesh, or group of all ranks",
    r"\bbucket slices?\b": "slice",
    r"(?<![\w.`\"])partition(s|ed)?\b(?![\w`(\"])": "shard",
}
# Modules that explain DeepSpeed's names and formats in DeepSpeed's words. A module's docstring may quote these words.
ITS_WORDS = ("deepspeed_c/compat", "deepspeed_c/checkpoint/formats/deepspeed", "deepspeed_c/zero/weights/param.py")


def python_files() -> list[Path]:
    return [path for top in ("deepspeed_c", "ops") for path in sorted((ROOT / top).rglob("*.py"))]


def rows() -> list[tuple[str, str, str]]:
    """(word, meaning, kind or name in the code) of the glossary's rows."""
    section = GLOSSARY.read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table]


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in python_files()}


@functools.cache
def definitions() -> dict[str, list[str]]:
    """Where each class is defined, in functions too."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def attributes_of(name: str) -> set[str]:
    """The names a class defines: methods, fields, and attributes that its methods set on ``self``."""
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or node.name != name:
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef):
                    found.add(inner.name)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    found.add(inner.id)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    found.add(inner.attr)
    return found


def missing(thing: str, classes: set[str]) -> str:
    """Why ``thing``, from the last column, does not exist; "" if it exists."""
    if "/" in thing:
        return "" if (ROOT / thing).is_file() else f"there is no file {thing}"
    name, _, attribute = thing.partition(".")
    if name.isupper():
        return ""  # a constant: test_constants looks for it in the file named beside it
    if name not in classes:
        return f"there is no class {name}"
    return "" if not attribute or attribute in attributes_of(name) else f"{name} has no {attribute}"


def test_the_glossary_has_each_word_once_and_one_sentence_for_it() -> None:
    words = [word for word, _, _ in rows()]
    assert set(words) == TERMS and len(words) == len(TERMS), set(words) ^ TERMS
    for word, meaning, _ in rows():
        assert meaning.endswith(".") and not re.search(r"\. [A-Z]", meaning), f"{word}: not one sentence: {meaning}"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_what_a_word_names_exists(row: tuple[str, str, str]) -> None:
    word, _, what = row
    # Classes of the binding are declared in its stub.
    stub = re.findall(r"^class (\w+)", (ROOT / "deepspeed_c" / "_C.pyi").read_text(), re.MULTILINE)
    things = re.findall(r"`([^`]+)`", what)
    assert things, f"{word} names nothing"
    found = [why for thing in things if (why := missing(thing, {*definitions(), *stub}))]
    assert not found, f"{word}: {found}"
    constants = [thing for thing in things if thing.isupper()]
    files = [ROOT / thing for thing in things if "/" in thing]
    assert all(any(f"\n{name} = " in path.read_text() for path in files) for name in constants), constants


def test_what_is_not_there_is_found() -> None:
    classes = {"Unit"}
    assert missing("Unit", classes) == missing("Unit.master", classes) == missing("docs/config.md", classes) == ""
    assert missing("Unitt", classes) and missing("Unit.masterr", classes) and missing("docs/nothing.md", classes)


def test_one_class_of_a_name() -> None:
    twice = {name: places for name, places in definitions().items() if len(places) > 1}
    assert not {name: places for name, places in twice.items() if name not in SAME_NAME}
    assert set(SAME_NAME) <= set(twice), "an exception that is none any more"


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments and docstrings of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def wrong_words(source: str) -> list[str]:
    return [
        f"{line}: {match.group()!r}: {word}"
        for line, text in prose(source)
        for pattern, word in OTHER_WORDS.items()
        for match in re.finditer(pattern, text)
    ]


def test_prose_keeps_to_the_words() -> None:
    paths = [path for path in python_files() if not str(path.relative_to(ROOT)).startswith(ITS_WORDS)]
    assert len(paths) > 400
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in wrong_words(path.read_text())]
    assert not found, "\n".join(found)


def test_other_words_are_found() -> None:
    source = 'x = "a gather group"  # of the microbatch\n"""The partition of a mesh dimension, `partition`, str.partition()."""\n'
    assert [line.partition(": ")[2] for line in wrong_words(source)] == [
        "'mesh dimension': axis", "'partition': shard", "'microbatch': micro-batch",
    ]  # fmt: skip
