"""The build checks its requirements before it starts. An error names the missing requirement and the remedy."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

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


# Writes its arguments to $CALLS. For the question for the cache's folder it answers, otherwise it runs the compiler.
CCACHE = """#!/bin/sh
if [ "$1" = -k ]; then echo "$CACHE_FOLDER"; exit; fi
printf '%s\\n' "$*" >> "$CALLS"
exec "$@"
"""
# Writes its arguments to $COMPILED, and makes an object that depends on its source.
COMPILER = """#!/bin/sh
if [ "$1" = -dumpmachine ]; then gcc "$1"; exit; fi
printf '%s\\n' "$*" >> "$COMPILED"
while [ $# -gt 1 ]; do case "$1" in -o) made=$2;; -c) source=$2;; c++-header) source=$2;; esac; shift; done
echo > "$made" && echo "$made: $source" > "${made%.*}.d"
"""


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A compiler cache on PATH, and a C++ compiler, each a script that lists its calls."""
    for name, text in (("ccache", CCACHE), ("recorded-g++", COMPILER)):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name, value in (("CALLS", "calls"), ("COMPILED", "compiled"), ("CACHE_FOLDER", "cache")):
        monkeypatch.setenv(name, str(tmp_path / value))
    for name in ("CC", "CXXFLAGS", "DSC_CCACHE", "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "recorded-g++"))
    monkeypatch.setenv("DSC_BUILD_CUDA", "0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def lines(path: Path) -> list[str]:
    """The lines of a list of calls, which this empties. Threads write them in any order."""
    found = sorted(path.read_text().splitlines()) if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def compile_binding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let setup.py compile the binding as a build does."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    found = runpy.run_path(str(ROOT / "setup.py"))
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ops" / "binding").glob("*.cpp"))
    command = SimpleNamespace(include_dirs=[sysconfig.get_path("include")])
    found["BuildExtension"]._compile(command, found["Tools"].find(), sources, folder)


def test_the_compiler_cache_serves_all_of_the_binding(cached, monkeypatch):
    n = len(list((ROOT / "ops" / "binding").glob("*.cpp"))) + 1  # and the precompiled header
    compile_binding(cached / "a", monkeypatch)
    compiled, calls = lines(cached / "compiled"), lines(cached / "calls")
    print(len(compiled), n)
    assert len(compiled) == n and calls == [f"{os.environ['CXX']} {words}" for words in compiled]


@pytest.mark.parametrize("reason", ["DSC_CCACHE=0", "no ccache", "a cache folder that cannot be made"])
def test_without_the_compiler_cache_commands_are_the_same(cached, monkeypatch, reason):
    compile_binding(cached / "a", monkeypatch)
    with_cache = lines(cached / "compiled")
    assert lines(cached / "calls")
    if reason == "DSC_CCACHE=0":
        monkeypatch.setenv("DSC_CCACHE", "0")
    elif reason == "no ccache":
        (cached / "bin" / "ccache").write_text("#!/bin/sh\nexit 127\n")
    else:
        monkeypatch.setenv("CACHE_FOLDER", "/proc/nowhere/cache")
    compile_binding(cached / "a", monkeypatch)
    assert lines(cached / "compiled") == [], "compiled again, because the command for comparison has changed"
    compile_binding(cached / "b", monkeypatch)
    assert lines(cached / "calls") == []
    without = [line.replace(f"{cached}/b/", f"{cached}/a/") for line in lines(cached / "compiled")]
    assert without == with_cache and f'-DDSC_BUILD_COMPILER="{os.environ["CXX"]}"' in without[0].replace("'", "")


def test_a_copy_of_the_objects_serves_a_build_elsewhere(cached, monkeypatch):
    compile_binding(cached / "a", monkeypatch)
    assert lines(cached / "compiled")
    for path in (cached / "a").glob("*.d"):
        assert all(Path(name).is_absolute() for name in path.read_text().split(":")[1].split()), path.read_text()
    shutil.copytree(cached / "a", cached / "b")
    compile_binding(cached / "b", monkeypatch)
    assert lines(cached / "compiled") == []


def make_csrc(*words: str, **environment: str) -> str:
    command = ["make", "-s", "--no-print-directory", "-C", str(ROOT / "csrc"), *words]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300).stdout


def test_the_compiler_cache_serves_c_and_misses_no_dependency(cached):
    build = os.path.relpath(cached / "csrc", ROOT / "csrc")
    made = f"{build}/once/base/check.o"
    words = [f"BUILD={build}", made]
    assert "CC once/base/check.o" in make_csrc(*words)
    (call,) = lines(cached / "calls")
    assert call.endswith(f"-c base/check.c -o {made}") and str(ROOT) not in call, call
    assert make_csrc(*words) == "" == make_csrc(*words, DSC_CCACHE="0")
    listed = (cached / "csrc" / "once" / "base" / "check.d").read_text().splitlines()
    header = next(line.removesuffix(":") for line in listed if line.endswith(".h:"))
    assert "CC once/base/check.o" in make_csrc(*words, "-W", header, DSC_CCACHE="0")
    assert lines(cached / "calls") == []


def test_the_package_and_the_c_tests_link_the_same_objects():
    def commands(*words: str) -> set[str]:
        said = make_csrc("-n", "-B", *words).splitlines()
        return {line for line in said if " -c " in line and "tests/" not in line.split(" -c ")[1]}

    tests, package = commands("programs"), commands("BUILD=../build/objects/csrc", "all")
    print(len(tests), len(package))
    assert package and tests == package
    assert all("-Werror" in line for line in tests)
    assert not any("-Werror" in line for line in commands("BUILD=../build/temp.linux/csrc", "all"))


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
