"""Statements of the documents about the whole tree, and a check of each.

A row names a document, a statement in its words, and a check, which returns counter-examples. The test fails on a
counter-example, and on a statement missing in the document: then its row goes, or gets the new words.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from deepspeed_c import errors
from deepspeed_c.config import load_config
from deepspeed_c.config.schedule import SCHEDULES
from deepspeed_c.engine import inputs
from deepspeed_c.launcher.commands import COMMANDS
from deepspeed_c.launcher.runners import RUNNERS
from deepspeed_c.monitor.monitor import MONITORS
from deepspeed_c.offload import file as offload_file
from tests import item_limits

ROOT = Path(__file__).resolve().parents[1]
README, ARCHITECTURE, CHANGELOG = "README.md", "docs/architecture.md", "CHANGELOG.md"
PERFORMANCE = "docs/performance"


def files(pattern: str, *folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob(pattern))]
    assert found, (pattern, folders)
    return found


def is_below(path: Path, *places: str) -> bool:
    return any(path.is_relative_to(ROOT / place) for place in places)


NODES = [
    (path, node)
    for path in files("*.py", "deepspeed_c", "ops")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
]


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    """The nodes of these kinds in all files of the package."""
    return ((path, node) for path, node in NODES if isinstance(node, kinds))


def shown(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def matches(pattern: str, paths: Iterable[Path]) -> list[str]:
    """``FILE: MATCH`` of each match in the text of the files, without their comments of C."""
    found = []
    for path in paths:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in re.finditer(pattern, text)]
    return found


def rows_between(document: str, begin: str, end: str) -> list[list[str]]:
    """The cells of the table rows between two texts of a document, without its head."""
    _, _, text = (ROOT / document).read_text(encoding="utf-8").partition(begin)
    text, _, _ = text.partition(end)
    rows = [row.strip("|").split(" | ") for row in text.splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def compare(said: Iterable[str], there: Iterable[str]) -> list[str]:
    """Names said without a thing, and things without a name."""
    said, there = set(said), set(there)
    assert said and there, (said, there)
    return [f"is not there: {name}" for name in sorted(said - there)] + [
        f"is not said: {name}" for name in sorted(there - said)
    ]


STAGE_NAMES = ("stage", "_stage", "zero_stage", "zero_optimization_stage")


def compared_stages() -> list[str]:
    """Comparisons of a ZeRO stage with numbers."""
    found = []
    deepspeeds = ("deepspeed_c/checkpoint/formats/deepspeed", "deepspeed_c/compat", "deepspeed_c/utils/zero_to_fp32.py")
    of_pipelines = ("deepspeed_c/pipe", "deepspeed_c/engine/pipeline.py")
    for path, node in nodes(ast.Compare):
        if is_below(path, *deepspeeds, *of_pipelines):
            continue
        sides = [each for side in (node.left, *node.comparators) for each in (getattr(side, "elts", None) or [side])]
        names = [getattr(side, "attr", getattr(side, "id", None)) for side in sides]
        numbers = [side for side in sides if isinstance(side, ast.Constant) and type(side.value) is int]
        if numbers and any(name in STAGE_NAMES for name in names):
            found.append(shown(path, node))
    return found


def read_variables() -> list[str]:
    """Reads of an environment variable by its name."""
    # A statement that is a call drops the value: it removes the variable.
    dropped = {id(node.value) for _, node in NODES if isinstance(node, ast.Expr)}
    found = []
    for path, node in nodes(ast.Call, ast.Subscript, ast.Compare):
        if is_below(path, "deepspeed_c/env.py", "deepspeed_c/compat/alias/bin"):
            continue
        if isinstance(node, ast.Call):
            reads = (
                ast.unparse(node.func) in ("os.environ.get", "os.getenv", "os.environ.pop") and id(node) not in dropped
            )
        elif isinstance(node, ast.Subscript):
            reads = ast.unparse(node.value) == "os.environ" and isinstance(node.ctx, ast.Load)
        else:
            reads = ast.unparse(node).endswith(" in os.environ")
        if reads:
            found.append(shown(path, node))
    return found


COLLECTIVES = r"(?:all_|reduce|broadcast|barrier|gather|scatter|send|recv|isend|irecv|monitored_barrier)\w*"


def collectives_of_torch() -> list[str]:
    """Calls of torch's collectives in the engine and the parts below it."""
    parts = ("engine", "zero", "pipe", "inject", "sequence", "moe", "offload", "inference", "checkpoint", "observe")
    paths = [path for part in parts for path in files("*.py", f"deepspeed_c/{part}")]
    torchs = [path for path in paths if "import torch.distributed as dist" in path.read_text(encoding="utf-8")]
    assert torchs
    return matches(rf"(?<![\w.])dist\.{COLLECTIVES}\(", torchs) + matches(
        rf"torch\.distributed\.{COLLECTIVES}\(", paths
    )


C_FILES = ("*.c", "*.h", "*.inc", "*.cu")


def sources_of_cores() -> list[Path]:
    return [path for pattern in C_FILES for path in files(pattern, "csrc") if not is_below(path, "csrc/build")]


def threads_of_loops() -> list[str]:
    """Starts of threads outside the pool, the file I/O and the requests of collectives: these are no loops."""
    loops = [path for path in sources_of_cores() if not is_below(path, "csrc/base", "csrc/aio", "csrc/comm")]
    return matches(r"pthread_create\(", loops) + matches(
        r"(?<![\w])(?:f?printf|f?puts|putchar|perror)\(", sources_of_cores()
    )


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def other_cplusplus() -> list[str]:
    done = git("ls-files")
    if done.returncode:
        pytest.skip("needs a git checkout: the files of a build are C++ too")
    names = [name for name in done.stdout.splitlines() if name.endswith((".cpp", ".cc", ".cxx", ".hpp"))]
    return [name for name in names if not name.startswith(("ops/binding/", "tests/", "benchmarks/"))]


def folders_of_csrc() -> list[str]:
    said = {row[0].strip("`") for row in rows_between(ARCHITECTURE, "## The cores", "Rules that hold throughout")}
    return compare(
        said - {"include/dsc"},
        {path.parent.relative_to(ROOT / "csrc").parts[0] for path in sources_of_cores()} - {"include"},
    )


def parts_of_the_package() -> list[str]:
    cells = [row[0] for row in rows_between(ARCHITECTURE, "## The Python tree", "## Tests and benchmarks")]
    said = {name.rstrip("/").split("/")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    tops = {path.relative_to(ROOT / "deepspeed_c").parts[0] for path in files("*.py", "deepspeed_c")}
    return compare(said, {name for name in tops if not name.startswith("_")})


def tables_of_csrc() -> list[str]:
    text = (ROOT / ARCHITECTURE).read_text(encoding="utf-8")
    said = re.findall(r"`([\w/]+\.inc)`", text[text.index("**Extension points are tables.**") :].partition("\n\n")[0])
    there = {str(path.relative_to(ROOT / "csrc")).removeprefix("include/") for path in files("*.inc", "csrc")}
    # Bodies of loops, and calls of operators that ops/binding and the tests expand: no places for extensions.
    return compare(said, there - {"cpu/gelu.inc", "dsc/nn_calls.inc", "dsc/moe_calls.inc", "dsc/quant_calls.inc"})


def words_of(document: str, begin: str, end: str) -> list[str]:
    """The words of a list between two texts of a document, without markup."""
    _, found, text = (ROOT / document).read_text(encoding="utf-8").partition(begin)
    assert found, begin
    return [
        word for word in re.split(r",\s+|\s+and\s+|\s+or\s+", text.partition(end)[0].replace("`", "").strip()) if word
    ]


def rows_of_table(path: str, macro: str) -> list[str]:
    return re.findall(rf"^{macro}\w*\((\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def optimizers_in_c() -> list[str]:
    said = [word.lower() for word in words_of(README, "| optimizers in C | ", ";")]
    # Muon works on whole matrices and not on elements: it has a file, and no row of this table.
    assert (ROOT / "csrc/optim/muon.c").is_file()
    return compare(said, {*rows_of_table("csrc/optim/optimizers.inc", "DSC_OPTIMIZER"), "muon"})


def schedules_of_pipelines() -> list[str]:
    names = {"1F1B": "one_f_one_b", "ZB-H1": "zb_h1", "ZB-V": "zb_v", "DualPipeV": "dualpipe_v"}
    said = words_of(README, "schedules 1F1B, ", ", each proved")
    there = {row for row in rows_of_table("csrc/pipe/schedules.inc", "DSC_SCHEDULE") if not row.startswith("inference")}
    return compare({names.get(word, word.lower()) for word in ["1F1B", *said]}, there)


def schedules_of_rates() -> list[str]:
    ours = [kind.name for kind in SCHEDULES.values() if kind.params is not None]
    return compare(words_of(README, "| schedules | ", " |"), ours)


def monitors() -> list[str]:
    names = {"W&B": "wandb", "CSV": "csv_monitor", "JSON lines": "jsonl"}
    said = words_of(CHANGELOG, "- Monitors for ", ":")
    return compare({names.get(word, word.lower()) for word in said}, MONITORS)


def runners() -> list[str]:
    names = {"ssh": "pdsh", "Open MPI": "openmpi", "Intel MPI": "impi"}
    said = words_of(README, "| several hosts | one command over ", ", or the same command")
    return compare({names.get(word, word.lower()) for word in said}, RUNNERS)


def commands_of_the_changelog() -> list[str]:
    text = (ROOT / CHANGELOG).read_text(encoding="utf-8")
    return compare(
        re.findall(r"`(\w+)`", text.partition("- The command `deepspeed_c`: launch, ")[2].partition("\n")[0]), COMMANDS
    )


def ratios_of_the_readme() -> list[str]:
    rows = rows_between(README, "<!-- figures: written by benchmarks/report.py -->", "<!-- /figures -->")
    return [] if len(rows) == 8 else [f"{len(rows)} rows"]


def ratios_said_twice() -> list[str]:
    """Ratios of the comparison at the top of the README that differ from the table of figures."""
    text = (ROOT / README).read_text(encoding="utf-8")
    pairs = {
        "| a step of `transformers.Trainer` at stage 3, ": (
            "stage 3: time of a step over",
            "stage 3: peak memory of a",
        ),
        "| a step at stage 3, 29M GPT, ": ("training step at stage 3, 29M GPT, fp32, 2 ranks: over FSDP2",),
    }
    found = []
    for beginning, figures in pairs.items():
        (row,) = (line for line in text.splitlines() if line.startswith(beginning))
        said = re.findall(r"(0\.\d\d) of its", row)
        rows = [next(line for line in text.splitlines() if figure in line) for figure in figures]
        medians = [f"{float(line.split(' | ')[2].split()[0]):.2f}" for line in rows]
        found += [] if said == medians else [f"{row}: {medians}"]
    return found


def errors_that_are_only_ours() -> list[str]:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) > 20
    base = errors.DeepSpeedCError
    found = [
        each.__name__
        for each in kinds
        if each is not base
        and not (issubclass(each, base) and any(a.__module__ == "builtins" for a in each.__mro__[1:-3]))
    ]
    found += [] if issubclass(errors.ConfigError, ValueError) else ["ConfigError"]
    return found + [] if issubclass(errors.FeatureError, NotImplementedError) else [*found, "FeatureError"]


def unknown_commits() -> list[str]:
    """Commits of figures outside the history."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / README, *files("*.md", PERFORMANCE)))
    found = set(re.findall(r"(?:\| |Commit )([0-9a-f]{7})(?=(?: and changes)?(?: \||, 20))", text))
    # A number of seven digits may stand in a table too.
    cited = {commit for commit in found if not commit.isdecimal()}
    assert len(cited) > 10, cited
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs a git checkout with its whole history: a shallow clone lacks the commits of figures")
    return sorted(commit for commit in cited if git("merge-base", "--is-ancestor", commit, "HEAD").returncode)


def seconds_of_an_item() -> list[str]:
    return [] if item_limits.ITEM_SECONDS == 120 else [f"{item_limits.ITEM_SECONDS} s"]


def steps_between_digests() -> list[str]:
    return [] if inputs.EVERY == 100 else [f"each {inputs.EVERY} steps"]


def elements_of_a_swap_buffer() -> list[str]:
    return [] if offload_file.SWAP_ELEMS == 4 << 20 else [f"{offload_file.SWAP_ELEMS} elements"]


def hours_of_the_benchmarks() -> list[str]:
    """A whole run takes the sum of the last runs."""
    firsts = [path.read_text(encoding="utf-8").partition("\n")[0] for path in files("*.jsonl", "benchmarks/results")]
    hours = sum(json.loads(first)["origin"]["seconds"] for first in firsts) / 3600
    return [] if 2.5 < hours < 3.5 else [f"{hours:.1f} hours"]


def seconds_of_the_watchdog() -> list[str]:
    seconds = load_config({}, world_size=1, batch="skip").collective_timeout_s
    return [] if seconds == 30 else [f"{seconds} s"]


def decorated_methods_of_torch() -> list[str]:
    methods = [
        node.name
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(torch.optim.Optimizer))))
        if isinstance(node, ast.FunctionDef)
        and any("_disable_dynamo" in ast.unparse(each) for each in node.decorator_list)
    ]
    return [] if len(methods) == 4 else methods or ["none"]


STATEMENTS: list[tuple[str, str, Callable[[], list[str]]]] = [
    (ARCHITECTURE, "is the only place that knows what a stage number means", compared_stages),
    (ARCHITECTURE, "every environment variable that is read by its name", read_variables),
    (
        ARCHITECTURE,
        "The cores read no environment variable",
        lambda: matches(r"\b(?:secure_)?getenv\(", sources_of_cores()),
    ),
    (ARCHITECTURE, "no core prints, no loop starts a thread", threads_of_loops),
    (
        ARCHITECTURE,
        "`csrc` knows neither torch nor Python",
        lambda: matches(r"#include [<\"](?:torch|ATen|c10|Python|pybind11)[^\n]*", sources_of_cores()),
    ),
    (ARCHITECTURE, "| folder of `csrc` | what it holds |", folders_of_csrc),
    (ARCHITECTURE, "| folder of `deepspeed_c` | duty |", parts_of_the_package),
    (ARCHITECTURE, "**Extension points are tables.**", tables_of_csrc),
    (README, "`ops/binding` is the only C++", other_cplusplus),
    (README, "| optimizers in C | Adam, AdamW,", optimizers_in_c),
    (README, "schedules 1F1B, interleaved,", schedules_of_pipelines),
    (README, "| schedules | LRRangeTest,", schedules_of_rates),
    (README, "one command over ssh, Open MPI,", runners),
    (README, "The table has eight ratios", ratios_of_the_readme),
    (README, "| a step of `transformers.Trainer` at stage 3, 2 CPU ranks |", ratios_said_twice),
    (README, "the smallest and the largest round, and the commit", unknown_commits),
    (README, "`make bench` measures everything again, in about 3 hours", hours_of_the_benchmarks),
    (README, "| wait for the timeout of NCCL or gloo | wait for it | end within 30 s,", seconds_of_the_watchdog),
    (ARCHITECTURE, "decorates four methods of `torch.optim.Optimizer`", decorated_methods_of_torch),
    (CHANGELOG, "- The command `deepspeed_c`: launch,", commands_of_the_changelog),
    (CHANGELOG, "- Monitors for TensorBoard,", monitors),
    (
        "docs/concepts/communication.md",
        "The engine communicates only through methods of `Collectives`",
        collectives_of_torch,
    ),
    ("docs/concepts/zero.md", "and at every hundredth step, these ranks compare digests", steps_between_digests),
    ("docs/concepts/zero.md", "in *swap buffers* of at most 4 Mi elements", elements_of_a_swap_buffer),
    (
        "docs/migrating-from-deepspeed.md",
        "Every error of deepspeed_c is a `DeepSpeedCError` with the attributes `what`, `where` and `fix`.",
        errors_that_are_only_ours,
    ),
    ("CONTRIBUTING.md", "A test that has not ended after 120 s is killed", seconds_of_an_item),
]


@pytest.mark.parametrize(
    ("document", "statement", "check"), STATEMENTS, ids=[row[2].__name__ + row[1][:30] for row in STATEMENTS]
)
def test_statement_holds(document: str, statement: str, check: Callable[[], list[str]]) -> None:
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    assert statement in text, f"{document} no longer says: {statement}"
    found = check()
    assert not found, f"{document} says: {statement}. But:\n" + "\n".join(found)
