"""``deepspeed_c run`` replaces its process by the command, with the alias in the environment and nothing else changed.
``deepspeed_c env`` prints the same environment for a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c.compat.alias import cli
from deepspeed_c.compat.alias.install import FORCE, SHIM
from deepspeed_c.launcher.main import main
from tests.waits import ran

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT_SECONDS = 300

SHOW = (
    "import json, sys; from importlib.metadata import version\n"
    "print(json.dumps([sys.argv[2:], version('deepspeed'), sys.stdin.read()]))\n"
    "sys.exit(7)\n"
)


@pytest.fixture
def real(tmp_path):
    folder = tmp_path / "site" / "deepspeed"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder.parent


def start(*argv, **variables):
    environment = {name: value for name, value in os.environ.items() if name != FORCE}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "deepspeed_c", *argv],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def replaced(monkeypatch):
    """Records the commands that would be executed, with their environments."""
    calls = []
    monkeypatch.setattr(os, "execvpe", lambda file, argv, env: calls.append((file, argv, env)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.delenv(FORCE, raising=False)
    return calls


def test_command_is_the_process_itself():
    words = ["a b", "", "--force", "--", "-x", "$HOME", "'q\"", "ä"]
    # With a shell in between, the whole tree of processes sees the alias.
    shell = 'grep SigIgn /proc/self/status; "$0" -c "$1" "$@"; exit $?'
    process = start("run", "sh", "-c", shell, sys.executable, SHOW, *words)
    out, err = process.communicate("typed", timeout=TIMEOUT_SECONDS)
    assert process.returncode == 7, err
    ignored, shown = out.splitlines()
    seen, version, typed = json.loads(shown)
    assert seen == words and version.startswith("0.19.6+c") and typed == "typed" and err == ""
    is_ignored = int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1))
    assert not is_ignored, "a command whose reader has gone would go on"


def test_signals_reach_the_command():
    process = start("run", sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGTERM


def test_real_deepspeed_is_refused_by_its_path(real):
    for command in (["run", "echo", "ran"], ["env"]):
        process = start(*command, PYTHONPATH=f"{ROOT}:{real}")
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert (process.returncode, out) == (3, ""), err
        assert str(real) in err and "--force" in err and "Traceback" not in err


def test_force_hides_it_from_the_whole_tree(real):
    code = "import deepspeed; print(deepspeed.__name__)"
    process = start("run", "--force", "sh", "-c", f"{sys.executable} -c '{code}'", PYTHONPATH=f"{ROOT}:{real}")
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (0, "deepspeed_c\n"), err


@pytest.mark.parametrize(
    ("argv", "command", "force"),
    [
        (["x"], ["x"], False),
        (["--force", "x", "--force"], ["x", "--force"], True),
        (["--", "--force"], ["--force"], False),
        (["--force", "--", "-x", "--"], ["-x", "--"], True),
        (["x", "--", "-h"], ["x", "--", "-h"], False),
    ],
)
def test_options_end_where_the_command_begins(argv, command, force, replaced):
    main(["run", *argv])
    ((file, words, environ),) = replaced
    assert (file, words) == (command[0], command)
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == SHIM and (environ.get(FORCE) == "1") is force


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["run"], "which command?"),
        (["run", "--"], "which command?"),
        (["run", "--forse", "x"], "what is '--forse'?"),
        (["env", "x"], "what is 'x'?"),
    ],
)
def test_misused(argv, text, replaced, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err and "usage: " in err and not replaced


@pytest.mark.parametrize("command", ["run", "env"])
def test_help(command, replaced, capsys):
    assert main([command, "--help"]) == 0
    assert "--force" in capsys.readouterr().out and not replaced


@pytest.mark.parametrize(("mode", "code"), [(None, 127), (0o644, 126)])
def test_command_that_cannot_be_run(mode, code, tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    if mode is not None:
        script.write_text("")
        script.chmod(mode)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert cli.run([str(script), "--lr", "1"]) == code
    assert f"Fix: deepspeed_c run python {script} --lr 1" in capsys.readouterr().err


def test_shell_takes_over_the_variables(monkeypatch, capsys, tmp_path):
    odd = f'{tmp_path}/it\'s a "folder" $HOME'
    monkeypatch.setenv("PYTHONPATH", odd)
    assert main(["env", "--force"]) == 0
    lines = capsys.readouterr().out
    done = ran(
        ["sh", "-c", f'eval "$1"; printf "%s|%s" "$PYTHONPATH" "${FORCE}"', "sh", lines],
        check=True,
        env={},
        timeout=TIMEOUT_SECONDS,
    )
    assert done.stdout == f"{SHIM}:{odd}|1"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint.ds_to_universal", "--output_folder"),
        ("utils.zero_to_fp32", "checkpoint_dir"),
        ("env_report", "--json"),
        ("launcher.runner", "usage: deepspeed_c"),
        ("launcher.launch", "--world_info"),
        ("utils.groups", ""),  # the module only has definitions
    ],
)
def test_modules_run_by_their_name(name, says):
    process = start("run", sys.executable, "-m", f"deepspeed.{name}", "--help")
    out, err = process.communicate("", timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0 and says in out, (process.returncode, out, err)


def test_a_module_that_nobody_has_does_not_run():
    process = start("run", sys.executable, "-m", "deepspeed.nothing")
    _, err = process.communicate("", timeout=TIMEOUT_SECONDS)
    assert process.returncode == 1 and "is not part of this version" in err, err
