"""The memory that control groups of both versions leave, and the accelerator of a machine with control groups.
(test_threads.py tests limits of processors.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from deepspeed_c import accelerator
from deepspeed_c.cgroups import memory_group, memory_left

MIB = 1 << 20


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_no_group_and_no_limit(tmp_path):
    assert memory_left(str(tmp_path)) is None
    put(tmp_path, "proc/self/cgroup", "0::/a/b\nnonsense\n")
    assert memory_left(str(tmp_path)) is None
    put(tmp_path, "sys/fs/cgroup/a/b/memory.max", "max\n")
    put(tmp_path, "sys/fs/cgroup/a/b/memory.current", "5\n")
    assert memory_left(str(tmp_path)) is None
    # A limit without a usage does not tell how much is left.
    put(tmp_path, "sys/fs/cgroup/a/memory.max", "1000\n")
    assert memory_left(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory.max": "1000\n", "memory.current": "1000\n"}, 0),
        # If a limit was lowered, more may be in use than it allows.
        ({"memory.max": "1000\n", "memory.current": "1300\n"}, 0),
        ({"memory.max": "0\n", "memory.current": "0\n"}, 0),
        (
            {
                "memory.max": "1000\n",
                "memory.current": "900\n",
                "memory.stat": "anon 500\nfile 300\ninactive_file 200\nactive_file 100\ninactive_file_x 7\n",
            },
            400,
        ),
    ],
)
def test_version_2(tmp_path, files, wanted):
    put(tmp_path, "proc/self/cgroup", "0::/pod/x\n")
    for name, text in files.items():
        put(tmp_path, f"sys/fs/cgroup/pod/x/{name}", text)
    assert memory_left(str(tmp_path)) == wanted
    # The parent group leaves more memory, and then less.
    put(tmp_path, "sys/fs/cgroup/pod/memory.max", "5000\n")
    put(tmp_path, "sys/fs/cgroup/pod/memory.current", "1300\n")
    assert memory_left(str(tmp_path)) == wanted
    put(tmp_path, "sys/fs/cgroup/pod/memory.current", "4999\n")
    assert memory_left(str(tmp_path)) == min(wanted, 1)


def test_version_1(tmp_path):
    put(tmp_path, "proc/self/cgroup", "12:cpu,cpuacct:/old\n9:memory:/pod/x\n0::/unified\n")
    put(tmp_path, "sys/fs/cgroup/memory/pod/x/memory.limit_in_bytes", "9223372036854771712\n")
    put(tmp_path, "sys/fs/cgroup/memory/pod/x/memory.usage_in_bytes", "0\n")
    assert memory_left(str(tmp_path)) is None
    put(tmp_path, "sys/fs/cgroup/memory/pod/x/memory.limit_in_bytes", f"{300 * MIB}\n")
    put(tmp_path, "sys/fs/cgroup/memory/pod/x/memory.usage_in_bytes", f"{200 * MIB}\n")
    assert memory_left(str(tmp_path)) == 100 * MIB
    # Cached files of child groups count too, because the usage includes them.
    stat = f"inactive_file 5\nactive_file 6\ntotal_inactive_file {30 * MIB}\ntotal_active_file {10 * MIB}\n"
    put(tmp_path, "sys/fs/cgroup/memory/pod/x/memory.stat", stat)
    assert memory_left(str(tmp_path)) == 140 * MIB
    # The root has no limit: its number is the largest number of whole pages.
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "17179869184\n")
    assert memory_left(str(tmp_path)) == 140 * MIB


def test_available_memory_is_what_the_container_leaves(tmp_path, monkeypatch):
    cpu = accelerator.Accelerator("cpu")
    monkeypatch.setattr(accelerator, "memory_left", partial(memory_left, str(tmp_path)))
    free = cpu.available_memory()
    assert free > 64 * MIB, free
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    put(tmp_path, "sys/fs/cgroup/memory.max", f"{100 * MIB}\n")
    put(tmp_path, "sys/fs/cgroup/memory.current", f"{61 * MIB}\n")
    assert cpu.available_memory() == 39 * MIB
    # The memory of the machine counts if it is less than the container may use.
    put(tmp_path, "sys/fs/cgroup/memory.max", f"{1 << 60}\n")
    assert cpu.available_memory() == pytest.approx(free, rel=0.5)


VERSIONS = {
    1: ("4:memory:/a/b\n0::/\n", "sys/fs/cgroup/memory/a", "memory.limit_in_bytes", "memory.oom_control"),
    2: ("0::/a/b\n", "sys/fs/cgroup/a", "memory.max", "memory.events"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_group_below_the_nearest_that_is_there(tmp_path, monkeypatch, version):
    """The kernel makes the files of a group; here a stand-in for mkdir does."""
    groups, parent, limits, events = VERSIONS[version]
    put(tmp_path, "proc/self/cgroup", groups)
    put(tmp_path, f"{parent}/cgroup.procs", "")
    made, removed = [], []
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if path.name == "mine":
            made.append(path)
            for name in (limits, "cgroup.procs"):
                (path / name).write_text("")
            (path / events).write_text("oom 3\noom_kill 2\n")

    def remove(path):
        if path.name == "mine":
            removed.append({file.name: file.read_text() for file in path.iterdir()})
            for file in path.iterdir():
                file.unlink()
        rmdir(path)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    with memory_group("mine", 12345, str(tmp_path)) as group:
        assert made == [tmp_path / parent / "mine"]
        group.add(os.getpid())
        assert group.n_killed() == 2 and group.limit == 12345
    (files,) = removed
    assert (files[limits], files["cgroup.procs"]) == ("12345", str(os.getpid()))
    assert not made[0].exists()


def test_where_no_group_can_be_made_there_is_none(tmp_path):
    with memory_group("mine", 1, str(tmp_path)) as group:
        assert group is None
    # A folder in which no files appear is no control group.
    put(tmp_path, "proc/self/cgroup", "0::/a\n")
    put(tmp_path, "sys/fs/cgroup/a/cgroup.procs", "")
    with memory_group("mine", 1, str(tmp_path)) as group:
        assert group is None
    assert not (tmp_path / "sys/fs/cgroup/a/mine").exists()


def test_a_full_group_kills_and_counts():
    with memory_group(f"deepspeed_c_test_{os.getpid()}", 64 * MIB) as group:
        if group is None:
            pytest.skip("no memory control group can be made here")

        def run(code):
            process = subprocess.Popen([sys.executable, "-S", "-c", f"input(); {code}"], stdin=subprocess.PIPE)
            group.add(process.pid)
            process.communicate(b"\n", timeout=200)
            return process.returncode

        assert run(f"x = bytearray({512 * MIB})") == -signal.SIGKILL
        assert group.n_killed() >= 1
        assert run("print(1)") == 0
    assert not group.folder.exists()
