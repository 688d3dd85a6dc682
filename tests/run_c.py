"""Lets pytest run the C tests and fuzz targets. Every program is one item for each instruction set and each sanitizer.

``tests/csrc/conftest.py`` and ``tests/fuzz/conftest.py`` import `pytest_collect_file` from here. ``csrc/Makefile``
builds the programs once for each session and mode. A file lock lets several workers (pytest-xdist) share one build.
Programs exit 0 (passed), 1 (failed) or 77 (skipped).
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SKIPPED = 77
BUILD_TIMEOUT_S = 600
RUN_TIMEOUT_S = 600
FUZZ_RUNS = 3000

# Name of an item -> sanitizers of its build. "" is the plain build.
SANITIZERS = {"asan-ubsan": "address,undefined", "tsan": "thread"}


class ProgramFailed(Exception):
    """A C program or its build failed; the text is its output."""


def compiler() -> str:
    return os.environ.get("CC", "cc")


def missing_tools() -> str | None:
    """The reason why nothing can be built here, or None."""
    for tool in ("make", compiler().split()[0]):
        if shutil.which(tool) is None:
            return f"no {tool} on PATH"
    return None


def make(*args: str) -> str:
    """Run csrc/Makefile and return its output."""
    command = ["make", "-s", "--no-print-directory", "-C", str(CSRC), f"CC={compiler()}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ProgramFailed(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the Makefile builds for this architecture."""
    return tuple(make("isas").split())


@functools.cache
def programs(sanitizer: str) -> frozenset[str]:
    """Paths of this mode's programs, relative to the build folder."""
    return frozenset((make("list-tests", f"SAN={sanitizer}") + make("list-fuzz", f"SAN={sanitizer}")).split())


@functools.cache
def lacks_sanitizer(sanitizer: str) -> str | None:
    """The reason why the compiler cannot link a program with this sanitizer, or None."""
    done = subprocess.run(
        [*compiler().split(), f"-fsanitize={sanitizer}", "-x", "c", "-", "-o", os.devnull],
        input="int main(void) { return 0; }\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return None if done.returncode == 0 else f"{compiler()} cannot link with -fsanitize={sanitizer}"


@functools.cache
def build(sanitizer: str) -> Path:
    """Builds all programs of a mode and returns their folder. make finds the outdated files; the lock keeps two makes
    apart."""
    folder = CSRC / "build" / (f"san-{sanitizer.replace(',', '-')}" if sanitizer else "")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make("-j2", "programs", f"SAN={sanitizer}")
    return folder


@functools.cache
def runnable_sets() -> frozenset[str]:
    """The instruction sets that this processor runs."""
    done = subprocess.run(
        [build("") / "tests" / "csrc" / "list_isas"], capture_output=True, text=True, timeout=300, check=True
    )
    return frozenset(done.stdout.split())


class CFile(pytest.File):
    """One C test program, or one fuzz target."""

    def collect(self) -> Iterator[pytest.Item]:
        reason = missing_tools()
        if reason is not None:
            yield CItem.from_parent(self, name="build", missing=reason)
            return
        program = self.path.relative_to(ROOT).with_suffix("").as_posix()
        is_fuzz = self.path.name.startswith("fuzz_")
        for isa in () if is_fuzz else instruction_sets():
            yield CItem.from_parent(self, name=isa, program=program, isa=isa)
        for name, sanitizer in SANITIZERS.items():
            if program in programs(sanitizer) and not (is_fuzz and name == "tsan"):
                yield CItem.from_parent(self, name=name, program=program, sanitizer=sanitizer)


class CItem(pytest.Item):
    """One run of a program."""

    def __init__(
        self, *, program: str = "", isa: str = "", sanitizer: str = "", missing: str = "", **kwargs: object
    ) -> None:
        super().__init__(**kwargs)
        self.program = program
        self.isa = isa
        self.sanitizer = sanitizer
        self.missing = missing
        self.folder = Path()
        self.add_marker(pytest.mark.limit(BUILD_TIMEOUT_S + RUN_TIMEOUT_S + 60, reason="may build all programs"))
        if sanitizer == "thread" and "/comm/" in program:  # races are what these programs are about
            self.add_marker("always")

    def setup(self) -> None:
        """Builds all programs, for the first item of a mode: meter.py does not count it for this item."""
        reason = self.missing or (lacks_sanitizer(self.sanitizer) if self.sanitizer else None)
        if reason:
            pytest.skip(reason)
        self.folder = build(self.sanitizer)
        if self.isa and self.isa not in runnable_sets():
            pytest.skip(f"this processor does not run {self.isa}")

    def runtest(self) -> None:
        command = [str(self.folder / self.program)]
        if Path(self.program).name.startswith("fuzz_"):
            command += [f"-runs={FUZZ_RUNS}", str(ROOT / "tests" / "fuzz" / "corpus" / Path(self.program).name)]
        self.run_program(command)

    def run_program(self, command: list[str]) -> None:
        environment = {**os.environ, "DSC_CPU_ISA": self.isa}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as expired:
            raise ProgramFailed(f"{command[0]} did not end within {RUN_TIMEOUT_S} s") from expired
        output = done.stdout + done.stderr
        if "ThreadSanitizer: unexpected memory mapping" in output:
            pytest.skip(
                "this kernel randomises addresses further than this compiler's thread sanitizer can follow (vm.mmap_rnd_bits)"
            )
        if done.returncode == SKIPPED:
            pytest.skip(output.strip().splitlines()[-1] if output.strip() else "skipped by the program")
        if done.returncode != 0:
            raise ProgramFailed(f"DSC_CPU_ISA={self.isa} {' '.join(command)} exited with {done.returncode}\n{output}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        if isinstance(excinfo.value, ProgramFailed):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.name}::{self.name}"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> CFile | None:
    """Collects ``test_*.c`` one folder below tests/csrc, and ``fuzz_*.c``: the programs built by the Makefile."""
    is_test = file_path.match("tests/csrc/*/test_*.c")
    is_fuzz = file_path.match("tests/fuzz/fuzz_*.c")
    return CFile.from_parent(parent, path=file_path) if is_test or is_fuzz else None
