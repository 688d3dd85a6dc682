"""The plan of a launch: the command, the environment and the devices of every rank, and refusals before anything
starts."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher import plan as plan_module
from deepspeed_c.launcher.job import HostPlace
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.plan import Devices, make_plan


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "t.py").write_text("")
    return tmp_path


def plan(*argv, devices=None, **options):
    return make_plan(parse_options(argv), devices, **options)


def command(*argv, rank=0):
    return plan(*argv).ranks[rank].command


def cuda(*names):
    return Devices("cuda", names)


def test_commands():
    for i in (0, 1):
        words = command("--num_procs", "2", "t.py", "--x", "a b", rank=i)
        assert words == (sys.executable, "-u", "t.py", f"--local_rank={i}", "--x", "a b")
    assert command("--no_local_rank", "t.py", "--x") == (sys.executable, "-u", "t.py", "--x")
    assert command("--module", "json.tool", "f")[1:] == ("-u", "-m", "json.tool", "--local_rank=0", "f")
    program, *rest = command("--no_python", "--no_local_rank", "sh", "-c", ":")
    assert os.path.isabs(program) and rest == ["-c", ":"]


def test_environment():
    for rank, planned in enumerate(plan("--num_procs", "3", "t.py").ranks):
        env = planned.environment
        assert [env[k] for k in ("RANK", "LOCAL_RANK", "CROSS_RANK", "GROUP_RANK")] == [str(rank), str(rank), "0", "0"]
        assert [env[k] for k in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")] == ["3"] * 3
        assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize(
    ("argv", "devices", "visible", "world"),
    [
        ([], cuda("0", "1"), "0,1", 2),
        (["--num_gpus", "1"], cuda("0", "1"), "0", 1),
        (["--include", "localhost:3,1"], cuda("0", "1", "2", "3"), "1,3", 2),
        (["--exclude", "localhost:0"], cuda("0", "1", "2"), "1,2", 2),
        (["--num_gpus", "1"], cuda("2", "5"), "2", 1),  # CUDA_VISIBLE_DEVICES=2,5 is already set
        (["--include", "localhost:5"], cuda("2", "5"), "5", 1),
        (["--include", "localhost:1"], cuda("GPU-aa", "GPU-bb"), "GPU-bb", 1),
    ],
)
def test_devices(argv, devices, visible, world):
    ranks = plan(*argv, "t.py", devices=devices).ranks
    assert [r.environment["CUDA_VISIBLE_DEVICES"] for r in ranks] == [visible] * world


def test_device_that_is_hidden_is_not_taken():
    with pytest.raises(LaunchError, match="no slot 0; it has 2, 5"):
        plan("--include", "localhost:0", "t.py", devices=cuda("2", "5"))


def test_other_accelerators_cannot_be_chosen_among():
    xpu = Devices("xpu", ("0", "1", "2"))
    assert len(plan("--num_gpus", "2", "t.py", devices=xpu).ranks) == 2
    with pytest.raises(LaunchError, match="not xpu"):
        plan("--include", "localhost:1", "t.py", devices=xpu)


def test_threads(monkeypatch):
    monkeypatch.setattr(plan_module, "threads_per_rank", lambda n: 12 // n)
    assert plan("--num_procs", "3", "t.py").ranks[2].environment["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" not in plan("--num_procs", "3", "t.py").ranks[0].environment


def test_bound_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    ranks = plan("--num_procs", "2", "--bind_cores_to_rank", "--bind_core_list", "0-2,5-7", "t.py").ranks
    for rank, cores in enumerate(("0,1,2", "5,6,7")):
        python, _, _, shim, bound, again = ranks[rank].command[:6]
        assert (python, os.path.basename(shim), bound, again) == (sys.executable, "bind.py", cores, sys.executable)
        assert ranks[rank].command[6:] == ("-u", "t.py", f"--local_rank={rank}")
        assert ranks[rank].environment["OMP_NUM_THREADS"] == "3"


def test_a_host_among_several():
    place = HostPlace("b", 1, [1, 2], 3, 2, 5)
    made = plan("--tag_output", "t.py", place=place, token="secret", environment={"OMP_NUM_THREADS": "3", "A": "b"})
    assert (made.first_rank, made.host, made.token, made.opens_store) == (3, "b", "secret", False)
    for i, rank in enumerate(made.ranks):
        env = rank.environment
        assert [env[k] for k in ("RANK", "LOCAL_RANK", "GROUP_RANK", "CROSS_RANK")] == [str(3 + i), str(i), "1", "1"]
        assert [env[k] for k in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE")] == ["5", "2", "2", "2"]
        assert (env["OMP_NUM_THREADS"], env["A"]) == ("3", "b")
        assert f"--local_rank={i}" in rank.command


def test_slots_of_a_hostfile_are_positions():
    place = HostPlace("b", 1, [0, 2], 2, 2, 4)
    made = plan("t.py", devices=cuda("4", "5", "7"), place=place)
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in made.ranks] == ["4,7", "4,7"]
    with pytest.raises(LaunchError, match="b has 3 slots there, and the host has 2 devices"):
        plan("t.py", devices=cuda("4", "5"), place=place)


def test_master_address_is_of_the_host_of_rank_0_alone():
    other = HostPlace("b", 1, [0], 1, 2, 2)
    assert plan("--master_addr", "192.0.2.1", "t.py", place=other).ranks
    with pytest.raises(LaunchError, match="not an address of this host"):
        plan("--master_addr", "192.0.2.1", "t.py", place=HostPlace("a", 0, [0], 0, 2, 2))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["none.py"], "none.py: there is no such script"),
        (["."], "folder without a __main__.py"),
        (["--no_python", "./t.py"], "not a program that can be run"),  # the file is not executable
        (["--no_python", "no-such-program"], "not a program that can be run"),
        (["--module", "no_such_module"], "no module 'no_such_module'"),
        (["--module", "json.no_such_module"], "no module 'json.no_such_module'"),
        (["--module", "this.that"], "'this' is no package"),
        (["--module", "t.py"], "'t' is no package"),
        (["--master_addr", "192.0.2.1", "t.py"], "not an address of this host"),
        (["--enable_each_rank_log", "t.py", "t.py"], "--enable_each_rank_log t.py: cannot be made"),
        (["--num_procs", "4096", "--bind_cores_to_rank", "t.py"], "4096 processes cannot have a core each"),
    ],
)
def test_refused(argv, text):
    with pytest.raises(LaunchError) as caught:
        plan(*argv)
    assert text in str(caught.value), caught.value


def test_modules_are_found_and_not_imported(folder):
    (folder / "pkg" / "sub").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "pkg" / "sub" / "train.py").write_text("")
    assert command("--module", "pkg.sub.train")[3] == "pkg.sub.train"
    assert command("--module", "t")[3] == "t"


def test_modules_of_an_editable_installation_are_found(monkeypatch):
    """They are on no path; a finder of their own knows them, as it does for ``python -m``."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return ModuleSpec(name, None) if name == "far_away" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert command("--module", "far_away")[3] == "far_away"


def test_folders_and_archives_are_scripts_too(folder):
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text("")
    assert command("app")[2] == "app"


def test_log_folder_is_made(folder):
    assert plan("--enable_each_rank_log", "a/b", "t.py").log_dir == "a/b"
    assert (folder / "a" / "b").is_dir()
