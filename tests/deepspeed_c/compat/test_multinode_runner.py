"""DeepSpeed's classes of runners make command lines that the launcher reads back as what was asked."""

from __future__ import annotations

import argparse
import base64
import json
import sys

import pytest

from deepspeed_c.compat import multinode_runner
from deepspeed_c.launcher.exports import exports
from deepspeed_c.launcher.hostfile import select_hosts
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.runners import RUNNERS, find_runner
from tests.launcher_jobs import install

NAMES = {
    "pdsh": "PDSHRunner", "openmpi": "OpenMPIRunner", "mpich": "MPICHRunner", "impi": "IMPIRunner",
    "slurm": "SlurmRunner", "mvapich": "MVAPICHRunner",
}  # fmt: skip
HOSTS = {"one": [0, 2], "two": [1]}
INFO = base64.urlsafe_b64encode(json.dumps(HOSTS).encode()).decode()


def runner_of(name, hostfile, **more):
    values = {"user_script": "train.py", "user_args": ["a b", 'q"x', "--module"]}
    values |= {"hostfile": str(hostfile), "launcher_args": ""}
    args = argparse.Namespace(**{**values, "include": "", "exclude": "", "num_nodes": -1, "num_gpus": -1, **more})
    pool = () if name == "pdsh" else ({"one": 3, "two": 2},)
    return getattr(multinode_runner, NAMES[name])(args, INFO, *pool)


@pytest.fixture
def hostfile(tmp_path):
    (tmp_path / "hosts").write_text("one slots=3\ntwo slots=2\n")
    return tmp_path / "hosts"


@pytest.mark.parametrize("name", RUNNERS)
def test_the_launcher_reads_what_was_asked(name, hostfile):
    more = {"ssh_port": 77, "no_local_rank": True, "module": True, "master_port": 29501, "venv_script": "a b.sh"}
    more["launcher_args"] = "-v 'x y'"
    runner = runner_of(name, hostfile, **more)
    runner.add_export(" MY_KEY ", " a b=c ")
    environment = {"HOME": "/root"}
    made = runner.get_cmd(environment, HOSTS)
    command = made[0] if name == "pdsh" else made
    assert command[:4] == [sys.executable, "-u", "-m", "deepspeed_c"]
    assert not [word for word in command if "a b=c" in word]
    options = parse_options(command[4:])
    assert (options.launcher, options.launcher_args, options.force_multi) == (name, "-v 'x y'", True)
    assert (options.script, options.script_args) == ("train.py", ("a b", 'q"x', "--module"))
    assert (options.ssh_port, options.master_port, options.venv_script) == (77, 29501, "a b.sh")
    assert (options.module, options.no_local_rank, options.no_python) == (True, True, False)
    assert select_hosts(options, None) == HOSTS
    assert exports(environment) == {"MY_KEY": "a b=c", "DSC_EXPORT": "MY_KEY"}
    assert runner.name == name
    if name == "pdsh":
        assert made[1:] == (["true"], environment)


@pytest.mark.parametrize("name", RUNNERS)
def test_numbers_of_slots(name, hostfile):
    made = runner_of(name, hostfile).get_cmd({}, {"two": 2})
    options = parse_options((made[0] if name == "pdsh" else made)[4:])
    assert select_hosts(options, None) == {"two": [0, 1]}


def test_slurm_comment(hostfile):
    for args, wanted in (("", "--comment 'a b'"), ("-v", "-v --comment 'a b'")):
        command = runner_of("slurm", hostfile, slurm_comment="a b", launcher_args=args).get_cmd({}, HOSTS)
        assert parse_options(command[4:]).launcher_args == wanted


def test_backend_exists(hostfile, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [runner_of(name, hostfile).backend_exists() for name in ("pdsh", "slurm", "mpich")] == [False] * 3
    install(tmp_path, {"pdsh": "", "ssh": "", "srun": ""})
    assert [runner_of(name, hostfile).backend_exists() for name in ("pdsh", "slurm", "mpich")] == [True, True, False]
    assert find_runner("slurm").program() == str(tmp_path / "srun")
