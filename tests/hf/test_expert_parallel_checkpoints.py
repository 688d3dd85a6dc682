"""Checkpoints and files of mixtures with their experts over ranks: any stage, number of ranks and of parts loads any
other, and plain transformers loads the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.launcher.main import main
from deepspeed_c.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.layout.cuts import cut_of
from tests.hf.expert_families import FAMILIES, assert_equal_tensors, make, rows_of
from tests.hf.stack import on_ranks
from tests.hf.test_expert_parallel import settings, whole_state
from tests.training import engine_of, update

MOMENTS = "exp_avg", "exp_avg_sq"


def model_of(family: str, frozen: str, seed: int) -> torch.nn.Module:
    """``frozen``: a part of the names of the parameters that are not trained; "" for none."""
    model = make(family, seed)
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    return model


def engine_for(family: str, stage: int, n_ranks: int, frozen: str = "", seed: int = 5, **changes: Any) -> Any:
    """``n_ranks``: 0 leaves the section out."""
    if n_ranks == 0:
        changes["expert_parallel"] = {"enabled": False}
    given = {"optimizer": "AdamW", "lr": 0.01, "params": {"eps": 1e-3, "weight_decay": 0.1}}
    return engine_of(model_of(family, frozen, seed), settings(stage, n_ranks, **{**given, **changes}))


def states_of(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments of this rank's parts, each in its place of a whole tensor of NaN."""
    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        read = {"master": safe_get_full_fp32_param(param)}
        read |= {key: safe_get_full_optimizer_state(param, key) for key in MOMENTS}
        for key, value in read.items():
            cut = cut_of(param)
            if cut is not None:
                part, value = value, torch.full(cut.logical_shape, torch.nan)
                cut.put(part.view(cut.local_shape), value)
            found[f"{name}:{key}"] = value.clone()
    return found


def merged(of_ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole tensors of the ranks' parts. Ranks with the same part have the same values."""
    whole: dict[str, torch.Tensor] = {}
    for of_rank in of_ranks:
        for name, value in of_rank.items():
            known = whole.setdefault(name, value)
            is_both = ~(known.isnan() | value.isnan())
            assert torch.equal(known[is_both], value[is_both]), name
            whole[name] = torch.where(known.isnan(), value, known)
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def step(engine: Any, number: int, rank: int, world: int) -> float:
    """A step on the batches of four ranks, at each number of ranks."""
    batches = [rows_of(number, micro, 0) for micro in range(4)][rank::world]
    losses = [update(engine, engine(**batch).loss) for batch in batches]
    return sum(losses)


def save_body(
    rank: int, world: int, folder: Path, family: str, stage: int, n_ranks: int, frozen: str
) -> dict[str, Any]:
    with engine_for(family, stage, n_ranks, frozen, accumulate=4 // world) as engine:
        for number in range(2):
            step(engine, number, rank, world)
        engine.save_checkpoint(folder, tag="saved")
        states, saved = states_of(engine), whole_state(engine)
        losses = [step(engine, number, rank, world) for number in (2, 3)]
        return {"states": states, "saved": saved, "losses": losses, "weights": whole_state(engine)}


def load_body(rank: int, world: int, folder: Path, family: str, cases: list[tuple[int, int]], frozen: str) -> list[Any]:
    found = []
    for stage, n_ranks in cases:
        with engine_for(family, stage, n_ranks, frozen, 6, accumulate=4 // world) as engine:
            path, _ = engine.load_checkpoint(folder, tag="saved")
            assert path is not None
            states, saved = states_of(engine), whole_state(engine)
            losses = [step(engine, number, rank, world) for number in (2, 3)]
            found.append({"states": states, "saved": saved, "losses": losses, "weights": whole_state(engine)})
    return found


SAVED = [
    ("mixtral", 1, 0, 1, ""),
    ("gpt_oss", 2, 3, 2, ""),
    ("deepseek_v3", 4, 1, 4, "experts"),
    ("qwen2_moe", 4, 2, 2, ""),
    ("mixtral", 4, 3, 2, "experts.gate_up_proj"),
]
LOADED = {1: [(2, 0), (3, 1)], 2: [(0, 2), (3, 2), (1, 0)], 4: [(3, 4), (2, 2), (0, 4)]}


@pytest.mark.parametrize("family, world, stage, n_ranks, frozen", SAVED)
def test_any_arrangement_loads_any_other(
    tmp_path: Path, family: str, world: int, stage: int, n_ranks: int, frozen: str
) -> None:
    of_ranks = on_ranks(world, save_body, tmp_path, family, stage, n_ranks, frozen)
    states = merged([of_rank["states"] for of_rank in of_ranks])
    assert any("experts" in name for name in states) == (frozen != "experts")
    losses = torch.tensor([of_rank["losses"] for of_rank in of_ranks]).sum(0)
    for n, cases in LOADED.items():
        loaded = on_ranks(n, load_body, tmp_path, family, cases, frozen)
        for i in range(len(cases)):
            found = merged([of_rank[i]["states"] for of_rank in loaded])
            assert found.keys() == states.keys()
            assert_equal_tensors(found, states)
            assert_equal_tensors(loaded[0][i]["saved"], of_ranks[0]["saved"])
            assert_equal_tensors(loaded[0][i]["weights"], of_ranks[0]["weights"], rtol=1e-5, atol=1e-5)
            after = torch.tensor([of_rank[i]["losses"] for of_rank in loaded]).sum(0)
            torch.testing.assert_close(after, losses, rtol=1e-5, atol=1e-5)


def files_body(rank: int, world: int, folder: Path, family: str, stage: int, n_ranks: int) -> dict[str, Any]:
    """Writes the weights in each way."""
    with engine_for(family, stage, n_ranks) as engine:
        step(engine, 0, rank, world)
        engine.save_checkpoint(folder / "checkpoint", tag="saved")
        engine.save_16bit_model(folder / "bin", "pytorch_model.bin")
        engine.save_model(folder / "model")
        if stage == 3:
            state = engine._zero3_consolidated_16bit_state_dict()
            engine.module.save_pretrained(folder / "pretrained", state_dict=state or {}, is_main_process=rank == 0)
        else:
            engine.module.save_pretrained(folder / "pretrained")
        engine.module.config.save_pretrained(folder / "bin")
        engine.eval()
        with torch.no_grad():
            return {"logits": engine(**rows_of(99, 0, 0)).logits, "state": whole_state(engine)}


def read_body(rank: int, world: int, folders: list[Path]) -> list[dict[str, Any]]:
    """The logits and weights of the folders in plain transformers."""
    from transformers import AutoModelForCausalLM

    found = []
    for folder in folders:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        with torch.no_grad():
            logits = model.eval()(**rows_of(99, 0, 0)).logits
        lacking = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
        found.append({"logits": logits, "state": model.state_dict(), "lacking": lacking})
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_reads_the_files(tmp_path: Path, family: str) -> None:
    stage = FAMILIES.index(family) % 4
    written = on_ranks(2, files_body, tmp_path, family, stage, 2)
    assert main(["checkpoint", "export", str(tmp_path / "checkpoint"), str(tmp_path / "exported")]) == 0
    assert (
        main(
            ["checkpoint", "convert", str(tmp_path / "checkpoint"), str(tmp_path / "converted"), "--to", "safetensors"]
        )
        == 0
    )
    names = ("model", "bin", "pretrained", "exported", "converted")
    for name in ("exported", "converted"):
        (tmp_path / name / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    (found,) = on_ranks(1, read_body, [tmp_path / name for name in names])
    for name, read in zip(names, found, strict=True):
        assert read["lacking"] == [], name
        assert_equal_tensors(read["state"], written[0]["state"])
        torch.testing.assert_close(read["logits"], written[0]["logits"], rtol=1e-5, atol=1e-5)


def edit_body(rank: int, world: int, stage: int, state: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    with engine_for("mixtral", stage, 2) as engine:
        engine.load_module_state_dict(state)
        assert_equal_tensors(whole_state(engine), {} if rank else state)
        param = dict(engine.module.named_parameters())[name]
        mine = cut_of(param).take(state[name])
        with GatheredParameters([param]):
            assert torch.equal(param.data, mine)
        assert torch.equal(safe_get_full_fp32_param(param), mine)

        update(engine, engine(**rows_of(0, 0, rank)).loss)
        safe_set_full_fp32_param(param, 2 * mine)
        safe_set_full_optimizer_state(param, 3 * mine, "exp_avg")
        assert torch.equal(safe_get_full_fp32_param(param), 2 * mine)
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), 3 * mine)
        after = whole_state(engine)
        assert rank or torch.equal(after[name], 2 * state[name])

        lacking = {key: value for key, value in state.items() if key != name}
        with pytest.raises(RuntimeError, match=name):
            engine.load_module_state_dict(lacking)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stacks_are_read_and_set(stage: int) -> None:
    (state,) = on_ranks(1, plain_state_body, 9)
    on_ranks(2, edit_body, stage, state)


def plain_state_body(rank: int, world: int, seed: int) -> dict[str, torch.Tensor]:
    return make("mixtral", seed).state_dict()
