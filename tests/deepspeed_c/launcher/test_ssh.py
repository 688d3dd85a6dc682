"""`deepspeed_c ssh`: a command on all hosts. The hosts of the last tests are network namespaces with ssh servers."""

from __future__ import annotations

import os
import stat

import pytest

from deepspeed_c.launcher.main import main
from tests.ssh_hosts import SshHosts, why_no_ssh

TIMEOUT_SECONDS = 300


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder on PATH with a pdsh that prints its words, one a line, and ends with code 3."""
    for name in ("pdsh", "ssh"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 3\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("b slots=2\na slots=1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ls"], "ls"),
        (["echo $HOME; ls | wc"], "echo $HOME; ls | wc"),
        (["--", "ls", "-l", "-f"], "ls -l -f"),
        (["touch", "a b", "it's", "$x", ""], "touch 'a b' 'it'\"'\"'s' '$x' ''"),
        (["date", "+%H %M"], "date '+%%H %%M'"),  # pdsh reads %% as %
    ],
    ids=range(5),
)
def test_the_words_of_pdsh(words, line, programs, capfd):
    assert main(["ssh", "-f", str(programs / "hosts"), *words]) == 3
    shown = capfd.readouterr().out.splitlines()
    print(shown)
    assert shown[shown.index("-w") + 1] == "b,a"
    assert shown[-2:] == ["%h", line]
    assert "-p" not in shown


def test_a_user_of_a_host(programs, capfd):
    (programs / "hosts").write_text("b slots=1\nme@a slots=1\n")
    assert main(["ssh", "-f", str(programs / "hosts"), "ls"]) == 3
    shown = capfd.readouterr().out.splitlines()
    assert shown[shown.index("-w") + 1] == "b,me@a"
    assert shown[shown.index("-l") + 1] == "%u"


def test_another_port(programs, capfd):
    assert main(["ssh", "--ssh_port", "2222", "--hostfile", str(programs / "hosts"), "ls"]) == 3
    shown = capfd.readouterr().out.splitlines()
    assert shown[shown.index("-p") + 1] == "2222"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-f", "/nonexistent/hosts", "ls"], "/nonexistent/hosts"),
        (["-f", "bad", "ls"], "line 2"),
        (["ls"], "/job/hostfile"),
        (["-f", "hosts"], "which command?"),
        (["-f", "hosts", "--ssh_port", "0", "ls"], "65535"),
    ],
    ids=range(5),
)
def test_mistakes_are_named(words, text, programs, monkeypatch, capfd):
    monkeypatch.chdir(programs)
    monkeypatch.setattr("deepspeed_c.launcher.hostfile.DEFAULT_HOSTFILES", ("/nonexistent/job/hostfile",))
    (programs / "bad").write_text("a slots=1\nb slots\n")
    assert main(["ssh", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and text in err, err


def test_without_pdsh_its_package_is_named(programs, monkeypatch, capfd):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["ssh", "-f", str(programs / "hosts"), "ls"]) == 2
    assert "apt-get install pdsh" in capfd.readouterr().err


@pytest.fixture(scope="module")
def hosts():
    if why := why_no_ssh():
        pytest.skip(why)
    with SshHosts(2) as found:
        yield found


def ask(hosts, *words):
    process = hosts.launch(0, words)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    print(out, err)
    return process.returncode, sorted(out.splitlines()), err


def test_a_command_on_two_hosts(hosts):
    file = hosts.hostfile([1, 1])
    code, lines, _ = ask(hosts, "ssh", "-f", file, "printf", r"%s|%s|%s|%s|\n", "a b", "it's", "$HOME", "")
    assert (code, lines) == (0, [f"host-{i}: a b|it's|$HOME||" for i in range(2)])
    code, lines, _ = ask(hosts, "ssh", "-f", file, "hostname; exit $(hostname | tr -dc 0-9)4")
    assert (code, lines) == (14, ["host-0: host-0", "host-1: host-1"])


def test_a_host_that_is_not_there(hosts):
    code, lines, err = ask(hosts, "ssh", "-f", hosts.hostfile({"host-0": 1, "nobody": 1}), "hostname")
    assert (code, lines) == (255, ["host-0: host-0"])
    assert "nobody" in err and "resolve" in err
