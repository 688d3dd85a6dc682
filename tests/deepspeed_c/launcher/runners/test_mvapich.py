"""MVAPICH's mpiexec starts the agents. Its program is MPICH's Hydra here, which it is."""

from __future__ import annotations

import os
import shutil

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.runners import find_runner
from tests.cells import full
from tests.launcher_jobs import install, job, words_after
from tests.launches import check_ranks, mpi_hosts

SAYS = "HYDRA build details:"


@full
def test_ranks(tmp_path):
    with mpi_hosts("mpiexec.mpich", "mpich") as hosts:
        (tmp_path / "bin").mkdir()
        install(tmp_path / "bin", {"mpiname": "MVAPICH2 2.3.7"})
        for name, real in (("mpiexec.hydra", "mpiexec.mpich"), ("hydra_pmi_proxy", "hydra_pmi_proxy")):
            (tmp_path / "bin" / name).symlink_to(shutil.which(real))
        words = ["--launcher", "mvapich", "--hostfile", hosts.hostfile([2, 2])]
        check_ranks(hosts, words, tmp_path, {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})


def test_command_line(tmp_path, monkeypatch):
    other, own = tmp_path / "other", tmp_path / "own"
    for folder in (other, own):
        folder.mkdir()
        install(folder, {"mpiexec.hydra": SAYS})
    monkeypatch.setenv("PATH", f"{other}:{own}")
    with pytest.raises(LaunchError, match="not installed here"):
        find_runner("mvapich").check()
    install(own, {"mpiname": "MVAPICH2 2.3.7"})
    start = find_runner("mvapich").start(job(), "")
    assert start.command[0] == str(own / "mpiexec.hydra")
    assert words_after(start.command, "-genvlist") == ["A,PYTHONPATH,DSC_LAUNCH_JOB"]
