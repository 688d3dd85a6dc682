"""The logger: ranks, levels and streams of its lines. An import writes nothing, and no line is written twice."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c import logging as own

ROOT = Path(__file__).resolve().parents[2]

# Runs in processes of their own, because a process has one logger.
SPEAK = """
from deepspeed_c.logging import log_dist, logger, set_level, set_rank
{before}
for level in ("debug", "info", "warning", "error", "critical"):
    getattr(logger, level)("own-" + level)
log_dist("dist-default")
log_dist("dist-1", ranks=[1])
log_dist("dist-all", ranks=[-1])
log_dist("dist-0-debug", ranks=[0], level=10)
log_dist("dist-1-debug", ranks=[1], level=10)
"""


def speak(before="", **env):
    code = SPEAK.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PYTHONPATH": str(ROOT), **env},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def said(lines):
    return [line.split("] ")[-1] for line in lines]


OWN = ["own-debug", "own-info", "own-warning", "own-error", "own-critical"]


@pytest.mark.parametrize(
    "env, before, expected",
    [
        ({}, "", [*OWN[1:], "dist-default", "dist-all"]),
        ({"RANK": "0"}, "", [*OWN[1:], "dist-default", "dist-all"]),
        ({"RANK": "1"}, "", [*OWN[2:], "dist-1", "dist-all"]),
        ({"RANK": "2"}, "", [*OWN[2:], "dist-all"]),
        ({}, "set_rank(1)", [*OWN[2:], "dist-1", "dist-all"]),
        ({"RANK": "1"}, "set_rank(0)", [*OWN[1:], "dist-default", "dist-all"]),
        ({}, "set_level('debug')", [*OWN, "dist-default", "dist-all", "dist-0-debug"]),
        ({"RANK": "1"}, "set_level('DEBUG')", [*OWN, "dist-1", "dist-all", "dist-1-debug"]),
        ({"RANK": "1"}, "set_level('error')", OWN[3:]),
        ({}, "set_level('error'); set_level(None)", [*OWN[1:], "dist-default", "dist-all"]),
        ({"DSC_LOG": "warning"}, "", OWN[2:]),
        ({"DSC_LOG": "warning"}, "set_level('debug')", OWN[2:]),
        ({"DSC_LOG": "error", "RANK": "1"}, "set_rank(0)", OWN[3:]),
        ({"RANK": "1"}, "logger.setLevel(40)", OWN[3:]),
        ({}, "logger.setLevel(10)", [*OWN, "dist-default", "dist-all", "dist-0-debug"]),
        ({"RANK": "junk"}, "", [*OWN[1:], "dist-default", "dist-all"]),
    ],
)
def test_who_says_what(env, before, expected):
    assert said(speak(before, **env)) == expected


def test_line_has_level_and_rank():
    (line,) = [line for line in speak(RANK="3") if "own-error" in line]
    assert "[ERROR] [rank 3] own-error" in line


def test_json_lines():
    lines = [json.loads(line) for line in speak(DSC_LOG="info,json", RANK="0")]
    assert [line["message"] for line in lines] == [*OWN[1:], "dist-default", "dist-all"]
    assert {line["rank"] for line in lines} == {0} and lines[0]["level"] == "info"
    assert all(line["where"].startswith("<string>:") for line in lines), lines
    assert all(isinstance(line["time"], float) for line in lines)


def test_json_holds_the_exception():
    before = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logger.exception('x')"
    line = json.loads(speak(before, DSC_LOG="json")[0])
    assert "ZeroDivisionError" in line["exception"]


def test_bad_dsc_log_is_refused_when_the_level_is_set_and_not_at_import():
    before = (
        "from deepspeed_c.errors import ConfigError\n"
        "try:\n    set_level(None)\n"
        "except ConfigError as e:\n    logger.error(str(e).replace(chr(10), ' '))"
    )
    assert "DSC_LOG: 'loud' is not a level" in speak(before, DSC_LOG="loud")[0]


def test_importing_again_does_not_double_the_lines():
    before = "import importlib, deepspeed_c.logging as again\nimportlib.reload(again)\nimportlib.reload(again)"
    lines = said(speak(before))
    assert lines.count("own-error") == 1


def test_root_logger_does_not_repeat():
    assert said(speak("import logging; logging.basicConfig(level=0)")).count("own-error") == 1


def test_writes_to_the_stderr_of_the_moment(capsys):
    from deepspeed_c.logging import logger

    logger.error("captured")
    assert "captured" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["loud", "", 1.5, True])
def test_unknown_level(level):
    from deepspeed_c.errors import ConfigError
    from deepspeed_c.logging import set_level

    with pytest.raises(ConfigError, match="level"):
        set_level(level)


def test_logger_is_an_ordinary_one():
    from deepspeed_c.logging import logger

    assert type(logger) is logging.Logger and logger.name == "deepspeed_c"


def test_what_deepspeeds_module_has_besides(tmp_path):
    """Runs in another process, because ranks and levels belong to the process."""
    path = tmp_path / "said.json"
    before = (
        "import json, logging, types\n"
        "import deepspeed_c.logging as own\n"
        "from deepspeed_c.errors import ConfigError\n"
        "assert own.get_dist_msg('x') is None and own.get_dist_msg('x', [1]) == own.get_dist_msg('x', [-1]) == '[Rank 1] x'\n"
        "own.print_dist('not here', [0]); own.print_dist('printed', [1])\n"
        "for _ in range(3): own.log_dist_once('once', [1]); own.log_dist_once('once', [0, 1]); own.warning_once('twice %d', 2)\n"
        f"own.print_json_dist({{'loss': 0.5}}, ranks=[1], path={str(path)!r})\n"
        f"own.print_json_dist({{'loss': 9}}, ranks=[0], path={str(path)!r})\n"
        "assert own.get_current_level() == logging.WARNING and own.should_log_le('error') and not own.should_log_le('info')\n"
        "own.set_log_level_from_string('INFO')\n"
        "assert own.get_current_level() == logging.INFO and own.should_log_le('info')\n"
        "own.print_configuration(types.SimpleNamespace(lr=0.1, beta=2), 'settings')\n"
        "other = logging.Logger('other'); other.addHandler(logging.NullHandler())\n"
        "own.set_log_level_from_string('error', other)\n"
        "assert other.level == other.handlers[0].level == logging.ERROR and own.get_current_level() == logging.INFO\n"
        "for wrong in (lambda: own.get_log_level_from_string('loud'), lambda: own.should_log_le(3), lambda: own.print_json_dist({})):\n"
        "    try: wrong()\n"
        "    except ConfigError: continue\n"
        "    raise SystemExit('nothing was raised')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", before],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANK": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[Rank 1] printed\n"
    lines = [line.split("] ")[-1] for line in done.stderr.splitlines()]
    assert lines == [
        "once",
        "once",
        "twice 2",
        "settings:",
        "  beta " + "." * 25 + " 2",
        "  lr " + "." * 27 + " 0.1",
    ], lines
    assert json.loads(path.read_text()) == {"loss": 0.5, "rank": 1}


class Pieces:
    """A stream without a buffer, as with PYTHONUNBUFFERED. Each write goes to the shared pipe by itself."""

    def __init__(self):
        self.written = []

    def write(self, text):
        self.written.append(text)
        return len(text)

    def flush(self):
        pass


def test_a_line_is_one_write(monkeypatch):
    pieces = Pieces()
    monkeypatch.setattr(sys, "stdout", pieces)
    monkeypatch.setattr(sys, "stderr", pieces)
    own.print_dist("printed", [-1])
    own.logger.error("logged\nin two lines")
    assert pieces.written[0] == "[Rank 0] printed\n", pieces.written
    assert len(pieces.written) == 2 and pieces.written[1].endswith("logged\nin two lines\n"), pieces.written
