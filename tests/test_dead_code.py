"""Find dead code: functions of the cores, names of the binding, and functions and classes of the package that only
tests use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Names kept although only tests use them, each with its reason.
KEPT = {
    "dsc_aio_plug_backend": "the cores' tests, and those of what uses the I/O engine, make transfers fail through it; the binding does not have it",
    "dsc_aio_wait_all": "a program in C drains its engine with it; in Python a handle counts its requests itself",
    "profile_of_layers": "programs that call configure(profile=True) ask for it; an engine logs the table by itself",
    "READY": "hooks start what is due by themselves; tests ask for it one by one",
    "muon_momentum": "ops/reference.py says what an operator computes, for tests to compare with",
    "muon_apply": "ops/reference.py says what an operator computes, for tests to compare with",
    "q8_quantize": "ops/reference.py says what an operator computes, for tests to compare with",
    "_create_expert_and_data_parallel": "programs for DeepSpeed make groups of experts with it, without an engine",
    "gumbel_rsample": "programs for DeepSpeed draw noise for gates of their own with it",
    "_SeqAllToAll": "programs for DeepSpeed exchange tensors of their own with it",
    "dsc_pipe_parse": "tests and fuzz targets write tables with it, as dsc_pipe_format does for people",
    "register_rollout": "programs with an engine of their own for rollouts call it",
    "build_service": "deployments name it as text, for their replicas (mii/deployment/start.py)",
    "MemoryTurns": "reinforcement learners with several engines use it",
    "WeightsFolder": "receivers of weights, which are other programs, read a folder with it",
    "receive_weights": "receivers of weights, which are other programs, take them from a process group with it",
    "q8_dequantize": "ops/reference.py says what an operator computes, for tests to compare with",
}

C_SUFFIXES = {".c", ".cu", ".cuh", ".cpp", ".h", ".inc"}


def c_functions() -> set[str]:
    """The functions of the cores' headers."""
    headers = (path.read_text() for path in (ROOT / "csrc" / "include" / "dsc").glob("*.h"))
    return {name for text in headers for name in re.findall(r"^DSC_API\s[^;(]*?\b(dsc_\w+)\s*\(", text, re.MULTILINE)}


def c_words(text: str) -> set[str]:
    """The words of a C file, except those in comments and in lines that begin a definition or declaration at the left
    margin.
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    lines = [line.partition("=")[2] if re.match(r"[A-Za-z]", line) else line for line in text.splitlines()]
    return set(re.findall(r"\bdsc_\w+", "\n".join(lines)))


def used_in_c() -> set[str]:
    words: set[str] = set()
    for folder in ("csrc", "ops/binding", "benchmarks/csrc"):
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT).parts
            if path.suffix in C_SUFFIXES and "build" not in inside and "include" not in inside:
                words |= c_words(path.read_text())
    return words


@cache
def python_trees() -> dict[Path, ast.Module]:
    folders = ("deepspeed_c", "ops", "benchmarks", "examples", "scripts")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths}


def python_words(tree: ast.Module) -> set[str]:
    """The names that a file reads. An import or an entry of ``__all__`` is no use."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            words.add(node.name.rpartition(".")[2])
    return words


@cache
def names_read() -> frozenset[str]:
    """The names that some file reads."""
    return frozenset().union(*map(python_words, python_trees().values()))


def binding_names(stubs: ast.Module) -> Iterator[str]:
    """The names of the compiled module and of its classes."""
    for node in stubs.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if isinstance(node, ast.ClassDef):
            yield from (name for name in binding_names(ast.Module(node.body, [])) if not name.startswith("__"))


def _all_of(module: Path) -> list[str]:
    """The ``__all__`` of a module."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [entry.value for entry in getattr(node.value, "elts", []) if isinstance(entry, ast.Constant)]
    return []


def public_names() -> set[str]:
    """DeepSpeed's names and our public names. These names are meant for users and need no caller here."""
    rows = (ROOT / "docs" / "compatibility.tsv").read_text().splitlines()
    words = {word for row in rows for word in re.findall(r"\w+", " ".join(row.split("\t")[:2]))}
    for path in (ROOT / "deepspeed_c" / "compat" / "alias" / "modules.py", ROOT / "deepspeed_c" / "__init__.py"):
        constants = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        strings = [text for text in constants if isinstance(text, str)]
        words |= {word for text in strings for word in re.findall(r"\w+", text)}
        # A replacement for a module of DeepSpeed provides every name of its ``__all__``.
        modules = {
            ROOT.joinpath(*text.partition(":")[0].split(".")).with_suffix(".py")
            for text in strings
            if text.startswith("deepspeed_c.")
        }
        words |= {word for module in modules if module.is_file() for word in _all_of(module)}
    return words


def definitions(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, str]]:
    """Functions and classes of the package's modules, except for those found in other ways: a decorator may register
    its function, users name an optimizer (a class with a ``kind``), and the policy of a model family is found by its
    model type."""
    for path, tree in trees.items():
        for node in tree.body if path.parts[0] in ("deepspeed_c", "ops") else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("__"):
                given = [ast.unparse(part.targets[0]) for part in node.body if isinstance(part, ast.Assign)]
                is_function = isinstance(node, ast.FunctionDef)
                is_policy = any(ast.unparse(entry).startswith("policy(") for entry in node.decorator_list)
                if not (node.decorator_list if is_function else is_policy or "kind" in given):
                    yield path, node.name


def test_every_function_of_the_cores_has_a_caller():
    assert len(c_functions()) > 80
    assert c_functions() - used_in_c() - set(KEPT) == set()


def test_every_name_of_the_binding_has_a_user():
    names = set(binding_names(ast.parse((ROOT / "deepspeed_c" / "_C.pyi").read_text())))
    used = names_read()
    assert len(names) > 80
    assert names - used - set(KEPT) == set()


def test_every_function_and_class_of_the_package_has_a_user():
    trees = python_trees()
    used = names_read() | public_names() | set(KEPT)
    found = list(definitions(trees))
    assert len(found) > 800
    assert [f"{path}: {name}" for path, name in found if name not in used] == []


def test_what_is_kept_is_there_and_has_no_user():
    trees = python_trees()
    used = set().union(used_in_c(), *map(python_words, trees.values()))
    there = c_functions() | {name for _, name in definitions(trees)}
    there |= set(binding_names(ast.parse((ROOT / "deepspeed_c" / "_C.pyi").read_text())))
    assert {name for name in KEPT if name not in there} == set(), "gone"
    assert {name for name in KEPT if name in used} == set(), "in use"


def test_the_search_finds_what_it_should():
    text = "dsc_status dsc_a(int x)\n{\n    /* dsc_b(x) */\n    return dsc_c(x); // dsc_d\n}\nstatic int y = dsc_e;\n"
    assert c_words(text) == {"dsc_c", "dsc_e"}
    tree = ast.parse("from m import f, g as h\n__all__ = ['f']\ndef k(): return a.b(c)\n")
    assert python_words(tree) == {"g", "a", "b", "c"}
    assert [name for _, name in definitions({Path("ops/x.py"): tree})] == ["k"]
    tree = ast.parse("class A(B):\n    kind = 'a'\nclass C(B):\n    kinds = 'c'\n")
    assert [name for _, name in definitions({Path("ops/x.py"): tree})] == ["C"]
