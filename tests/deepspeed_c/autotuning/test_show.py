"""``deepspeed_c tune show``, on records written by hand."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from deepspeed_c.launcher.main import main

SVG = "{http://www.w3.org/2000/svg}"


def row(name, status, value=None, size=1, stage=2, **facts):
    choices = {"train_micro_batch_size_per_gpu": size, "zero_optimization.stage": stage}
    ran = {"value": value, "seconds": 2.0, "metrics": {"peak_host_bytes": 3 << 20}} if status == "ran" else {}
    return {
        "name": name,
        "choices": choices,
        "status": status,
        "plan": {"host": 2 << 20},
        "problem": "",
        **ran,
        **facts,
    }


def written(folder, rows, metric="throughput", best="c", **facts):
    record = {"script": "t.py", "arguments": [], "n_ranks": 2, "metric": metric, "is_finished": True, "best": best}
    (folder / "records.json").write_text(json.dumps({**record, "experiments": rows, **facts}))
    return folder


ROWS = [
    row("too_large", "left out", size=64, problem="needs 5 bytes, has 4\nmore"),
    row("a", "ran", 10.0),
    row("b", "failed", size=2, seconds=1.0, problem="exit code 1"),
    row("c", "ran", 30.0, size=4),
    row("d", "ran", 20.0, size=4, stage=3),
]


@pytest.mark.parametrize(("metric", "order"), [("throughput", "cda"), ("latency", "adc")])
def test_the_best_is_first_and_what_did_not_run_is_last(tmp_path, capsys, metric, order):
    folder = written(tmp_path, ROWS, metric, best=order[0])
    assert main(["tune", "show", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [*order, "too_large", "b"], lines
    assert "left out: needs 5 bytes, has 4" in lines[4] and "failed: exit code 1" in lines[5]
    assert lines[1].split()[2:] == ["2.0", "2", "MiB", "3", "MiB"], lines[1]
    assert lines[-1] == f"best: {order[0]}; 3 of 5 ran, in 7 s"


def test_a_search_under_way_says_so(tmp_path, capsys):
    folder = written(tmp_path, [], best=None, is_finished=False)
    assert main(["tune", "show", str(folder), "--svg", str(tmp_path / "none.svg")]) == 0
    assert "best: none; 0 of 0 ran, in 0 s; the search has not ended" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "none.svg")


@pytest.mark.parametrize(("metric", "best"), [("throughput", [10, 10, 30, 30]), ("latency", [10, 10, 10, 10])])
def test_the_picture_has_a_dot_for_each_experiment_and_the_best_so_far(tmp_path, capsys, metric, best):
    picture = tmp_path / "a.svg"
    assert main(["tune", "show", str(written(tmp_path, ROWS, metric)), "--svg", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    heights = {dot.find(f"{SVG}title").text: float(dot.get("cy")) for dot in root.findall(f"{SVG}circle")}
    assert set(heights) == {"a", "c", "d"}
    # Heights are linear in the values.
    assert heights["a"] - heights["d"] == pytest.approx(heights["d"] - heights["c"], abs=0.2)
    stairs = [point.split(",") for point in root.find(f"{SVG}polyline").get("points").split()]
    of_value = {10: heights["a"], 20: heights["d"], 30: heights["c"]}
    assert [float(y) for _, y in stairs] == pytest.approx([of_value[each] for each in best for _ in range(2)], abs=0.1)


def test_json_is_the_record(tmp_path, capsys):
    assert main(["tune", "show", str(written(tmp_path, ROWS)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experiments"] == ROWS


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"metric": "beauty", "experiments": []}'])
def test_what_is_no_search_is_an_error(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "records.json").write_text(content)
    assert main(["tune", "show", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "records.json cannot be read" in said and "results_dir" in said


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path, capsys):
    assert main(["tune", "show", str(written(tmp_path, ROWS)), "--svg", str(tmp_path / "no" / "a.svg")]) == 2
    assert "--svg" in capsys.readouterr().err
