"""An installed DeepSpeed goes on from what we saved, and we from what it saved: stages 0 to 3, one and two ranks, three dtypes.

Runs where DSC_PEER_PYTHON names a Python that has DeepSpeed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.deepspeed_c.checkpoint.deepspeed.harness import DTYPES, STATES, config, run_peers
from tests.deepspeed_c.engine.test_interchange import LOSS_TOLERANCE, differences, make, show, train
from tests.ranks import run_ranks

PYTHON = os.environ.get("DSC_PEER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")

FIRST, MORE = 2, 2
CASES = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in DTYPES]
# Master weights after the last step, absolute: a step of Adam is about 0.01. DeepSpeed's gradients are rounded in other places in half precision.
END_TOLERANCE = {"fp32": 1e-6, "bf16": 2e-4, "fp16": 2e-4}


class Run(NamedTuple):
    """One side's view: when it saved (or had loaded), its further losses, and when it was done."""

    shown: dict[str, Any]
    losses: list[float]
    end: dict[str, Any]


def save_ours(rank: int, world: int, folder: str) -> dict[tuple[int, str], Run]:
    runs = {}
    for stage, dtype in CASES:
        with make(stage, dtype, checkpoint={"format": "deepspeed"}) as engine:
            train(engine, 0, FIRST)
            engine.save_checkpoint(f"{folder}/{stage}{dtype}", tag="t2", client_state={"epoch": 2})
            shown = show(engine, STATES["adamw"])
            losses = train(engine, FIRST, MORE)
            runs[stage, dtype] = Run(shown, losses, show(engine, STATES["adamw"]))
    return runs


def load_theirs(rank: int, world: int, folder: str) -> dict[tuple[int, str], Run]:
    runs = {}
    for stage, dtype in CASES:
        with make(stage, dtype) as engine:
            path, client_state = engine.load_checkpoint(f"{folder}/{stage}{dtype}")
            assert Path(path).name == "t2" and client_state == {"epoch": 2}
            shown = show(engine, STATES["adamw"])
            losses = train(engine, FIRST, MORE)
            runs[stage, dtype] = Run(shown, losses, show(engine, STATES["adamw"]))
    return runs


class Both(NamedTuple):
    ours: dict[tuple[int, str], Run]
    """We save and go on."""
    theirs_of_ours: dict[tuple[int, str], dict[str, Any]]
    """DeepSpeed's reports: it loads that and goes on."""
    theirs: dict[tuple[int, str], dict[str, Any]]
    """It saves and goes on."""
    ours_of_theirs: dict[tuple[int, str], Run]
    """We load that and go on."""


@pytest.fixture(scope="module", params=[1, 2], ids=["world1", "world2"])
def both(request, tmp_path_factory) -> Both:
    world, folder = request.param, tmp_path_factory.mktemp("live")
    ours = run_ranks(world, save_ours, str(folder / "ours"), timeout=240)[0]
    loads = [
        {
            "config": config(stage, dtype),
            "load": str(folder / "ours" / f"{stage}{dtype}"),
            "client_keys": ["epoch"],
            "steps": MORE,
        }
        for stage, dtype in CASES
    ]
    saves = [
        {
            "config": config(stage, dtype),
            "steps": FIRST,
            "save": str(folder / "theirs" / f"{stage}{dtype}"),
            "tag": "t2",
            "client_state": {"epoch": 2},
            "more_steps": MORE,
        }
        for stage, dtype in CASES
    ]
    reports = run_peers(PYTHON, [*loads, *saves], folder / "peer", world, timeout=500)
    ours_of_theirs = run_ranks(world, load_theirs, str(folder / "theirs"), timeout=240)[0]
    n = len(CASES)
    return Both(ours, dict(zip(CASES, reports[:n])), dict(zip(CASES, reports[n:])), ours_of_theirs)


def far(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> list[str]:
    """Master weights (weights, where DeepSpeed has no others) that are further apart than ``tolerance``, with both values."""
    masters = theirs["master"] or {name: theirs["param"][name] for name in ours["master"]}
    return [
        f"{name}: DeepSpeed has {want.flatten()[:4].tolist()}, ours {ours['master'][name].flatten()[:4].tolist()}"
        for name, want in masters.items()
        if (ours["master"][name] - want).abs().max() > tolerance
    ]


@pytest.mark.parametrize("stage, dtype", CASES)
def test_deepspeed_goes_on_from_what_we_saved(both, stage, dtype):
    ours, report = both.ours[stage, dtype], both.theirs_of_ours[stage, dtype]
    assert report["client_state"] == {"epoch": 2}
    assert differences(report["loaded"], ours.shown) == []
    print(report["losses"], ours.losses)
    assert ours.losses == pytest.approx(report["losses"], rel=LOSS_TOLERANCE[dtype])
    assert far(ours.end, report["end"], END_TOLERANCE[dtype]) == []


@pytest.mark.parametrize("stage, dtype", CASES)
def test_we_go_on_from_what_deepspeed_saved(both, stage, dtype):
    ours, report = both.ours_of_theirs[stage, dtype], both.theirs[stage, dtype]
    assert differences(report["saved"], ours.shown) == []
    print(report["losses"], ours.losses)
    assert ours.losses == pytest.approx(report["losses"][FIRST:], rel=LOSS_TOLERANCE[dtype])
    assert far(ours.end, report["end"], END_TOLERANCE[dtype]) == []
