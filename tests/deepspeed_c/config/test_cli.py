"""``deepspeed_c config show`` and ``config check``: their exit codes, and their texts on stdout and stderr."""

import json
import sys
from pathlib import Path

import pytest

from deepspeed_c.launcher import main as command
from tests.waits import ran

ROOT = Path(__file__).resolve().parents[3]


def main(words):
    return command.main(["config", *words])


GOOD = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
BAD = {"train_batch_size": 8, "zero_optimization": {"stag": 2}, "amp": {"enabled": True}}


@pytest.fixture
def file(tmp_path):
    def write(tree):
        path = tmp_path / "c.json"
        path.write_text(json.dumps(tree))
        return str(path)

    return write


def test_show(file, capsys):
    assert main(["show", file(GOOD), "--world-size", "2"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert ["zero_optimization.stage", "2", "user"] in rows
    assert ["train_micro_batch_size_per_gpu", "4", "derived"] in rows
    assert not any(row[0].startswith("nebula") for row in rows)
    assert err == ""


def test_show_all(file, capsys):
    assert main(["show", "--all", file(GOOD)]) == 0
    assert "hybrid_engine.enabled" in capsys.readouterr().out


def test_check_good(file, capsys):
    assert main(["check", file(GOOD)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and "zero_optimization.stage 2" in out and err == ""


@pytest.mark.parametrize("command", ["check", "show"])
def test_bad(file, capsys, command):
    assert main([command, file(BAD)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "zero_optimization.stage?" in err and "amp.enabled" in err and "2 problems" in err


def test_world_size_resolves_the_batch(file, capsys):
    tree = {"train_batch_size": 7}
    assert main(["check", file(tree)]) == 0
    assert main(["check", file(tree), "--world-size", "2"]) == 1
    assert main(["check", file(tree), "--world-size", "0"]) == 1
    assert "world_size" in capsys.readouterr().err


def test_auto_is_left_to_the_caller_without_a_world_size(file, capsys):
    tree = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    assert main(["check", file(tree)]) == 0
    assert main(["check", file(tree), "--world-size", "1"]) == 1


def test_missing_file(capsys):
    assert main(["check", "missing.json"]) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["show"], ["tell", "x"], ["check", "a", "b"], ["check", "a", "--world-size", "two"]]
)
def test_wrong_command_line(argv, capsys):
    assert main(argv) == 2
    assert "usage" in capsys.readouterr().err


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "show" in capsys.readouterr().out


def test_as_a_module_without_torch(file):
    """The command runs where torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['x', 'check', sys.argv[1]];"
        "import runpy; runpy.run_module('deepspeed_c.config', run_name='__main__')"
    )
    run = ran([sys.executable, "-c", code, file(GOOD)], cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")
    assert "zero_optimization.stage 2" in run.stdout
