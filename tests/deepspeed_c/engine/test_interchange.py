"""engine.load_checkpoint of other libraries' checkpoints: DeepSpeed's files (shipped fixtures), Hugging Face folders,
torch's DCP folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import deepspeed_c
from deepspeed_c.errors import StateError
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.deepspeed_c.checkpoint.formats.deepspeed.harness import GROUP_NAMES, MORE_STEPS, STATES, STEPS, config
from tests.deepspeed_c.checkpoint.formats.deepspeed.test_read import FIXTURES, unpack
from tests.deepspeed_c.checkpoint.formats.deepspeed.tiny import Tiny, batch, groups_of, train
from tests.ranks import run_ranks
from tests.training import whole_weights


def make(stage: int, dtype: str, kind: str = "adamw", seed: int = 11, **more: Any):
    """Our engine with the fixtures' model. The weights differ from the fixtures' weights."""
    torch.manual_seed(seed)
    model = Tiny()
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9)
    elif kind == "fused":
        optimizer = deepspeed_c.ops.adam.FusedAdam(groups_of(model), lr=0.01, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, betas=(0.9, 0.95))
    settings = {key: value for key, value in config(stage, dtype, **more).items() if value is not None}
    return deepspeed_c.initialize(model=model, optimizer=optimizer, config=settings)[0]


def show(engine, states: list[str]) -> dict[str, Any]:
    """All tensors of our engine, in the form in which peer.py reports DeepSpeed's. Collective."""
    shown: dict[str, Any] = {"param": whole_weights(engine.module)}
    shown |= {"master": {}, "state": {name: {} for name in states}}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            shown["master"][name] = safe_get_full_fp32_param(param)
            for state in states:
                shown["state"][state][name] = safe_get_full_optimizer_state(param, state)
    shown["buffer"] = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    shown["lr"] = engine.get_lr()
    shown["counters"] = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
    }
    return shown


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The entries in which our engine's values differ from DeepSpeed's, with both values."""
    pairs = {("buffer", name): (theirs["buffer"][name], ours["buffer"][name]) for name in ("offset", "seen")}
    pairs.update({("param", name): (theirs["param"][name], ours["param"][name]) for name in theirs["param"]})
    pairs.update({("master", name): (value, ours["master"][name]) for name, value in theirs["master"].items()})
    for state, of_state in theirs["state"].items():
        pairs.update({(state, name): (value, ours["state"][state][name]) for name, value in of_state.items()})
    found = [
        f"{key}: DeepSpeed has {want.flatten()[:4].tolist()}, ours {got.flatten()[:4].tolist()}"
        for key, (want, got) in pairs.items()
        if want.shape != got.shape or not torch.equal(want.to(got.dtype), got)
    ]
    return found + [
        f"{key}: DeepSpeed has {theirs[key]}, ours {ours[key]}"
        for key in ("lr", "counters")
        if theirs[key] != ours[key]
    ]


def load_and_go_on(rank: int, world: int, folder: str, stages: list[int], dtype: str, kind: str) -> list[Any]:
    results = []
    for stage in stages:
        with make(stage, dtype, kind) as engine:
            path, client_state = engine.load_checkpoint(folder, tag="t3")
            shown = show(engine, STATES.get(kind, STATES["adamw"]))
            results.append((stage, path, client_state, shown, train(engine, STEPS, MORE_STEPS)))
    return results


def kind_of(name: str) -> str:
    return "sgd" if "sgd" in name else "fused" if "fused" in name else "adamw"


def world_of(name: str) -> int:
    return 1 if "stage0" in name or "old-format" in name else 2


# Relative tolerance. On one machine the losses are equal bit for bit; on another, matrix products round otherwise.
# Losses without the loaded moments differ by 1e-2.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


def losses_of_deepspeed(name: str, report: dict[str, Any]) -> list[float]:
    """DeepSpeed's losses of the steps after its save, up to the last one that our losses should equal."""
    losses = report["losses"][STEPS:]
    if "round-robin" in name:
        # Three ranks saved this checkpoint. From the second step on, losses depend on batches of the other two.
        return losses[:1]
    if "stage0-fp16" in name and name.startswith(("0.18", "0.19")):
        # Without ZeRO these versions divide gradients by a loss scale, but did not multiply the loss by it.
        return losses[:1]
    return losses


@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures_load_and_go_on_as_deepspeed_did(tmp_path, name):
    folder, report = unpack(name, tmp_path)
    stage = int(name.split("stage")[1][0])
    dtype = re.search(r"stage\d-(\w+)", name)[1]
    if "round-robin" in name:
        # DeepSpeed's accessors read the wrong places of these states (see test_read.py).
        report["saved"] |= {"master": {}, "state": {}}
    stages = [stage] if stage else [0, 2, 3]
    results = run_ranks(world_of(name), load_and_go_on, str(folder), stages, dtype, kind_of(name))
    for rank, of_rank in enumerate(results):
        for at, path, client_state, shown, losses in of_rank:
            assert Path(path) == folder / "t3" and client_state["epoch"] == 3
            assert differences(report["saved"], shown) == [], at
            if rank == 0:
                expected = losses_of_deepspeed(name, report)
                assert losses[: len(expected)] == pytest.approx(expected, rel=LOSS_TOLERANCE[dtype]), at


# -- weights alone -------------------------------------------------------------------------------------------------------


def trained_by_torch(n_steps: int) -> tuple[Tiny, torch.optim.Optimizer]:
    """The model after some steps of plain torch."""
    torch.manual_seed(5)
    model = Tiny()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, betas=(0.9, 0.95))
    go_on_in_torch(model, optimizer, 0, n_steps)
    return model, optimizer


def go_on_in_torch(model: Tiny, optimizer: torch.optim.Optimizer, first: int, n_steps: int) -> list[float]:
    losses = []
    for step in range(first, first + n_steps):
        loss = model(*batch(step, 0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_hugging_face(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Saves two files with an index by Hugging Face's library."""
    folder.mkdir()
    names = list(weights)
    weight_map = {}
    for file, part in (
        ("model-00001-of-00002.safetensors", names[::2]),
        ("model-00002-of-00002.safetensors", names[1::2]),
    ):
        safetensors.torch.save_file({name: weights[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")


PLACES = ("hf", "both_names", "dcp", "one.safetensors")


def load_weights(rank: int, world: int, folder: str, weights: dict[str, torch.Tensor]) -> list[str]:
    found = []

    def check(is_right: bool, text: str) -> None:
        if not is_right:
            found.append(f"stage {stage} {dtype}: {text}")

    def refused(place: str, message: str, **options: Any) -> None:
        try:
            engine.load_checkpoint(f"{folder}/{place}", **options)
            check(False, f"{place} was loaded")
        except StateError as error:
            check(message in str(error), f"{place}: {error}")

    for stage, dtype in ((0, "fp32"), (3, "bf16")):
        with make(stage, dtype) as engine:
            train(engine, 0, 1)
            before = show(engine, STATES["adamw"])
            for place in PLACES:
                refused(place, "it holds no optimizer state; load_module_only=True loads the weights alone")
            refused("lacking", "missing: up.bias; unexpected: extra", load_module_only=True)
            check(differences(before, show(engine, STATES["adamw"])) == [], "changed by a refusal")
            params = dict(engine.module.named_parameters())
            for place in PLACES:
                train(engine, 1, 1)
                step = engine.global_steps, safe_get_full_optimizer_state(params["gain"], "exp_avg")
                path, client_state = engine.load_checkpoint(f"{folder}/{place}", load_module_only=True)
                check((path, client_state) == (f"{folder}/{place}", {}), f"{path}, {client_state}")
                for name, got in whole_weights(engine.module).items():
                    want = weights[name]
                    check(torch.equal(got, want.to(got.dtype)), f"{place}: {name} is {got}, not {want}")
                for name in ("embed.weight", "norm.bias"):
                    master = safe_get_full_fp32_param(params[name])
                    check(
                        torch.equal(master, weights[name]), f"{place}: master {name} is {master}, not {weights[name]}"
                    )
                seen = engine.module.seen
                check(torch.equal(seen, weights["seen"]), f"{place}: buffer {seen}, not {weights['seen']}")
                moment = safe_get_full_optimizer_state(params["gain"], "exp_avg")
                check(engine.global_steps == step[0], f"{place}: step {engine.global_steps}, not {step[0]}")
                check(torch.equal(moment, step[1]), f"{place}: moment {moment}, not {step[1]}")
            train(engine, 1, 1)
            engine.load_checkpoint(f"{folder}/lacking", load_module_strict=False, load_module_only=True)
            got = whole_weights(engine.module)["embed.weight"]
            check(torch.equal(got, weights["embed.weight"].to(got.dtype)), "lacking: embed.weight was not loaded")
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_hugging_face_and_dcp_folders_are_loaded_alone(tmp_path):
    model, _ = trained_by_torch(2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    one_name = {name: value for name, value in weights.items() if name != "head.weight"}
    save_hugging_face(tmp_path / "hf", one_name)
    save_hugging_face(tmp_path / "both_names", weights)
    save_hugging_face(
        tmp_path / "lacking",
        {name: value for name, value in one_name.items() if name != "up.bias"} | {"extra": torch.ones(2)},
    )
    safetensors.torch.save_file(one_name, tmp_path / "one.safetensors")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for found in run_ranks(2, load_weights, str(tmp_path), weights):
        assert found == []


# -- weights and an optimizer ------------------------------------------------------------------------------------------


def load_dcp(rank: int, world: int, folder: str) -> list[Any]:
    results = []
    for stage in (0, 1, 3):
        with make(stage, "fp32", scheduler=None) as engine:
            path, _ = engine.load_checkpoint(folder)
            results.append((path, show(engine, STATES["adamw"]), train(engine, STEPS, MORE_STEPS)))
    return results


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_run_of_torch_goes_on_from_its_dcp_folder(tmp_path, is_flat):
    model, optimizer = trained_by_torch(STEPS)
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=is_flat))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    moments = {
        state: {n: optimizer.state[p][state].clone() for n, p in model.named_parameters() if p.requires_grad}
        for state in STATES["adamw"]
    }
    losses = go_on_in_torch(model, optimizer, STEPS, MORE_STEPS)
    for path, shown, ours in run_ranks(1, load_dcp, str(tmp_path / "dcp"))[0]:
        assert path == str(tmp_path / "dcp")
        for name, value in masters.items():
            assert torch.equal(shown["master"][name], value), name
            for state, of_state in moments.items():
                assert torch.equal(shown["state"][state][name], of_state[name]), (state, name)
        assert shown["lr"] == [0.01, 0.02]
        assert ours == pytest.approx(losses, rel=LOSS_TOLERANCE["fp32"])


# -- finding the checkpoint --------------------------------------------------------------------------------------------


def find_places(rank: int, world: int, universal: str, folder: str) -> list[Any]:
    with make(1, "bf16") as engine:
        found = [engine.load_checkpoint(universal)[0]]
        train(engine, engine.global_steps, 1)
        engine.save_checkpoint(folder)
        engine.save_model(folder)
        found.append(engine.load_checkpoint(folder)[0])
        engine.load_checkpoint(f"{folder}/global_step{STEPS + 1}", load_module_only=True)
        found.append(engine.load_checkpoint(f"{folder}/global_step{STEPS + 1}")[0])
        found.append(engine.load_checkpoint(f"{folder}/nothing"))
        return found


def test_a_folder_of_tags_comes_before_weights_beside_it_and_a_tags_own_folder_is_one(tmp_path):
    folder, _ = unpack("0.19.6-universal-stage1-bf16", tmp_path / "universal")
    (folder / "latest_universal").write_text("t3")
    tag = str(tmp_path / "ours" / f"global_step{STEPS + 1}")
    for found in run_ranks(2, find_places, str(folder), str(tmp_path / "ours")):
        assert found == [str(folder / "t3"), tag, tag, (None, None)]


# -- from us to DeepSpeed ----------------------------------------------------------------------------------------------


def save_for_deepspeed(rank: int, world: int, folder: str) -> Any:
    """Saves for DeepSpeed at stages 0 and 1. The optimizer groups are not in the module's order, and DeepSpeed keeps
    the states of this optimizer flat at stage 0."""
    found = []
    for stage in (0, 1):
        torch.manual_seed(11)
        model = Tiny()
        groups = [{**group, "params": group["params"][::-1]} for group in groups_of(model)]
        optimizer = deepspeed_c.ops.adam.FusedAdam(groups, lr=0.01)
        settings = config(stage, "bf16", checkpoint={"format": "deepspeed"})
        with deepspeed_c.initialize(model=model, optimizer=optimizer, config=settings)[0] as engine:
            train(engine, 0, 2)
            engine.save_checkpoint(f"{folder}/{stage}", tag="t2")
            found.append(show(engine, STATES["adamw"])["master"])
    return found


def test_groups_are_written_as_the_optimizer_has_them(tmp_path):
    masters = run_ranks(1, save_for_deepspeed, str(tmp_path))[0]
    groups = [of_group[::-1] for of_group in GROUP_NAMES]
    wrapped = torch.load(tmp_path / "0" / "t2" / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]
    for flat, names in zip(wrapped["fp32_groups_flat"], groups, strict=True):
        assert torch.equal(flat, torch.cat([masters[0][name].flatten() for name in names])), names
    assert wrapped["optimizer_state_dict"]["state"][0]["step"] == 2
    shapes = torch.load(tmp_path / "1" / "t2" / "mp_rank_00_model_states.pt", weights_only=True)["param_shapes"]
    assert [list(of_group) for of_group in shapes] == groups
