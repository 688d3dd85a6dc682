"""The memory that control groups of both versions leave, and the accelerator of a machine with control groups.
(test_threads.py tests limits of processors.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from deepspeed_c import accelerator
from deepspeed_c.cgroups import memory_left

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
