"""Slurm's srun starts the agents: command lines, the hosts of an allocation, launches on a cluster of two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepspeed_c.errors import CommError, LaunchError
from deepspeed_c.launcher.hostfile import select_hosts
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.runners import find_runner
from deepspeed_c.scheduled import expand_nodelist
from tests.launcher_jobs import install, job, words_after
from tests.launches import check_failure, check_ranks, check_sigterm
from tests.slurm_hosts import SlurmHosts, why_no_slurm

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def hosts():
    if why_no_slurm():
        pytest.skip(why_no_slurm())
    with SlurmHosts(2) as made:
        yield made


@pytest.fixture
def words(hosts):
    return ["--launcher", "slurm", "--hostfile", hosts.hostfile([2, 2])]


def test_ranks(hosts, words, tmp_path):
    check_ranks(hosts, words, tmp_path)


def test_a_failing_rank(hosts, words, tmp_path):
    check_failure(hosts, words, tmp_path)


def test_sigterm(hosts, words, tmp_path):
    check_sigterm(hosts, words, tmp_path)


def test_scancel_is_no_success(hosts, words, tmp_path):
    check_sigterm(hosts, words, tmp_path, lambda: hosts.run(0, ["scancel", "--user", "root"]))


SEES = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURMD_NODENAME", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")
os.write(1, (" ".join(os.environ.get(name, "none") for name in names) + "\\n").encode())
"""


def test_in_a_step_of_an_allocation_without_a_hostfile(hosts, tmp_path):
    # Each task of the job has one device, and the step of the launching command too. An agent still sees all.
    (tmp_path / "sees.py").write_text(SEES)
    job_words = ["salloc", "--nodes", "2", "--gpus-per-node", "2", "--ntasks-per-node", "2", "--gpus-per-task", "1"]
    step_words = ["srun", "--nodes", "1", "--ntasks", "1", "--gpus-per-task", "1"]
    launch = [sys.executable, "-m", "deepspeed_c", "--launcher", "slurm", "--no_local_rank", str(tmp_path / "sees.py")]
    done = hosts.run(0, [*job_words, *step_words, *launch], env={"PYTHONPATH": str(ROOT)})
    places = ["0 0 4 host-0", "1 1 4 host-0", "2 0 4 host-1", "3 1 4 host-1"]
    assert sorted(done.stdout.splitlines()) == [f"{place} 0,1 0,1" for place in places], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_nodelists_as_slurm_expands_them(hosts):
    lists = ["a", "a,b", "gpu[07-09,12],login", "n[1-3]", "r[1-2]n[08-11]", "x[0-0],y-1", "n[098-101]", "b[2]"]
    for text in lists:
        done = hosts.run(0, ["scontrol", "show", "hostnames", text])
        assert expand_nodelist(text) == done.stdout.split(), text


@pytest.mark.parametrize("text", ["", "a[", "a[1-", "a[]", "a[x]", "a b", "a,", "a[1--2]", "a]b["])
def test_no_nodelist(text):
    with pytest.raises(CommError, match="is no list of nodes"):
        expand_nodelist(text)


def environment(monkeypatch, **variables):
    names = ("JOB_ID", "JOB_NODELIST", "GPUS_PER_NODE", "GPUS_ON_NODE", "NTASKS_PER_NODE", "GPUS_PER_TASK")
    for name in (f"SLURM_{name}" for name in names):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "n"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:3"}, 3),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "7"}, 2),
        ({"SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "1"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "5"}, 5),
    ],
)
def test_slots_of_an_allocation(variables, n, monkeypatch):
    environment(monkeypatch, SLURM_JOB_ID="3", SLURM_JOB_NODELIST="n[1-2]", **variables)
    hosts = select_hosts(parse_options(["--launcher", "slurm", "t.py"]), None)
    assert hosts == {"n1": list(range(n)), "n2": list(range(n))}
    hosts = select_hosts(parse_options(["--launcher", "slurm", "--exclude", "n1:0", "t.py"]), None)
    assert hosts == {host: slots for host, slots in (("n1", list(range(1, n))), ("n2", list(range(n)))) if slots}


def test_the_number_of_processes_is_the_users(monkeypatch):
    environment(monkeypatch, SLURM_JOB_ID="3", SLURM_JOB_NODELIST="n[1-2]")
    with pytest.raises(LaunchError, match="Slurm job 3: does not say how many processes a host has"):
        select_hosts(parse_options(["--launcher", "slurm", "t.py"]), None)
    options = parse_options(["--launcher", "slurm", "--num_gpus", "3", "--num_nodes", "1", "t.py"])
    assert select_hosts(options, None) == {"n1": [0, 1, 2]}


def test_other_launchers_do_not_ask_slurm(monkeypatch):
    environment(monkeypatch, SLURM_JOB_ID="3", SLURM_JOB_NODELIST="n[1-2]", SLURM_GPUS_PER_NODE="2")
    assert list(select_hosts(parse_options(["t.py"]), None)) == ["localhost"]


def test_command_line(tmp_path, monkeypatch):
    program = install(tmp_path, {"srun": "slurm 22.05"})["srun"]
    environment(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    start = find_runner("slurm").start(job(launcher_args="--comment 'a b'"), "")
    command = start.command
    assert command[0] == program
    assert words_after(command, "--nodelist") == ["one,two"]
    assert (words_after(command, "--nodes"), words_after(command, "--ntasks")) == (["2"], ["2"])
    assert words_after(command, "--chdir") == ["/work folder"]
    assert words_after(command, "--export") == ["ALL"]
    assert words_after(command, "--comment") == ["a b"]
    assert "--exclusive" in command
    assert "--overlap" not in command
    assert start.environment["A"] == "se cret"
    assert not [word for word in command if "se cret" in word or "t0ken" in word]
    # In an allocation: its limits for a task are not those of an agent.
    environment(monkeypatch, SLURM_JOB_ID="3", SLURM_GPUS_PER_TASK="1", SLURM_NTASKS_PER_NODE="8")
    command = find_runner("slurm").start(job(), "").command
    assert command[:4] == ["env", "-u", "SLURM_GPUS_PER_TASK", program]
    assert "--overlap" in command
    assert "--exclusive" not in command


def test_a_program_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="--launcher slurm: is not installed here\nFix: install .*slurm-client"):
        find_runner("slurm").check()
