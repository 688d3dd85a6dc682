"""Checkpoints of DeepSpeed 0.16 to 0.19 (fixtures/, see make_fixtures.py): our reader finds the values that DeepSpeed
itself showed when it wrote them."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_c.checkpoint.formats.deepspeed import DeepSpeedSource, UniversalSource, open_deepspeed
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, Box, LogicalTensor, Read
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.formats.deepspeed.harness import DTYPES, GROUP_NAMES, STEPS
from tests.deepspeed_c.checkpoint.formats.deepspeed.memory_source import whole

FIXTURES = sorted(path.name.removesuffix(".tar.xz") for path in Path(__file__).with_name("fixtures").glob("*.tar.xz"))


def unpack(name: str, folder: Path) -> tuple[Path, dict]:
    """(the folder that DeepSpeed saved into, its report)."""
    with tarfile.open(Path(__file__).with_name("fixtures") / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "checkpoint", torch.load(folder / "report.pt", weights_only=True)


def check_equals_report(source, report: dict, is_round_robin: bool = False) -> None:
    """The checkpoint has every tensor that DeepSpeed showed, bit for bit, and no other.

    With round_robin_gradients DeepSpeed's accessors read places of an order that is not used any more. So a master
    weight is then compared with its weight, and a state only if its master weight was shown right.
    """
    shown = report["saved"]
    seen = set()
    for kind, name in source.tensors:
        got = whole(source, kind, name)
        if kind == BUFFER:
            want = shown["buffer"][name]
        elif kind == MASTER:
            want = shown["master"][name]
        elif kind == PARAM:
            # Stage 3 in fp32 shows the weight both as weight and as master.
            want = shown["param"][name]
        else:
            want = shown["state"][kind][name]
        assert got.shape == want.shape and got.dtype == want.dtype, (kind, name, got.dtype, want.dtype)
        if is_round_robin and kind not in (PARAM, BUFFER):
            master = whole(source, MASTER, name)
            assert torch.equal(master.to(shown["param"][name].dtype), shown["param"][name]), (name, master)
            if not torch.equal(master, shown["master"][name]):
                seen.add((kind, name))
                continue
        assert torch.equal(got, want), (kind, name, got, want)
        seen.add((kind, name))
    trained = {name for of_group in GROUP_NAMES for name in of_group}
    for name in shown["param"]:
        assert (PARAM, name) in seen or (MASTER, name) in seen, name
    for state, of_state in shown["state"].items():
        assert {name for kind, name in seen if kind == state} == set(of_state) == trained, state
    assert {name for kind, name in seen if kind == BUFFER} == {"offset", "seen"}


def test_which_versions_and_stages_there_are_fixtures_of():
    stages: dict[str, set[str]] = {}
    for name in FIXTURES:
        version = ".".join(name.split("-")[0].split(".")[:2])
        stages.setdefault(version, set()).update(part for part in name.split("-") if part.startswith("stage"))
    every = {"stage0", "stage1", "stage2", "stage3"}
    # On torch 2.13 DeepSpeed 0.18.9 fails at stage 1 ("Output 0 of Split is a view and is being modified inplace").
    # Stages 2 and 3 of 0.18.9 were not tried.
    assert stages == {"0.16": every, "0.17": every, "0.18": {"stage0"}, "0.19": every}


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture_holds_what_deepspeed_showed(name, tmp_path):
    folder, report = unpack(name, tmp_path)
    with open_deepspeed(str(folder), "t3" if "universal" in name else None) as source:
        assert isinstance(source, UniversalSource if "universal" in name else DeepSpeedSource)
        if getattr(source, "problem", ""):
            assert "stage0" in name
            source.name_groups(GROUP_NAMES)
            assert not source.problem
        check_equals_report(source, report, is_round_robin="round-robin" in name)
        assert source.aliases == {"head.weight": "embed.weight"}
        assert {n: info.group for n, info in source.params.items()} == {
            "frozen.weight": None,
            "frozen.bias": None,
            **{n: g for g, of_group in enumerate(GROUP_NAMES) for n in of_group},
        }
        is_sgd = "sgd" in name
        for of_group in GROUP_NAMES:
            for n in of_group:
                counts = source.params[n].counts
                # Without ZeRO the wrapper of half precision first makes a step with zero gradients, which makes the
                # states.
                steps = {STEPS, STEPS + 1} if "stage0" in name else {STEPS}
                assert ("step" not in counts) if is_sgd else (float(counts["step"]) in steps), (n, counts)
        if "elastic" not in name:
            assert [group["lr"] for group in source.groups] == report["saved"]["lr"]
            assert all("params" not in group for group in source.groups)
        state = source.state
        for key, value in report["saved"]["counters"].items():
            assert state["counters"][key] == value
        assert state["client_state"] == {"epoch": 3, "note": "fixture"}
        assert state["lr_scheduler"] == report["saved"]["scheduler"]
        assert state["versions"]["deepspeed"] == report["version"]
        assert state["config"]["zero_optimization"]["stage"] == int(name.split("stage")[1][0])
        if "fp16" in name:
            # The scale begins at 2 ** 8, and two good steps double it. Without ZeRO DeepSpeed does not show it.
            assert state["loss_scaler"]["scale"] == 512.0
            assert report["saved"]["scale"] in (None, 512.0)
            # Each step is one attempt, and none overflows.
            assert state["loss_scaler"]["step"] == STEPS
            assert state["loss_scaler"]["last_overflow_step"] == -1
        else:
            assert "loss_scaler" not in state
        # Weights come in the order of the module.
        weights = [n for kind, n in source.tensors if kind in (PARAM, MASTER)]
        order = list(dict.fromkeys(weights))
        assert order == [n for n in report["saved"]["param"] if n in set(order)]


def test_boxes(tmp_path):
    folder, report = unpack("0.19.6-stage3-bf16", tmp_path)
    with open_deepspeed(str(folder)) as source:
        tensor = source.tensors[MASTER, "embed.weight"]
        want = report["saved"]["master"]["embed.weight"]
        for box in (
            *(Box((0, 0), (7, 5)), Box((2, 0), (3, 5)), Box((0, 1), (7, 3)), Box((3, 2), (4, 2))),
            Box((6, 4), (1, 1)),
        ):
            part = want[box.start[0] : box.start[0] + box.size[0], box.start[1] : box.start[1] + box.size[1]].reshape(
                -1
            )
            for begin in range(part.numel()):
                into = torch.empty(part.numel() - begin, dtype=torch.float64)
                source.read([Read(tensor, begin, into, box)])
                assert torch.equal(into, part[begin:].double()), (box, begin)


def test_what_is_not_there_or_too_long(tmp_path):
    folder, _ = unpack("0.19.6-stage1-bf16", tmp_path)
    with open_deepspeed(str(folder)) as source:
        gone = LogicalTensor(name="gone", kind=PARAM, shape=(2,), dtype=torch.float32)
        with pytest.raises(CheckpointError, match="has no param of that name"):
            source.read([Read(gone, 0, torch.empty(2))])
        with pytest.raises(CheckpointError, match=r"elements \[34, 36\) are asked of 35"):
            source.read([Read(source.tensors[MASTER, "embed.weight"], 34, torch.empty(2))])


def test_open_by_folder_tag_and_latest(tmp_path):
    folder, _ = unpack("0.19.6-stage1-bf16", tmp_path)
    for path, tag in ((folder, None), (folder, "t3"), (folder / "t3", None)):
        with open_deepspeed(str(path), tag) as source:
            assert source.format == "deepspeed" and source.topology.world_size == 2 and source.topology.stage == 1


def test_latest_universal_is_followed(tmp_path):
    folder, _ = unpack("0.19.6-universal-stage1-bf16", tmp_path)
    (folder / "latest_universal").write_text("t3")
    with open_deepspeed(str(folder)) as source:
        assert source.format == "deepspeed-universal"


def test_nothing_there_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError) as error:
        open_deepspeed(str(tmp_path))
    for what in ("latest", "latest_universal", "optimizer_state.pt", "mp_rank_00_model_states.pt"):
        assert what in str(error.value)


@pytest.mark.parametrize(
    "name, removed",
    [
        ("0.19.6-stage1-bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("0.19.6-stage3-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("0.19.6-stage3-bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("0.19.6-stage3-bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_removed_file_is_missed(tmp_path, name, removed):
    folder, _ = unpack(name, tmp_path)
    (folder / "t3" / removed).unlink()
    with pytest.raises(CheckpointError, match=r"missing|rank 0"):
        open_deepspeed(str(folder))


def test_file_of_another_checkpoint_is_noticed(tmp_path):
    """The optimizer file of rank 1 comes from a run on three ranks."""
    folder, _ = unpack("0.19.6-stage1-bf16", tmp_path / "a")
    from_folder, _ = unpack("0.19.6-stage2-bf16-round-robin", tmp_path / "b")
    file = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copyfile(from_folder / "t3" / file, folder / "t3" / file)
    with pytest.raises(CheckpointError, match="shards, and 2 ranks saved it"):
        open_deepspeed(str(folder))


@pytest.mark.parametrize(
    "added, message",
    [
        ("mp_rank_01_model_states.pt", "tensor-parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor-parallel"),
        ("layer_00-expert_00-model_states.pt", "pipeline"),
        ("layer_3_expert_7_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "two runs"),
        ("offloaded_tensors/x", "NVMe"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, added, message):
    folder, _ = unpack("0.19.6-stage1-bf16", tmp_path)
    path = folder / "t3" / added
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=message) as error:
        open_deepspeed(str(folder))
    assert "Fix: " in str(error.value)


def test_files_that_a_larger_world_left_are_not_read(tmp_path):
    folder, report = unpack("0.19.6-stage1-bf16", tmp_path)
    left = folder / "t3" / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    left.write_bytes(b"not a checkpoint")
    with open_deepspeed(str(folder)) as source:
        check_equals_report(source, report)


def test_pages_are_read_in_bounded_pieces(tmp_path, monkeypatch):
    """A staging buffer of 12 bytes gives the same values."""
    monkeypatch.setattr("deepspeed_c.checkpoint.formats.torch_file.STAGING_BYTES", 12)
    monkeypatch.setattr("deepspeed_c.checkpoint.formats.deepspeed.pieces.JOBS_AT_ONCE", 3)
    folder, report = unpack("0.19.6-stage2-bf16-round-robin", tmp_path)
    with open_deepspeed(str(folder)) as source:
        for (kind, name), tensor in source.tensors.items():
            if kind == MASTER:
                into = torch.empty(report["saved"]["master"][name].numel(), dtype=torch.float64)
                source.read([Read(tensor, 0, into)])
                weight = report["saved"]["param"][name]
                assert torch.equal(into.to(weight.dtype), weight.view(-1)), name


def test_dtypes_of_the_fixtures(tmp_path):
    for dtype in ("bf16", "fp16"):
        name = {"bf16": "0.19.6-stage1-bf16", "fp16": "0.19.6-stage2-fp16"}[dtype]
        folder, _ = unpack(name, tmp_path / dtype)
        with open_deepspeed(str(folder)) as source:
            assert source.tensors[PARAM, "embed.weight"].dtype == DTYPES[dtype]
            assert source.tensors[MASTER, "embed.weight"].dtype == torch.float32


def save_stage0(folder: Path, module: dict, optimizer: dict, **more: object) -> DeepSpeedSource:
    """Writes a checkpoint of stage 0 by hand, as DeepSpeed saves one in fp32 training."""
    folder.mkdir()
    content = {
        "module": module, "buffer_names": [], "optimizer": optimizer, "dp_world_size": 1, "ds_config": {}, **more,
    }  # fmt: skip
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return DeepSpeedSource(str(folder))


@pytest.mark.parametrize("n_experts", [[0], [2, -1], [2**40], [True], 1.5])
def test_a_number_of_experts_that_cannot_be_is_refused(tmp_path, n_experts):
    shown = n_experts if isinstance(n_experts, list) else [n_experts]
    with pytest.raises(CheckpointError, match=re.escape(f"has {shown} experts")):
        save_stage0(tmp_path / "t", {"a": torch.ones(2)}, {"state": {}, "param_groups": []}, num_experts=n_experts)


def test_names_of_the_optimizers_groups_count_for_more_than_the_modules_order(tmp_path):
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([b, a])
    a.grad, b.grad = torch.full((3,), 2.0), torch.full((3,), 5.0)
    optimizer.step()
    module = {"a": a.detach(), "b": b.detach()}
    source = save_stage0(tmp_path / "t", module, optimizer.state_dict())
    # The shapes are equal, so without names the module's order is assumed. It is wrong here.
    assert torch.equal(whole(source, "exp_avg", "a"), optimizer.state[b]["exp_avg"])
    source.name_groups([["b", "a"]])
    for name, param in (("a", a), ("b", b)):
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(source, state, name), optimizer.state[param][state]), (name, state)
    # Names that do not fit change nothing.
    source.name_groups([["a"], ["b"]])
    assert torch.equal(whole(source, "exp_avg", "b"), optimizer.state[b]["exp_avg"])


def test_numbers_of_frozen_parameters_are_left_out(tmp_path):
    a, b, c = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = torch.optim.Adam([a, b, c])
    a.grad, c.grad = torch.full((3,), 2.0), torch.full((3,), 5.0)
    optimizer.step()
    source = save_stage0(tmp_path / "t", {"a": a.detach(), "b": b.detach(), "c": c.detach()}, optimizer.state_dict())
    source.name_groups([["a", "c"]])
    for name, param in (("a", a), ("c", c)):
        assert torch.equal(whole(source, "exp_avg", name), optimizer.state[param]["exp_avg"]), name
    assert ("exp_avg", "b") not in source.tensors


def test_names_that_do_not_fit_are_refused(tmp_path):
    module = {name: nn.Parameter(torch.zeros(3)) for name in "abc"} | {"wide": nn.Parameter(torch.zeros(2, 2))}
    optimizer = torch.optim.Adam([module["a"], module["c"], module["wide"]])
    for param in module.values():
        param.grad = torch.randn_like(param)
    optimizer.step()
    saved = {name: param.detach() for name, param in module.items()}
    with save_stage0(tmp_path / "t", saved, optimizer.state_dict()) as source:
        assert "more than one way" in source.problem and not source.groups
        for names, message in (
            ([["a", "c"], ["wide"]], r"groups have \[3\] parameters, and \[2, 1\] are named"),
            ([["a", "c"]], r"groups have \[3\] parameters, and \[2\] are named"),
            ([["a", "wide", "c"]], r"wide: has shape \(2, 2\), and the optimizer's state in its place \(3,\)"),
        ):
            with pytest.raises(CheckpointError, match=message) as error:
                source.name_groups(names)
            assert "Fix: build the optimizer" in str(error.value)
            assert source.problem and ("exp_avg", "a") not in source.tensors
        source.name_groups([["a", "c", "wide"]])
        assert not source.problem and len(source.groups) == 1
        for name in ("a", "c", "wide"):
            assert torch.equal(whole(source, "exp_avg", name), optimizer.state[module[name]]["exp_avg"]), name


@pytest.mark.parametrize("name", ["0.19.6-stage0-fp16", "0.19.6-stage0-fp16-fused"])
def test_names_that_master_weights_contradict_are_not_taken(tmp_path, name):
    """Two parameters share a shape and a group."""
    folder, report = unpack(name, tmp_path)
    group = list(GROUP_NAMES[1])
    i, j = group.index("norm.weight"), group.index("norm.bias")
    group[i], group[j] = group[j], group[i]
    with open_deepspeed(str(folder)) as source:
        assert not source.problem
        source.name_groups([GROUP_NAMES[0], group])
        check_equals_report(source, report)
