"""A job and programs for tests of the launcher's runners that start nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.options import parse_options

__all__ = ["install", "job", "words_after"]


def job(**options: Any) -> Job:
    """A job on the hosts ``one`` and ``two``, which have different numbers of slots. options: fields of ``Options``."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return Job(
        options=parse_options([*words, "train.py", "se cret"]),
        hosts={"one": [0, 1, 2], "two": [1]},
        environment={"A": "se cret", "PYTHONPATH": "/work folder"},
        folder="/work folder",
        token="t0ken",
        store=("10.0.0.1", 1234),
    )


def install(folder: Path, says: Mapping[str, str]) -> dict[str, str]:
    """Makes programs in ``folder`` that print a text. Returns their paths by name."""
    paths = {}
    for name, text in says.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)
        paths[name] = str(path)
    return paths


def words_after(command: Sequence[str], word: str) -> list[str]:
    """Each word that follows ``word`` in a command line."""
    return [after for before, after in pairwise(command) if before == word]
