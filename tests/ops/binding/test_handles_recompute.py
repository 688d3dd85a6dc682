"""The Python interface of the activation budget: each argument reaches its parameter, and failures raise the right
exceptions.
"""

from __future__ import annotations

import pytest

from deepspeed_c import _C

# A layer that is saved as a whole, or as its input (10 bytes) plus one or both of two operators: the first is slow (30
# bytes), the second fast (20 bytes).
LAYER = (0, [(100, 0, 0)], [[(10, 50, 5)], [(0, 30, 90), (30, 0, 0)], [(0, 20, 6), (20, 0, 0)]])


def test_each_field_has_its_effect():
    assert _C.recompute_plan([], 0) == ([], 0, 0, 0, True)
    assert _C.recompute_smallest([LAYER, LAYER]) == 110
    recomputed, slow_kept, kept = (-1, [0, 0, 0]), (-1, [0, 1, 0]), (0, [-1, -1, -1])
    # Keeping the last layer is free.
    assert _C.recompute_plan([LAYER, LAYER], 120) == ([recomputed, kept], 110, 101, 101, True)
    assert _C.recompute_plan([LAYER, LAYER], 140) == ([slow_kept, kept], 140, 11, 11, True)
    assert _C.recompute_plan([LAYER, LAYER], 200) == ([kept, kept], 200, 0, 0, True)
    assert _C.recompute_peak([LAYER, LAYER], [slow_kept, recomputed]) == (40 + 110, 11 + 101)
    assert _C.recompute_peak([(151, *LAYER[1:]), LAYER], [slow_kept, recomputed]) == (40 + 151, 11 + 101)


def test_failures():
    with pytest.raises(MemoryError, match="recompute_plan: the smallest possible budget is 110 bytes, 109 are given"):
        _C.recompute_plan([LAYER, LAYER], 109)
    with pytest.raises(ValueError, match=r"recompute_smallest: choices\[0\] is \{-1, 0, 0\}"):
        _C.recompute_smallest([(0, [(-1, 0, 0)], [])])
    with pytest.raises(ValueError, match="budget_bytes is -5"):
        _C.recompute_plan([LAYER], -5)
    with pytest.raises(ValueError, match=r"recompute_peak: whole\[0\] is 1 of 1"):
        _C.recompute_peak([LAYER], [(1, [-1, -1, -1])])
    with pytest.raises(ValueError, match="recompute_peak: 1 layers and 2 groups are treated, of 1 and 3"):
        _C.recompute_peak([LAYER], [(-1, [0, 0])])


@pytest.mark.parametrize(
    "layers",
    [
        [None],
        [(0, [])],
        [(0, [], [], [])],
        [(0, [(1, 2)], [])],
        [(0, [(1, 2, 3, 4)], [])],
        [(0, [(1, 2, 3.5)], [])],
        [(0, [1], [])],
        [(0, 1, [])],
        [(0, [], [1])],
        [("0", [], [])],
    ],
    ids=str,
)
def test_what_is_no_layer(layers):
    for function in (_C.recompute_smallest, lambda given: _C.recompute_plan(given, 100)):
        with pytest.raises(TypeError):
            function([LAYER, *layers])


def test_numbers_that_are_too_large_and_any_kind_of_sequence():
    with pytest.raises(OverflowError):
        _C.recompute_smallest([(0, [(1 << 64, 0, 0)], [])])
    as_lists = [0, [[100, 0, 0]], [[[10, 50, 5]], ((0, 30, 90), (30, 0, 0)), [(0, 20, 6), [20, 0, 0]]]]
    assert _C.recompute_smallest((as_lists, tuple(LAYER))) == 110
