"""NUMA nodes and the command ``numactl`` that binds a rank to its cores, as ``deepspeed.utils.numa`` has them."""

from __future__ import annotations

import re
import shutil
import subprocess

from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError, LaunchError

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]


def get_numa_cores() -> list[list[int]]:
    """The cores of each NUMA node, as ``numactl --hardware`` lists them; [] where there is no numactl, and an empty
    list for a node of memory only.
    """
    try:
        done = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    nodes = dict(re.findall(r"^node (\d+) cpus:([\d ]*)$", done.stdout, re.MULTILINE))
    return [[int(core) for core in nodes[node].split()] for node in sorted(nodes, key=int)]


def check_for_numactl_pkg() -> bool:
    """Whether the program numactl can be found."""
    return shutil.which("numactl") is not None


def parse_range(rng: str) -> range:
    """ "3" or "2-5", both ends included. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", rng)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ConfigError(f"{rng!r} is no range", where="cores", fix='write a number, or two in ascending order: "2-5"')
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def parse_range_list(range_str: str) -> list[int]:
    """ "0,2-4" as numbers. Raises ConfigError: the ranges overlap or are not in ascending order."""
    numbers: list[int] = []
    for part in range_str.split(","):
        cores = parse_range(part)
        if numbers and cores[0] <= numbers[-1]:
            raise ConfigError(
                f"{part!r} in {range_str!r} does not come after {numbers[-1]}",
                where="cores",
                fix="write ranges that do not overlap, in ascending order",
            )
        numbers += cores
    return numbers


def _physical_cores() -> int:
    """Cores of the host, not counting the second thread of one."""
    found = set()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for block in file.read().split("\n\n"):
            fields = dict(re.findall(r"^([\w ]+?)\s*: *(.*)$", block, re.MULTILINE))
            if "processor" in fields:
                found.add((fields.get("physical id"), fields.get("core id", fields["processor"])))
    return len(found)


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Cores of each rank, and the words to put in front of a rank's command so that it runs on its own.

    A rank whose cores lie in one NUMA node gets that node's memory too: with "-m", or with "-p" the node of fast memory
    that belongs to it, where there is one for each node with cores. Nodes that list the same cores count as one.

    Args:
        bind_core_list: cores to divide, "0,2-5"; None for all of the host.
        num_local_procs: ranks on this host.
        local_rank: which of them.

    Raises:
        LaunchError: KMP_AFFINITY is set, which binds threads by itself, or there are fewer cores than ranks.
        ConfigError: ``bind_core_list`` cannot be read.
    """
    if read_env().kmp_affinity:
        raise LaunchError("is set, and binds threads to cores too", where="KMP_AFFINITY", fix="unset KMP_AFFINITY")
    cores = list(range(_physical_cores())) if bind_core_list is None else parse_range_list(bind_core_list)
    n_each = len(cores) // num_local_procs
    if n_each < 1:
        raise LaunchError(
            f"{len(cores)} cores are not enough for {num_local_procs} ranks", where="cores", fix="start fewer ranks"
        )
    own = cores[n_each * local_rank : n_each * (local_rank + 1)]
    return n_each, ["numactl", *_memory_of(own, get_numa_cores()), "-C", _as_ranges(own)]


def _memory_of(own: list[int], nodes: list[list[int]]) -> list[str]:
    home = next((i for i, cores in enumerate(nodes) if set(own) <= set(cores)), None)
    if home is None:
        return []
    with_cores = [i for i, cores in enumerate(nodes) if cores]
    without = [i for i, cores in enumerate(nodes) if not cores]
    if without and len(without) == len(with_cores):
        return ["-p", str(without[with_cores.index(home)])]
    # Emulated nodes: neighbours with the same cores.
    same = [i for i in with_cores if nodes[i] == nodes[home]]
    return ["-m", ",".join(map(str, same))]


def _as_ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
