"""With two MPIs installed, a runner takes the program of its own, whichever ``mpirun`` is."""

from __future__ import annotations

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.runners import find_runner
from deepspeed_c.launcher.runners.mpi import ssh_words, version_of
from tests.launcher_jobs import install, job

OPEN_MPI, MPICH = "mpirun (Open MPI) 4.1.4", "HYDRA build details:\n    Version: 4.0.2"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.10"


def folder_of(tmp_path, name, says):
    (tmp_path / name).mkdir()
    install(tmp_path / name, says)
    return str(tmp_path / name)


@pytest.mark.parametrize("order", [("open", "mpich", "intel"), ("mpich", "intel", "open"), ("intel", "open", "mpich")])
def test_each_finds_its_own(order, tmp_path, monkeypatch):
    folders = {
        "open": folder_of(tmp_path, "open", {"mpirun": OPEN_MPI, "mpiexec": OPEN_MPI}),
        "mpich": folder_of(tmp_path, "mpich", {"mpirun": MPICH, "mpiexec": MPICH}),
        "intel": folder_of(tmp_path, "intel", {"mpirun": INTEL, "mpiexec.hydra": INTEL}),
    }
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    monkeypatch.setenv("PATH", ":".join(["/nowhere", *(folders[name] for name in order)]))
    assert find_runner("openmpi").program() == f"{folders['open']}/mpirun"
    assert find_runner("mpich").program() == f"{folders['mpich']}/mpiexec"
    assert find_runner("impi").program() == f"{folders['intel']}/mpiexec.hydra"


@pytest.mark.parametrize(
    ("runner", "package"), [("openmpi", "openmpi-bin"), ("mpich", "mpich"), ("mvapich", "MVAPICH"), ("impi", "Intel")]
)
def test_one_that_is_not_installed(runner, package, tmp_path, monkeypatch):
    says = MPICH if runner in ("openmpi", "impi") else OPEN_MPI
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "mpirun").mkdir()  # a folder is no program
    with pytest.raises(LaunchError, match=f"--launcher {runner}: is not installed here\nFix: install .*{package}"):
        find_runner(runner).check()
    (tmp_path / "mpirun").rmdir()
    path = install(tmp_path, {"mpirun": says})["mpirun"]
    other = "" if runner == "mvapich" else rf" \({path} is {says.splitlines()[0][:6]}"
    with pytest.raises(LaunchError, match=f"is not installed here{other}".replace("(O", r"\(O")):
        find_runner(runner).check()


def test_a_program_that_cannot_be_started(tmp_path):
    path = tmp_path / "mpirun"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    assert version_of(str(path)) == ""
    assert version_of(str(tmp_path / "missing")) == ""


def test_words_for_ssh(monkeypatch):
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F 'my config'")
    with pytest.raises(LaunchError, match=r"PDSH_SSH_ARGS_APPEND: 'my config' cannot be passed on: openmpi splits"):
        ssh_words(job(launcher="openmpi"))
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F config")
    assert ssh_words(job(launcher="openmpi", ssh_port=77)).endswith("-p 77 -F config")
