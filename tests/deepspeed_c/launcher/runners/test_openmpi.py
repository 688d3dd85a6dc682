"""Open MPI's mpirun starts the agents: its command line, and launches on two hosts."""

from __future__ import annotations

import os

import pytest

from deepspeed_c.launcher.runners import find_runner
from tests.launcher_jobs import install, job, words_after
from tests.launches import check_failure, check_ranks, check_sigterm, mpi_hosts

SAYS = "mpirun (Open MPI) 4.1.4"


@pytest.fixture(scope="module")
def hosts():
    with mpi_hosts("mpirun.openmpi", "openmpi-bin") as made:
        yield made


@pytest.fixture
def words(hosts):
    return ["--launcher", "openmpi", "--hostfile", hosts.hostfile([2, 2])]


def test_ranks(hosts, words, tmp_path):
    check_ranks(hosts, words, tmp_path)


def test_a_failing_rank(hosts, words, tmp_path):
    check_failure(hosts, words, tmp_path)


def test_sigterm(hosts, words, tmp_path):
    check_sigterm(hosts, words, tmp_path)


@pytest.mark.parametrize(("user", "allows"), [(0, True), (1000, False)])
def test_command_line(user, allows, tmp_path, monkeypatch):
    program = install(tmp_path, {"mpirun": SAYS})["mpirun"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    start = find_runner("openmpi").start(job(launcher_args="--mca btl 'a b'", ssh_port=2222), "")
    command = start.command
    assert command[0] == program
    assert words_after(command, "-n") == ["2"]
    assert words_after(command, "--host") == ["one:1,two:1"]
    assert words_after(command, "--wdir") == ["/work folder"]
    assert words_after(command, "-x") == ["A", "PYTHONPATH", "DSC_LAUNCH_JOB"]
    assert words_after(command, "btl") == ["a b"]
    assert ("--allow-run-as-root" in command) is allows
    assert "-p 2222" in start.environment["OMPI_MCA_plm_rsh_args"]
    assert start.environment["A"] == "se cret"
    assert not [word for word in command if "se cret" in word or "t0ken" in word]


def test_by_its_name_if_it_is_the_systems(monkeypatch):
    runner = find_runner("openmpi")
    monkeypatch.setattr(type(runner), "program", lambda self: "/usr/bin/mpirun.openmpi")
    assert runner.start(job(), "").command[0] == "mpirun.openmpi"
    monkeypatch.setattr(type(runner), "program", lambda self: "/opt/openmpi/bin/mpirun")
    assert runner.start(job(), "").command[0] == "/opt/openmpi/bin/mpirun"
