"""``deepspeed.launcher.multinode_runner``: DeepSpeed's classes of runners, over those of the launcher.

``get_cmd`` returns a command line of ``deepspeed_c``, which presides over the host agents until they have ended. Run it
on one host, as DeepSpeed's launcher runs the command lines of its own classes.
"""

from __future__ import annotations

import os
import shlex
import sys
from abc import ABC
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from deepspeed_c.launcher.exports import EXPORT_VARIABLE
from deepspeed_c.launcher.runners import find_runner

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]

_FLAGS = ("module", "no_python", "no_local_rank", "save_pid", "bind_cores_to_rank", "elastic_training")
_VALUES = ("ssh_port", "venv_script", "master_addr", "master_port", "enable_each_rank_log", "bind_core_list")


class MultiNodeRunner(ABC):
    """Makes the command line of a launch on several hosts.

    args: the parsed options of DeepSpeed's launcher. world_info_base64: kept for callers that read it; ``get_cmd``
    takes the hosts.
    """

    _launcher = ""

    def __init__(self, args: Any, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    def backend_exists(self) -> bool:
        """Whether the program that starts the hosts is installed here."""
        return find_runner(self._launcher).program() is not None

    def add_export(self, key: str, var: str) -> None:
        """A variable for the ranks of all hosts. Unlike DeepSpeed's, the value needs no quotes: no shell reads it."""
        self.exports[key.strip()] = var.strip()

    def parse_user_args(self) -> list[str]:
        """The words for the script. They reach it as they are."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """The name for ``--launcher``."""
        return self._launcher

    def validate_args(self) -> None:
        """Every runner knows every option, so there is nothing to refuse."""

    def _launcher_args(self) -> str:
        return getattr(self.args, "launcher_args", "") or ""

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, int | Sequence[int]]
    ) -> Any:
        """The command line. Adds the variables of ``add_export`` to ``environment``, the environment for it.

        active_resources: host -> its slots, or their number.
        """
        environment.update(self.exports)
        names = [name for name in (environment.get(EXPORT_VARIABLE, ""), *self.exports) if name]
        if names:
            environment[EXPORT_VARIABLE] = ",".join(dict.fromkeys(names))
        hosts = {host: range(slots) if isinstance(slots, int) else slots for host, slots in active_resources.items()}
        words = ["--launcher", self._launcher, "--force_multi"]
        if more := self._launcher_args():
            words += ["--launcher_args", more]
        hostfile = getattr(self.args, "hostfile", None)
        if hostfile and os.path.isfile(hostfile):
            words += ["--hostfile", hostfile]
        words += ["--include", "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items())]
        words += [f"--{name}" for name in _FLAGS if getattr(self.args, name, False)]
        for name in _VALUES:
            value = getattr(self.args, name, None)
            if value not in (None, "", "None"):
                words += [f"--{name}", str(value)]
        return [sys.executable, "-u", "-m", "deepspeed_c", *words, self.user_script, *self.user_arguments]


class PDSHRunner(MultiNodeRunner):
    """pdsh over ssh."""

    _launcher = "pdsh"

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, int | Sequence[int]]
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """(command line, command line that ends the ranks, environment). The second one has nothing to do: the launch
        ends its ranks itself.
        """
        return super().get_cmd(environment, active_resources), ["true"], environment


class _PoolRunner(MultiNodeRunner):
    def __init__(self, args: Any, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool


class OpenMPIRunner(_PoolRunner):
    """Open MPI's mpirun."""

    _launcher = "openmpi"


class MPICHRunner(_PoolRunner):
    """MPICH's mpiexec."""

    _launcher = "mpich"


class IMPIRunner(_PoolRunner):
    """Intel MPI's mpiexec."""

    _launcher = "impi"


class SlurmRunner(_PoolRunner):
    """Slurm's srun."""

    _launcher = "slurm"

    def _launcher_args(self) -> str:
        comment = getattr(self.args, "slurm_comment", "")
        words = super()._launcher_args()
        return f"{words} {shlex.join(['--comment', comment])}".strip() if comment else words


class MVAPICHRunner(_PoolRunner):
    """MVAPICH's mpiexec."""

    _launcher = "mvapich"
