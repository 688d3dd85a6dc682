"""Tables of schedules, the choice of a schedule, and the command that shows tables."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError
from deepspeed_c.launcher.main import main
from deepspeed_c.pipe.schedule import SCHEDULES, Cost, StageUnit, choose, make_table, simulate, with_gathers
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
        (["--stages", "2", "--micro-batches", "2", "--max-live", "7"], "--unit-elements"),
        (["--stages", "2", "--micro-batches", "2", "--unit-elements", "5,x"], "no list of sizes"),
        (["--stages", "2", "--micro-batches", "2", "--unit-elements", "5,3", "--max-live", "4"], "has 5 elements"),
        (["--stages", "2", "--micro-batches", "2", "--unit-elements", "5", "--ahead", "-1"], "--ahead"),
    ],
)
def test_show_refuses(words, said, capsys):
    assert main(["pipe", "show", *words]) == 2
    assert said in capsys.readouterr().err


UNITS = [StageUnit(0, 3), StageUnit(0, 2), StageUnit(1, 4), StageUnit(2, 6), StageUnit(3, 5), StageUnit(3, 3)]


def gathers_by_search(computed: list[int], units: list[StageUnit], limit: int) -> int:
    """The fewest elements that a rank gathers for computations on these stages: the cheapest path through all sets of
    live units."""
    mine = [i for i, unit in enumerate(units) if unit.stage in computed]
    sets = [
        frozenset(chosen)
        for n in range(len(mine) + 1)
        for chosen in itertools.combinations(mine, n)
        if sum(units[i].numel for i in chosen) <= limit
    ]
    costs = {frozenset(): 0}
    for stage in computed:
        needed = {i for i in mine if units[i].stage == stage}
        costs = {
            live: min(cost + sum(units[i].numel for i in live - before) for before, cost in costs.items())
            for live in sets
            if needed <= live
        }
    return min(costs.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_gathers(name):
    traits = SCHEDULES[name]
    n_virtual = min(2, traits.max_virtual)
    table = make_table(name, 4 // n_virtual, n_virtual, 4, "test")
    for limit in (11, 12, 14, None) if n_virtual == 2 else (8, None):
        gathered = with_gathers(table, UNITS, limit, where="test")
        outcome = simulate(gathered, [Cost()] * 4)
        assert gathered.units == UNITS and gathered.limit_elements == (-1 if limit is None else limit)
        assert outcome.makespan_ns == simulate(table, [Cost()] * 4).makespan_ns
        for rank in range(table.n_ranks):
            actions = gathered.actions(rank)
            computed = [stage for kind, stage, _ in actions if kind < _C.PIPE_SEND_F]
            assert [action for action in actions if action[0] < _C.PIPE_GATHER] == table.actions(rank)
            least = gathers_by_search(computed, UNITS, 99 if limit is None else limit)
            assert outcome.gathered_elements[rank] == least
            assert outcome.n_gathers[rank] == sum(kind == _C.PIPE_GATHER for kind, _, _ in actions)
            assert outcome.peak_live_elements[rank] <= (99 if limit is None else limit)
        lists = [gathered.actions(rank) for rank in range(table.n_ranks)]
        again = _C.PipeTable(lists, table.rank_of, 4, table.has_backward, UNITS, gathered.limit_elements)
        again.verify()
        assert simulate(again, [Cost()] * 4) == outcome
        del lists[0][next(i for i, action in enumerate(lists[0]) if action[0] == _C.PIPE_RELEASE)]
        with pytest.raises(ValueError, match="rank 0 "):
            _C.PipeTable(lists, table.rank_of, 4, table.has_backward, UNITS, gathered.limit_elements).verify()


def test_a_limit_below_one_computation_is_refused():
    table = make_table("interleaved", 2, 2, 4, "test")
    with pytest.raises(ConfigError, match=r"^stage3_max_live.*stage 3 of rank 1 needs 8 live elements, the limit is 7"):
        with_gathers(table, UNITS, 7, where="stage3_max_live_parameters")


def test_gathers_take_time():
    """Two stages on one rank, by hand: 5 gathers of 20 ns, the first two before anything can run beside them."""
    table = make_table("interleaved", 1, 2, 1, "test")
    units = [StageUnit(0, 1, 20), StageUnit(0, 1, 20), StageUnit(1, 1, 20)]
    costs = [Cost(100, 50, 50)] * 2
    assert simulate(with_gathers(table, units, 3, where="test"), costs).makespan_ns == 400 + 40
    outcome = simulate(with_gathers(table, units, 2, where="test"), costs)
    # One unit of stage 0 is released for stage 1, and comes back; neither has a computation to run beside.
    assert (outcome.makespan_ns, outcome.n_gathers, outcome.link_ns) == (400 + 40 + 20 + 20, [4], [80])


def test_show_gathers(capsys, tmp_path):
    picture = tmp_path / "t.svg"
    words = [
        "pipe",
        "show",
        "--schedule",
        "interleaved",
        "--stages",
        "2",
        "--virtual",
        "2",
        "--micro-batches",
        "4",
        "--unit-elements",
        "5,3",
    ]
    assert main([*words, "--max-live", "8", "--gather", "1", "--svg", str(picture), "--actions"]) == 0
    out = capsys.readouterr().out
    assert "with a limit of 8" in out and "0G0 0G1 0F0" in out and "without gathers: 27.000 ms" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  live")]
    assert len(rows) == 2 and all(" ".join(row[2:]) == "at most 8 of 16 elements" for row in rows)
    # Live are 8 of 16 elements, in tenths 5; while units come and go, less.
    assert all("5" in row[1] and set(row[1]) <= set(".135") for row in rows)
    assert main([*words, "--max-live", "8", "--gather", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for rank in found["ranks"]:
        gathers = [action for action in rank["actions"] if "G" in action]
        assert rank["n_gathers"] == len(gathers) and rank["gathered_elements"] == 4 * len(gathers)
        assert rank["peak_live_elements"] == 8 and rank["link_ns"] == 500_000 * len(gathers)
    titles = [e.text for e in ElementTree.parse(picture).iter() if e.tag.endswith("title")]
    assert sum("G" in title for title in titles) == sum(rank["n_gathers"] for rank in found["ranks"])
    assert main([*words, "--json"]) == 0
    assert [rank["n_gathers"] for rank in json.loads(capsys.readouterr().out)["ranks"]] == [4, 4]
