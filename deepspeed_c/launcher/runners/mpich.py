"""MPICH's mpiexec, over ssh."""

from __future__ import annotations

from deepspeed_c.launcher.runners.hydra import HydraRunner

__all__ = ["MpichRunner"]


class MpichRunner(HydraRunner):
    """Runs MPICH's ``mpiexec``, which is Hydra."""

    name = "mpich"
    package = "MPICH (Debian: apt-get install mpich openssh-client)"
    programs = ("mpiexec.mpich", "mpirun.mpich", "mpiexec.hydra", "mpiexec", "mpirun")
    says = "HYDRA build details"
