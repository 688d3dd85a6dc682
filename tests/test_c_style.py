"""C, C++ and CUDA are laid out as .clang-format says; `make format` does it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waits import ran

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".cpp"}
# The required version: other versions lay out some lines differently.
VERSION = re.search(r"^clang-format==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def formatter() -> str:
    """Path of clang-format: from the tests' environment, or the system's if it has the same version."""
    for path in (shutil.which("clang-format", path=str(Path(sys.executable).parent)), shutil.which("clang-format")):
        if path and VERSION in ran([path, "--version"], check=True).stdout:
            return path
    pytest.skip(f"clang-format {VERSION} is not installed")


def sources() -> list[str]:
    paths = [path for folder in ("csrc", "ops/binding") for path in sorted((ROOT / folder).rglob("*"))]
    return [str(path) for path in paths if path.suffix in SUFFIXES and "build" not in path.relative_to(ROOT).parts]


def test_sources_are_laid_out():
    assert len(sources()) > 100
    command = [formatter(), "--dry-run", "--Werror", *sources()]
    done = ran(command, cwd=ROOT)
    assert done.returncode == 0, f"run make format\n{done.stderr[-3000:]}"


def test_what_is_not_laid_out_is_found(tmp_path):
    shutil.copy(ROOT / ".clang-format", tmp_path)
    (tmp_path / "x.c").write_text("int  f( void ) { return 1; }\n")
    command = [formatter(), "--dry-run", "--Werror", str(tmp_path / "x.c")]
    assert subprocess.run(command, capture_output=True, check=False, timeout=300).returncode != 0
