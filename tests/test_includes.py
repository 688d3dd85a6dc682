"""Checks the direction of dependencies in C and C++: the files of each folder have only permitted includes, and each
public header compiles alone.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.waits import ran

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".c", ".h", ".inc", ".cpp", ".cu", ".cuh"}

# folder below csrc -> permitted includes in quotes of its files: a folder of ours, or one header.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "include": ("dsc/status.h", "dsc/types.h"), "base": ("base/", "dsc/"), "cpu": ("cpu/", "base/", "dsc/"),
    "zero": ("zero/", "base/", "dsc/"), "recompute": ("recompute/", "base/", "dsc/"), "compile": ("base/", "dsc/"),
    "tp": ("tp/", "cpu/", "base/", "dsc/"), "pipe": ("pipe/", "base/", "dsc/"), "plan": ("plan/", "base/", "dsc/"),
    "seq": ("seq/", "cpu/", "base/", "dsc/"), "scale": ("scale/", "base/", "dsc/"), "data": ("data/", "base/", "dsc/"),
    "quant": ("quant/", "cpu/", "base/", "dsc/"), "optim": ("optim/", "quant/", "cpu/", "base/", "dsc/"),
    "nn": ("nn/", "cpu/", "base/", "dsc/"), "infer": ("infer/", "nn/", "cpu/", "base/", "dsc/"), "moe": ("nn/", "cpu/", "base/", "dsc/"),
    "accel": ("accel/", "base/", "dsc/"), "aio": ("aio/", "base/", "dsc/"), "ckpt": ("ckpt/", "base/", "dsc/"),
    "sums": ("cpu/", "base/", "dsc/"), "comm": ("comm/", "cpu/", "base/", "dsc/"), "cuda": ("cuda/", "dsc/"),
}  # fmt: skip

# The table of an accelerator refers to spans and tensors, and gradients are spans. The umbrella header includes all
# headers.
MAY_INCLUDE_TOO: dict[str, tuple[str, ...]] = {
    "cuda/nn_math.cuh": ("cpu/gelu.inc",),  # a table of numbers that device and host share
    "cuda/quant_math.cuh": ("quant/format.h",),  # the scale of a group
    "include/dsc/sums.h": ("dsc/flat.h", "dsc/status.h", "dsc/types.h"),
    "include/dsc/accel.h": (
        "dsc/flat.h", "dsc/moe.h", "dsc/moe_calls.inc", "dsc/nn.h", "dsc/nn_calls.inc", "dsc/optim.h", "dsc/quant.h",
        "dsc/quant_calls.inc", "dsc/tp.h",
    ),
    "include/dsc/moe.h": ("dsc/moe_calls.inc",), "include/dsc/nn.h": ("dsc/activations.inc", "dsc/nn_calls.inc"),
    "include/dsc/quant.h": ("dsc/quant_calls.inc", "dsc/quant_formats.inc"), "include/dsc/intake.h": ("dsc/flat.h",),
    "include/dsc/dsc.h": ("dsc/",),
}  # fmt: skip

# <header> that only some files may name -> those files, as globs from the root. Everything else in <> is libc, or the C++ library in C++ files.
ONLY_IN: dict[str, tuple[str, ...]] = {
    r"(torch|ATen|c10)/": ("ops/binding/dsc_torch.*",), r"(pybind11/|Python\.h)": ("ops/binding/*",),
    r"(cuda|nccl|cub/|thrust/)": ("csrc/cuda/*",), r"dlfcn\.h": ("csrc/accel/*", "ops/binding/*"),
    r"pthread\.h": (
        "csrc/base/pool.c", "csrc/base/process.c", "csrc/cpu/dispatch.c", "csrc/ckpt/crc32c.c", "csrc/aio/threads.c",
        "csrc/comm/*",
    ),
    r"immintrin\.h": ("csrc/cpu/*", "csrc/nn/loops/mul_add.c"), r"(libaio|liburing)\.h": (),
}  # fmt: skip


def includes(path: Path) -> list[tuple[bool, str]]:
    """(whether it is in quotes, included name) of every include line."""
    return [(mark == '"', name) for mark, name in INCLUDE.findall(path.read_text())]


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCES]
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


def test_every_folder_has_its_rule() -> None:
    folders = {path.relative_to(CSRC).parts[0] for path in sources("csrc")}
    assert folders <= set(MAY_INCLUDE), f"no rule for {sorted(folders - set(MAY_INCLUDE))}"
    assert {"include", "base", "cpu", "zero", "scale", "optim"} <= folders


def test_cores_include_only_what_lies_below_them() -> None:
    wrong = []
    for path in sources("csrc"):
        name = path.relative_to(CSRC).as_posix()
        allowed = MAY_INCLUDE[name.split("/")[0]] + MAY_INCLUDE_TOO.get(name, ())
        for is_quoted, included in includes(path):
            if is_quoted and not any(
                included == rule or (rule.endswith("/") and included.startswith(rule)) for rule in allowed
            ):
                wrong.append(f"csrc/{name} includes {included}; it may include {', '.join(allowed)}")
    assert not wrong, "\n".join(wrong)


def test_public_headers_name_no_library() -> None:
    for path in sources("csrc/include"):
        named = {included for is_quoted, included in includes(path) if not is_quoted}
        assert named <= {"stddef.h", "stdint.h", "stdbool.h"}, f"{path.name} includes {sorted(named)}"


def test_the_binding_reaches_the_cores_through_their_headers() -> None:
    local = {path.name for path in sources("ops/binding")}
    for path in sources("ops/binding"):
        for is_quoted, included in includes(path):
            assert not is_quoted or included in local or re.fullmatch(r"dsc/\w+\.(h|inc)", included), (
                f"{path.name} includes {included}"
            )


@pytest.mark.parametrize("pattern", ONLY_IN)
def test_libraries_are_named_only_where_they_belong(pattern: str) -> None:
    for path in sources("csrc", "ops/binding"):
        name = path.relative_to(ROOT)
        if any(name.match(glob) for glob in ONLY_IN[pattern]):
            continue
        wrong = [included for is_quoted, included in includes(path) if not is_quoted and re.match(pattern, included)]
        assert not wrong, f"{name} includes {wrong}; only {ONLY_IN[pattern]} may"


@pytest.mark.limit(600, reason="compiles each header")
@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_public_headers_stand_alone(language: str) -> None:
    headers = sorted(path.name for path in sources("csrc/include") if path.suffix == ".h")
    assert len(headers) > 20
    tool = os.environ.get("CXX", "c++") if language == "c++17" else os.environ.get("CC", "cc")
    if shutil.which(tool.split()[0]) is None:
        pytest.skip(f"no {tool} on PATH")
    kind = "c++" if language == "c++17" else "c"
    options = [
        f"-std={language}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{CSRC / 'include'}",
    ]  # fmt: skip
    messages = []
    for header in headers:
        done = ran(
            [*tool.split(), *options, "-x", kind, "-"], input=f'#include "dsc/{header}"\n#include "dsc/{header}"\n'
        )
        if done.returncode != 0:
            messages.append(f"{header}: {done.stderr}")
    assert not messages, "\n".join(messages)


def test_the_cores_read_no_environment() -> None:
    """Only the Python package decides how much of the machine a process may use. It lists every variable in env.py."""
    reads = re.compile(r"\b(secure_)?getenv\b|\benviron\b")
    assert [path.name for path in sources("csrc", "ops/binding") if reads.search(path.read_text())] == []
    assert reads.search("x = getenv(name)") and not reads.search("fegetenv(&job.environment)")


def test_an_accelerator_is_named_in_the_registry_alone() -> None:
    """An accelerator is added by one line in dsc/accelerators.inc.

    Neither the binding nor the loader distinguishes accelerators.
    """
    names = re.findall(
        r"^DSC_ACCEL_LIBRARY\((\w+)", (CSRC / "include" / "dsc" / "accelerators.inc").read_text(), re.MULTILINE
    )
    assert names == ["cuda"]
    for path in sources("ops/binding", "csrc/accel"):
        if path.name == "handles_build.cpp":  # depends on the build, which makes each library separately
            continue
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert not re.search("|".join(names), code, re.IGNORECASE), f"{path.name} names an accelerator"


def test_no_file_needs_a_table_of_contents() -> None:
    """A file that needs banners should be two files."""
    banner = re.compile(r"^\s*(#|//|/\*)\s*(-{2,}|={2,}|\*{3,})", re.MULTILINE)
    paths = [
        *sources("csrc", "ops/binding"), *(ROOT / "ops").glob("*.py"), CSRC / "Makefile", CSRC / "cuda" / "cuda.mk",
    ]  # fmt: skip
    assert [path.name for path in paths if banner.search(path.read_text())] == []
    assert (
        banner.search("    # -- saving ---")
        and banner.search("/* ---- blocks ---- */")
        and not banner.search("x = 1 /* -- */")
    )
