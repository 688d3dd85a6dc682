"""The command ``deepspeed_c io``: small measurements, their text and JSON, and wrong calls. The command leaves nothing
in the folder."""

from __future__ import annotations

import json
import os
import re

import pytest

from deepspeed_c.io import cli
from deepspeed_c.io.scratch import ScratchFile
from deepspeed_c.launcher.main import EXIT_INTERRUPTED, EXIT_USAGE, main
from deepspeed_c.ops.aio import AioBackend, backends
from tests.open_files import open_files

SMALL = ["--size", "300kB", "--block", "64KiB", "--rounds", "2"]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    yield
    assert os.listdir(tmp_path) == []


def test_bench_as_json(tmp_path, capsys):
    assert main(["io", "bench", str(tmp_path), *SMALL, "--json", "--no-fio", "--backend", "sync", "--depth", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["bytes"], result["block_size"], result["queue_depth"]) == (4 * 65536, 65536, 3)
    assert (result["backend"], result["rounds"], result["folder"]) == ("sync", 2, str(tmp_path))
    rows = {(row["contender"], row["direction"]): row for row in result["results"]}
    assert set(rows) == {(name, d) for name in ("ordinary tensor", "locked tensor") for d in ("write", "read")}
    for row in rows.values():
        assert 0 < row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
        assert row["ratio_to_fio"] is None


def test_bench_as_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_fio", lambda: None)
    assert main(["io", "bench", str(tmp_path), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "256 KiB in blocks of 64 KiB, 8 deep, backend" in out and "median of 2 rounds" in out
    assert "ordinary tensor" in out and "locked tensor" in out
    assert "note: fio is not installed" in out


def test_the_text_has_the_ratios_and_the_notes():
    rows = [
        {
            "contender": name,
            "direction": d,
            "gb_per_s": 1.234,
            "gb_per_s_min": 1.0,
            "gb_per_s_max": 2.0,
            "ratio_to_fio": ratio,
        }
        for name, ratio in (("ordinary tensor", 0.956), ("fio libaio", 1.0))
        for d in ("write", "read")
    ]
    result = {
        "folder": "/x",
        "bytes": 1 << 30,
        "block_size": 1 << 20,
        "queue_depth": 8,
        "backend": "uring",
        "rounds": 1,
    }
    text = cli._as_text({**result, "results": rows, "notes": ["fio io_uring: no such engine"]})
    assert "1.23 (1.00 to 2.00)  0.96" in text and "1 round (" in text
    assert text.endswith("note: fio io_uring: no such engine")


def test_a_device_that_is_not_reached_directly_is_said():
    file = ScratchFile("/x", 1, "the file system refuses O_DIRECT")
    assert cli._notes(file, {"fio libaio": "no"}, "fio", False) == [
        "not the device but the page cache was measured: the file system refuses O_DIRECT",
        "fio libaio: no",
    ]


def test_tune_prints_what_can_be_pasted(tmp_path, capsys):
    assert main(["io", "tune", str(tmp_path), "--budget", "0.05"]) == 0
    shown = capsys.readouterr()
    assert json.loads("{" + shown.out + "}")["aio"].keys() >= {"block_size", "queue_depth", "backend"}
    assert "settings timed with transfers of" in shown.err
    assert main(["io", "tune", str(tmp_path), "--budget", "0.05", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["write_gb_per_s"] > 0 and 1 <= result["measured"] <= result["candidates"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["bench", "DIR", "--size", "1000TiB"],
            r"1099511627776000 bytes \(1024000\.00 GiB\) cannot be reserved, \d+ \(.*\) are free",
        ),
        (["bench", "DIR/missing", *SMALL], "No such file or directory"),
        (["bench", "DIR", "--size", "much"], "--size: 'much' is not understood"),
        (["bench", "DIR", "--size", "1000", "--block", "4KiB"], "nothing to measure"),
        (["bench", "DIR", *SMALL[:-1], "0"], "nothing to measure"),
        (["bench", "DIR", "--block", "2GiB"], "block_bytes is 2147483648"),
        (["bench", "DIR", "--block", "0"], "block_bytes is 0"),
        (["bench", "DIR", "--depth", "0"], "queue_depth is 0"),
        (["tune", "DIR/missing"], "No such file or directory"),
        (["tune", "DIR", "--budget", "0"], "--budget: 0.0 seconds"),
        (["tune", "DIR", "--budget", "nan"], "--budget: nan seconds"),
        (["tune", "DIR", "--budget", "inf"], "--budget: inf seconds"),
        (["bench", "DIR", "--backend", "tape"], "invalid choice: 'tape'"),
        ([], "required"),
    ],
)
def test_wrong_calls(tmp_path, capfd, words, message):
    assert main(["io", *(word.replace("DIR", str(tmp_path)) for word in words)]) == EXIT_USAGE
    shown = capfd.readouterr()
    assert shown.out == "" and re.search(message, shown.err), shown.err


def test_a_backend_that_the_kernel_does_not_allow(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "backends", lambda: [AioBackend("uring", False, "io_uring is disabled"), *backends()[1:]])
    assert main(["io", "bench", str(tmp_path), *SMALL, "--backend", "uring"]) == EXIT_USAGE
    assert "--backend uring: io_uring is disabled" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    before = open_files()

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "compare", interrupt)
    assert main(["io", "bench", str(tmp_path), *SMALL]) == EXIT_INTERRUPTED
    assert open_files() == before
