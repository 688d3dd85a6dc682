"""The process of an experiment: how it is watched, and how it ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c.autotuning.experiment import Launch, prepare, run_experiment
from deepspeed_c.autotuning.progress import ProgressBar
from deepspeed_c.autotuning.space import make_space
from deepspeed_c.cgroups import memory_group
from tests.deepspeed_c.launcher.test_main import wait_for
from tests.waits import ended


class Shell(Launch):
    """A launch of a shell that leaves its process id in the experiment's folder."""

    def command(self, arguments):
        return [
            "/bin/sh",
            "-c",
            f'cd "$(dirname "$0")"; echo $$ > pid.part; mv pid.part pid; {self.script}',
            arguments[-1],
        ]


def shell(script):
    return Shell((), script, ("--deepspeed_config", "ds.json"), 1, 1)


def candidate(minutes):
    section = {"max_train_micro_batch_size_per_gpu": 1, "max_minutes_without_step": minutes}
    (found,) = make_space({"autotuning": section}, 1, has_accelerator=False).candidates
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def with_limit(minutes):
    """A candidate whose limit no configuration file can have."""
    found = candidate(1)
    return found._replace(config={**found.config, "autotuning": {"max_minutes_without_step": minutes}})


def test_an_experiment_without_a_step_is_ended(tmp_path):
    result = run_experiment(with_limit(0.005), shell("exec sleep 1000"), tmp_path, {})
    assert result.is_stuck and result.metrics is None and result.problem == "no step in 0.005 minutes"
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert json.loads((tmp_path / "exp.json").read_text())["exit_code"] is None


def test_steps_prolong_an_experiment_and_are_watched(tmp_path):
    """It takes longer than its limit, and each step less. Steps of an earlier run do not count."""
    (tmp_path / "steps.txt").write_text("77")
    script = "for i in 1 2 3 4 5 6; do sleep 1; echo $i > steps.txt; done; echo '{}' > metrics.json"
    seen = []
    result = run_experiment(with_limit(0.07), shell(script), tmp_path, {}, seen.append)
    assert not result.is_stuck and result.metrics == {} and result.seconds > 0.07 * 60
    assert seen == sorted(seen) and seen[0] == 0 and set(seen) <= set(range(7)) and len(set(seen)) > 2


def test_an_experiment_leaves_the_checkpoints_of_the_run_alone(tmp_path):
    found = candidate(1)
    section = {"auto_resume": "saved", "every": "60s", "preemption": {"enabled": True}, "keep_last": 3}
    found = found._replace(config={**found.config, "checkpoint": section})
    words = prepare(found, shell("true"), tmp_path, {})
    written = json.loads((tmp_path / "ds_config.json").read_text())
    assert words == ["--deepspeed_config", str(tmp_path / "ds_config.json")]
    assert written["checkpoint"] == {"keep_last": 3}, written


def test_half_written_steps_are_no_step(tmp_path):
    result = run_experiment(with_limit(0.01), shell(": > steps.txt; exec sleep 1000"), tmp_path, {})
    assert result.is_stuck


def test_an_experiment_that_fills_its_control_group_is_out_of_memory(tmp_path):
    with memory_group(f"deepspeed_c_test_{os.getpid()}", 1 << 30) as group:
        if group is None:
            pytest.skip("no memory control group can be made here")
    script = f"sleep 1; {sys.executable} -S -c 'x = bytearray(512 << 20)'"
    result = run_experiment(candidate(1), shell(script), tmp_path, {}, host_limit=64 << 20)
    assert result.problem == f"out of memory: killed by its cgroup at {64 << 20} bytes (64 MiB)", result
    larger = run_experiment(
        candidate(1), shell(f"{script}; echo {{}} > metrics.json"), tmp_path, {}, host_limit=2 << 30
    )
    assert larger.problem == "" and larger.metrics == {}


TUNER = """
import sys
from tests.deepspeed_c.autotuning.test_experiment import candidate, run_experiment, shell
from pathlib import Path
run_experiment(candidate(5), shell("exec sleep 1000"), Path(sys.argv[1]), {})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_experiment_does_not_outlive_its_tuner(tmp_path, number):
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "pid").exists, "the experiment")
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
    finally:
        tuner.send_signal(number)
        ended(tuner)
    wait_for(lambda: not is_running(pid), "the end of the experiment")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_is_drawn_on_a_terminal_alone(monkeypatch):
    file = io.StringIO()
    bar = ProgressBar(6, file)
    bar.watch("z0", 0, 3, "none")(1)
    bar.clear()
    assert file.getvalue() == ""
    terminal = Terminal()
    bar = ProgressBar(6, terminal)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((30, 5)))
    draw = bar.watch("z0_gas1_tmbspg1", 0, 3, "none")
    draw(1)
    draw(1)
    assert terminal.getvalue() == "\r\x1b[K[#...................] 0/3; z", "drawn once, and cut to the width"
    bar.clear()
    bar.clear()
    assert terminal.getvalue().count("\r\x1b[K") == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a", 0, 4, "none", 0, None), "[....................] 0/4; a: step 0/5; best: none"),
        (("a", 2, 2, "b, 3.5", 5, 41.6), "[###############.....] 2/4, 42 s left; a: step 5/5; best: b, 3.5"),
        (("a", 0, 1, "none", 9, 0.0), "[####################] 0/1, 0 s left; a: step 9/5; best: none"),
    ],
)
def test_text_of_the_bar(given, expected):
    assert ProgressBar(5, io.StringIO()).text(*given) == expected
