"""The command line for pdsh: what is on it, and what is not."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.options import parse_options
from deepspeed_c.launcher.runners import RUNNERS, find_runner
from deepspeed_c.launcher.runners.pdsh import PdshRunner


def job(*words, **values):
    made = {
        "options": parse_options([*words, "t.py", "a b"]),
        "hosts": {"a": [0, 1], "b": [0]},
        "environment": {"PYTHONPATH": "/x y/100%", "KEY": "hunter2"},
        "folder": "/it's here/50%",
        "token": "secret",
        "store": ("10.0.0.1", 4321),
    }
    return Job(**{**made, **values})


def test_a_job_survives_its_way():
    made = job("--ssh_port", "2222")
    assert Job.from_json(made.to_json()) == made
    assert made.place(1, [0, 1]).first_rank == 2 and made.place(1, [0, 1]).world_size == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"options": {}}', "null"])
def test_a_job_that_is_none(text):
    with pytest.raises(LaunchError, match="not that of this version"):
        Job.from_json(text)


def test_words():
    command = PdshRunner().start(job("--ssh_port", "2222", "--launcher_args", "-t '5 6'"), "/tmp/j").command
    assert command[command.index("-w") + 1] == "a,b"
    assert command[command.index("-t") + 1] == "5 6"
    assert command[command.index("-p") + 1] == "2222" and "%h" in command
    assert not [word for word in command if "hunter2" in word or "secret" in word or "KEY" in word]


def test_a_user_of_a_host():
    assert "%u" not in PdshRunner().start(job(), "/tmp/j").command
    command = PdshRunner().start(job(hosts={"a": [0], "me@b": [0]}), "/tmp/j").command
    assert command[command.index("-w") + 1] == "a,me@b"
    assert command[command.index("-l") + 1] == "%u"


def test_the_shells_on_the_way_take_nothing_away(tmp_path):
    """What sh would run on the host: pdsh's notation undone, the folder and PYTHONPATH as they were."""
    folder = tmp_path / "it's here, 50%"
    folder.mkdir()
    made = PdshRunner().start(job(folder=str(folder), environment={"PYTHONPATH": "/x y/100%"}), "/dev/null").command
    remote = made[-1].replace("%%", "\0").replace("%h", "host").replace("\0", "%")
    shown = remote.replace(shlex.join(PdshRunner().agent(job(), "--host")), "printenv PYTHONPATH; pwd; echo")
    shown = shown.replace("exec printenv", "printenv")
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.splitlines() == ["/x y/100%", str(folder), "host"]


def test_launcher_args_that_do_not_end():
    with pytest.raises(LaunchError, match="cannot be split into words"):
        PdshRunner().start(job("--launcher_args", "'x"), "j")


def test_a_program_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="not installed") as caught:
        find_runner("pdsh").check()
    assert "pdsh" in caught.value.fix


def test_an_unknown_runner():
    assert isinstance(find_runner("pdsh"), RUNNERS["pdsh"])
    with pytest.raises(LaunchError, match="did you mean 'pdsh'"):
        find_runner("pdhs")
