"""Control groups (version 1 and 2) of this process: their limits, and the memory that is left within the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["least", "memory_left"]

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
