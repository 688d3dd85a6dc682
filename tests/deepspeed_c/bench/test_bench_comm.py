"""``deepspeed_c bench comm``: its measurements, the definitions of its numbers, its charts, and its refusals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from deepspeed_c.bench import comm as bench_comm
from deepspeed_c.bench.cli import main
from deepspeed_c.bench.comm import CONTENDERS, OPS, CommBench, run
from deepspeed_c.bench.plot import Chart, as_svg, as_text
from deepspeed_c.errors import CommError, ConfigError
from tests import fresh

SMALL = ["--min", "100B", "--max", "6KiB", "--step", "60", "--rounds", "1"]


def test_every_operation_at_every_size_by_every_backend(tmp_path, capsys):
    chart = tmp_path / "chart.svg"
    assert main(["comm", "--ranks", "3", "--json", "--plot", str(chart), *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {(row["op"], row["n_bytes"], row["contender"]): row for row in result["results"]}
    assert rows.keys() == {(op, size, name) for op in OPS for size in (100, 6000) for name in CONTENDERS}
    assert result["notes"] == [] and (result["n_ranks"], result["rounds"], result["dtype"]) == (3, 1, "fp32")
    for (op, n_bytes, _), row in rows.items():
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        # As nccl-tests define bandwidths (PERFORMANCE.md): bytes over time, times the share of the bytes on each link.
        factor = {"all_reduce": 2 * 2 / 3, "broadcast": 1.0}.get(op, 2 / 3)
        whole = n_bytes if op in ("all_reduce", "broadcast") else n_bytes // 3 * 3
        assert math.isclose(row["algorithm_gb_per_s"], whole / row["seconds"] / 1e9), (op, row)
        assert math.isclose(row["bus_gb_per_s"], factor * whole / row["seconds"] / 1e9), (op, row)
    lines = ElementTree.parse(chart).getroot().findall(".//{*}polyline")
    assert len(lines) == len(OPS) * len(CONTENDERS)


def test_the_table_compares_with_gloo(tmp_path, capsys):
    chart = tmp_path / "chart.txt"
    words = ["--ops", "all-reduce", "--dtype", "bf16", "--plot", str(chart), *SMALL]
    assert main(["comm", *words]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, bf16" in out and "of gloo's time" in out and "reduce_scatter" not in out
    assert [line.split()[0] for line in out.splitlines() if "(" in line and "KiB" in line] == ["all_reduce"] * 3
    assert chart.read_text().startswith("all_reduce: bus bandwidth") and "+ shm, copied" in chart.read_text()


def test_backends_that_are_not_asked_for_are_not_measured(capsys):
    assert main(["comm", "--backends", "gloo", "--ops", "broadcast", "--json", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert {row["contender"] for row in rows} == {"gloo"} and {row["op"] for row in rows} == {"broadcast"}


@pytest.mark.parametrize(
    "words",
    [
        ["--min", "2KiB", "--max", "1KiB"],
        ["--min", "0"],
        ["--step", "1"],
        ["--rounds", "0"],
        ["--ranks", "1"],
        ["--ranks", "17"],
    ],
)
def test_numbers_out_of_range(words):
    with pytest.raises(ConfigError, match="nothing to measure"):
        main(["comm", *words])


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["comm", "--ops", "all_reduce,gossip"])
    assert "'gossip' is none of all_reduce" in capsys.readouterr().err


def test_a_rank_that_fails_ends_all(monkeypatch):
    """Rank 1 ends at once. Rank 0 waits for rank 1, and the launcher ends it too."""
    started = []
    popen = subprocess.Popen

    def start(command, env):
        if env["RANK"] == "1":
            command = [sys.executable, "-c", "raise SystemExit(9)"]
        started.append(popen(command, env=env))
        return started[-1]

    monkeypatch.setattr(bench_comm.subprocess, "Popen", start)
    monkeypatch.setattr(bench_comm, "_GRACE_S", 0.1)
    with pytest.raises(CommError, match="ended with exit code"):
        run(CommBench(2, ["broadcast"], [64], "fp32", ["gloo"], 1))
    assert [process.poll() is not None for process in started] == [True, True]


def test_the_command_is_found():
    done = fresh.run(["-m", "deepspeed_c", "bench", "comm", "--help"], env={**os.environ, "COLUMNS": "200"}, check=True)
    assert "--plot FILE" in done.stdout and "--ranks" in done.stdout


def test_charts_of_one_point_and_of_many():
    chart = Chart("a < b", "GB/s", {"one": [(4096, 0.5)]}, lambda x: f"{x:g} B")
    many = Chart("c", "GB/s", {"x": [(1, 1), (10, 100)], "y": [(1, 10), (10, 10)]}, lambda x: f"{x:g} B")
    picture = ElementTree.fromstring(as_svg([chart, many]))
    lines = picture.findall(".//{*}polyline")
    assert len(lines) == 3 and "a < b: GB/s" in "".join(picture.itertext())
    points = [tuple(map(float, point.split(","))) for point in lines[1].get("points").split()]
    assert points[0][0] < points[1][0] and points[0][1] > points[1][1], "y grows upwards"
    text = as_text([many]).splitlines()
    assert text[1].strip().startswith("100 |") and text[1].endswith("o") and "1 B" in text[-2] and "10 B" in text[-2]
    assert any("+" in line and "|" in line for line in text)
