"""Ranks are started and ended from this process: cases that the command line alone cannot cause."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.plan import Plan, RankPlan, make_plan
from deepspeed_c.launcher.run import SIGNALS, launch
from tests.open_files import open_files


def plan_of(*commands):
    ranks = tuple(RankPlan(tuple(command), {"RANK": str(i)}) for i, command in enumerate(commands))
    return Plan(
        ranks=ranks,
        master_addr="127.0.0.1",
        master_port=None,
        log_dir=None,
        tag_output=False,
        grace=5.0,
        save_pid=False,
        log_level="warning",
    )


def processes_with(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_rank_that_cannot_be_started_takes_the_others_with_it():
    mark = f"1000.{os.getpid()}"
    ranks = [["sleep", mark], ["sleep", mark], ["sleep", "a\0b"]]
    with pytest.raises(LaunchError, match="cannot be started: embedded null byte"):
        launch(plan_of(*ranks))
    assert processes_with(mark) == []


def test_program_that_is_no_program():
    with pytest.raises(LaunchError, match="cannot be started"):
        launch(plan_of(["/proc/self/status"]))


def test_nothing_is_left_behind_in_the_callers_process(tmp_path):
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    files = open_files()
    before = children()
    script = tmp_path / "t.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    for code in (0, 3):
        assert launch(make_plan(parse_options(["--no_local_rank", str(script), str(code)]))) == code
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
    assert len(open_files()) <= len(files) + 2, "the store's own descriptors may close a little later"
    assert children() <= before, "processes that the launcher started, dead ones too"


def children() -> set[str]:
    """The process ids of the children of this process. The test session has other children, such as the zygote of
    ranks."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process ended meanwhile
        if int(parent) == os.getpid():
            found.add(pid)
    return found


def test_first_failure_is_reported_not_the_lowest_rank(tmp_path, capfd):
    """Rank 1 fails first. Rank 0 fails later, when it is ended because of rank 1."""
    ready = str(tmp_path / "ready")
    first = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(4)); open(sys.argv[1], 'w'); time.sleep(1000)"
    )
    second = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(5)"
    assert launch(plan_of(*([sys.executable, "-c", code, ready] for code in (first, second)))) == 5
    assert "rank 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("sys.exit(3)", 3, "failed with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL (the kernel does that when memory runs out)"),
        ("ctypes.string_at(0)", 139, "was ended by SIGSEGV"),
    ],
)
def test_exit_code_of_the_rank(how, code, text, capfd):
    python = [sys.executable, "-c", f"import ctypes, os, sys\nif os.environ['RANK'] == '1': {how}"]
    assert launch(plan_of(python, python)) == code
    err = capfd.readouterr().err
    assert "rank 1 (process" in err and text in err, err


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "t.py"
    path.write_text("import os, sys\nprint('to', sys.argv[1:], flush=True)\nsys.exit('no ' + os.environ['RANK'])")
    return str(path)


def test_logs(script, tmp_path, capfd):
    logs = tmp_path / "logs"
    assert (
        launch(make_plan(parse_options(["--num_procs", "2", "--enable_each_rank_log", str(logs), script]), None)) == 1
    )
    out, err = capfd.readouterr()
    first, second = sorted(logs.iterdir())
    assert first.name.endswith("_rank0.log") and second.name.endswith("_rank1.log")
    rank = 0 if "rank 0 (process" in err else 1
    assert (first, second)[rank].read_text() == f"to ['--local_rank={rank}']\nno {rank}\n"
    assert out == "" and f"Its log is {(first, second)[rank]}" in err and f"  no {rank}" in err, err


def test_labels(script, capfd):
    assert launch(make_plan(parse_options(["--tag_output", "--no_local_rank", script, "x"]), None)) == 1
    out, err = capfd.readouterr()
    assert out == "[rank0]: to ['x']\n" and "[rank0]: no 0\n" in err, (out, err)


@pytest.fixture
def pid_path(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"{os.getpid()}.deepspeed"


def see_pid_file(path):
    """A rank that exits with 0 if the file holds the id of this process and only this user may read it."""
    code = "import os, sys; path, pid = sys.argv[1:]; sys.exit(open(path).read() != pid or os.stat(path).st_mode & 0o777 != 0o600)"
    return replace(plan_of([sys.executable, "-c", code, str(path), str(os.getpid())]), save_pid=True)


def test_pid_file(pid_path):
    assert launch(see_pid_file(pid_path)) == 0
    assert list(pid_path.parent.iterdir()) == []


def test_a_pid_file_that_an_earlier_process_left_is_replaced(pid_path):
    pid_path.write_text("left by a process that was killed")
    pid_path.chmod(0o666)
    assert launch(see_pid_file(pid_path)) == 0
    assert list(pid_path.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "link to nothing", "folder", "pipe"])
def test_what_is_no_pid_file_of_ours_is_neither_followed_nor_removed(pid_path, kind):
    victim = pid_path.with_name("victim")
    if kind.startswith("link"):
        if kind == "link":
            victim.write_text("precious")
        pid_path.symlink_to(victim)
    elif kind == "folder":
        pid_path.mkdir()
    else:
        os.mkfifo(pid_path)
    before = os.lstat(pid_path)
    with pytest.raises(LaunchError, match="cannot be made: File exists") as caught:
        launch(see_pid_file(pid_path))
    assert str(pid_path) in caught.value.where and caught.value.fix
    assert os.path.samestat(os.lstat(pid_path), before)
    assert victim.exists() == (kind == "link") and (kind != "link" or victim.read_text() == "precious")


def test_a_pid_file_of_somebody_else(pid_path, monkeypatch):
    pid_path.write_text("1")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LaunchError, match="cannot be made: File exists"):
        launch(see_pid_file(pid_path))
    assert pid_path.read_text() == "1"


@pytest.mark.parametrize("address", ["203.0.113.7", "no-such-host.invalid", "2001:db8::7"])
def test_a_master_address_of_another_host(address):
    with pytest.raises(LaunchError, match="is not an address of this host") as caught:
        launch(replace(plan_of([sys.executable, "-c", ""]), master_addr=address))
    assert caught.value.where == f"--master_addr {address}" and caught.value.fix
