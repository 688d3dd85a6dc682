"""A runner: a program of the cluster that starts one host agent on each host."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from deepspeed_c.env import JOB_VARIABLE, read_env
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.options import Options

__all__ = ["HostRunner", "Start"]

AGENT = "deepspeed_c.launcher.agent"


@dataclass(frozen=True, slots=True)
class Start:
    """A process that starts the agents, and ends when they have ended."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those of the launching command."""


class HostRunner(ABC):
    """One way to start the agents. Its program passes on their output and, where it can, their exit codes.

    Secrets must not be on a command line, which every user of a host can read: the job goes over stdin (pdsh) or in
    the environment.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    """What to install if the program is not there."""

    @abstractmethod
    def program(self) -> str | None:
        """The path of the program, or None if it is not installed."""

    @abstractmethod
    def start(self, job: Job, job_file: str) -> Start:
        """How to start the agents of ``job``, which ``job_file`` holds as JSON. Raises LaunchError where the program
        cannot do what the job asks."""

    def start_again(self, job: Job, job_file: str, host: str) -> Start:
        """How to start the agent of one host anew, while the others run. Raises LaunchError where the program cannot:
        it ends all agents when one host is lost.
        """
        raise LaunchError(
            "ends the agents of all hosts when one host is lost",
            where=f"--launcher {self.name} --elastic_training",
            fix="use pdsh, or --no_ssh on each host",
        )

    def allocated(self, options: Options) -> dict[str, int] | None:
        """Host -> its number of slots, in the allocation of the batch system that the launching command is in. None if
        it is in no allocation. Raises LaunchError if the allocation does not say the number of slots.
        """
        return None

    def labels_hosts(self) -> bool:
        """Whether the program begins every line of output with ``HOST: ``."""
        return False

    def check(self) -> None:
        """Raises LaunchError if the program is not installed."""
        if self.program() is None:
            raise LaunchError("is not installed here", where=f"--launcher {self.name}", fix=f"install {self.package}")

    def agent(self, job: Job, *words: str) -> list[str]:
        """The command line of an agent, to be run on its host by ``execve``, without a shell."""
        command = [sys.executable, "-u", "-m", AGENT, *words]
        if job.options.venv_script is None:
            return command
        # $0 is the first word of the command
        return ["bash", "-c", f'. {shlex.quote(job.options.venv_script)} && exec "$0" "$@"', *command]

    def job_environment(self, job: Job) -> dict[str, str]:
        """The variables for a program that passes variables on by name: the job, and those of the ranks."""
        return {**job.environment, JOB_VARIABLE: job.without_environment().to_json()}

    def more_words(self, job: Job) -> list[str]:
        """The words of --launcher_args. Raises LaunchError for a quotation that does not end."""
        try:
            return shlex.split(job.options.launcher_args)
        except ValueError as error:
            raise LaunchError(
                f"cannot be split into words: {error}",
                where=f"--launcher_args {job.options.launcher_args}",
                fix="quote it as for a shell",
            ) from error


def which(names: Sequence[str]) -> str | None:
    """The path of the first of these programs that is installed."""
    return next((path for name in names if (path := shutil.which(name))), None)


def python_path() -> str:
    """PYTHONPATH for agents and ranks: the working directory, as DeepSpeed has it, then the launching command's."""
    return os.pathsep.join(filter(None, (os.getcwd(), read_env().python_path or "")))
