"""MVAPICH's mpiexec, over ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator

from deepspeed_c.launcher.runners.hydra import HydraRunner
from deepspeed_c.launcher.runners.mpi import installed
from deepspeed_c.launcher.runners.runner import which

__all__ = ["MvapichRunner"]


class MvapichRunner(HydraRunner):
    """Runs MVAPICH's ``mpiexec``, which is Hydra and says nothing of MVAPICH: it is the program beside ``mpiname``."""

    name = "mvapich"
    package = "MVAPICH (https://mvapich.cse.ohio-state.edu), and put its bin folder on PATH"
    programs = ("mpiexec.hydra", "mpiexec", "mpirun")
    says = "HYDRA build details"

    def paths(self) -> Iterator[str]:
        if name := which(["mpiname"]):
            yield from installed(self.programs, [os.path.dirname(name)])
