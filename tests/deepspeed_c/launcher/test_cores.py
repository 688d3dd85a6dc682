"""Lists of cores: parsing, the order by nearness, equal parts for ranks, and the number of threads."""

from __future__ import annotations

import os

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.cores import (
    allowed_cpus,
    as_ranges,
    parse_core_list,
    split_cores,
    threads_per_rank,
    topology_order,
)


@pytest.fixture
def allowed(monkeypatch):
    """Lets a test choose which CPUs this process may use."""

    def choose(cpus):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))

    return choose


def write_topology(tree, places):
    """Writes a /sys tree of CPUs. places: number of a CPU -> (socket, siblings as the kernel writes them)."""
    for cpu, (package, siblings) in places.items():
        folder = tree / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0", [0]),
        ("1,3-5,7", [1, 3, 4, 5, 7]),
        ("3,1,3", [1, 3]),
        ("2-2", [2]),
        (" 0 , 2 ", [0, 2]),
        ("0-3,2-4", [*range(5)]),
    ],
)
def test_core_list(text, cores):
    assert parse_core_list(text) == cores
    assert parse_core_list(as_ranges(cores)) == cores


@pytest.mark.parametrize("text", ["", ",", "a", "1-", "-1", "3-1", "1,,2", "1-2-3", "0x1"])
def test_malformed_core_list(text):
    with pytest.raises(LaunchError, match="neither a core nor a range"):
        parse_core_list(text)


def test_ranges():
    assert as_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_hardware_threads_of_a_core_stay_together(tmp_path, allowed):
    # Two sockets of two cores of two threads. Linux numbers the second threads after all first threads.
    write_topology(tmp_path, {c: (c % 4 // 2, f"{c % 4},{c % 4 + 4}") for c in range(8)})
    assert topology_order(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    allowed(range(8))
    assert split_cores(2, None, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_without_topology_by_number(tmp_path, allowed):
    allowed([7, 3, 5, 1])
    assert split_cores(2, None, tmp_path) == [[1, 3], [5, 7]]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 7])
def test_parts_are_equal_and_disjoint(tmp_path, allowed, n_ranks):
    allowed(range(7))
    parts = split_cores(n_ranks, None, tmp_path)
    assert [len(part) for part in parts] == [7 // n_ranks] * n_ranks
    assert len({core for part in parts for core in part}) == 7 // n_ranks * n_ranks


def test_core_list_of_the_user(allowed):
    allowed(range(8))
    assert split_cores(2, "1,3-5,7") == [[1, 3], [4, 5]]


def test_more_ranks_than_cores(tmp_path, allowed):
    allowed([0, 1])
    with pytest.raises(LaunchError, match="there are 2"):
        split_cores(3, None, tmp_path)
    with pytest.raises(LaunchError, match="there are 1"):
        split_cores(2, "1")


def test_core_that_is_not_allowed(allowed):
    allowed([0, 1, 4])
    with pytest.raises(LaunchError, match="core 2 is not there or not allowed; allowed: 0-1,4"):
        split_cores(1, "0-3")


@pytest.mark.parametrize(("n_ranks", "threads"), [(1, 6), (2, 3), (4, 1), (6, 1), (9, 1)])
def test_threads(tmp_path, allowed, n_ranks, threads):
    allowed(range(6))
    assert threads_per_rank(n_ranks, str(tmp_path)) == threads


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 6), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("", 6)]
)
def test_quota_of_a_container(tmp_path, allowed, quota, threads):
    allowed(range(6))
    # /proc/self/cgroup names a path on the host. In a container the file at the mount point has the quota.
    for name, text in (("proc/self/cgroup", "0::/pod/x\n"), ("sys/fs/cgroup/cpu.max", quota)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert threads_per_rank(1, str(tmp_path)) == threads


def test_this_machine():
    cpus = allowed_cpus()
    assert sorted(topology_order(cpus)) == cpus
    assert 1 <= threads_per_rank(1) <= len(cpus)
