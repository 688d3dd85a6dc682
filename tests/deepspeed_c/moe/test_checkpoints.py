"""Checkpoints of models with experts: any stage, number of ranks and ``ep_size`` loads any other; whole weights have all
experts by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import Read
from deepspeed_c.errors import FeatureError, ModelError, StateError
from deepspeed_c.utils import safe_get_full_optimizer_state
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.deepspeed_c.moe.dense import Model, batch, fill
from tests.deepspeed_c.moe.test_zero import N_EXPERTS, config_of, fill_engine, whole_params
from tests.ranks import run_ranks
from tests.training import engine_of, update


def states_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Masters and moments of this rank's parameters, by logical name."""
    numbered = ExpertNames(model)
    found = {f"{name}:master": value for name, value in whole_params(model).items()}
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{numbered.logical(name)}:{key}"] = safe_get_full_optimizer_state(param, key).clone()
    return found


def save_body(rank: int, world: int, folder: str, sizes: tuple[int, int], stage: int, extra: dict[str, Any]):
    model = Model(N_EXPERTS, sizes)
    with engine_of(model, config_of(stage, 1, "AdamW", extra)) as engine:
        fill_engine(engine)
        for step in range(2):
            update(engine, engine(*batch(step, 0, rank)))
        engine.save_checkpoint(folder, tag="saved")
        return states_of(model)


def load_body(rank: int, world: int, folder: str, cells: list[tuple]) -> list[dict[str, torch.Tensor]]:
    found = []
    for sizes, stage, extra in cells:
        model = Model(N_EXPERTS, sizes)
        with engine_of(model, config_of(stage, 1, "AdamW", extra)) as engine:
            path, _ = engine.load_checkpoint(folder, tag="saved")
            assert path is not None
            found.append(states_of(model))
    return found


HOST = {"zero": {"offload_optimizer": {"device": "cpu"}}}
SAVED = [(1, (1, 1), 0, {}), (2, (2, 1), 1, {}), (2, (2, 2), 3, {}), (4, (2, 4), 2, {}), (4, (4, 2), 3, HOST)]
LOADED = {
    1: [((1, 1), 3, {})],
    2: [((1, 2), 0, {}), ((2, 2), 2, HOST), ((2, 1), 3, {})],
    4: [((4, 2), 1, {}), ((2, 4), 3, {}), ((2, 2), 2, {"use_data_before_expert_parallelism": True})],
}


@pytest.mark.parametrize("world, sizes, stage, extra", SAVED)
def test_any_arrangement_loads_any_other(tmp_path: Path, world: int, sizes, stage: int, extra: dict[str, Any]) -> None:
    want: dict[str, torch.Tensor] = {}
    for of_rank in run_ranks(world, save_body, str(tmp_path), sizes, stage, extra):
        want.update(of_rank)
    n_tensors = 3 * len(list(Model(N_EXPERTS, (1, 1)).parameters()))
    assert len(want) == n_tensors, (len(want), n_tensors)
    for n_ranks, cells in LOADED.items():
        results = run_ranks(n_ranks, load_body, str(tmp_path), cells)
        for i, cell in enumerate(cells):
            seen: set[str] = set()
            for rank, of_rank in enumerate(results):
                seen |= of_rank[i].keys()
                for name, got in of_rank[i].items():
                    assert torch.equal(got, want[name]), (n_ranks, cell, rank, name, got, want[name])
            assert seen == want.keys(), (n_ranks, cell, seen ^ want.keys())


def topology_body(rank: int, world: int, folder: str) -> None:
    save_body(rank, world, folder, (2, 2), 1, {})


def test_a_checkpoint_says_how_experts_were_spread(tmp_path: Path) -> None:
    run_ranks(4, topology_body, str(tmp_path))
    with open_checkpoint(str(tmp_path), "saved") as source:
        assert source.topology.expert_parallel == 2, source.topology
        names = {name for _, name in source.tensors if "deepspeed_experts" in name}
        assert names == {n for n in Model(N_EXPERTS, (1, 1)).state_dict() if "deepspeed_experts" in n}, names


def whole_body(rank: int, world: int, folder: str, stage: int) -> dict[str, Any]:
    model = Model(N_EXPERTS, (2, 1))
    config = config_of(stage, 1, "AdamW", {"zero": {"stage3_gather_16bit_weights_on_model_save": True}})
    with engine_of(model, config) as engine:
        fill_engine(engine)
        engine.save_16bit_model(folder, "whole.bin")
        engine.save_model(folder + "/model")
        return {"whole": engine._consolidated_16bit_state_dict()}


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_have_all_experts(tmp_path: Path, stage: int) -> None:
    model = Model(N_EXPERTS, (1, 1))
    fill(model)
    want = model.state_dict()
    first, _ = run_ranks(2, whole_body, str(tmp_path), stage)
    saved = torch.load(tmp_path / "whole.bin", weights_only=True)
    with open_checkpoint(str(tmp_path / "model"), None) as source:
        reads = {name: torch.empty(t.shape, dtype=t.dtype) for (_, name), t in source.tensors.items()}
        source.read([Read(t, 0, reads[name].view(-1)) for (_, name), t in source.tensors.items()])
    for label, got in (("consolidated", first["whole"]), ("file", saved), ("folder", reads)):
        assert got.keys() == want.keys(), (label, got.keys() ^ want.keys())
        for name, value in want.items():
            assert torch.equal(got[name], value), (label, name, got[name], value)


LACKING = "first.experts.deepspeed_experts.3.2.bias"  # of rank 1


def load_plain_body(rank: int, world: int, state: dict[str, torch.Tensor], stage: int) -> list[Any]:
    model = Model(N_EXPERTS, (2, 2))
    with engine_of(model, config_of(stage, 1, "AdamW", {})) as engine:
        before = whole_params(model)
        lacking = {name: value for name, value in state.items() if name != LACKING}
        with pytest.raises(StateError) as caught:
            engine.load_module_state_dict(lacking)
        after = whole_params(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.load_module_state_dict(state)
        return [str(caught.value), whole_params(model)]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_plain_state_dict_gives_each_rank_its_own_experts(stage: int) -> None:
    """DS#6589: not the first experts to every rank."""
    model = Model(N_EXPERTS, (1, 1))
    fill(model, seed=9)
    want = dict(model.named_parameters())
    for rank, (said, got) in enumerate(run_ranks(2, load_plain_body, model.state_dict(), stage)):
        assert f"missing: {LACKING}" in said, (rank, said)
        for name, value in got.items():
            assert torch.equal(value, want[name]), (rank, name, value, want[name])


def load_experts_body(rank: int, world: int, folder: str) -> dict[str, Any]:
    model = Model(N_EXPERTS, (2, 1))
    with engine_of(model, config_of(1, 1, "AdamW", {})) as engine:
        state: dict[str, Any] = {"other": 1}
        engine.load_moe_state_dict(folder, "saved", state, old_moe_load=False, model=model)
        with pytest.raises(ModelError, match="a model is needed"):
            engine.load_moe_state_dict(folder, "saved", state, False)
        with pytest.raises(FeatureError, match="do not say which layer"):
            engine.load_moe_state_dict(folder, "saved", state, True, model=model)
        numbered = ExpertNames(model)
        return {"keys": sorted(state), **{numbered.logical(name): value for name, value in state.items()}}


def test_experts_are_added_to_a_state_dict(tmp_path: Path) -> None:
    want: dict[str, torch.Tensor] = {}
    for of_rank in run_ranks(2, save_body, str(tmp_path), (2, 2), 1, {}):
        want.update(of_rank)
    own = Model(N_EXPERTS, (2, 1)).state_dict()
    for rank, got in enumerate(run_ranks(2, load_experts_body, str(tmp_path))):
        keys = got.pop("keys")
        assert keys == sorted(["other", *(name for name in own if "deepspeed_experts" in name)]), (rank, keys)
        assert got.pop("other") == 1
        for name, value in got.items():
            assert torch.equal(value, want[f"{name}:master"]), (rank, name, value, want[f"{name}:master"])
