"""The Python interface of the tier planner: each argument reaches its parameter, and failures raise the right
exceptions.
"""

from __future__ import annotations

import math

import pytest

from deepspeed_c import _C

DEVICE, HOST, NVME = _C.TIER_DEVICE, _C.TIER_HOST, _C.TIER_NVME
ANY = (1 << 63) - 1


def kind(n_bytes: int, link: int = 0, disk: int = 0, lowest: int = NVME, follows: int = -1, buffers: int = 0):
    return [[n_bytes, 0, 0], [0, n_bytes, 0], [0, buffers, n_bytes]], link, disk, lowest, follows


def test_each_field_has_its_effect():
    assert (DEVICE, HOST, NVME) == (0, 1, 2)
    assert _C.tier_plan([], [0, 0, 0]) == ([], [0, 0, 0])
    assert _C.tier_plan([kind(5), kind(6)], [11, 0, 0]) == ([DEVICE, DEVICE], [11, 0, 0])
    # the kind with the most traffic on the link stays on the device
    assert _C.tier_plan([kind(5, link=1), kind(5, link=2)], [5, ANY, ANY]) == ([HOST, DEVICE], [5, 5, 0])
    # the kind with the most disk traffic stays on the host, where the buffers of the other kind take room too
    kinds = [kind(5, disk=2, buffers=1), kind(5, disk=1, buffers=3)]
    assert _C.tier_plan(kinds, [0, 8, ANY]) == ([HOST, NVME], [0, 8, 5])
    assert _C.tier_plan(kinds, [0, 7, ANY]) == ([NVME, HOST], [0, 6, 5])
    assert _C.tier_plan([kind(5), kind(5, lowest=HOST, follows=0)], [9, 5, ANY]) == ([NVME, HOST], [0, 5, 5])


def test_failures():
    with pytest.raises(MemoryError, match=r"tier_plan: .* device lacks 1 bytes \(5 of 4\)"):
        _C.tier_plan([kind(5, lowest=DEVICE)], [4, ANY, ANY])
    for kinds, budget, word in (
        ([kind(-1)], [0, 0, 0], r"kinds\[0\].held_bytes"),
        ([kind(1, lowest=3)], [0, 0, 0], "no tier"),
        ([kind(1, follows=0)], [0, 0, 0], "follows"),
        ([kind(1)], [0, -1, 0], "budget_bytes"),
        ([kind(ANY)], [0, 0, 0], "do not add up"),
        ([kind(1)] * 17, [0, 0, 0], "17 kinds"),
    ):
        with pytest.raises(ValueError, match=word):
            _C.tier_plan(kinds, budget)
    for kinds, budget in (([kind(1 << 63)], [0, 0, 0]), ([kind(1)], [0, 0]), ([kind(1.5)], [0, 0, 0])):
        with pytest.raises(TypeError):
            _C.tier_plan(kinds, budget)


FLOW = {
    "n_elems": 1000,
    "device_elems_per_s": 3e9,
    "host_elems_per_s": 1e9,
    "link_bytes_per_s": 1e9,
    "link_bytes_per_elem": 0.0,
    "state_bytes_per_elem": 14,
    "device_bytes": ANY,
}


def test_twin_flow():
    assert _C.twin_flow_ratio(**FLOW) == (0.25, pytest.approx(250e-9))
    assert _C.twin_flow_ratio(**{**FLOW, "link_bytes_per_elem": 2.0})[0] == pytest.approx(0.1)
    assert _C.twin_flow_ratio(**{**FLOW, "device_bytes": 14 * 250})[0] == 0.75
    for key, value in FLOW.items():
        with pytest.raises(ValueError, match=f"twin_flow_ratio: {key}"):
            _C.twin_flow_ratio(**{**FLOW, key: -1})
        if isinstance(value, float):
            with pytest.raises(ValueError, match=f"twin_flow_ratio: {key}"):
                _C.twin_flow_ratio(**{**FLOW, key: math.nan})
