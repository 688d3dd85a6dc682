"""The cores of this machine, and the share of each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepspeed_c.errors import LaunchError
from deepspeed_c.threads import fair_part, quota

__all__ = ["allowed_cpus", "as_ranges", "parse_core_list", "split_cores", "threads_per_rank", "topology_order"]

CPU_TREE = Path("/sys/devices/system/cpu")


def allowed_cpus() -> list[int]:
    """The logical CPUs that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads_per_rank(n_ranks: int, root: str = "/") -> int:
    """Threads that each of ``n_ranks`` processes can keep busy: its share of the allowed CPUs, or its share of the
    control groups' quota if this share is smaller.

    Tests pass another folder as ``root``.
    """
    n_cpus = len(allowed_cpus())
    return fair_part(n_cpus, n_cpus, quota(root), n_ranks)


def topology_order(cpus: Iterable[int], tree: Path = CPU_TREE) -> list[int]:
    """The CPUs ordered so that neighbours in the list are near each other: by socket, then core, then hardware thread.

    Linux usually numbers the first hardware threads of all cores before the second threads. Each half of the CPUs in
    numerical order would then contain a thread of every core. If the kernel gives no topology, the order is numerical.
    """

    def place(cpu: int) -> tuple[int, int, int]:
        folder = tree / f"cpu{cpu}" / "topology"
        try:
            siblings = parse_core_list((folder / "thread_siblings_list").read_text().strip())
            return int((folder / "physical_package_id").read_text()), siblings[0], cpu
        except (OSError, ValueError, LaunchError):
            return 0, cpu, cpu

    return sorted(cpus, key=place)


def parse_core_list(text: str) -> list[int]:
    """Parse ``1,3-5,7`` to [1, 3, 4, 5, 7]: ascending, each core once."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if first > last:
            raise LaunchError(
                f"{part!r} is neither a core nor a range of cores", where=f"--bind_core_list {text}", fix="0,2-5"
            )
        cores.update(range(first, last + 1))
    return sorted(cores)


def split_cores(n_ranks: int, core_list: str | None, tree: Path = CPU_TREE) -> list[list[int]]:
    """Lists of neighbouring cores, one list for each rank, all of the same length. Remaining cores stay unused.

    Raises ``LaunchError`` if there are fewer cores than ranks, or if this process may not use a listed core.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError(
            "this system cannot bind processes to cores", where="--bind_cores_to_rank", fix="leave it out"
        )
    allowed = allowed_cpus()
    if core_list is None:
        cores = topology_order(allowed, tree)
    else:
        cores = parse_core_list(core_list)
        if missing := sorted(set(cores) - set(allowed)):
            raise LaunchError(
                f"core {missing[0]} is not there or not allowed; allowed: {as_ranges(allowed)}",
                where=f"--bind_core_list {core_list}",
            )
    n_each = len(cores) // n_ranks
    if n_each == 0:
        raise LaunchError(
            f"{n_ranks} processes cannot have a core each: there are {len(cores)}",
            where="--bind_cores_to_rank",
            fix=f"start at most {len(cores)} processes, or leave the option out",
        )
    return [cores[rank * n_each : (rank + 1) * n_each] for rank in range(n_ranks)]


def as_ranges(cores: Sequence[int]) -> str:
    """[0, 1, 2, 5] as ``0-2,5``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
