"""The test files that recent changes may break, nearest first.

A change of a file reaches the files that import it, the test at its path (``deepspeed_c/a/b.py``, ``tests/deepspeed_c/a/test_b.py``),
and of C code the files that include it and the tests of its folder. Imports are read from the text, so that nothing is
run to find them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["changed", "reached", "touched"]

DAYS = 2
FOLDERS = ("deepspeed_c", "tests", "benchmarks", "examples", "scripts", "csrc")
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+)|import[ \t]+([^\n]+))", re.MULTILINE
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_GIT_SECONDS = 300


def touched(root: Path) -> list[str]:
    """Test files that the last two days of history and uncommitted changes reach, nearest and newest change first."""
    texts = {
        path.relative_to(root).as_posix(): path.read_text(errors="replace")
        for folder in FOLDERS
        for pattern in ("*.py", "*.c", "*.h", "*.inc", "*.cu", "*.cuh")
        for path in (root / folder).rglob(pattern)
        if "build" not in path.relative_to(root).parts
    }
    return [file for file in reached(changed(root), texts) if Path(file).name.startswith("test_")]


def changed(root: Path) -> list[str]:
    """Paths of files with uncommitted changes, then of files in the commits of the ``DAYS`` before the last commit, newest
    first. A commit without a parent, as in a clone of one commit, names each file of the tree and says nothing: it is
    left out. Without git nothing has changed.
    """

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(root), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
        return [line for line in done.stdout.splitlines() if line]

    try:
        newest = int(git("show", "-s", "--format=%ct", "HEAD")[0])
        paths = git("diff", "--name-only", "--relative", "HEAD")
        paths += git("ls-files", "--others", "--exclude-standard")
        since = f"--since={newest - DAYS * 86400}"
        paths += git("log", since, "--min-parents=1", "--name-only", "--relative", "--format=")
    except (OSError, subprocess.SubprocessError):
        return []
    return list(dict.fromkeys(paths))


def reached(changes: Iterable[str], texts: dict[str, str]) -> list[str]:
    """Files of ``texts`` (text by path) that ``changes`` reach. Files with few imports between come first, and at equal
    distance files of the first changes.
    """
    users: dict[str, list[str]] = {}
    for file, text in texts.items():
        for used in _uses(file, text, texts):
            users.setdefault(used, []).append(file)
    found = dict.fromkeys(changes)
    ring = list(found)
    while ring:
        ring = [
            user for user in dict.fromkeys(user for file in ring for user in users.get(file, ())) if user not in found
        ]
        found.update(dict.fromkeys(ring))
    return [file for file in found if file in texts]


def _uses(file: str, text: str, texts: dict[str, str]) -> Iterator[str]:
    """Paths of the files that ``file`` imports, includes or tests. A path may name no file."""
    path = Path(file)
    if path.suffix == ".py":
        for name in _imported(path, text):
            yield from (f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
    else:
        for name in _INCLUDE.findall(text):
            for folder in (path.parent, Path("csrc"), Path("csrc/include"), Path("tests/csrc")):
                yield (folder / name).as_posix()
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        yield Path(*path.parts[1:-1], path.name.removeprefix("test_")).as_posix()
        if path.suffix == ".c":
            folder = Path(*path.parts[1:-1])
            yield from (other for other in texts if Path(other).parent == folder)


def _imported(path: Path, text: str) -> Iterator[str]:
    """Full names of imported modules. ``from a import b`` gives ``a`` and ``a.b``: b may be a module or not."""
    for base, names, modules in _IMPORT.findall(text):
        if modules:
            yield from (each.split()[0] for each in modules.split("#")[0].split(",") if each.split())
            continue
        dots = len(base) - len(base.lstrip("."))
        if dots:
            base = ".".join((*path.parent.parts[: len(path.parent.parts) - dots + 1], *filter(None, [base[dots:]])))
        yield base
        names = re.sub(r"#[^\n]*", "", names)
        yield from (f"{base}.{each.split()[0]}" for each in names.strip("()").split(",") if each.split())
