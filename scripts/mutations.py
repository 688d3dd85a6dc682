"""Do the tests that `make test` runs find as many small mistakes as a larger selection of tests?

    git clone . /tmp/tree && make -C /tmp/tree build programs
    python -m scripts.mutations --tree /tmp/tree --out mutations.jsonl         (hours)

draws mutations of the package with a seed, and runs tests on each one: first the new selection of tests (``--new``, the
value of ``CELL_SECONDS`` in tests/costs.py), nearest to the changed file first, until one fails; then the tests that only
the old selection (``--old``) has. A mutation changes a sign, a bound, an order or a type. Each mutation gives a line of
``--out``, and the counts stand at the end. A run that starts again goes on after the last line. ``--dry-run`` prints the
mutations only.

The tree must be a clone with nothing changed: its files are changed and restored. A test that fails on the restored file
too has found nothing, and is left out from then on. A mutation that does not compile, or that leaves the compiled library
as it was, is replaced by the next one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.touched import reached

__all__ = ["KINDS", "Mutation", "Searcher", "candidates", "counts", "draw", "main", "measure", "nearest_tests"]

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("sign", "bound", "order", "dtype")
PYTHON_SHARE = 0.65
FILES_AT_ONCE = (4, 16, 32)  # test files of the first sessions of a selection; the last number repeats
N_JOINED_FIRST = 8
BUILD_SECONDS = 1800
SESSION_SECONDS = 1500  # beyond the limit, for the last item
FOUND_NEW, FOUND_OLD, NOT_FOUND, SKIPPED = "new", "old only", "none", "no mutation"

# Files without code that tests on a machine without a GPU could reach, texts of errors, and headers that the CUDA library
# includes, which takes minutes to compile.
UNREACHED = re.compile(r"cuda|errors\.py$|/compat/alias/|^csrc/include/|^csrc/base/half\.h$|^csrc/quant/format\.h$")

# Runs in the tree. Writes the items that begin and fail as JSON lines, and begins none after the time limit.
SESSION = """
import json, sys, time
sys.path.insert(0, "")
import pytest
from tests import costs

spec = json.loads(sys.argv[1])

def tell(**line):
    with open(spec["lines"], "a") as lines:
        lines.write(json.dumps(line) + "\\n")

def selected(items, cell_seconds):
    costs.CELL_SECONDS = cell_seconds
    kept = [item for item in items if not item.get_closest_marker("full")]
    costs.leave_out(kept, ())
    return kept

class Session:
    def pytest_sessionstart(self, session):
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if spec["only"]:
            items[:] = [item for item in items if item.nodeid == spec["only"]]
            return
        kept = selected(items, spec["with"])
        if spec["but"] is not None:
            less = set(selected(items, spec["but"]))
            kept = [item for item in kept if item not in less]
        items[:] = [item for item in kept if item.nodeid not in spec["broken"]]

    def pytest_runtest_logstart(self, nodeid):
        tell(begins=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            tell(fails=report.nodeid, why=report.longreprtext[-1500:])

    def pytest_collectreport(self, report):
        if report.failed:
            tell(fails=report.nodeid, why=report.longreprtext[-1500:])

    def pytest_runtest_logfinish(self, nodeid):
        tell(ends=nodeid)
        if time.time() > spec["ends_at"]:
            self.session.shouldstop = "the time limit of this mutation"

sys.exit(pytest.main(["--full", "-xq", "-p", "no:cacheprovider", *spec["options"], *spec["files"]], plugins=[Session()]))
"""


class Edit(NamedTuple):
    begin: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change of one file. edit: offsets in the file's text."""

    file: str
    line: int
    kind: str
    sort: str  # finer than kind
    edit: Edit
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind} at {self.edit.begin}"

    @property
    def is_c(self) -> bool:
        return not self.file.endswith(".py")

    def applied(self, text: str) -> str:
        return text[: self.edit.begin] + self.edit.text + text[self.edit.end :]


def _mutation(file: str, text: str, kind: str, sort: str, edit: Edit) -> Mutation:
    changed = text[: edit.begin] + edit.text + text[edit.end :]
    first, last = text.rfind("\n", 0, edit.begin) + 1, text.find("\n", edit.end)
    grown = len(changed) - len(text)
    before, after = text[first:last], changed[first : last + grown]
    return Mutation(file, text.count("\n", 0, edit.begin) + 1, kind, sort, edit, before.strip(), after.strip())


# Python

_DTYPES = {"float32": "bfloat16", "bfloat16": "float32", "float16": "bfloat16", "int64": "int32", "int32": "int64"}
_BOUNDS = {"<=": "<", "<": "<=", ">=": ">", ">": ">="}
_SIGNS = {"+": "-", "-": "+"}
# Arguments of these have no order, or swapped ones never get past the call.
_UNORDERED = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "min", "max", "print", "cast", "zip", "gcd"}
_TEXTS = re.compile(r"Error$|^(?:raise|warn|log|debug|info|print|field|add_argument|TypeVar)")


class _PythonEdits(ast.NodeVisitor):
    """Collects (kind, sort, edit). Texts, annotations and decorators are left out."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[str, str, Edit]] = []
        self._lines = text.splitlines(keepends=True)
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line))
        self.visit(ast.parse(text))

    def _span(self, node: Any) -> tuple[int, int]:
        """The offsets of a node. Its columns count bytes."""
        places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        begin, end = (self._begins[row - 1] + len(self._lines[row - 1].encode()[:col].decode()) for row, col in places)
        return begin, end

    def _token(self, left: ast.AST, right: ast.AST, tokens: dict[str, str], kind: str) -> None:
        """Replaces the operator between two operands."""
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.text[begin:end]
        if (match := re.search(r"<=|>=|[<>+-]", between)) and "#" not in between:
            edit = Edit(begin + match.start(), begin + match.end(), tokens[match.group()])
            self.found.append((kind, "operator", edit))

    def _swap(self, one: ast.AST, other: ast.AST, sort: str) -> None:
        (begin, middle), (second, end) = self._span(one), self._span(other)
        first_text, second_text = self.text[begin:middle], self.text[second:end]
        if first_text != second_text:
            edit = Edit(begin, end, second_text + self.text[middle:second] + first_text)
            self.found.append(("order", sort, edit))

    def generic_visit(self, node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and not isinstance(node, ast.ClassDef | ast.Module):
                for one, other in itertools.pairwise(statements):
                    if _may_swap(one, other):
                        self._swap(one, other, "statements")
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        self.visit(each)

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if _TEXTS.search(name):
            return
        two = node.args[:2]
        if len(two) == 2 and name not in _UNORDERED and not any(isinstance(each, ast.Starred) for each in two):
            self._swap(*two, "arguments")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        literals = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
        is_text = any(
            isinstance(side, literals) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
            for side in (node.left, node.right)
        )
        if isinstance(node.op, ast.Add | ast.Sub) and not is_text:
            self._token(node.left, node.right, _SIGNS, "sign")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and not isinstance(
            node.value, ast.List | ast.JoinedStr | ast.ListComp
        ):
            self._token(node.target, node.value, _SIGNS, "sign")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                self._token(left, right, _BOUNDS, "bound")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.found.append(("bound", "number", Edit(*self._span(node), str(node.value + 1))))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in _DTYPES:
            self.found.append(("dtype", "torch", Edit(*self._span(node), f"torch.{_DTYPES[node.attr]}")))
        self.generic_visit(node)


def _may_swap(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether two statements act on something, and the second one can run first."""

    def acts(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)

    if not all(acts(each) or isinstance(each, ast.Assign | ast.AugAssign) for each in (one, other)):
        return False
    stored = {node.id for node in ast.walk(one) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loaded = {node.id for node in ast.walk(other) if isinstance(node, ast.Name)}
    return (acts(one) or acts(other)) and not stored & loaded


# C

_BLANK = re.compile(
    r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*""", re.DOTALL | re.MULTILINE
)
_SIMPLE = r"[\w.&*\[\]]+(?:->[\w.\[\]]+)*"
_C_EDITS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("sign", "operator", r"(?<=[\w\])] )[+-](?==? [\w(*])", _SIGNS),
    ("bound", "operator", r"(?<=[\w\])] )(?:<=|>=|<|>)(?= [\w(*-])", _BOUNDS),
    ("dtype", "type", r"\b(?:float|double|u?int(?:32|64)_t|DSC_(?:F32|BF16))\b", {
        "float": "double", "double": "float", "DSC_F32": "DSC_BF16", "DSC_BF16": "DSC_F32",
        **{f"{sign}int{bits}_t": f"{sign}int{96 - bits}_t" for sign in ("", "u") for bits in (32, 64)},
    }),
)  # fmt: skip
_C_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_C_CALL = re.compile(rf"(\b[a-z]\w+\()({_SIMPLE}), ({_SIMPLE})(?=[,)])")
_C_STATEMENT = re.compile(rf"[ \t]+(?!return|break|goto|case|default){_SIMPLE}(?:\([^;{{}}]*\)| [-+*|&]?= [^;{{}}]*);$")


def _blanked(text: str) -> str:
    """The text with blanks in place of comments, strings, preprocessor lines and lines outside of functions."""
    text = _BLANK.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    is_code = (line.startswith((" ", "\t")) and not re.search(r"fail|FAIL", line) for line in text.split("\n"))
    return "\n".join(
        line if keep else " " * len(line) for keep, line in zip(is_code, text.split("\n"), strict=True)
    )  # lines keep their lengths, and so offsets their meaning


def _c_edits(text: str) -> Iterator[tuple[str, str, Edit]]:
    code = _blanked(text)
    for kind, sort, pattern, tokens in _C_EDITS:
        for match in re.finditer(pattern, code):
            yield kind, sort, Edit(match.start(), match.end(), tokens[match.group()])
    for match in _C_NUMBER.finditer(code):
        yield "bound", "number", Edit(match.start(), match.end(), str(int(match.group()) + 1))
    for match in _C_CALL.finditer(code):
        if match[2] != match[3] and not re.match(r"min|max|sizeof|if|for|while|return", match[1]):
            yield "order", "arguments", Edit(match.start(2), match.end(3), f"{match[3]}, {match[2]}")
    begin = 0
    lines = code.split("\n")
    for above, one, other in zip(["", *lines], lines, lines[1:], strict=False):
        is_block = above.rstrip().endswith((";", "{", "}")) and _indent(one) == _indent(other)
        if is_block and _C_STATEMENT.match(one) and _C_STATEMENT.match(other) and one != other:
            end = begin + len(one) + 1 + len(other)
            kept = text[begin:end].split("\n")
            yield "order", "statements", Edit(begin, end, "\n".join(reversed(kept)))
        begin += len(one) + 1


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def candidates(file: str, text: str) -> list[Mutation]:
    """All mutations of a file."""
    found = _PythonEdits(text).found if file.endswith(".py") else _c_edits(text)
    return [_mutation(file, text, kind, sort, edit) for kind, sort, edit in found]


def draw(texts: dict[str, str], seed: int, *, is_c: bool) -> Iterator[Mutation]:
    """Mutations without end but for their number: the kinds in turn; of a kind, each sort as often as the others."""
    rng = random.Random(f"{seed} {'C' if is_c else 'Python'}")
    pools: dict[str, dict[str, list[Mutation]]] = {kind: {} for kind in KINDS}
    for file in sorted(texts):
        ours = file.startswith("csrc/") and file.endswith((".c", ".h")) if is_c else file.startswith("deepspeed_c/")
        if ours and file.endswith((".py", ".c", ".h")) and not UNREACHED.search(file):
            for mutation in candidates(file, texts[file]):
                pools[mutation.kind].setdefault(mutation.sort, []).append(mutation)
    while any(pools.values()):
        for sorts in filter(None, pools.values()):
            sort = rng.choice(sorted(sorts))
            yield sorts[sort].pop(rng.randrange(len(sorts[sort])))
            if not sorts[sort]:
                del sorts[sort]


# Tests


def read_texts(tree: Path) -> dict[str, str]:
    """The text of each file that git knows, by path."""
    command = ["git", "-C", str(tree), "ls-files"]
    files = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    ends = (".py", ".c", ".h", ".inc", ".cpp")
    return {file: (tree / file).read_text(errors="replace") for file in files if file.endswith(ends)}


def nearest_tests(file: str, texts: dict[str, str]) -> list[str]:
    """All test files, nearest first: the test at the path of ``file``, users by imports, then paths with equal words.
    Imports lead neither from Python to C files nor through names with an import at their first use.
    """
    tests = [each for each in sorted(texts) if re.match(r"tests/(?:.*/)?(?:test_\w+\.(?:py|c)|fuzz_\w+\.c)$", each)]
    joined = [each for each in reached([file], texts) if each in set(tests)]
    own = Path("tests", file).with_name(f"test_{Path(file).name}").as_posix()
    first = [own] if own in texts else []
    alike = {each: n for each in tests if (n := _n_shared(_words(file), _words(each)))}
    return list(
        dict.fromkeys(
            [*first, *joined[:N_JOINED_FIRST], *sorted(alike, key=lambda each: -alike[each]), *joined, *tests]
        )
    )


def _words(path: str) -> set[str]:
    return set(re.split(r"[/_.]", path)) - {"deepspeed", "c", "py", "tests", "test", "csrc", "ops", "h"}


def _n_shared(ours: set[str], theirs: set[str]) -> int:
    """The number of pairs of words like "pipeline" and "pipe": one begins with the other."""
    pairs = ((one, other) for one in ours for other in theirs if min(len(one), len(other)) > 2)
    return sum(one.startswith(other) or other.startswith(one) for one, other in pairs)


class Find(NamedTuple):
    test: str
    why: str


class Searcher:
    """Runs tests in a tree. options: more options of pytest."""

    def __init__(self, tree: Path, python: Path, options: Sequence[str] = (), *, builds: bool = True) -> None:
        self.tree, self.python, self.options, self.builds = tree, python, options, builds
        self.broken: set[str] = set()

    def build(self) -> str | None:
        """Builds the library and the C programs. Returns a hash of the library, or None after an error of the compiler."""
        if not self.builds:
            return ""
        env = {**os.environ, "DSC_BUILD_DIR": str(self.tree / "build" / "objects")}
        commands = (
            [self.python, "setup.py", "build_ext", "--inplace"],
            ["make", "-s", "-C", "csrc", "-j2", "programs"],
        )
        for command in commands:
            done = subprocess.run(
                command, cwd=self.tree, env=env, capture_output=True, timeout=BUILD_SECONDS, check=False
            )
            if done.returncode:
                return None
        return hashlib.sha256((self.tree / "build" / "objects" / "csrc" / "libdsc.a").read_bytes()).hexdigest()

    def session(self, files: Sequence[str], ends_at: float, **selection: Any) -> Find | None:
        """Runs tests of ``files`` up to the first failure."""
        with tempfile.TemporaryDirectory(prefix="dsc_mutations_") as folder:
            lines = Path(folder, "lines")
            spec: dict[str, Any] = {"with": None, "but": None, "only": None, "broken": sorted(self.broken)}
            spec |= {"lines": str(lines), "files": files, "ends_at": ends_at, "options": self.options, **selection}
            with open(Path(folder, "out"), "w+") as out:
                process = subprocess.Popen(
                    [self.python, "-c", SESSION, json.dumps(spec)],
                    cwd=self.tree,
                    # Python would take bytecode of a file of the same second and length for that of the mutated one.
                    env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
                try:
                    status = process.wait(max(ends_at - time.time(), 0) + SESSION_SECONDS)
                except subprocess.TimeoutExpired:
                    status = -int(signal.SIGKILL)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait(SESSION_SECONDS)
                out.seek(0)
                said = out.read()[-1500:]
            told = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        for line in told:
            if "fails" in line:
                return Find(line["fails"], line["why"])
        if status in (0, 1, 2, 5):  # 2: stopped at the time limit; 5: no tests
            return None
        begun = [line["begins"] for line in told if "begins" in line]
        return Find(begun[-1] if begun else "start", f"status {status}\n{said}")

    def search(self, files: Sequence[str], seconds: float, **selection: Any) -> tuple[Find | None, bool]:
        """The first failure, and whether the time ended before the tests did."""
        ends_at = time.time() + seconds
        sizes = list(FILES_AT_ONCE)
        files = list(files)
        while files:
            if time.time() > ends_at:
                return None, True
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            if find := self.session(files[:size], ends_at, **selection):
                return find, False
            files = files[size:]
        return None, time.time() > ends_at


def measure(
    searcher: Searcher, mutation: Mutation, texts: dict[str, str], new: float, old: float, seconds: float
) -> dict[str, Any]:
    """The line of a mutation: the selection and the test that find it."""
    path = searcher.tree / mutation.file
    near = nearest_tests(mutation.file, texts)
    costly = {function.split("::")[0] for function in _costly(searcher.tree, new)}
    result: dict[str, Any] = {"found": NOT_FOUND, "test": "", "why": "", "out_of_time": []}
    unchanged = searcher.build() if mutation.is_c else None
    began = time.time()
    while True:
        find = None
        try:
            path.write_text(mutation.applied(texts[mutation.file]))
            if mutation.is_c and (built := searcher.build()) in (None, unchanged) and searcher.builds:
                return {**result, "found": SKIPPED, "why": "does not compile" if built is None else "same machine code"}
            for found, files, selection in (
                (FOUND_NEW, near, {"with": new}),
                (FOUND_OLD, [file for file in near if file in costly], {"with": old, "but": new}),
            ):
                find, is_late = searcher.search(files, seconds, **selection)
                if is_late:
                    result["out_of_time"].append(found)
                if find:
                    break
        finally:
            path.write_text(texts[mutation.file])
            if mutation.is_c:
                searcher.build()
        if find and find.test != "start":
            is_broken = searcher.session([find.test.split("::")[0]], time.time() + seconds, only=find.test)
            if is_broken:
                searcher.broken.add(find.test)
                result["out_of_time"] = []
                continue
        if find:
            result |= {"found": found, "test": find.test, "why": find.why}
        return {**result, "seconds": round(time.time() - began)}


def _costly(tree: Path, seconds: float) -> set[str]:
    table = (line.split("\t") for line in (tree / "tests" / "costs.tsv").read_text().splitlines() if "\t" in line)
    return {function for cost, function in table if float(cost) > seconds}


def counts(lines: Sequence[dict[str, Any]]) -> str:
    """The result of all mutations in one sentence."""
    found = [line["found"] for line in lines if "found" in line and line["found"] != SKIPPED]
    new, old = found.count(FOUND_NEW), found.count(FOUND_OLD)
    return (
        f"{len(found)} mutations: the new selection finds {new}, the old one {new + old}, none {found.count(NOT_FOUND)}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="a built clone, whose files are changed and restored")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a mutation")
    parser.add_argument("--python", type=Path, help="TREE/.venv/bin/python by default")
    parser.add_argument("--mutations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=61)
    parser.add_argument("--new", type=float, default=5.0, help="CELL_SECONDS of the new selection")
    parser.add_argument("--old", type=float, default=15.0, help="CELL_SECONDS of the old selection")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a selection's tests, a mutation")
    parser.add_argument("--item-seconds", type=float, help="limit of a test, for pytest")
    parser.add_argument("--dry-run", action="store_true", help="print the mutations only")
    options = parser.parse_args(argv)
    tree = options.tree.resolve()
    if tree == ROOT:
        parser.error("--tree is this checkout: name a clone of it, because its files will be changed")
    texts = read_texts(tree)
    command = ["git", "-C", str(tree), "diff", "--name-only", "HEAD", "--", "deepspeed_c", "csrc"]
    if changed := subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split():
        parser.error(f"{changed} of {tree} are changed: git -C {tree} checkout -- deepspeed_c csrc")
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {line["mutation"]: line for line in lines if "mutation" in line}
    more = [] if options.item_seconds is None else [f"--item-seconds={options.item_seconds:g}"]
    searcher = Searcher(tree, options.python or tree / ".venv" / "bin" / "python", more)
    searcher.broken = {test for line in lines for test in line.get("broken", ())}
    n_python = round(options.mutations * PYTHON_SHARE)
    left = {False: n_python, True: options.mutations - n_python}
    drawn = {is_c: draw(texts, options.seed, is_c=is_c) for is_c in left}
    while any(left.values()):
        # The language that has more left is next, so that both begin early.
        is_c = left[True] * PYTHON_SHARE > left[False] * (1 - PYTHON_SHARE)
        if (mutation := next(drawn[is_c], None)) is None:
            left[is_c] = 0
            continue
        print(f"{mutation.name}\n  - {mutation.before}\n  + {mutation.after}", flush=True)
        if options.dry_run:
            left[is_c] -= 1
            continue
        if (line := done.get(mutation.name)) is None:
            result = measure(searcher, mutation, texts, options.new, options.old, options.seconds)
            line = {"mutation": mutation.name, "before": mutation.before, "after": mutation.after, **result}
            line["broken"] = sorted(searcher.broken)
            lines.append(line)
            with open(options.out, "a") as out:
                out.write(json.dumps(line) + "\n")
        print(f"  {line['found']} {line['test']} ({line.get('seconds', 0)} s)", flush=True)
        left[is_c] -= line["found"] != SKIPPED
    print(counts(lines))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the mutated file is restored
    sys.exit(main())
