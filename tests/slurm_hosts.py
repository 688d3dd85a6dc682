"""Simulated hosts that are the nodes of a Slurm cluster: ``SshHosts`` with a munged, a slurmctld and a slurmd a host.

    with SlurmHosts(2) as hosts:
        launch = hosts.launch(0, ["--launcher", "slurm", "--hostfile", hosts.hostfile([2, 2]), "train.py"])

Configuration, keys, sockets and logs lie in the folder of the fixture. Nothing of the machine's own Slurm is read or
changed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ssh_hosts import START_SECONDS, SshHosts, why_no_ssh
from tests.waits import ended, ran

__all__ = ["SlurmHosts", "why_no_slurm"]

_NEEDED = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
N_CORES = 4
"""Cores and devices that each node declares: names only, nothing is bound to them."""


class SlurmHosts(SshHosts):
    """``n`` hosts, named host-0, host-1 and so on, in one partition. The controller runs on host-0."""

    def __init__(self, n: int, *, network: int = 78, **options: Any) -> None:
        """options: of ``Hosts``."""
        self._daemons: list[subprocess.Popen[bytes]] = []
        super().__init__(n, network=network, **options)
        try:
            self._start_cluster()
        except BaseException:
            self.stop()
            raise

    def _start_cluster(self) -> None:
        self.folder.chmod(0o755)
        socket, config = self.folder / "munge.socket", self.folder / "slurm.conf"
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        config.write_text(self._config(socket))
        # Slurm wants a device file for each, and uses only its name here.
        for k in range(N_CORES):
            (self.folder / f"gpu{k}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{N_CORES - 1}]\n")
        (self.folder / "state").mkdir()
        files = {"socket": socket, "key-file": key} | {
            name: self.folder / f"munge.{name}" for name in ("pid-file", "log-file", "seed-file")
        }
        # Processes of all hosts reach its socket, by its path.
        self._daemon(0, "munged", ["--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())])
        self._wait("munged", socket.exists)
        self._daemon(0, "slurmctld", ["-D", "-f", str(config)])
        for i in range(len(self)):
            (self.folder / f"spool.{self[i].name}").mkdir()
            self._daemon(i, "slurmd", ["-D", "-N", self[i].name, "-f", str(config)])
        self._wait("slurmctld and slurmd", lambda: self._states() == ["idle"] * len(self))

    def _config(self, socket: Path) -> str:
        nodes = [
            f"NodeName={self[i].name} NodeAddr={self[i].address} NodeHostname={self[i].name} CPUs={N_CORES} "
            f"RealMemory=100 Gres=gpu:{N_CORES} State=UNKNOWN"
            for i in range(len(self))
        ]
        lines = [
            "ClusterName=simulated", f"SlurmctldHost={self[0].name}({self[0].address})", "SlurmUser=root",
            "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={socket}", "CredType=cred/munge",
            f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/spool.%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid", f"SlurmdPidFile={self.folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log", f"SlurmdLogFile={self.folder}/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none", "MpiDefault=none", "SwitchType=switch/none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "GresTypes=gpu", "ReturnToService=2",
            "KillWait=5", "SchedulerParameters=sched_interval=1",
            # The nodes declare more than this machine has.
            "SlurmdParameters=config_overrides", *nodes,
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _daemon(self, i: int, program: str, words: Sequence[str]) -> None:
        with (self.folder / f"{program}{i}.out").open("wb") as log:
            command = [_find(program) or program, *words]
            self._daemons.append(self[i].start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _wait(self, name: str, is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_up():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                logs = [f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log"))]
                raise OSError(f"{name} did not start\n" + "\n".join(logs))
            time.sleep(0.1)

    def _states(self) -> list[str]:
        shown = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        command = self[0].command(["sinfo", "-h", "-N", "-o", "%t"])
        return ran(command, env=shown).stdout.split()

    def start(self, i: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Starts a process on host ``i``, from which Slurm's commands reach the cluster."""
        return super().start(i, command, env={"SLURM_CONF": str(self.folder / "slurm.conf"), **(env or {})}, **options)

    def stop(self) -> None:
        """Ends all processes of all hosts."""
        super().stop()
        for daemon in self._daemons:
            ended(daemon)


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin")


def why_no_slurm() -> str:
    """Why no Slurm cluster can be simulated here; "" if it can."""
    for program, package in _NEEDED.items():
        if _find(program) is None:
            return f"no network namespace can be made here: {package} is not installed"
    return why_no_ssh()
