"""Processor seconds of this process and of all processes that it starts.

A control group of its own counts them exactly, also those of processes that their parent has left behind. Where no
group can be made, the process adds its own seconds, the seconds of children that it has waited for, and the seconds of
descendants that still run (from /proc).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Collection
from pathlib import Path

from tests.limit_process import descendants, parents

__all__ = ["Descendants", "Group", "clock", "parts"]

_MOUNT = Path("/sys/fs/cgroup")
_TICKS = os.sysconf("SC_CLK_TCK")
_CLOSE_TRIES = 100


class Group:
    """A control group below the group of this process, and this process in it. Raises OSError if none can be made."""

    def __init__(self) -> None:
        is_v1 = (_MOUNT / "cpuacct").is_dir()
        self._file, self._unit = ("cpuacct.usage", 1e-9) if is_v1 else ("cpu.stat", 1e-6)
        # A group elsewhere in the tree would be free of the limits of this process's group.
        self._above = (_MOUNT / "cpuacct" if is_v1 else _MOUNT) / _own("cpuacct" if is_v1 else "")
        self._group = self._above / f"dsc_costs_{os.getpid()}"
        self._group.mkdir(exist_ok=True)
        try:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
            self._first = self._read()
        except OSError:
            self.close()
            raise

    def _read(self) -> float:
        words = (self._group / self._file).read_text().split()
        return int(words[0] if len(words) == 1 else words[1]) * self._unit  # cpu.stat begins with usage_usec

    def seconds(self) -> float:
        """Processor seconds since the group was made."""
        return self._read() - self._first

    def close(self) -> None:
        """Leaves the group and removes it. Processes that still start others may need several tries."""
        for _ in range(_CLOSE_TRIES):
            with contextlib.suppress(OSError):
                for pid in (self._group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (self._above / "cgroup.procs").write_text(pid)
                self._group.rmdir()
                return
            time.sleep(0.1)


class Descendants:
    """The same count without a control group. Orphans are lost with their seconds."""

    def __init__(self) -> None:
        self._first = self._read()

    def _read(self) -> float:
        return sum(parts(()))

    def seconds(self) -> float:
        """Processor seconds since this object was made."""
        return self._read() - self._first

    def close(self) -> None:
        """Nothing is held."""


def clock() -> Group | Descendants:
    try:
        return Group()
    except OSError:
        return Descendants()


def parts(servers: Collection[int]) -> tuple[float, float, float]:
    """Processor seconds until now of this process, of its children ``servers`` with all that they have started, and of all
    other processes that this one has started.
    """
    own, ended = (sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    parent_of = parents()
    served = {pid for server in servers for pid in (server, *descendants(server, parent_of))}
    others = set(descendants(os.getpid(), parent_of)) - served
    return own, sum(map(_seconds_of, served)), ended + sum(map(_seconds_of, others))


def _own(controller: str) -> str:
    """The folder of this process's group below the mount; "" if it is not seen there (in containers)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            folder = group.lstrip("/")
            if controller in controllers.split(",") and (_MOUNT / controller / folder).is_dir():
                return folder
    return ""


def _seconds_of(pid: int) -> float:
    """Seconds of a running process and of the children that it has waited for."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / _TICKS
    return 0.0
