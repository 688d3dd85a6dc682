"""Tables of schedules, the choice of a schedule, and the command that shows tables."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError
from deepspeed_c.launcher.main import main
from deepspeed_c.pipe.schedule import SCHEDULES, Cost, choose, make_table, simulate
from deepspeed_c.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_from_lists_is_the_same(name):
    traits = SCHEDULES[name]
    table = make_table(name, 3, traits.min_virtual, 6, "test")
    lists = [table.actions(rank) for rank in range(3)]
    again = _C.PipeTable(lists, table.rank_of, 6, table.has_backward)
    again.verify()
    costs = [Cost(3, 5, 2)] * len(table.rank_of)
    assert simulate(again, costs, 1) == simulate(table, costs, 1)


def test_a_list_that_lacks_an_action_is_refused():
    table = make_table("1f1b", 2, 1, 3, "test")
    lists = [table.actions(rank) for rank in range(2)]
    del lists[1][-1]
    with pytest.raises(ValueError, match="rank 1 lacks 1SEND_B2"):
        _C.PipeTable(lists, table.rank_of, 3, True).verify()


def test_choose():
    even = [Cost(100, 100, 100, 10, 5)]
    assert choose(4, 8, even * 4) == "zb_h1"
    assert choose(4, 8, even * 8) in ("zb_v", "dualpipe_v")
    assert choose(4, 3, even * 8) == "zb_v"
    with pytest.raises(ConfigError, match=r"at most 39 bytes.*least, 40"):
        choose(4, 8, even * 4, limit_bytes=39)


def test_topologies():
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=2)
    assert (grid.world_size(), grid.get_dim("model"), grid.get_dim("expert")) == (12, 3, 0)
    assert grid.get_rank(pipe=1, data=0, model=2) == 8
    assert tuple(grid.get_coord(8)) == (1, 0, 2)
    assert grid.get_axis_comm_lists("pipe") == [[i, i + 6] for i in range(6)]
    assert grid.get_axis_comm_lists("expert") == []
    assert grid.get_axis_list("data", 1) == [3, 4, 5, 9, 10, 11]
    assert grid.filter_match(pipe=0, model=1) == [1, 4]
    assert grid.get_rank_repr(8) == "model_02"
    assert grid.get_rank_repr(8, omit_axes=["model"], outer_sep="/") == "pipe_01/data_00"
    assert PipeDataParallelTopology(2, 2).get_axis_names() == ["pipe", "data"]
    for wrong in ({"pipe": 0}, {"pipe": 2, "data": 0, "model": 0}):
        with pytest.raises(ValueError, match="rank"):
            grid.get_rank(**wrong)
    with pytest.raises(RuntimeError, match="axes"):
        ProcessTopology(["a", "a"], [1, 2])


def test_show(capsys, tmp_path):
    picture = tmp_path / "t.svg"
    words = ["pipe", "show", "--schedule", "zb_h1", "--stages", "4", "--micro-batches", "8"]
    assert main([*words, "--svg", str(picture), "--actions"]) == 0
    out = capsys.readouterr().out
    # 8 micro-batches of 3 ms each, and (p - 1)(F + I - W) of idle time.
    assert "27.000 ms" in out and "0F0 0SEND_F0" in out
    boxes = [e for e in ElementTree.parse(picture).iter() if e.tag.endswith("title")]
    assert len(boxes) == 4 * 8 * 3
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan_ns"] == 27_000_000 and len(found["ranks"]) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "zb_h2", "--stages", "2", "--micro-batches", "2"], "zb_h1"),
        (["--schedule", "dualpipe_v", "--stages", "4", "--micro-batches", "7"], "at least 8"),
        (["--schedule", "1f1b", "--stages", "0", "--micro-batches", "7"], "0 ranks"),
        (["--stages", "2", "--micro-batches", "2", "--forward", "-1"], "--forward"),
        (["--stages", "2", "--micro-batches", "2", "--svg", "/nowhere/x.svg"], "/nowhere/x.svg"),
    ],
)
def test_show_refuses(words, said, capsys):
    assert main(["pipe", "show", *words]) == 2
    assert said in capsys.readouterr().err
