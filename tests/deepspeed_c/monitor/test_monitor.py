"""``MonitorMaster``: CSV and JSON lines, read back by their own readers; checks of events; errors; and lost events."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_c.config import load_config
from deepspeed_c.errors import ConfigError, EventError
from deepspeed_c.monitor import MonitorMaster
from deepspeed_c.monitor.base import Monitor
from deepspeed_c.monitor.writer import EventWriter
from tests import fresh
from tests.ranks import run_ranks
from tests.waits import exit_status, fork_with_alarm


def settings(**sections):
    return load_config({"train_batch_size": 4, **sections}, world_size=1)


def files(folder, **more):
    section = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    return settings(csv_monitor=section, jsonl=section, **more)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of the package's logger. pytest does not see them, because the logger does not propagate."""
    found = []
    monkeypatch.setattr("deepspeed_c.monitor.writer.logger.warning", lambda text, *args, **_: found.append(text % args))
    return found


def test_both_files_have_every_event_and_the_configuration(tmp_path):
    master = MonitorMaster(files(tmp_path, optimizer={"type": "Adam", "params": {"lr": 0.25}}))
    for step in range(4, 84, 4):
        master.write_events(
            [("Train/Samples/train_loss", torch.tensor(1 / step), step), ("my lr", np.float32(0.5), step)]
        )
    master.write_events([])
    master.close()
    loss = [[str(step), repr(torch.tensor(1 / step).item())] for step in range(4, 84, 4)]
    assert rows_of(tmp_path / "run" / "Train_Samples_train_loss.csv") == [["step", "train_loss"], *loss]
    assert rows_of(tmp_path / "run" / "my_lr.csv") == [["step", "my lr"], *([str(s), "0.5"] for s in range(4, 84, 4))]
    head, *lines = lines_of(tmp_path)
    assert head["config"]["optimizer"]["params"]["lr"] == 0.25
    assert [line["step"] for line in lines] == list(range(4, 84, 4))
    assert [line["Train/Samples/train_loss"] for line in lines] == [float(value) for _, value in loss]
    assert all(abs(line["time"] - time.time()) < 600 for line in lines)


def test_a_restart_appends_under_one_header_and_cuts_a_torn_line(tmp_path):
    def run(step):
        master = MonitorMaster(files(tmp_path))
        master.write_events([("a/loss", step * 0.5, step)])
        master.close()

    run(1)
    with open(tmp_path / "run" / "a_loss.csv", "a") as file:
        file.write("2,0.12")  # the beginning of 0.125
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        file.write('{"step": 2, "a/lo')
    run(3)
    assert rows_of(tmp_path / "run" / "a_loss.csv") == [["step", "loss"], ["1", "0.5"], ["3", "1.5"]]
    assert [line.get("step", "config") for line in lines_of(tmp_path)] == ["config", 1, "config", 3]


def test_a_file_that_has_only_a_torn_header_gets_a_whole_one(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "loss.csv").write_text("st")
    master = MonitorMaster(files(tmp_path))
    master.write_events([("loss", 1, 7)])
    master.close()
    assert rows_of(tmp_path / "run" / "loss.csv") == [["step", "loss"], ["7", "1"]]


def test_what_is_not_finite_is_null_and_named(tmp_path):
    master = MonitorMaster(files(tmp_path))
    master.write_events(
        [("a", math.nan, 1), ("b", -math.inf, 1), ("c", torch.tensor(math.inf), 1), ("step", 5, 1), ("d", True, 1)]
    )
    master.close()
    line = lines_of(tmp_path)[1]
    assert line["nonfinite"] == {"a": "nan", "b": "-inf", "c": "inf"}
    assert [line[name] for name in ("a", "b", "c", "step", "event/step", "d")] == [None, None, None, 1, 5, 1]
    assert rows_of(tmp_path / "run" / "b.csv")[1] == ["1", "-inf"]


def test_two_names_of_one_file_do_not_mix(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("deepspeed_c.monitor.csv_monitor.logger.warning", lambda text, *args: said.append(text % args))
    master = MonitorMaster(files(tmp_path))
    for step in (1, 2):
        master.write_events([("a/b", 1, step), ("a_b", 2, step)])
    master.close()
    assert rows_of(tmp_path / "run" / "a_b.csv") == [["step", "b"], ["1", "1"], ["2", "1"]]
    assert len(said) == 1 and "a_b is not written" in said[0], said


def test_a_tensor_may_change_after_the_call(tmp_path):
    master = MonitorMaster(files(tmp_path))
    loss = torch.tensor([1.5], dtype=torch.bfloat16)
    for step in range(100):
        master.write_events([("loss", loss, step)])
        loss += 0.5
    master.close()
    values = [float(value) for _, value in rows_of(tmp_path / "run" / "loss.csv")[1:]]
    assert values == [1.5 + 0.5 * step for step in range(100)]


@pytest.mark.parametrize(
    "event, word",
    [
        (("a", 1), "(name, value, step)"),
        (5, "(name, value, step)"),
        ((3, 1.0, 1), "name 3"),
        (("", 1.0, 1), "name ''"),
        (("a", "1", 1), "value '1'"),
        (("a", None, 1), "value None"),
        (("a", torch.ones(2), 1), "tensor of (2,)"),
        (("a", torch.tensor(1j), 1), "complex"),
        (("a", 1.0, 1.5), "step 1.5"),
    ],
)
def test_another_thing_than_an_event_is_refused_and_nothing_of_the_list_is_written(tmp_path, event, word):
    master = MonitorMaster(files(tmp_path))
    with pytest.raises(EventError, match="write_events") as raised:
        master.write_events([("good", 1, 1), event])
    master.close()
    assert word in str(raised.value)
    assert not (tmp_path / "run" / "good.csv").exists()


def test_secrets_stay_out(tmp_path):
    config = files(tmp_path, comet={"api_key": "SECRET", "experiment_key": "k" * 32})
    master = MonitorMaster(config)
    master.close()
    text = (tmp_path / "run" / "events.jsonl").read_text()
    assert "SECRET" not in text and "api_key" not in text and "k" * 32 in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"csv_monitor.output_path: .*file/x/run cannot be written: Not a directory"):
        MonitorMaster(
            settings(csv_monitor={"enabled": True, "output_path": str(tmp_path / "file" / "x"), "job_name": "run"})
        )


def test_without_a_monitor_no_thread_starts():
    before = threading.active_count()
    master = MonitorMaster(settings())
    master.write_events([("a", 1, 1)])
    master.close()
    assert (master.enabled, threading.active_count()) == (False, before)


def _on_ranks(rank, world, folder):
    from deepspeed_c.comm.collectives import Collectives

    comm = Collectives()
    blocked = Path(folder) / "file"
    if rank == 0:
        blocked.touch()
    try:
        MonitorMaster(files(blocked / "x"), comm=comm)
        raised = None
    except ConfigError as error:
        raised = error.where
    master = MonitorMaster(files(folder), comm=comm)
    master.write_events([("rank", rank, 1)])
    master.close()
    return raised, master.enabled, list(master.monitors)


def test_all_ranks_raise_and_rank_0_alone_writes(tmp_path):
    first, *others = run_ranks(3, _on_ranks, str(tmp_path))
    assert first == ("csv_monitor.output_path", True, ["csv_monitor", "jsonl"])
    assert others == [("csv_monitor.output_path", True, [])] * 2
    assert rows_of(tmp_path / "run" / "rank.csv") == [["step", "rank"], ["1", "0"]]


class Recorder(Monitor):
    """Keeps events. Waits for ``gate`` before each write, and raises if ``fails``."""

    key = "recorder"

    def __init__(self, fails=False):
        self.gate, self.events, self.fails, self.is_closed = threading.Event(), [], fails, False

    def write_events(self, event_list):
        self.gate.wait(30)
        if self.fails:
            raise RuntimeError("out of paper")
        self.events += event_list

    def close(self):
        self.is_closed = True


def test_a_slow_monitor_holds_nothing_up_and_lost_events_are_counted(warnings):
    slow = Recorder()
    writer = EventWriter({"recorder": slow}, capacity=10)
    began = time.monotonic()
    for step in range(25):
        writer.put([("a", 1.0, step)])
    assert time.monotonic() - began < 5
    assert writer.n_dropped == 15
    assert len(warnings) == 1 and "from step 10 on" in warnings[0], warnings
    assert not writer.flush(timeout_s=0.05)
    slow.gate.set()
    assert writer.flush()
    writer.put([("a", 1.0, 99)])
    writer.close()
    assert [step for _, _, step in slow.events] == [*range(10), 99]
    assert slow.is_closed and "15 events were dropped" in warnings[-1], warnings


def test_a_monitor_that_fails_says_so_once_and_the_others_go_on(warnings):
    broken, good = Recorder(fails=True), Recorder()
    broken.gate.set()
    good.gate.set()
    writer = EventWriter({"broken": broken, "good": good})
    for step in range(3):
        writer.put([("a", 1.0, step), ("b", 1.0, step)])
        writer.flush()
    writer.close()
    assert [step for _, _, step in good.events] == [0, 0, 1, 1, 2, 2]
    assert len(warnings) == 2, warnings
    assert "RuntimeError: out of paper" in warnings[0] and "broken.enabled" in warnings[0]
    assert warnings[1] == "broken: 6 events could not be written"


def test_events_after_close_are_counted(warnings):
    writer = EventWriter({})
    writer.close()
    writer.put([("a", 1.0, 5)])
    writer.close()
    assert writer.n_dropped == 1 and "they are closed" in warnings[0], warnings


PROGRAM = """
import os, signal, sys
from deepspeed_c.config import load_config
from deepspeed_c.monitor import MonitorMaster
section = {"enabled": True, "output_path": sys.argv[1], "job_name": "run"}
master = MonitorMaster(load_config({"train_batch_size": 4, "csv_monitor": section, "jsonl": section}, world_size=1))
for step in range(500):
    master.write_events([("loss", step / 2, step)])
if sys.argv[2] == "exit":
    sys.exit(3)
master.flush()
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_waits_at_exit_is_written(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), "exit"], check=False, timeout=300)
    assert done.returncode == 3
    assert len(rows_of(tmp_path / "run" / "loss.csv")) == 501
    assert [line["step"] for line in lines_of(tmp_path)[1:]] == list(range(500))


def test_what_was_written_survives_a_kill(tmp_path):
    done = fresh.run(["-c", PROGRAM, tmp_path, "kill"])
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "written\n"), done.stderr
    assert rows_of(tmp_path / "run" / "loss.csv")[-1] == ["499", "249.5"]
    assert lines_of(tmp_path)[-1]["loss"] == 249.5


def test_a_forked_process_leaves_the_files_to_its_parent(tmp_path):
    master = MonitorMaster(files(tmp_path))
    master.write_events([("loss", 1, 1)])
    master.flush()
    pid = fork_with_alarm()
    if pid == 0:
        master.write_events([("loss", 2, 2)])
        master.close()
        os._exit(0)
    assert exit_status(pid) == 0
    master.close()
    assert rows_of(tmp_path / "run" / "loss.csv")[1:] == [["1", "1"]]
