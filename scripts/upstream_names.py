"""Write a table of deepspeed_c/compat/alias: each name of an installed DeepSpeed or MII, its kind, and plain values.

PYTHON scripts/upstream_names.py deepspeed_c/compat/alias/upstream.tsv
PYTHON scripts/upstream_names.py deepspeed_c/compat/alias/mii.tsv mii

PYTHON is an interpreter with DeepSpeed installed. For MII, the files on PYTHONPATH are enough: a module whose import
fails is read as source. The script imports the modules one by one, and does not need deepspeed_c. The table has only
facts: names, kinds, and constants whose value depends on the source and not on the machine.

A row is ``where, name, kind, defined, value``. A module has a row with an empty name. The names of the module follow,
with an empty ``where``. Constants in the body of a class follow the class, with ``:Class`` in ``where``. The value of a
module's row says how the module was read: "imported", or "source" if its import fails on this machine (no device, no
triton). For "source", kinds come from the syntax tree only. ``kind`` is module, class, exception, function or constant.
``defined`` is the place of a name that its module imports from another module: that module, followed by ``:name`` if
the name differs there, or by ``:`` if the name stands for the module itself. The name ``*`` stands for all names of the
module ``defined`` that begin with a letter. ``value`` is a literal, or for an exception its bases. A name counts if its
module defines it or imports it from within the package, and if it begins with a letter or is in docs/compatibility.tsv.
"""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.metadata
import importlib.util
import inspect
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

COMPATIBILITY = Path(__file__).resolve().parents[1] / "docs" / "compatibility.tsv"
# Private names that transformers, accelerate, trl, peft and Lightning read.
PRIVATE = {
    ("deepspeed.runtime.zero.partition_parameters", "_orig_torch_arange"),
    ("deepspeed.utils.groups", "_get_sequence_parallel_group"),
    ("deepspeed.utils.groups", "_get_sequence_parallel_rank"),
    ("deepspeed.utils.groups", "_get_sequence_parallel_world_size"),
}
LONGEST_VALUE = 400
# Errors that a foreign package may raise on import if its device is missing.
_IMPORT_FAILS = (
    *(
        ImportError,
        AttributeError,
        RuntimeError,
        OSError,
        NameError,
        AssertionError,
        TypeError,
        ValueError,
        LookupError,
    ),
    SystemExit,
)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


class Row(NamedTuple):
    where: str
    name: str
    kind: str
    defined: str
    value: str


class Unknown(LookupError):
    """The value of an expression does not follow from the source."""


class Source:
    """The syntax tree of a module, and the origin of each of its names."""

    def __init__(self, name: str, file: Path) -> None:
        self.top = name.partition(".")[0]
        self.name, self.package = name, name if file.name == "__init__.py" else name.rpartition(".")[0]
        self.bound: dict[str, list[ast.AST | tuple[str, str]]] = {}
        """For each name: a definition, an assigned expression, or (module, name) of an import.

        An import from outside DeepSpeed is ("", "").
        """
        self.stars: list[str] = []
        self._walk(ast.parse(file.read_text(encoding="utf-8")).body)

    def _walk(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._bind(node.name, node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.AugAssign):
                self._assign(node.target, node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    inside = alias.name.split(".")[0] == self.top
                    path = alias.name if alias.asname else self.top
                    self._bind(alias.asname or alias.name.split(".")[0], (path, "") if inside else ("", ""))
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
            elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                continue
            else:
                if isinstance(node, ast.For):
                    self._assign(node.target, node)
                for part in ("body", "orelse", "finalbody"):
                    self._walk(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    self._walk(handler.body)

    def _bind(self, name: str, what: ast.AST | tuple[str, str]) -> None:
        self.bound.setdefault(name, []).append(what)

    def _assign(self, target: ast.expr, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            for i, each in enumerate(target.elts):
                self._assign(each, parts[i] if len(parts) == len(target.elts) else ast.Pass())

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            module = ".".join([*above, *([module] if module else [])])
        inside = module.split(".")[0] == self.top
        for alias in node.names:
            if alias.name == "*":
                self.stars += [module] if inside else []
            else:
                self._bind(alias.asname or alias.name, (module, alias.name) if inside else ("", ""))


class Tree:
    """All modules of the installed package, from their files and from imports."""

    def __init__(self, package: str) -> None:
        self.package = package
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        self.sources: dict[str, Source] = {}
        for file in sorted(Path(folder).rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if all(part.isidentifier() for part in parts) and parts[-1] != "__main__":
                name = ".".join([package, *(part for part in parts if part != "__init__")])
                self.sources[name] = Source(name, file)
        self.imported: dict[str, ModuleType] = {}
        for name in self.sources:
            try:
                self.imported[name] = importlib.import_module(name)
            except _IMPORT_FAILS as error:
                print(f"{name}: read as source, its import says {type(error).__name__}: {error}", file=sys.stderr)
        # Modules without a file, which the package creates for old import paths
        for name, module in [*sys.modules.items()]:
            if name.startswith(f"{package}.") and name not in self.sources and isinstance(module, ModuleType):
                self.imported[name] = module

    def names(self, module: str) -> set[str]:
        source = self.sources.get(module)
        if source is None:
            return set(vars(self.imported[module])) if module in self.imported else set()
        found = set(source.bound)
        for star in source.stars:
            found |= {name for name in self.names(star) if not name.startswith("_")}
        return found

    def origin(self, module: str, name: str) -> tuple[str, str] | None:
        """Return the place of the definition: (module, name), (module, "") for a module, or None for a name from
        outside DeepSpeed.
        """
        source = self.sources.get(module)
        bound = source.bound.get(name, []) if source else []
        inside = [each for each in bound if each != ("", "")]
        if bound and len(inside) < len(bound) and all(_is_none(each) for each in inside):
            return None  # an optional package, or None without it
        if any(isinstance(each, ast.AST) and not _is_none(each) for each in inside):
            return module, name
        for each in inside:
            if isinstance(each, tuple):
                return (each[0], "") if not each[1] else self.origin(*each) if each != (module, name) else None
        if inside:
            return module, name
        if f"{module}.{name}" in self.sources or f"{module}.{name}" in self.imported:
            return f"{module}.{name}", ""
        for star in source.stars if source else []:
            if name in self.names(star):
                return self.origin(star, name)
        # A name that the module creates while it is imported, for example through globals()
        value = vars(self.imported[module]).get(name) if module in self.imported else None
        return (module, name) if str(getattr(value, "__module__", "")).split(".")[0] == self.package else None

    # -- values ---------------------------------------------------------------------------------------------------------

    def value(self, node: Any, module: str, depth: int = 0) -> Any:
        """Return the value of an expression if it depends only on the source. Raises Unknown otherwise."""
        if depth > 20:
            raise Unknown
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
            return kind(self.value(each, module, depth + 1) for each in node.elts)
        if isinstance(node, ast.Dict) and None not in node.keys:
            values = [[self.value(each, module, depth + 1) for each in part] for part in (node.keys, node.values)]
            return dict(zip(*values))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            sides = [self.value(each, module, depth + 1) for each in (node.left, node.right)]
            return _OPERATORS[type(node.op)](*sides)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.value(node.operand, module, depth + 1))
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(each, module, depth + 1)) for each in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self.value(node.value, module, depth + 1)
        if isinstance(node, ast.Name) and (place := self.origin(module, node.id)) and place[1]:
            return self._value_at(*place, depth + 1)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            place = self.origin(module, node.value.id)
            if place and not place[1] and (of_module := self.origin(place[0], node.attr)) and of_module[1]:
                return self._value_at(*of_module, depth + 1)
            if place and place[1]:
                constants = self.class_constants(*place)
                if node.attr in constants:
                    return constants[node.attr]
        raise Unknown

    def _value_at(self, module: str, name: str, depth: int = 0) -> Any:
        source = self.sources.get(module)
        values = [self.value(each, module, depth) for each in (source.bound.get(name, []) if source else [])]
        if not values:
            raise Unknown
        if module in self.imported:
            found = vars(self.imported[module]).get(name, Unknown)
            if not any(type(found) is type(each) and found == each for each in values):
                raise Unknown
            return found
        return values[-1]

    def class_constants(self, module: str, name: str) -> dict[str, Any]:
        """The constants in the bodies of a class and of its bases within DeepSpeed."""
        source = self.sources.get(module)
        definition = next(
            (each for each in (source.bound.get(name, []) if source else []) if isinstance(each, ast.ClassDef)), None
        )
        if definition is None:
            return {}
        found: dict[str, Any] = {}
        for base in reversed(definition.bases):
            place = self.origin(module, base.id) if isinstance(base, ast.Name) else None
            if place and place[1] and place != (module, name):
                found |= self.class_constants(*place)
        live = vars(self.imported[module]).get(name) if module in self.imported else None
        for node in definition.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                # A field of a pydantic model is no attribute of its class
                is_field = isinstance(node, ast.AnnAssign) and not (live and hasattr(live, ast.unparse(target)))
                if isinstance(target, ast.Name) and not target.id.startswith("_") and not is_field:
                    try:
                        found[target.id] = self.value(node.value, module)
                    except (Unknown, TypeError):
                        found.pop(target.id, None)
        return found

    # -- kinds ----------------------------------------------------------------------------------------------------------

    def kind(self, module: str, name: str) -> str:
        if not name:
            return "module"
        if module in self.imported and name in vars(self.imported[module]):
            value = vars(self.imported[module])[name]
            if inspect.isclass(value):
                return "exception" if issubclass(value, BaseException) else "class"
            return "module" if inspect.ismodule(value) else "function" if callable(value) else "constant"
        last = [each for each in self.sources[module].bound[name] if isinstance(each, ast.AST)][-1]
        if isinstance(last, ast.ClassDef):
            bases = [ast.unparse(base) for base in last.bases]
            return "exception" if any(base.endswith(("Error", "Exception")) for base in bases) else "class"
        if isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return "function"
        if isinstance(last, ast.Name) and last.id != name and (place := self.origin(module, last.id)):
            return self.kind(*place)
        return "constant"

    def bases(self, module: str, name: str) -> str:
        """The bases of an exception: places for bases within DeepSpeed, and names for exceptions of Python."""
        definitions = self.sources[module].bound.get(name, [])
        found = []
        for base in next(each for each in definitions if isinstance(each, ast.ClassDef)).bases:
            place = self.origin(module, base.id)
            found.append(":".join(place) if place else base.id)
        return " ".join(found)

    # -- rows -----------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        with open(COMPATIBILITY, encoding="utf-8", newline="") as lines:
            listed = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            private = PRIVATE | {(row["where"], row["name"]) for row in listed if row["name"].startswith("_")}
        places = {module: self._places(module, private) for module in sorted({*self.sources, *self.imported})}
        for module, names in places.items():
            yield Row(module, "", "module", "", "imported" if module in self.imported else "source")
            covered: set[str] = set()
            for star in self.sources[module].stars if module in self.sources else []:
                public = {name: place for name, place in places[star].items() if not name.startswith("_")}
                if public and public.items() <= names.items():
                    covered |= public.keys()
                    yield Row("", "*", "", star, "")
            for name in sorted(names.keys() - covered):
                yield from self._rows_of(module, name, names[name])

    def _places(self, module: str, private: set[tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """Each name of a module that counts, with the place of its definition."""
        live = vars(self.imported[module]) if module in self.imported else {}
        found = {}
        for name in self.names(module) | {name for name in live if not inspect.ismodule(live[name])}:
            if name.startswith("_") and (module, name) not in private:
                continue
            place = self.origin(module, name)
            if place is None or (not place[1] and place[0] == f"{module}.{name}"):
                continue  # a submodule has its own row
            # The name has no value after the import: its branch was not taken, or the module deleted it
            if not (live and name not in live) and (place[1] or place[0] in self.sources.keys() | self.imported.keys()):
                found[name] = place
        return found

    def _rows_of(self, module: str, name: str, place: tuple[str, str]) -> Iterator[Row]:
        kind = self.kind(*place)
        if place != (module, name):
            yield Row("", name, kind, place[0] if place[1] == name else ":".join(place), "")
            return
        value = self.bases(module, name) if kind == "exception" else ""
        if kind == "constant" and not module.endswith(".templates"):  # texts of files
            try:
                value = _literal(self._value_at(*place))
            except (Unknown, TypeError):
                value = ""
        yield Row("", name, kind, "", value)
        for constant, of_class in sorted(self.class_constants(module, name).items() if kind == "class" else ()):
            if text := _literal(of_class):
                yield Row(f":{name}", constant, "constant", "", text)


def _literal(value: Any) -> str:
    """Return the text from which ast.literal_eval reads the value.

    Returns "" if there is no such text or the text is long.
    """
    text = repr(value)
    try:
        return text if len(text) <= LONGEST_VALUE and ast.literal_eval(text) == value else ""
    except (ValueError, SyntaxError):
        return ""


def _is_none(what: object) -> bool:
    return isinstance(what, ast.Constant) and what.value is None


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 2):
        print("usage: PYTHON scripts/upstream_names.py FILE [PACKAGE]", file=sys.stderr)
        return 2
    tree = Tree(argv[1] if len(argv) == 2 else "deepspeed")
    rows = [Row("where", "name", "kind", "defined", "value"), *tree.rows()]
    if any("\t" in part or "\n" in part for row in rows for part in row):
        raise ValueError("a value has a tab or a line break in it: repr() was to escape both")
    Path(argv[0]).write_text("".join("\t".join(row).rstrip("\t") + "\n" for row in rows), encoding="utf-8")
    print(
        f"{len(tree.imported)} modules imported, {len(tree.sources.keys() - tree.imported.keys())} read as source,",
        file=sys.stderr,
    )
    (distribution,) = set(importlib.metadata.packages_distributions()[tree.package])
    print(f"{len(rows) - 1} rows; {distribution} {importlib.metadata.version(distribution)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
