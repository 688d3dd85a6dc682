"""What starts the agents of the hosts, by its name on the command line: one file each."""

from __future__ import annotations

import difflib

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.runners.impi import IntelMpiRunner
from deepspeed_c.launcher.runners.mpich import MpichRunner
from deepspeed_c.launcher.runners.mvapich import MvapichRunner
from deepspeed_c.launcher.runners.openmpi import OpenMpiRunner
from deepspeed_c.launcher.runners.pdsh import PdshRunner
from deepspeed_c.launcher.runners.runner import HostRunner
from deepspeed_c.launcher.runners.slurm import SrunRunner

__all__ = ["RUNNERS", "find_runner"]

RUNNERS: dict[str, type[HostRunner]] = {
    "pdsh": PdshRunner,
    "openmpi": OpenMpiRunner,
    "mpich": MpichRunner,
    "impi": IntelMpiRunner,
    "mvapich": MvapichRunner,
    "slurm": SrunRunner,
}


def find_runner(name: str) -> HostRunner:
    """A new runner of that name. Raises LaunchError for an unknown one."""
    if name not in RUNNERS:
        near = difflib.get_close_matches(name, RUNNERS, n=1)
        raise LaunchError(
            "is no launcher" + (f" (did you mean {near[0]!r}?)" if near else ""),
            where=f"--launcher {name}",
            fix=f"name one of {', '.join(RUNNERS)}",
        )
    return RUNNERS[name]()
