"""The Python interface of the simulation of a step: each argument reaches its parameter, each result comes from its
field, and failures raise ValueError.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_c import _C

GB = 10**9


def step(**changes: Any) -> dict[str, Any]:
    """A host of two ranks below a root. Each computes, then gathers 2,000 bytes; the second reads and copies, too."""
    gather = (_C.PLAN_OPS["all-gather"], 0, 0, 0, 2000)
    first = [(_C.PLAN_RUN, 100), (_C.PLAN_START, 0), (_C.PLAN_WAIT, 0)]
    second = [*first, (_C.PLAN_START, 1), (_C.PLAN_START, 2), (_C.PLAN_WAIT, 1), (_C.PLAN_WAIT, 2)]
    given = {
        "nodes": [(-1, 0, 0, 0, 0, 0, 4 * GB, 0, 7), (0, GB, 50, GB, GB // 2, 30, 0, 0, 0)],
        "ranks": [(1, 0, 1_000_000, 2 * GB, 5, 0), (1, 1, 2_000_000, 2 * GB, 5, GB)],
        "programs": [
            (first, [gather]),
            (second, [gather, (_C.PLAN_OPS["read"], 0, 0, 0, 400), (_C.PLAN_OPS["copy"], 0, 1, 0, 300)]),
        ],
        "groups": [[0, 1]],
        "group_of": [[0], [0]],
        "n_lanes": 2,
        "shown": [1],
    }
    return given | changes


def test_each_field_comes_from_the_core():
    found = _C.plan_simulate(**step())
    # The second rank computes for 200 ns. Two streams of 1,000 bytes share 1 GB/s inside the host, after 10 ns.
    assert found.actions == [
        [(0, 200), (200, 200), (200, 2210), (2210, 2210), (2210, 2210), (2210, 2317), (2317, 2510)]
    ]
    assert found.transfers == [[(200, 2210), (2210, 2317), (2210, 2510)]]
    assert found.exposed_ns == [[2110], [2010, 107, 193]]
    assert found.makespan_ns == 2510
    first, second = found.ranks
    assert (first.end_ns, first.busy_ns, first.waited_ns) == (2210, 100, 2110)
    assert (second.end_ns, second.busy_ns, second.waited_ns) == (2510, 200, 2010 + 107 + 193)
    assert (first.up_bytes, second.up_bytes) == (1000, 1000)
    root, host = found.nodes
    assert (root.read_bytes, root.written_bytes, root.inner_bytes) == (400, 0, 0)
    assert (host.up_bytes, host.inner_bytes) == (0, 2000)


def test_pulls_and_messages():
    for flags, wanted in ((0, 10 + 2000), (_C.PLAN_PULL, 30 + 2 * 2000)):
        program = [(_C.PLAN_START, 0), (_C.PLAN_WAIT, 0)], [(_C.PLAN_OPS["message"], 0, 0, flags, 2000)]
        ranks = [(1, 0, 1_000_000, 2 * GB, 5, 0)] * 2
        found = _C.plan_simulate(**step(programs=[program], ranks=ranks, shown=[], groups=[[1, 0]]))
        assert found.makespan_ns == wanted, flags
        assert found.ranks[0].end_ns == wanted, flags
        assert found.actions == found.transfers == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"group_of": [[0]]}, "group_of has 1 entries for 2 ranks"),
        ({"group_of": [[0], [0, 0]]}, "has 2 axes, the first has 1"),
        ({"groups": [[0, 0]]}, "rank 0 is a member of group 0 twice"),
        ({"shown": [2]}, "entry of shown 0 is 2"),
        ({"shown": [-1]}, "entry of shown 0 is -1"),
        ({"ranks": [(1, 2, 1, 0, 0, 0)] * 2}, "program of rank 0 is 2"),
        ({"nodes": []}, "n_nodes of step 0 is 0"),
        ({"n_lanes": 65}, "n_lanes of step 0 is 65"),
        ({"ranks": [], "group_of": [], "groups": [], "shown": []}, "n_ranks of step 0 is 0"),
    ],
)
def test_what_is_wrong_is_named(changes, says):
    with pytest.raises(ValueError, match=says):
        _C.plan_simulate(**step(**changes))


def test_a_rank_that_waits_for_ever_is_named():
    transfers = [(_C.PLAN_OPS["all-reduce"], 0, 0, 0, 8), (_C.PLAN_OPS["all-to-all"], 1, 0, 0, 8)]
    programs = [
        ([(_C.PLAN_START, i), (_C.PLAN_WAIT, i), (_C.PLAN_START, 1 - i), (_C.PLAN_WAIT, 1 - i)], transfers)
        for i in range(2)
    ]
    given = step(programs=programs, groups=[[0, 1], [0, 1]], group_of=[[0, 1], [0, 1]])
    with pytest.raises(
        ValueError, match=r"rank 0 waits for ever at action 1, .*all-reduce.* rank 1 has not started it"
    ):
        _C.plan_simulate(**given)
