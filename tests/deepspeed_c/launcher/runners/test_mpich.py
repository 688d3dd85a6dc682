"""MPICH's mpiexec starts the agents: its command line, and launches on two hosts."""

from __future__ import annotations

import pytest

from deepspeed_c.launcher.runners import find_runner
from tests.cells import full
from tests.launcher_jobs import install, job, words_after
from tests.launches import check_failure, check_ranks, check_sigterm, mpi_hosts

SAYS = "HYDRA build details:"


@pytest.fixture(scope="module")
def hosts():
    with mpi_hosts("mpiexec.mpich", "mpich") as made:
        yield made


@pytest.fixture
def words(hosts):
    return ["--launcher", "mpich", "--hostfile", hosts.hostfile([2, 2])]


@full
def test_ranks(hosts, words, tmp_path):
    check_ranks(hosts, words, tmp_path)


def test_a_failing_rank(hosts, words, tmp_path):
    check_failure(hosts, words, tmp_path)


def test_sigterm(hosts, words, tmp_path):
    check_sigterm(hosts, words, tmp_path)


def test_command_line(tmp_path, monkeypatch):
    program = install(tmp_path, {"mpirun": SAYS})["mpirun"]
    monkeypatch.setenv("PATH", str(tmp_path))
    start = find_runner("mpich").start(job(launcher_args="-iface 'eth 0'", ssh_port=2222), "")
    command = start.command
    assert command[0] == program
    assert words_after(command, "-hosts") == ["one,two"]
    assert (words_after(command, "-n"), words_after(command, "-ppn")) == (["2"], ["1"])
    assert words_after(command, "-wdir") == ["/work folder"]
    assert words_after(command, "-genvlist") == ["A,PYTHONPATH,DSC_LAUNCH_JOB"]
    assert words_after(command, "-iface") == ["eth 0"]
    assert start.environment["HYDRA_LAUNCHER"] == "ssh"
    assert "-p 2222" in start.environment["HYDRA_LAUNCHER_EXTRA_ARGS"]
    assert start.environment["A"] == "se cret"
    assert not [word for word in command if "se cret" in word or "t0ken" in word]
