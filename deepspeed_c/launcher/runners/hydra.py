"""Hydra, the process manager of MPICH and of the MPIs that come from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.runners.mpi import MpiRunner, ssh_words
from deepspeed_c.launcher.runners.runner import Start

__all__ = ["HydraRunner"]


class HydraRunner(MpiRunner):
    """Runs Hydra's ``mpiexec`` with one process for each host. Variables reach the hosts by name (``-genvlist``), over
    Hydra's own connections.
    """

    settings: ClassVar[Mapping[str, str]] = {"HYDRA_LAUNCHER": "ssh"}
    """Variables for Hydra itself."""
    ssh_variable: ClassVar[str] = "HYDRA_LAUNCHER_EXTRA_ARGS"
    """Name of the variable with the words for ssh."""
    agent_settings: ClassVar[Mapping[str, str]] = {}
    """Variables for the part of the MPI that starts an agent."""

    def start(self, job: Job, job_file: str) -> Start:
        environment = {**self.job_environment(job), **self.agent_settings}
        words = ["-hosts", ",".join(job.hosts), "-n", str(len(job.hosts)), "-ppn", "1", "-wdir", job.folder]
        words += ["-genvlist", ",".join(environment)]
        settings = {**self.settings, self.ssh_variable: ssh_words(job)}
        command = [self.program() or "mpiexec", *words, *self.more_words(job), *self.agent(job)]
        return Start(command, {**environment, **settings})
