"""Intel MPI's mpiexec, over ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import ClassVar

from deepspeed_c.env import read_env
from deepspeed_c.launcher.runners.hydra import HydraRunner
from deepspeed_c.launcher.runners.mpi import installed

__all__ = ["IntelMpiRunner"]


class IntelMpiRunner(HydraRunner):
    """Runs Intel MPI's ``mpiexec.hydra``, which speaks Hydra's command line and has variables of its own."""

    name = "impi"
    package = "Intel MPI, and source its setvars.sh (https://www.intel.com/content/www/us/en/developer/tools/oneapi/mpi-library.html)"
    programs = ("mpiexec.hydra", "mpirun", "mpiexec")
    says = r"Intel\(R\) MPI Library"
    settings: ClassVar[Mapping[str, str]] = {
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        # Otherwise a batch system's number of processes a host would win over that of the command line.
        "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0",
    }
    ssh_variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
    agent_settings: ClassVar[Mapping[str, str]] = {"I_MPI_PIN": "0"}  # agents bind their ranks themselves

    def paths(self) -> Iterator[str]:
        if root := read_env().impi_root:
            yield from installed(self.programs, [os.path.join(root, "bin")])
        yield from super().paths()
