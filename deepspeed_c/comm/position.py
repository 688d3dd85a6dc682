"""Position of a rank: the collectives that the rank has entered, the collectives that it waits for, the line of its
main thread, and the state of the other processes on its host.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

import msgspec
import torch.distributed as dist

from deepspeed_c.comm.ledger import Ledger, LedgerEntry, describe

__all__ = [
    "GroupPosition",
    "Life",
    "Position",
    "Presence",
    "ToldEntry",
    "life_of",
    "locate",
    "own_presence",
    "take_position",
]

# Number of entries of a group that a rank sends to the others. It is larger than the number in flight at once, so that
# the first entry that differs is included.
_N_TOLD = 64

Life = Literal["gone", "stopped", "traced", "runs"]
"""State of a process. "gone": it has ended; "stopped": by a signal; "traced": a debugger holds it; "runs": all other
states.
"""


class ToldEntry(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a ledger's entry that are sent to other ranks."""

    seq: int
    op: str
    n_bytes: int
    label: str
    phase: str
    module: str
    state: str
    seconds: float
    """Time for which the sending rank's entry has been in its state."""
    path: str = ""
    """Transport, as in ``LedgerEntry``."""

    def __str__(self) -> str:
        return describe(self.op, self.seq, self.label, self.phase, self.module, self.path)


class GroupPosition(msgspec.Struct, frozen=True):
    """Position of a rank among the collectives of one group."""

    name: str
    ranks: list[int]
    """The global ranks of the members; empty: all ranks."""
    axes: str
    """The axes of a mesh that the group lies along, or ""."""
    blocking: list[ToldEntry]
    """Collectives that the rank waits for, oldest first."""
    recent: list[ToldEntry]
    """The newest entries, oldest first."""

    @property
    def last(self) -> int:
        """The number of the newest entry; 0 for none."""
        return self.recent[-1].seq if self.recent else 0


class Position(msgspec.Struct, frozen=True):
    """Position of a rank at one moment."""

    rank: int
    groups: list[GroupPosition]
    where: str
    """Source line of the main thread."""
    dist_call: str
    """The function of ``torch.distributed`` that the main thread is in, or ""."""
    neighbours: dict[int, Life] = {}
    """Other ranks on the same host, with the states of their processes."""

    def group(self, name: str) -> GroupPosition | None:
        """The rank's position in the group of that name; None if it has entered nothing there."""
        return next((group for group in self.groups if group.name == name), None)


class Presence(msgspec.Struct, frozen=True):
    """The process of a rank, and whether the process still watches."""

    host: str
    """A mark that is equal for processes that can look each other up by ``pid``."""
    pid: int
    started: int
    """Start time in the system's ticks. It tells the process from a later process with the same ``pid``."""
    state: Literal["watching", "closed", "ended"] = "watching"
    how: str = ""
    """How the process ended, and its last collective."""


def take_position(rank: int, world_size: int, ledgers: Iterable[Ledger], neighbours: dict[int, Life]) -> Position:
    """This rank's position now."""
    now = time.monotonic()
    groups = [
        GroupPosition(
            name=ledger.name,
            ranks=[] if len(ledger.ranks) == world_size else list(ledger.ranks),
            axes=ledger.axes,
            blocking=[_told(entry, now) for entry in ledger.blocking()],
            recent=[_told(entry, now) for entry in ledger.recent(_N_TOLD)],
        )
        for ledger in ledgers
    ]
    where, dist_call = locate()
    return Position(rank, groups, where, dist_call, neighbours)


def _told(entry: LedgerEntry, now: float) -> ToldEntry:
    return ToldEntry(
        entry.seq,
        entry.op,
        entry.n_bytes,
        entry.label,
        entry.phase,
        entry.module,
        entry.state,
        max(0.0, now - entry.since),
        entry.path,
    )


_C10D = dist.distributed_c10d.__file__
_TORCH = str(Path(dist.__file__).parents[1]) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def locate() -> tuple[str, str]:
    """(line that the main thread is at, function of ``torch.distributed`` that the main thread is in, or "").

    The line is the innermost line outside torch and the standard library. If the innermost line of all is another one,
    and the thread is in no such function, that line follows.
    """
    inner = sys._current_frames().get(threading.main_thread().ident or 0)
    if inner is None:
        return "an unknown place", ""
    stack = [inner]
    while stack[-1].f_back is not None:
        stack.append(stack[-1].f_back)
    user = next((frame for frame in stack if _is_users(frame.f_code.co_filename)), inner)
    where, dist_call = _line(user), _dist_call(stack)
    if user is not inner and not dist_call:
        where += f" (in {_line(inner)})"
    return where, dist_call


def _dist_call(stack: Sequence[FrameType]) -> str:
    """The collective of torch that the stack ends in, or "". Functions that write files or start processes give "",
    because they do not wait for ranks.
    """
    name = ""
    for frame in stack:
        if frame.f_code.co_filename == _C10D:
            name = frame.f_code.co_name
        elif not name or not frame.f_code.co_filename.startswith(os.path.dirname(_C10D)):
            break
    return name


def _is_users(filename: str) -> bool:
    if filename.startswith((_TORCH, "<frozen")):
        return False
    return not filename.startswith(_STDLIB) or any(part in filename for part in _PACKAGES)


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    shown = path.removeprefix(os.getcwd() + os.sep)
    return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"


def own_presence() -> Presence:
    """This process, described so that other processes can find it."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Two containers on one machine have separate process numbers.
        host = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
        started = int(_stat(pid)[19])
    except OSError:
        # No /proc: nobody can look this process up.
        return Presence(f"{socket.gethostname()} {pid}", pid, 0)
    return Presence(host, pid, started)


def life_of(presence: Presence) -> Life:
    """State of a process on this host, according to the operating system."""
    try:
        fields = _stat(presence.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    if int(fields[19]) != presence.started or fields[0] in "ZXx":
        return "gone"
    return "stopped" if fields[0] == "T" else "traced" if fields[0] == "t" else "runs"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (proc(5)). The second field is skipped because it may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
