"""Intel MPI's mpiexec starts the agents. Its program is MPICH's Hydra here, from which it comes, with Intel's names of
variables.
"""

from __future__ import annotations

import os

from deepspeed_c.launcher.runners import find_runner
from tests.cells import full
from tests.launcher_jobs import install, job, words_after
from tests.launches import check_ranks, mpi_hosts

SAYS = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619"
PROGRAM = f"""#!/bin/sh
if [ "$1" = --version ]; then echo '{SAYS}'; exit; fi
[ "$I_MPI_PIN" = 0 ] || exit 9
export HYDRA_LAUNCHER="$I_MPI_HYDRA_BOOTSTRAP" HYDRA_LAUNCHER_EXTRA_ARGS="$I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
exec mpiexec.mpich "$@"
"""


@full
def test_ranks(tmp_path):
    with mpi_hosts("mpiexec.mpich", "mpich") as hosts:
        (tmp_path / "bin").mkdir()
        path = tmp_path / "bin" / "mpiexec.hydra"
        path.write_text(PROGRAM)
        path.chmod(0o755)
        words = ["--launcher", "impi", "--hostfile", hosts.hostfile([2, 2])]
        check_ranks(hosts, words, tmp_path, {"I_MPI_ROOT": str(tmp_path)})


def test_command_line(tmp_path, monkeypatch):
    paths = install(tmp_path, {"mpiexec.hydra": "HYDRA build details:", "mpirun": SAYS})
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    start = find_runner("impi").start(job(ssh_port=2222), "")
    assert start.command[0] == paths["mpirun"]  # the other is MPICH's
    assert words_after(start.command, "-genvlist") == ["A,PYTHONPATH,DSC_LAUNCH_JOB,I_MPI_PIN"]
    assert start.environment["I_MPI_PIN"] == "0"
    assert start.environment["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] == "0"
    assert "-p 2222" in start.environment["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"]


def test_its_own_folder_comes_first(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    own = install(tmp_path / "bin", {"mpirun": SAYS})["mpirun"]
    install(tmp_path, {"mpirun": SAYS})
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setenv("I_MPI_ROOT", os.fspath(tmp_path))
    assert find_runner("impi").start(job(), "").command[0] == own
