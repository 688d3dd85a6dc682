"""An installed DeepSpeed goes on from our checkpoints of models with experts, and our engine from DeepSpeed's.

The tests run if DSC_PEER_PYTHON names a Python that has DeepSpeed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed_c
from deepspeed_c.moe.layer import MoE
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.deepspeed_c.checkpoint.formats.deepspeed.harness import PEER_MOE, config, run_peers
from tests.deepspeed_c.checkpoint.formats.deepspeed.tiny_moe import TinyMoE, train
from tests.ranks import run_ranks
from tests.training import whole_weights

PYTHON = os.environ.get("DSC_PEER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")

FIRST, MORE = 2, 2
STATES = ["exp_avg", "exp_avg_sq"]
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}


class Cell(NamedTuple):
    ep_sizes: tuple[int, int]
    stage: int
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.ep_sizes[0]}{self.ep_sizes[1]}-{self.stage}{self.dtype}"


# World size -> cells. Layers with different numbers of ranks are tested one way only: DeepSpeed's own order of their
# groups differs from run to run (see test_moe.py).
CELLS = {
    1: [Cell((1, 1), stage, "fp32") for stage in (0, 1, 2)],
    2: [*(Cell((2, 2), stage, "fp32") for stage in (0, 1, 2)), *(Cell((2, 2), stage, "bf16") for stage in (0, 2))],
    4: [Cell((2, 2), 0, "fp32"), Cell((4, 4), 1, "bf16"), Cell((2, 2), 2, "fp32")],
}


def settings(cell: Cell) -> dict[str, Any]:
    # DeepSpeed's norm of gradients has the mean over expert-parallel ranks in place of the sum, so it clips otherwise.
    made = config(cell.stage, cell.dtype, gradient_clipping=0.0)
    params = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    made["optimizer"] = {"type": "AdamW", "params": params}
    return made


def shown(engine) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's tensors, with experts numbered over all ranks."""
    numbered = ExpertNames(engine.module)
    found: dict[str, dict[str, torch.Tensor]] = {"param": {}, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, value in whole_weights(engine.module).items():
        found["param"][numbered.logical(name)] = value.clone()
    for name, param in engine.module.named_parameters():
        found["master"][numbered.logical(name)] = safe_get_full_fp32_param(param).clone()
        for state in STATES:
            found[state][numbered.logical(name)] = safe_get_full_optimizer_state(param, state).clone()
    return found


def make(cell: Cell, seed: int, **more: Any):
    torch.manual_seed(seed)
    model = TinyMoE(MoE, cell.ep_sizes)
    return deepspeed_c.initialize(model=model, config={**settings(cell), **more})[0]


def save_ours(rank: int, world: int, folder: str, cells: list[Cell]) -> list[Any]:
    runs = []
    for cell in cells:
        with make(cell, 7 + rank, checkpoint={"format": "deepspeed"}) as engine:
            train(engine, 0, FIRST)
            engine.save_checkpoint(f"{folder}/{cell.label}", tag="t2", client_state={"epoch": 2})
            at_save = shown(engine)
            runs.append((at_save, train(engine, FIRST, MORE), shown(engine)))
    return runs


def load_theirs(rank: int, world: int, folder: str, cells: list[Cell]) -> list[Any]:
    runs = []
    for cell in cells:
        with make(cell, 70 + rank) as engine:
            path, client_state = engine.load_checkpoint(f"{folder}/{cell.label}")
            assert Path(path).name == "t2" and client_state["epoch"] == 2, (path, client_state)
            at_load = shown(engine)
            runs.append((at_load, train(engine, FIRST, MORE), shown(engine)))
    return runs


def merged(of_ranks: list[Any], i: int) -> tuple[dict, list[float], dict]:
    """Tensors of all ranks, and rank 0's losses."""
    first, end = {}, {}
    for at_first, _, at_end in (of_rank[i] for of_rank in reversed(of_ranks)):
        for whole, part in ((first, at_first), (end, at_end)):
            for kind, named in part.items():
                whole.setdefault(kind, {}).update(named)
    return first, of_ranks[0][i][1], end


@pytest.fixture(scope="module", params=sorted(CELLS))
def both(request, tmp_path_factory) -> dict[Cell, tuple[Any, ...]]:
    world, folder = request.param, tmp_path_factory.mktemp("moe")
    cells = CELLS[world]
    ours = run_ranks(world, save_ours, str(folder / "ours"), cells)
    common = [{"config": settings(cell), "ep_sizes": cell.ep_sizes} for cell in cells]
    loads = [{**spec, "load": str(folder / "ours" / cell.label), "steps": MORE} for spec, cell in zip(common, cells)]
    saves = [
        {
            **spec,
            "steps": FIRST,
            "save": str(folder / "theirs" / cell.label),
            "tag": "t2",
            "client_state": {"epoch": 2},
            "more_steps": MORE,
        }
        for spec, cell in zip(common, cells)
    ]
    reports = run_peers(PYTHON, [*loads, *saves], folder / "peer", world, timeout=500, script=PEER_MOE)
    theirs = run_ranks(world, load_theirs, str(folder / "theirs"), cells)
    return {
        cell: (merged(ours, i), reports[i], reports[len(cells) + i], merged(theirs, i)) for i, cell in enumerate(cells)
    }


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    pairs = [("param", theirs["param"]), ("master", theirs["master"])]
    pairs += [(state, theirs["state"][state]) for state in STATES]
    found = []
    for kind, named in pairs:
        if kind == "param" or named:
            found += [f"{kind} of {name} on one side only" for name in named.keys() ^ ours[kind].keys()]
        for name, want in named.items():
            got = ours[kind].get(name)
            if got is not None and not torch.equal(want.to(got.dtype), got):
                found.append(f"{kind} of {name}: DeepSpeed has {want.flatten()[:3]}, ours {got.flatten()[:3]}")
    return found


def far(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float) -> list[str]:
    masters = theirs["master"] or theirs["param"]
    return [
        f"{name}: DeepSpeed has {want.flatten()[:3]}, ours {ours['master'][name].flatten()[:3]}"
        for name, want in masters.items()
        if (want - ours["master"][name]).abs().max() > tolerance
    ]


def test_each_goes_on_from_the_others_checkpoint(both):
    for cell, (ours, theirs_of_ours, theirs, ours_of_theirs) in both.items():
        at_save, losses, end = ours
        assert differences(theirs_of_ours["loaded"], at_save) == [], cell
        assert theirs_of_ours["losses"] == pytest.approx(losses, rel=LOSS_TOLERANCE[cell.dtype]), cell
        # In bf16 a small gradient may round to the other sign, and a step of Adam is about 0.005.
        tolerance = 2e-6 if cell.dtype == "fp32" else 6e-3
        assert far(theirs_of_ours["end"], end, tolerance) == [], cell
        at_load, losses, end = ours_of_theirs
        assert differences(theirs["saved"], at_load) == [], cell
        assert theirs["losses"][FIRST:] == pytest.approx(losses, rel=LOSS_TOLERANCE[cell.dtype]), cell
        assert far(theirs["end"], end, tolerance) == [], cell
