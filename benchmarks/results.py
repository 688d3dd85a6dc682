"""Results on disk: a line with commit, state of the tree, date and machine, and then the JSON lines of the benchmark.

Also says whether the code has changed since.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RESULTS", "WRITTEN", "Origin", "Result", "age", "commit_of", "commits_since", "is_dirty", "load", "store"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# Files that a run of benchmarks writes. Changes to these files do not make the tree dirty.
WRITTEN = (
    "benchmarks/results",
    "docs/performance.md",
    "docs/performance",
    "docs/images/memory_by_stage.svg",
    "README.md",
)

Line = dict[str, Any]


class Origin(NamedTuple):
    """The origin of results."""

    commit: str  # "" outside a repository
    is_dirty: bool  # the measured code differs from that commit
    date: str  # UTC, ISO 8601
    machine: str
    seconds: int  # duration of the run
    skipped: str = ""  # reason why there are no lines

    def __str__(self) -> str:
        return f"{self.commit[:7] or 'no commit'}{' and changes' if self.is_dirty else ''}"


class Result(NamedTuple):
    origin: Origin
    lines: list[Line]


def load(name: str) -> Result | None:
    """Return the stored results, or None if the benchmark never ran."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return None
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Result(Origin(**first["origin"]), lines)


def store(name: str, result: Result) -> None:
    RESULTS.mkdir(exist_ok=True)
    rows = [{"origin": result.origin._asdict()}, *result.lines]
    (RESULTS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def git(*args: str) -> str | None:
    """Return git's output; None where it fails, as outside a repository or without git."""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def commit_of() -> str:
    return git("rev-parse", "HEAD") or ""


def is_dirty() -> bool:
    """Return whether files outside ``WRITTEN`` differ from the commit."""
    return bool(git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN)))


def commits_since(origin: Origin, paths: Sequence[str]) -> int | None:
    """Return the number of commits to the measured code since ``origin``; None if its commit is not in this history."""
    if not origin.commit or git("merge-base", "--is-ancestor", origin.commit, "HEAD") is None:
        return None
    found = git("rev-list", "--count", f"{origin.commit}..HEAD", "--", *paths)
    return None if found is None else int(found)


def age(origin: Origin, paths: Sequence[str]) -> str:
    """Return changes of the measured code since ``origin``, in words; "" when there are none."""
    n_commits = commits_since(origin, paths)
    if n_commits is None:
        return f"{origin} is not in this history"
    parts = []
    if origin.is_dirty:
        parts.append("measured with changes that were not committed")
    if n_commits:
        parts.append(f"{n_commits} commits since {origin}")
    if git("status", "--porcelain", "--", *paths):
        parts.append("changes that are not committed")
    return ", ".join(parts)
