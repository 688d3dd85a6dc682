"""Checks the direction of imports in Python (docs/architecture.md).

Importing the package must be cheap, silent and free of side effects.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A part of the package -> the parts it may import. A part is a folder or a file directly below deepspeed_c/; ops/ is
# the part "ops". Every part may import itself and the leaves. A part that is not listed may import no other part.
LEAVES = {
    "errors",
    "_version",
    "env",
    "command_line",
    "listening",
    "buffers",
    "saved_tensors",
    "scheduled",
    "background",
    "step_file",
    "guarded",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "env": set(),
    "listening": set(),
    "scheduled": set(),
    "background": set(),
    "step_file": set(),
    "buffers": set(),
    "saved_tensors": set(),
    "arguments": set(),
    "command_line": set(),
    "quantity": set(),
    "script": set(),
    "cgroups": set(),
    "processor": set(),
    "guard": set(),
    "guarded": set(),
    "threads": {"_C", "cgroups"},
    "alias": set(),
    "_C": set(),
    "ops": {"_C", "processor"},
    "config": {"logging", "quantity"},
    "logging": set(),
    "accelerator": {"config", "ops", "_C", "cgroups"},
    "comm": {"config", "logging", "accelerator", "ops", "_C"},
    "recompute": {
        *("saved_tensors", "config", "logging", "comm", "accelerator", "ops", "_C"),
        *("inject", "offload", "quantity"),
    },
    "lr_schedules": {"config", "logging"},
    "checkpoint": {"config", "logging", "_C"},
    "data": {"config", "logging", "comm", "accelerator", "checkpoint", "_C"},
    "profile": {"config", "logging", "comm", "accelerator", "ops", "_C"},
    "monitor": {"config", "logging", "comm", "observe"},
    "observe": {"comm"},
    "zero": {"saved_tensors", "inject", "config", "logging", "comm", "accelerator", "ops", "_C"},
    "utils": {"config", "logging", "comm", "accelerator", "zero", "data", "profile", "checkpoint"},
    "compat": {
        *("config", "logging", "comm", "accelerator", "zero", "checkpoint", "utils", "recompute", "monitor"),
        *("launcher", "compile", "autotuning", "ops"),
    },
    "offload": {"config", "logging", "comm", "ops", "_C", "zero"},
    "inject": {"config", "logging", "comm", "checkpoint", "ops", "_C", "quantity"},
    "compression": {"checkpoint", "config", "inject", "logging", "ops", "pipe", "quantity", "zero"},
    "distill": {"ops"},
    "sequence": {
        *("saved_tensors", "config", "logging", "comm", "ops", "_C"),
        *("zero", "recompute", "offload", "quantity", "inject"),
    },
    "weights": {"logging", "accelerator", "checkpoint", "zero"},
    "transfer": {"comm", "_C", "checkpoint", "zero", "weights"},
    "pipe": {
        "config",
        "logging",
        "comm",
        "accelerator",
        "utils",
        "recompute",
        "_C",
        "checkpoint",
        "offload",
        "weights",
        "zero",
    },
    "kv": {"ops", "_C"},
    "engine": {
        "kv",
        "pipe",
        "offload",
        "inject",
        "sequence",
        "config",
        "logging",
        "comm",
        "accelerator",
        "ops",
        "_C",
        "zero",
        "lr_schedules",
        "checkpoint",
        "recompute",
        "data",
        "profile",
        "monitor",
        "observe",
        "utils",
        "threads",
        "moe",
        "compile",
        "weights",
        "compression",
        "transfer",
        "quantity",
        "processor",
    },
    "compile": {"config", "logging", "_C", "script"},
    "moe": {"config", "logging", "comm", "ops", "_C", "zero", "recompute", "utils", "inject"},
    "inference": {
        *("config", "logging", "comm", "accelerator", "ops", "_C", "zero", "engine", "inject", "utils", "checkpoint"),
        *("offload", "weights", "compression", "kv", "threads"),
    },
    "serving": {"logging", "comm", "ops", "_C", "inference"},
    "server": {"config", "logging", "ops", "inject", "inference", "serving", "quantity"},
    "mii": {"config", "logging", "ops", "_C", "inject", "inference", "serving", "launcher"},
    "rollout": {"config", "logging", "quantity", "accelerator", "ops", "kv", "engine", "moe", "inference"},
    "plan": {
        *("config", "comm", "ops", "_C", "zero", "offload", "engine", "quantity", "inject", "recompute", "inference"),
        *("moe", "script", "pipe", "kv"),
    },
    "io": {"config", "ops", "_C", "quantity"},
    "bench": {"config", "comm", "quantity"},
    "autotuning": {"accelerator", "config", "logging", "plan", "engine", "profile", "cgroups", "quantity"},
    "calibration": {
        *("config", "logging", "accelerator", "comm", "ops", "engine", "quantity", "plan", "io", "bench", "autotuning"),
        "launcher",
    },
    "launcher": {
        *(
            "autotuning",
            "alias",
            "config",
            "logging",
            "plan",
            "checkpoint",
            "io",
            "bench",
            "inject",
            "sequence",
            "pipe",
            "threads",
        ),
        *("inference", "comm", "compression", "ops", "processor"),
    },
}
# The top modules put the parts together. Only they import one another.
TOP = {"__init__", "__main__", "initialize"}


def python_files() -> list[Path]:
    return [p for top in ("deepspeed_c", "ops") for p in sorted((ROOT / top).rglob("*.py"))]


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT).parts
    if relative[1:3] == ("compat", "alias"):
        return "alias"  # a separate part, because it starts without torch and the other modules of its folder do not
    return "ops" if relative[0] == "ops" else relative[1].removesuffix(".py")


def names_imported(path: Path) -> list[tuple[str, int]]:
    """(absolute dotted name, line) of every import, also those inside functions; `from a import b` gives a.b."""
    package = (
        ["deepspeed_c", *path.relative_to(ROOT).parts[:-1]]
        if path.is_relative_to(ROOT / "ops")
        else list(path.relative_to(ROOT).parts[:-1])
    )
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


# Names that Python's own modules have since 3.11 or later. The package runs on 3.10; typing_extensions has those of typing.
NEWER_THAN_3_10 = {
    *(
        f"typing.{name}"
        for name in ("LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack")
    ),
    *(f"typing.{name}" for name in ("assert_never", "assert_type", "dataclass_transform", "override", "reveal_type")),
    *("contextlib.chdir", "datetime.UTC", "enum.StrEnum", "itertools.batched", "tomllib"),
}


def test_names_of_newer_pythons_are_not_imported() -> None:
    files = [path for folder in ("deepspeed_c", "ops") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    newer = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for name, line in names_imported(path)
        if name in NEWER_THAN_3_10
    ]
    assert newer == []


def parts_imported(path: Path) -> list[tuple[str, int]]:
    known = set(MAY_IMPORT) | TOP
    parts = []
    for name, line in names_imported(path):
        top, *rest = name.split(".")
        if name.startswith("deepspeed_c.compat.alias"):
            parts.append(("alias", line))
        elif top == "deepspeed_c":
            # If x is no part, `from deepspeed_c import x` imports a public name of the top module.
            parts.append((rest[0] if rest and rest[0] in known else "__init__", line))
    return parts


def forbidden(path: Path) -> list[str]:
    part = part_of(path)
    if part in TOP:
        return []
    allowed = MAY_IMPORT[part] | LEAVES | {part}
    where = path.relative_to(ROOT)
    return [f"{where}:{line} imports {found}" for found, line in parts_imported(path) if found not in allowed]


def test_every_part_has_its_rule():
    parts = {part_of(path) for path in python_files()}
    assert parts <= set(MAY_IMPORT) | TOP, f"no rule for {sorted(parts - set(MAY_IMPORT) - TOP)}"


def test_imports_point_downwards():
    paths = python_files()
    assert len(paths) > 400
    found = [line for path in paths for line in forbidden(path)]
    assert not found, "\n".join(found)


def test_rules_have_no_cycle():
    def reaches(part: str, seen: frozenset[str] = frozenset()) -> set[str]:
        assert part not in seen, f"{part} imports itself by way of {sorted(seen)}"
        return set().union(*({p} | reaches(p, seen | {part}) for p in MAY_IMPORT[part])) if MAY_IMPORT[part] else set()

    for part in MAY_IMPORT:
        assert part not in reaches(part)


def test_the_check_finds_what_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = tmp_path / "deepspeed_c" / "comm" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "def f():\n    from deepspeed_c.engine import engine\n    from ..zero import unit\n    from deepspeed_c import initialize\n"
    )
    assert [line.split(" imports ")[1] for line in forbidden(bad)] == ["engine", "zero", "initialize"]


# Parts that work without torch. launcher/run.py starts the ranks, and is loaded only after all arguments have been
# checked; so is launcher/meeting.py.
TORCH_FREE = {
    "errors",
    "_version",
    "env",
    "arguments",
    "command_line",
    "quantity",
    "alias",
    "cgroups",
    "config",
    "launcher",
    "logging",
    "threads",
}
LOADED_LATE = {
    ROOT / "deepspeed_c" / "launcher" / name for name in ("run.py", "meeting.py", "chair.py", "presiding.py")
}


def test_what_starts_without_torch_does_not_name_it():
    # Imports of torch inside functions are allowed: `deepspeed_c report` prints the version of torch.
    found = []
    for path in python_files():
        if part_of(path) not in TORCH_FREE or path in LOADED_LATE:
            continue
        at_top = [
            node.lineno for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        found += [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for name, line in names_imported(path)
            if line in at_top and name.split(".")[0] in ("torch", "numpy")
        ]
    assert found == []


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout


def test_import_needs_no_torch_and_says_nothing():
    assert run("import deepspeed_c, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules") == ""


def test_import_loads_next_to_nothing():
    out = run("import sys; before = set(sys.modules); import deepspeed_c; print(*sorted(set(sys.modules) - before))")
    ours = {name for name in out.split() if name.startswith("deepspeed_c")}
    assert ours == {"deepspeed_c", "deepspeed_c._version"}


@pytest.mark.parametrize("name", ["errors", "config", "launcher.main", "arguments", "logging", "env", "threads"])
def test_part_without_torch(name):
    assert run(f"import deepspeed_c.{name}, sys; assert 'torch' not in sys.modules") == ""


def test_all_of_it_says_nothing_and_starts_nothing():
    """Importing all modules gives no output, no child process, no thread of this package, no CUDA context and no open
    file.
    """
    code = (
        "import os, subprocess, sys, threading, torch\n"
        "def audit(event, args):\n"
        "    if event in ('subprocess.Popen', 'os.system', 'os.fork', 'os.posix_spawn', 'os.exec'): raise AssertionError(event)\n"
        "sys.addaudithook(audit)\n"
        "files = len(os.listdir('/proc/self/fd'))\n"
        "import deepspeed_c\n"
        "deepspeed_c.initialize, deepspeed_c.ops, deepspeed_c.zero, deepspeed_c.utils, deepspeed_c._C\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert len(os.listdir('/proc/self/fd')) == files, os.listdir('/proc/self/fd')\n"
    )
    assert run(code) == ""


def test_missing_extension_is_a_build_error_that_says_what_to_do():
    code = (
        "import sys, deepspeed_c\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'deepspeed_c._C': raise ModuleNotFoundError('hidden', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "try: from deepspeed_c.ops.adam import FusedAdam\n"
        "except deepspeed_c.BuildError as error: print(error)\n"
    )
    out = run(code)
    assert "cannot be loaded" in out and "pip install --no-build-isolation" in out
