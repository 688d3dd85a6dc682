"""Control groups (version 1 and 2) of this process: their limits, the memory that is left within the limits, and groups
below them with limits of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryGroup", "least", "memory_group", "memory_left"]

# A group can be removed when its last process has gone, which takes the kernel a moment.
_REMOVE_SECONDS = 5.0

_Reader = Callable[[Path], "int | None"]


def least(controller: str, of_version_2: _Reader, of_version_1: _Reader, root: str = "/") -> int | None:
    """The least number among the process's groups and all groups above them; None if no group has a number.

    Readers get the folder of a group. They return None, or raise OSError or ValueError, if the group has no limit. In a
    container the path of a group may be a path of the host: a missing folder counts as no limit. Tests pass another
    folder as ``root``.
    """
    found: list[int] = []
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split(":", 2)  # number, controllers (none in version 2), group
        if len(fields) < 3:
            continue
        _, controllers, group = fields
        if not controllers:
            found += _upwards(Path(root, "sys/fs/cgroup"), group, of_version_2)
        elif controller in controllers.split(","):
            found += _upwards(Path(root, "sys/fs/cgroup", controller), group, of_version_1)
    return min(found, default=None)


def _upwards(mount: Path, group: str, read: _Reader) -> Iterator[int]:
    """The numbers that ``read`` finds in a group and its parents, up to the mount point."""
    parts = [part for part in group.split("/") if part]
    for n in range(len(parts), -1, -1):
        try:
            number = read(mount.joinpath(*parts[:n]))
        except (OSError, ValueError):
            continue  # no such file, or "max"
        if number is not None:
            yield number


def memory_left(root: str = "/") -> int | None:
    """Bytes that the process may still allocate within the limits of its groups, at least 0; None if no group has a
    limit. Pages of the page cache count as free, as in the kernel's MemAvailable, because the kernel drops them when
    memory is needed.
    """
    return least("memory", _left_of_version_2, _left_of_version_1, root)


def _left_of_version_2(folder: Path) -> int:
    limit = int(folder.joinpath("memory.max").read_text())
    return _left(folder, limit, "memory.current", "")


def _left_of_version_1(folder: Path) -> int | None:
    limit = int(folder.joinpath("memory.limit_in_bytes").read_text())
    # Without a limit, the file contains the largest number of whole pages.
    return None if limit >= 1 << 62 else _left(folder, limit, "memory.usage_in_bytes", "total_")


def _left(folder: Path, limit: int, usage: str, prefix: str) -> int:
    used = int(folder.joinpath(usage).read_text())
    droppable = {f"{prefix}inactive_file", f"{prefix}active_file"}
    try:
        pairs = [line.split() for line in folder.joinpath("memory.stat").read_text().splitlines()]
    except OSError:
        pairs = []
    files = sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in droppable)
    return max(limit - used + files, 0)


class MemoryGroup(NamedTuple):
    """A group whose processes may take ``limit`` bytes together."""

    folder: Path
    limit: int

    def add(self, pid: int) -> None:
        """Moves a process into the group. Processes that it starts from now on are in it, too."""
        self.folder.joinpath("cgroup.procs").write_text(str(pid))

    def n_killed(self) -> int:
        """Processes that the kernel has killed because the group was full."""
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = self.folder.joinpath(name).read_text().splitlines()
            except OSError:
                continue
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return 0


@contextmanager
def memory_group(name: str, limit: int, root: str = "/") -> Iterator[MemoryGroup | None]:
    """A group with this limit below the process's own, for the time of the context; None where none can be made:
    without permission, or where the memory controller of version 2 is not handed on to groups below."""
    folder = _make_group(name, limit, root)
    try:
        yield None if folder is None else MemoryGroup(folder, limit)
    finally:
        if folder is not None:
            _remove(folder)


def _make_group(name: str, limit: int, root: str) -> Path | None:
    for mount, group, file in _memory_groups(root):
        parts = [part for part in group.split("/") if part]
        # In a container the path may be one of the host, which is not there.
        at = next((n for n in range(len(parts), -1, -1) if mount.joinpath(*parts[:n]).is_dir()), None)
        if at is None:
            continue
        folder = mount.joinpath(*parts[:at], name)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            # In a control group the kernel makes the files.
            with open(folder / file, "r+") as limits:
                limits.write(str(limit))
            return folder
        except OSError:
            with suppress(OSError):
                folder.rmdir()
    return None


def _memory_groups(root: str) -> Iterator[tuple[Path, str, str]]:
    """(where the hierarchy is mounted, the process's group, the file of a limit), version 1 first."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    groups = {fields[1]: fields[2] for fields in (line.split(":", 2) for line in lines) if len(fields) == 3}
    for controllers, group in groups.items():
        if "memory" in controllers.split(","):
            yield Path(root, "sys/fs/cgroup/memory"), group, "memory.limit_in_bytes"
    if "" in groups:
        yield Path(root, "sys/fs/cgroup"), groups[""], "memory.max"


def _remove(folder: Path) -> None:
    until = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                return
            time.sleep(0.05)
