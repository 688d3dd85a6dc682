"""Finds the ``mpirun`` of one MPI by its version text, because several MPIs may be installed."""

from __future__ import annotations

import os
import re
import subprocess
from abc import ABC
from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.runners.pdsh import ssh_command
from deepspeed_c.launcher.runners.runner import HostRunner

__all__ = ["MpiRunner", "ssh_words"]

VERSION_SECONDS = 20


class MpiRunner(HostRunner, ABC):
    """The program of an MPI. It starts the agents as if they were processes of MPI, one on each host."""

    programs: ClassVar[tuple[str, ...]]
    """Names of the program, those of no other MPI first."""
    says: ClassVar[str]
    """Regular expression for the output of ``PROGRAM --version``."""

    def program(self) -> str | None:
        return next((path for path in self.paths() if re.search(self.says, version_of(path))), None)

    def paths(self) -> Iterator[str]:
        """The programs with one of the names, in the order of the names, then of the folders of PATH."""
        return installed(self.programs, os.get_exec_path())

    def check(self) -> None:
        if self.program() is None:
            said = {path: version_of(path).strip() for path in self.paths()}
            others = ", ".join(f"{path} is {text.splitlines()[0]}" for path, text in said.items() if text)
            raise LaunchError(
                "is not installed here" + (f" ({others})" if others else ""),
                where=f"--launcher {self.name}",
                fix=f"install {self.package}",
            )


def installed(names: Sequence[str], folders: Sequence[str]) -> Iterator[str]:
    """The paths of the programs with these names in these folders, by name and then by folder."""
    for name in names:
        for folder in folders:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                yield path


@cache
def version_of(path: str) -> str:
    """What ``path --version`` prints; "" if it prints nothing within VERSION_SECONDS, or cannot be started."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=VERSION_SECONDS,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def ssh_words(job: Job) -> str:
    """The words between ssh and the host, for a program that starts ssh itself and splits them at spaces."""
    words = ssh_command(job.options.ssh_port)[1:]
    for word in words:
        if not word or any(c.isspace() for c in word):
            raise LaunchError(
                f"{word!r} cannot be passed on: {job.options.launcher} splits the words for ssh at every space",
                where="PDSH_SSH_ARGS_APPEND",
                fix="put the option into ~/.ssh/config",
            )
    return " ".join(words)
