"""_C.compile_verify: each argument reaches its parameter, each rule is found, and what describes no graph is refused."""

from __future__ import annotations

import pytest

from deepspeed_c import _C

PLAIN, GATHER, WAIT, RELEASE = _C.COMPILE_PLAIN, _C.COMPILE_GATHER, _C.COMPILE_WAIT, _C.COMPILE_RELEASE
REDUCE, OUTPUT = _C.COMPILE_REDUCE, _C.COMPILE_OUTPUT
N_UNITS = 3

# (kind, unit or slot, units that it reads, units that it writes to) of each node, in the order in which they run.
Node = tuple[int, int, list[int], list[int]]
RIGHT: list[Node] = [
    (PLAIN, -1, [], []),
    (GATHER, 2, [], []),
    (GATHER, 0, [], []),
    (WAIT, 2, [], []),
    (PLAIN, -1, [2, 2], []),
    (WAIT, 0, [], []),
    (PLAIN, -1, [0, 2], []),
    (RELEASE, 2, [], []),
    (REDUCE, 1, [], []),
    (RELEASE, 0, [], []),
    (OUTPUT, -1, [], []),
]
WANTED = [False, True]


def arguments(nodes: list[Node], wanted: list[bool] = WANTED) -> dict[str, object]:
    read_starts, write_starts = [0], [0]
    for _, _, reads, writes in nodes:
        read_starts.append(read_starts[-1] + len(reads))
        write_starts.append(write_starts[-1] + len(writes))
    return {
        "kinds": [kind for kind, *_ in nodes],
        "units": [number if kind in (GATHER, WAIT, RELEASE) else -1 for kind, number, *_ in nodes],
        "slots": [number if kind == REDUCE else -1 for kind, number, *_ in nodes],
        "read_starts": read_starts,
        "reads": [unit for node in nodes for unit in node[2]],
        "write_starts": write_starts,
        "writes": [unit for node in nodes for unit in node[3]],
        "n_units": N_UNITS,
        "wanted": wanted,
    }


def without(node: int) -> list[Node]:
    return [*RIGHT[:node], (PLAIN, -1, [], []), *RIGHT[node + 1 :]]


def test_a_right_graph():
    assert _C.compile_verify(**arguments(RIGHT)) == ("", -1, -1)
    assert _C.compile_verify(*arguments(RIGHT).values()) == ("", -1, -1)
    assert _C.compile_verify([], [], [], [0], [], [0], [], 0, []) == ("", -1, -1)
    assert _C.compile_format(("", -1, -1)) == ""


@pytest.mark.parametrize(
    ("nodes", "wanted", "fault", "sentence"),
    [
        (without(3), WANTED, ("read_not_held", 4, 2),
         "node 4: unit 2 is read, but not between its wait and its release"),
        (without(1), WANTED, ("wait_not_gathered", 3, 2), "node 3: unit 2 is waited for, but not gathered"),
        ([*RIGHT[:3], *RIGHT[1:]], WANTED, ("gather_twice", 3, 2),
         "node 3: unit 2 is gathered again before its release"),
        ([*RIGHT[:8], RIGHT[7]], WANTED, ("release_not_gathered", 8, 2),
         "node 8: unit 2 is released, but not gathered"),
        ([*RIGHT[:3], RIGHT[7]], WANTED, ("release_not_waited", 3, 2),
         "node 3: unit 2 is released, but was gathered without a wait"),
        (without(9), WANTED, ("never_released", 10, 0), "node 10: unit 0 is still gathered at the end"),
        ([*RIGHT[:9], *RIGHT[8:]], WANTED, ("reduce_twice", 9, 1), "node 9: slot 1 is reduced a second time"),
        (RIGHT, [True, False], ("reduce_unwanted", 8, 1), "node 8: slot 1 is reduced, but not wanted"),
        (RIGHT, [True, True], ("never_reduced", 10, 0), "node 10: slot 0 is wanted, but never reduced"),
        ([*RIGHT[:6], (PLAIN, -1, [0], [2]), *RIGHT[7:]], WANTED, ("weight_written", 6, 2),
         "node 6: unit 2 has a weight that is written to"),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)  # fmt: skip
def test_each_rule(nodes, wanted, fault, sentence):
    assert _C.compile_verify(**arguments(nodes, wanted)) == fault
    assert _C.compile_format(fault) == sentence


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kinds", [9] * 11, r"compile_verify: kinds\[0\] is 9"),
        ("units", [-1] * 10, "compile_verify: units has 10 entries, must have 11"),
        ("slots", [-1] * 12, "compile_verify: slots has 12 entries, must have 11"),
        ("read_starts", [0] * 11, "compile_verify: read_starts has 11 entries, must have 12"),
        ("read_starts", [0] * 12, "compile_verify: read_starts goes from 0 to 0, must go from 0 to 4"),
        ("reads", [2, 2, 3, 2], r"compile_verify: reads\[2\] is 3 of 3 units"),
        ("write_starts", [0], "compile_verify: write_starts has 1 entries, must have 12"),
        ("write_starts", [0, 1, *[0] * 10], r"compile_verify: write_starts\[2\] is 0 after 1"),
        ("writes", [0], "compile_verify: write_starts goes from 0 to 0, must go from 0 to 1"),
        ("n_units", 2, r"compile_verify: units\[1\] is 2, must be one of 2"),
        ("n_units", -1, "negative"),
        ("wanted", [True], r"compile_verify: slots\[8\] is 1, must be one of 1"),
    ],
)
def test_what_is_no_graph(name, value, message):
    with pytest.raises(ValueError, match=message):
        _C.compile_verify(**{**arguments(RIGHT), name: value})


@pytest.mark.parametrize("bad", [[2**31], ["0"], [None], [0.5], None])
def test_what_is_no_list_of_numbers(bad):
    with pytest.raises(TypeError):
        _C.compile_verify(bad, [-1], [-1], [0, 0], [], [0, 0], [], 0, [])


def test_what_is_no_fault():
    with pytest.raises(ValueError, match="compile_format: rule is"):
        _C.compile_format(("no such rule", 0, 0))
