"""Simulated hosts on this machine. Each is a network namespace with an address and a name, and all are on one switch.

    with Hosts(2, rate="1gbit") as hosts:
        process = hosts[1].start([sys.executable, "train.py"])      # a process of that host
        hosts[0].n_bytes_sent()                                     # bytes it has sent so far

``run_ranks(4, body, hosts=(0, 0, 1, 1))`` runs the ranks of a test on such hosts (tests/ranks.py).

[Note: nothing is left] Namespaces have no names, and the switch is a namespace too. A keeper process holds each
namespace and only reads a pipe from this process. However this process ends, the pipe closes and the keepers end, and
the kernel removes the namespaces, links and addresses. The machine's own network is not touched.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from typing_extensions import Self

from tests.waits import LIMIT_SECONDS, ended, first_line, output_of

__all__ = ["DEVICE", "Host", "Hosts", "Place", "why_no_hosts"]

DEVICE = "eth0"
"""The network device of each host, also the value of GLOO_SOCKET_IFNAME there."""

_NEEDED = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_KINDS = (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS))
# A token bucket that lasts a millisecond or two at the requested rate, and a queue like a switch's.
_BURST, _LATENCY = "256kb", "50ms"


class Host:
    """A member of ``Hosts``: a network namespace and a host name, and with ``processes`` a process namespace too."""

    def __init__(self, name: str, address: str, *, processes: bool = False) -> None:
        """address: with the prefix length of its network. processes: the host gets a process namespace, in which its
        processes see no others, and ``kill`` kills all of them.
        """
        self.name, self.address = name, address.partition("/")[0]
        self.processes = processes
        kinds = ["--net", "--uts", *(["--pid", "--fork", "--kill-child", "--mount-proc"] if processes else [])]
        self._keeper = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if first_line(self._keeper) != "made\n":
            problem = output_of(self._keeper)[1].strip()
            raise OSError(f"no network namespace can be made here: {problem}")
        self.pid = self._keeper.pid
        """A process in the namespaces of this host."""
        if processes:
            self.pid = int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])
        try:
            self.run(["hostname", name])
            self.run(["ip", "link", "set", "lo", "up"])
        except BaseException:
            self.stop()
            raise

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on this host."""
        more = ["--pid", "--mount"] if self.processes else []
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", *more, "--", *command]

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Starts a process on this host (``subprocess.Popen``). env: variables added to those of this process."""
        merged = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, **(env or {})}
        return subprocess.Popen(self.command(command), env=merged, **options)

    def run(self, command: Sequence[str]) -> str:
        """Run ``command`` on this host and return its output. Raises ``OSError`` with its messages if it fails."""
        done = subprocess.run(self.command(command), check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode:
            raise OSError(f"no network namespace can be made here: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def n_bytes_sent(self) -> int:
        """The bytes that have left this host since it was made, headers included."""
        line = re.search(rf"^\s*{DEVICE}:(.*)$", Path(f"/proc/{self.pid}/net/dev").read_text(), re.MULTILINE)
        assert line is not None, f"host {self.name} has no {DEVICE}"
        return int(line[1].split()[8])

    def unplug(self) -> None:
        """Takes the link of the host down.

        Nothing reaches the host any more, and its connections get no message about this.
        """
        self.run(["ip", "link", "set", DEVICE, "down"])

    def plug(self) -> None:
        """Takes the link up again."""
        self.run(["ip", "link", "set", DEVICE, "up"])

    def kill(self) -> None:
        """Kill all processes of the host (made with ``processes``)."""
        if not self.processes:
            raise ValueError(f"host {self.name} has no process space of its own")
        os.kill(self.pid, signal.SIGKILL)
        ended(self._keeper)

    def stop(self) -> None:
        """Releases the namespaces. The kernel removes them when no process is left in them."""
        if self._keeper.poll() is None:
            self._keeper.kill()
        output_of(self._keeper)


class Hosts:
    """A sequence of ``n`` hosts, and a context manager that removes them at its end."""

    def __init__(self, n: int, *, rate: str = "", processes: bool = False, network: int = 77) -> None:
        """rate: a host's sending rate in tc's notation (``1gbit``); "" for no limit. network: the second number of the
        addresses, 10.network.0.1 and so on.

        Raises ``OSError`` if hosts cannot be made here.
        """
        self._members: list[Host] = []
        self._switch: Host | None = None
        try:
            self._switch = Host("switch", f"10.{network}.0.254/24")
            self._switch.run(["ip", "link", "add", "br0", "type", "bridge"])
            self._switch.run(["ip", "link", "set", "br0", "up"])
            for i in range(n):
                address = f"10.{network}.0.{i + 1}/24"
                host = Host(f"host-{i}", address, processes=processes)
                self._members.append(host)
                peer = ["peer", "name", DEVICE, "netns", str(host.pid)]
                self._switch.run(["ip", "link", "add", f"port{i}", "type", "veth", *peer])
                self._switch.run(["ip", "link", "set", f"port{i}", "master", "br0", "up"])
                host.run(["ip", "address", "add", address, "dev", DEVICE])
                host.run(["ip", "link", "set", DEVICE, "up"])
                if rate:
                    shape = ["rate", rate, "burst", _BURST, "latency", _LATENCY]
                    host.run(["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape])
        except BaseException:
            self.stop()
            raise

    def place(self, rank: int, numbers: Sequence[int]) -> Place:
        """The place of ``rank``. numbers: the number of each rank's host."""
        mine = numbers[rank]
        environment = {
            "LOCAL_RANK": str(numbers[:rank].count(mine)), "LOCAL_WORLD_SIZE": str(numbers.count(mine)),
            "MASTER_ADDR": self[numbers[0]].address, "GLOO_SOCKET_IFNAME": DEVICE,
        }  # fmt: skip
        return Place(self[mine].pid, environment)

    def __getitem__(self, i: int) -> Host:
        return self._members[i]

    def __len__(self) -> int:
        return len(self._members)

    def stop(self) -> None:
        """Releases all hosts. May be called twice."""
        for host in self._members:
            host.stop()
        if self._switch is not None:
            self._switch.stop()
        self._members, self._switch = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class Place(NamedTuple):
    """Where one rank runs."""

    pid: int
    """The id of a process on the host."""
    environment: dict[str, str]

    def enter(self) -> None:
        """Move this thread and its children to the host; the process takes the rank's environment."""
        libc = ctypes.CDLL(None, use_errno=True)
        for name, kind in _KINDS:
            fd = os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY)
            try:
                if libc.setns(fd, kind) != 0:
                    raise OSError(ctypes.get_errno(), f"setns to the {name} namespace of process {self.pid}")
            finally:
                os.close(fd)
        os.environ.update(self.environment)


@cache
def why_no_hosts() -> str:
    """Why hosts cannot be made here; "" if they can."""
    if not sys.platform.startswith("linux"):
        return "no network namespace can be made here: this is not Linux"
    missing = [package for program, package in _NEEDED.items() if shutil.which(program) is None]
    if missing:
        return f"no network namespace can be made here: {missing[0]} is not installed"
    try:
        Hosts(1).stop()
    except OSError as error:
        return str(error)
    return ""
