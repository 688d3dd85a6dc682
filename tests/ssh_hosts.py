"""Simulated hosts with an ssh server each: ``Hosts`` of tests/hosts.py that know each other by name.

    with SshHosts(2) as hosts:
        done = hosts.run(0, [sys.executable, "-m", "deepspeed_c", "--hostfile", hosts.hostfile(2), "train.py"])

Servers and clients use keys that are made here. Nothing of the machine's own ssh is read or changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tests.hosts import Hosts, why_no_hosts
from tests.waits import LIMIT_SECONDS, ended

__all__ = ["ABSENT", "SshHosts", "why_no_ssh"]

ABSENT = "absent-host"
"""A host that all know, and whose address nobody has."""
START_SECONDS = 200


class SshHosts:
    """``n`` hosts, named host-0, host-1 and so on, with an ssh server each. A context manager."""

    def __init__(self, n: int, **options: Any) -> None:
        """options: of ``Hosts``."""
        self.folder = Path(tempfile.mkdtemp(prefix="deepspeed_c_hosts_"))
        self._hosts = Hosts(n, processes=True, **options)
        self._servers: list[subprocess.Popen[bytes]] = []
        try:
            self._make_files()
            for i in range(n):
                self._start_server(i)
        except BaseException:
            self.stop()
            raise

    def _make_files(self) -> None:
        for name in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
        names = [f"{host.address} {host.name}\n" for host in self._hosts]
        absent = f"{self._hosts[0].address.rpartition('.')[0]}.250 {ABSENT}\n"
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + absent + "".join(names))
        (self.folder / "ssh_config").write_text(
            f"IdentityFile {self.folder}/user_key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        )
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\n"
            "PermitRootLogin yes\nUsePAM no\nPidFile none\nMaxStartups 100\n"
        )

    def _start_server(self, i: int) -> None:
        # The mount namespace of the host has /etc/hosts of its own.
        self._hosts[i].run(["mount", "--bind", str(self.folder / "hosts"), "/etc/hosts"])
        self._hosts[i].run(["mkdir", "-p", "/run/sshd"])
        command = [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        log = (self.folder / f"sshd{i}.log").open("wb")
        self._servers.append(self._hosts[i].start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        log.close()
        deadline = time.monotonic() + START_SECONDS
        while "Server listening" not in (self.folder / f"sshd{i}.log").read_text():
            if time.monotonic() > deadline or self._servers[-1].poll() is not None:
                raise OSError((self.folder / f"sshd{i}.log").read_text())
            time.sleep(0.02)

    def hostfile(self, slots: Sequence[int] | Mapping[str, int]) -> str:
        """The path of a new hostfile. slots: of host-0, host-1 and so on, or of each name."""
        named = slots if isinstance(slots, Mapping) else {self[i].name: n for i, n in enumerate(slots)}
        path = self.folder / f"hostfile{len(list(self.folder.glob('hostfile*')))}"
        path.write_text("".join(f"{name} slots={n}\n" for name, n in named.items()))
        return str(path)

    def start(
        self, i: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Any = ".", **options: Any
    ) -> Any:
        """Starts a process on host ``i``, from which ssh reaches all hosts."""
        shown = {"PDSH_SSH_ARGS_APPEND": f"-F {self.folder}/ssh_config", **(env or {})}
        # Entering a mount namespace leads to its root.
        return self._hosts[i].start(
            ["env", "-u", "GLOO_SOCKET_IFNAME", "-C", os.path.abspath(cwd), *command], env=shown, **options
        )

    def launch(self, i: int, words: Sequence[str], **options: Any) -> Any:
        """Starts ``deepspeed_c`` with ``words`` on host ``i``, with its output in pipes."""
        command = [sys.executable, "-m", "deepspeed_c", *words]
        return self.start(i, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def run(self, i: int, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on host ``i`` as ``start`` does, to its end."""
        process = self.start(i, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        out, err = process.communicate(timeout=START_SECONDS)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def processes(self, i: int, text: str = "") -> dict[int, str]:
        """Process id on host ``i`` -> command line, of those that contain ``text``."""
        lines = self._hosts[i].run(["ps", "-eo", "pid=,args=", "-ww"]).splitlines()
        pairs = (line.split(maxsplit=1) for line in lines)
        return {int(pid): line for pid, line in pairs if text in line and not line.startswith("ps -eo")}

    def signal(self, i: int, text: str, number: int) -> list[int]:
        """Send a signal to the processes of host ``i`` whose command lines contain ``text``. Returns their ids."""
        pids = list(self.processes(i, text))
        if pids:
            self._hosts[i].run(["kill", f"-{int(number)}", *map(str, pids)])
        return pids

    def __getitem__(self, i: int) -> Any:
        return self._hosts[i]

    def __len__(self) -> int:
        return len(self._hosts)

    def stop(self) -> None:
        """Ends all processes of all hosts."""
        self._hosts.stop()  # with the first process of a process namespace the kernel ends all others
        for server in self._servers:
            ended(server)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def why_no_ssh() -> str:
    """Why no hosts with ssh servers can be made here; "" if they can."""
    for program, package in (("pdsh", "pdsh"), ("ssh", "openssh-client"), ("sshd", "openssh-server")):
        if shutil.which(program) is None and not os.path.exists(f"/usr/sbin/{program}"):
            return f"no network namespace can be made here: {package} is not installed"
    return why_no_hosts()
