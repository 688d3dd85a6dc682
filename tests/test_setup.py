"""The build checks its requirements before it starts. An error names the missing requirement and the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tools_only(tmp_path):
    """A folder with the compilers and make, but no nvcc, to serve as the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gcc", "g++", "make", "sh"):
        found = shutil.which(name)
        assert found, f"{name} is needed for this test"
        (folder / name).symlink_to(found)
    return folder


def build(tmp_path: Path, hide: str | None = None, **environment: str) -> str:
    """The standard error of a build that has to fail. The build uses temporary folders."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{hide!r}] = None\n" if hide else "")
    clean = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "MAKE", "NVCC", "DSC_BUILD_CUDA")}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-t", str(tmp_path / "t"), "-b", str(tmp_path / "b")],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(tmp_path), "DSC_BUILD_CUDA": "0", **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "BuildError" in done.stderr and "Fix: " in done.stderr, done.stderr
    assert not (tmp_path / "t" / "csrc").exists(), "something was compiled before all was there"
    return done.stderr.split("BuildError", 1)[1]


@pytest.mark.parametrize("variable, words", [("CC", "C compiler"), ("CXX", "C++ compiler"), ("MAKE", "make")])
def test_missing_program(tmp_path, variable, words):
    message = build(tmp_path, **{variable: "/nowhere/tool"})
    assert f"no {words}: '/nowhere/tool' is not on PATH" in message and variable in message


def test_empty_path_names_the_first_missing_tool(tmp_path):
    assert "build-essential" in build(tmp_path, PATH="/nowhere")


@pytest.mark.parametrize("name", ["torch", "pybind11"])
def test_missing_package(tmp_path, name):
    assert f"no {name} to build" in build(tmp_path, hide=name)


def test_old_torch(tmp_path):
    info = tmp_path / "torch-2.9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    assert "torch 2.9.1 is too old" in build(tmp_path)


def test_cuda_that_was_asked_for_and_is_not_there(tmp_path, tools_only):
    message = build(tmp_path, PATH=str(tools_only), CUDA_HOME="/nowhere", DSC_BUILD_CUDA="1")
    assert "DSC_BUILD_CUDA=1 and no nvcc" in message


def test_cuda_switch_has_two_positions(tmp_path):
    assert "DSC_BUILD_CUDA is 'yes'" in build(tmp_path, DSC_BUILD_CUDA="yes")


def test_metadata_agrees_with_itself():
    tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name] = version
    needs = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    needs += [need for extra in project["project"]["optional-dependencies"].values() for need in extra]
    for need in needs:
        name = need.split(">")[0].split("<")[0]
        assert name in pins, f"{need} is not pinned in constraints.txt"
        assert ">=" in need, f"{need} has no lower bound"
    # The oldest supported torch also stands in setup.py.
    assert "torch>=2.10,<3" in project["project"]["dependencies"]
    # torch asks for no numpy, and without it ranks cannot exchange objects (all_gather_object), so no engine starts.
    assert any(need.startswith("numpy>=") for need in project["project"]["dependencies"])
    assert "TORCH_MINIMUM = (2, 10)" in (ROOT / "setup.py").read_text()
