"""The number of threads for a rank's passes over host memory: limits by control groups of both versions, the rank's
part of the processors, and the threads that are left for backward."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from deepspeed_c.env import Env
from deepspeed_c.errors import ConfigError
from deepspeed_c.threads import fair_part, number, one_torch_thread, quota
from tests import fresh, waits


def put(root, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("", None),
        ("400000 100000", 4),
        ("nonsense\n", None),
        ("100000 0\n", None),
    ],
)
def test_the_limit_of_one_group(tmp_path, text, wanted):
    assert quota(str(tmp_path)) is None
    put(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    assert quota(str(tmp_path)) is None
    put(tmp_path, "sys/fs/cgroup/a/b/cpu.max", text)
    assert quota(str(tmp_path)) == wanted


def test_the_least_limit_of_all_groups_above_counts(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    put(tmp_path, "sys/fs/cgroup/a/b/cpu.max", "800000 100000\n")
    put(tmp_path, "sys/fs/cgroup/a/cpu.max", "300000 100000\n")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "500000 100000\n")
    assert quota(str(tmp_path)) == 3
    put(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert quota(str(tmp_path)) == 1
    # A container may see the path that its group has on the host. A folder that does not exist limits nothing.
    put(tmp_path, "proc/self/cgroup", "0::/elsewhere/deep/down\n")
    assert quota(str(tmp_path)) == 1
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    assert quota(str(tmp_path)) == 1


def test_version_1_of_control_groups(tmp_path):
    put(tmp_path, "proc/self/cgroup", "12:memory:/m\n5:cpuset:/s\n4:cpu,cpuacct:/pod/x\n0::/unified\n")
    assert quota(str(tmp_path)) is None
    put(tmp_path, "sys/fs/cgroup/cpu/pod/x/cpu.cfs_quota_us", "250000\n")
    put(tmp_path, "sys/fs/cgroup/cpu/pod/x/cpu.cfs_period_us", "50000\n")
    assert quota(str(tmp_path)) == 5
    put(tmp_path, "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "-1\n")
    put(tmp_path, "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n")
    assert quota(str(tmp_path)) == 5
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100001\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert quota(str(tmp_path)) == 2
    # Groups of other controllers do not count.
    put(tmp_path, "proc/self/cgroup", "5:cpuset:/pod/x\n3:cpuacct:/pod/x\n")
    assert quota(str(tmp_path)) is None


@pytest.mark.parametrize(
    "n_own, n_launcher, n_quota, n_ranks, wanted",
    [
        (64, 64, None, 1, 64),  # one rank alone
        (64, 64, None, 8, 8),  # all ranks share all processors
        (8, 64, None, 8, 8),  # each rank is bound to its own processors
        (4, 4, None, 2, 2),  # the launcher itself was bound, so its ranks share
        (24, 96, None, 8, 12),  # ranks are bound to NUMA nodes, two to a node
        (64, 64, 6, 2, 3),  # a container may use the time of 6 processors
        (8, 64, 6, 2, 3),
        (2, 2, None, 5, 1),
        (1, 64, None, 2, 1),
        (3, 7, None, 2, 3),
        (64, 64, 1, 1, 1),
    ],
)
def test_the_part_of_a_rank(n_own, n_launcher, n_quota, n_ranks, wanted):
    assert fair_part(n_own, n_launcher, n_quota, n_ranks) == wanted


def test_what_the_environment_asks_for_comes_first():
    assert number(Env({"DSC_NUM_THREADS": "5", "LOCAL_WORLD_SIZE": "100"}), 512) == 5
    with pytest.raises(ConfigError, match="(?s)DSC_NUM_THREADS: is 513.*1 to 512"):
        number(Env({"DSC_NUM_THREADS": "513"}), 512)
    assert number(Env({"LOCAL_WORLD_SIZE": "100000"}), 512) == 1
    assert 1 <= number(Env({}), 512) <= len(os.sched_getaffinity(0))
    assert number(Env({}), 1) == 1


LEAVING = """
import os
from deepspeed_c import _C, threads
def now(): return _C.pool_n_threads()
seen = [now()]
threads.leave(0.5); seen.append(now())
threads.leave(0.25); seen.append(now())
threads.take_back(0.5); seen.append(now())
child = os.fork()
if child == 0:
    os._exit(now())
seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
threads.take_back(0.25); seen.append(now())
print(*seen)
"""


def test_engines_leave_processors_and_take_them_back_in_any_order():
    done = fresh.run(["-c", LEAVING], env={**os.environ, "DSC_NUM_THREADS": "8"})
    assert (done.returncode, done.stdout) == (0, "8 4 2 2 2 8\n"), done.stdout + done.stderr


@pytest.fixture
def three_torch_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_torch_thread_is_for_the_body_and_the_calling_thread_alone(three_torch_threads) -> None:
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))  # calls torch for the first time
    with one_torch_thread():
        assert torch.get_num_threads() == 1
        other.start()
        waits.joined(other)
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert found == [3]
    assert torch.get_num_threads() == 3


def test_torch_threads_are_as_before_after_an_exception(three_torch_threads) -> None:
    with pytest.raises(KeyError), one_torch_thread():
        raise KeyError
    assert torch.get_num_threads() == 3
