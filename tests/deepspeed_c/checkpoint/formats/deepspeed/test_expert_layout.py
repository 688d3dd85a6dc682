"""Mixtures of experts in DeepSpeed's files: values come back bit for bit, each rank's file holds the experts that
DeepSpeed's rank has, and engines in any arrangement load them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.checkpoint.experts import expert_name
from deepspeed_c.checkpoint.formats.deepspeed import open_deepspeed, write_deepspeed, write_universal
from deepspeed_c.checkpoint.native.commit import _step_of_deepspeed
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, ParamInfo, Topology
from deepspeed_c.errors import CheckpointError
from deepspeed_c.moe.layer import MoE
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.deepspeed_c.checkpoint.formats.deepspeed.memory_source import MemorySource, whole
from tests.deepspeed_c.checkpoint.formats.deepspeed.tiny_moe import TinyMoE, train
from tests.ranks import run_ranks

N_EXPERTS = {"a.moe.deepspeed_moe": 4, "b.deepspeed_moe": 8}
FROZEN = "b.deepspeed_moe.experts.deepspeed_experts.{}.fixed"


class MoeSource(MemorySource):
    """Two layers of experts, with a buffer, an empty parameter and a frozen parameter in each expert."""

    def __init__(self, low: torch.dtype, config: dict[str, Any] | None = None, frozen: bool = False) -> None:
        super().__init__(low)
        generator = torch.Generator().manual_seed(9)
        self.state["config"] = {**self.state["config"], **(config or {})}
        for layer, n_experts in N_EXPERTS.items():
            shapes = {f"{layer}.gate.wg.weight": (n_experts, 3)}
            for i in range(n_experts):
                prefix = f"{layer}.experts.deepspeed_experts.{i}"
                shapes |= {f"{prefix}.0.weight": (3, 5), f"{prefix}.0.bias": (7,), f"{prefix}.none": (0, 2)}
                self.data[BUFFER, f"{prefix}.seen"] = torch.tensor(i)
                if frozen:
                    self.data[PARAM, f"{prefix}.fixed"] = torch.randn(3, generator=generator).to(low)
                    self.params[f"{prefix}.fixed"] = ParamInfo()
            for name, shape in shapes.items():
                exact = torch.randn(shape, generator=generator)
                self.data[PARAM, name] = exact.to(low)
                if low != torch.float32:
                    self.data[MASTER, name] = exact
                for kind in ("exp_avg", "exp_avg_sq"):
                    self.data[kind, name] = torch.randn(shape, generator=generator)
                self.params[name] = ParamInfo(group=0, counts={"step": torch.tensor(4.0)})
        self.topology = Topology(expert_parallel=2)
        self.tensors = {
            (kind, name): LogicalTensor(name=name, kind=kind, shape=tuple(data.shape), dtype=data.dtype)
            for (kind, name), data in self.data.items()
        }


def compare(source: MoeSource, written, states: bool = True) -> None:
    for (kind, name), want in source.data.items():
        if states or kind in (PARAM, BUFFER):
            got = whole(written, kind, name)
            assert got.dtype == want.dtype and torch.equal(got, want), (kind, name, got, want)
    extra = written.tensors.keys() - source.tensors.keys()
    assert not extra, extra


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world, ep", [(1, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2)])
def test_what_is_written_is_read_back(tmp_path, stage, world, ep, low):
    source = MoeSource(low)
    path = write_deepspeed(
        source, tmp_path, tag="t", world_size=world, stage=stage, dtype=low, expert_ranks=ep, is_fused=False
    )
    prefix = "bf16_" if low == torch.bfloat16 else ""
    want = {f"layer_{i}_expert_{e}_mp_rank_00_model_states.pt" for i, n in enumerate((4, 8)) for e in range(n)}
    want |= {f"expp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ep)} if stage == 0 else set()
    want |= {f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(world)} if stage else set()
    want |= {"mp_rank_00_model_states.pt"}
    assert {file.name for file in Path(path).iterdir()} == want
    with open_deepspeed(str(tmp_path)) as written:
        assert written.problem == "", written.problem
        assert (written.topology.expert_parallel, written.topology.world_size) == (ep, world), written.topology
        compare(source, written)
        marks = [(group.get("moe", False), group["name"]) for group in written.groups]
        assert marks == [(False, "dense-params"), (False, "dense-params"), (True, f"ep_size_{ep}")], marks
        for name, info in written.params.items():
            own = source.params[name].group
            assert info.group == (2 if expert_name(name) and own is not None else own), (name, info)
        names = [name for kind, name in written.tensors if kind == PARAM]
        of_layer = [name for name in names if name.startswith("a.moe")]
        assert of_layer == [name for kind, name in source.tensors if kind == PARAM and name.startswith("a.moe")]
    assert _step_of_deepspeed(path) == 4


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_rank_has_the_shard_of_its_own_experts(tmp_path, is_strided):
    """Against plain concatenation, for each rank and group."""
    world, sizes = 4, {"a.moe.deepspeed_moe": 2, "b.deepspeed_moe": 4}
    source = MoeSource(torch.float32, {"use_data_before_expert_parallelism": is_strided})
    path = write_deepspeed(
        source, tmp_path, tag="t", world_size=world, stage=2, dtype=torch.float32, expert_ranks=sizes
    )
    for rank in range(world):
        file = Path(path) / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        saved = _load(file)
        assert saved["partition_count"] == [4, 4, 2, 1], saved["partition_count"]
        for g, (layer, n) in zip((2, 3), sizes.items()):
            n_local = N_EXPERTS[layer] // n
            expert_rank = rank // (world // n) if is_strided else rank % n
            holder = rank % (world // n) if is_strided else rank // n
            own = range(expert_rank * n_local, (expert_rank + 1) * n_local)
            names = [
                name
                for name, info in source.params.items()
                if (split := expert_name(name)) and split.layer == layer and split.number in own
            ]
            flat = torch.cat([source.data[PARAM, name].flatten() for name in names])
            size = math.ceil(len(flat) / (2 * (world // n))) * 2
            want = flat[holder * size : (holder + 1) * size]
            got = saved["single_partition_of_fp32_groups"][g]
            assert torch.equal(got, want), (rank, g, got, want)
            state = saved["base_optimizer_state"]["state"][g]["exp_avg"]
            moments = torch.cat([source.data["exp_avg", name].flatten() for name in names])
            want = moments[holder * size : (holder + 1) * size]
            assert torch.equal(state[: len(want)], want), (rank, g)
    with open_deepspeed(str(tmp_path)) as written:
        assert written.topology.expert_parallel == 4, written.topology
        compare(source, written)


def _load(file: Path) -> dict[str, Any]:
    """The optimizer's state, with tensors read by our own reader of pickles (classes of DeepSpeed are in them)."""
    from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
    from deepspeed_c.checkpoint.formats.torch_file import materialize

    return materialize(read_file(file).content["optimizer_state_dict"])


def test_groups_in_another_order_on_another_rank(tmp_path):
    """DeepSpeed orders groups of experts by a set of strings, which differs between processes."""
    from deepspeed_c.checkpoint.formats.deepspeed import write as writer
    from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
    from deepspeed_c.checkpoint.formats.torch_file import materialize

    source = MoeSource(torch.bfloat16)
    sizes = {"a.moe.deepspeed_moe": 2, "b.deepspeed_moe": 4}
    path = write_deepspeed(source, tmp_path, tag="t", world_size=4, stage=1, dtype=torch.bfloat16, expert_ranks=sizes)
    for rank in (1, 3):
        file = f"{path}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        content = materialize(read_file(file).content)
        saved = content["optimizer_state_dict"]
        order = [0, 1, 3, 2]
        for key in ("single_partition_of_fp32_groups", "partition_count", "group_paddings", "param_slice_mappings"):
            saved[key] = [saved[key][g] for g in order]
        optimizer = saved["base_optimizer_state"]
        optimizer["param_groups"] = [{**optimizer["param_groups"][g], "params": [i]} for i, g in enumerate(order)]
        optimizer["state"] = {i: optimizer["state"][g] for i, g in enumerate(order)}
        writer._save(file, content)
    with open_deepspeed(str(tmp_path)) as written:
        compare(source, written)


def test_layers_on_different_ranks_without_zero_keep_their_weights_only(tmp_path):
    source = MoeSource(torch.float32)
    sizes = {"a.moe.deepspeed_moe": 2, "b.deepspeed_moe": 4}
    write_deepspeed(source, tmp_path, tag="t", world_size=4, stage=0, dtype=torch.float32, expert_ranks=sizes)
    with open_deepspeed(str(tmp_path)) as written:
        assert "ep_size_2, ep_size_4" in written.problem, written.problem
        compare(source, written, states=False)
        with pytest.raises(CheckpointError, match="different numbers of ranks"):
            written.name_groups([[]])


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_experts(tmp_path, stage):
    source = MoeSource(torch.bfloat16, frozen=True)
    path = write_deepspeed(source, tmp_path, tag="t", world_size=4, stage=stage, dtype=torch.bfloat16)
    with open_deepspeed(str(tmp_path)) as written:
        compare(source, written)
        assert written.params[FROZEN.format(5)].group is None
    assert Path(path, "layer_1_expert_7_mp_rank_00_model_states.pt").exists()


def test_what_does_not_fit_is_refused(tmp_path):
    source = MoeSource(torch.float32)
    options = {"tag": "t", "dtype": torch.float32}
    for said, more in (
        ("at stage 3", {"world_size": 2, "stage": 3}),
        ("4 experts on 6 ranks cannot be held by 3 ranks", {"world_size": 6, "stage": 1, "expert_ranks": 3}),
        ("cannot be held by 2 ranks", {"world_size": 3, "stage": 0}),
        ("cannot be held by 0 ranks", {"world_size": 2, "stage": 0, "expert_ranks": 0}),
    ):
        with pytest.raises(CheckpointError, match=said) as caught:
            write_deepspeed(source, tmp_path / "none", **options, **more)
        assert "Fix: " in str(caught.value)
        assert not any((tmp_path / "none").glob("t*")), said
    with pytest.raises(CheckpointError, match="universal format does not hold"):
        write_universal(source, tmp_path / "none", "t")


def test_damaged_folders_are_refused(tmp_path):
    source = MoeSource(torch.float32)
    path = Path(write_deepspeed(source, tmp_path, tag="t", world_size=2, stage=1, dtype=torch.float32))
    lost, other = (path / f"layer_1_expert_{e}_mp_rank_00_model_states.pt" for e in (3, 5))
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"files of 1 experts are missing: \(layer, expert\) \[\(1, 3\)\]"):
        open_deepspeed(str(tmp_path))
    assert _step_of_deepspeed(str(path)) is None
    lost.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match="no tensor of expert 3"):
        open_deepspeed(str(tmp_path))
    lost.write_bytes(content)
    (path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_deepspeed(str(tmp_path))
    write_deepspeed(source, tmp_path, tag="s", world_size=2, stage=0, dtype=torch.float32)
    (tmp_path / "s" / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"saved by 2 expert-parallel ranks.*missing \(\[1\]\)"):
        open_deepspeed(str(tmp_path), "s")


# -- engines ---------------------------------------------------------------------------------------------------------


def make(ep_sizes: tuple[int, int], stage: int, seed: int, **more: Any):
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return deepspeed_c.initialize(model=TinyMoE(MoE, ep_sizes), config=config)[0]


def states_of(engine) -> dict[str, torch.Tensor]:
    numbered = ExpertNames(engine.module)
    found = {}
    for name, param in engine.module.named_parameters():
        found[f"{numbered.logical(name)}:master"] = safe_get_full_fp32_param(param).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{numbered.logical(name)}:{key}"] = safe_get_full_optimizer_state(param, key).clone()
    return found


def save_body(rank: int, world: int, folder: str, cells: list[tuple]) -> list[dict[str, torch.Tensor]]:
    found = []
    for i, (ep_sizes, stage, more) in enumerate(cells):
        with make(ep_sizes, stage, 7 + rank, checkpoint={"format": "deepspeed"}, **more) as engine:
            train(engine, 0, 2)
            engine.save_checkpoint(folder, tag=f"t{i}")
            found.append(states_of(engine))
    return found


def load_body(rank: int, world: int, folder: str, n_tags: int, cells: list[tuple]) -> list[Any]:
    found = []
    for ep_sizes, stage in cells:
        with make(ep_sizes, stage, 70 + rank) as engine:
            for i in range(n_tags):
                engine.load_checkpoint(folder, tag=f"t{i}")
                found.append((i, states_of(engine)))
            train(engine, 2, 1)
    return found


SAVED = [
    ((2, 2), 0, {}), ((2, 1), 1, {}), ((2, 4), 2, {}), ((4, 2), 1, {"bf16": {"enabled": True}}),
    ((2, 2), 2, {"use_data_before_expert_parallelism": True}),
]  # fmt: skip
LOADED = {1: [((1, 1), 0), ((1, 1), 3)], 2: [((2, 1), 2), ((2, 2), 3)]}


def test_engines_in_other_arrangements_load_what_an_engine_saved(tmp_path):
    saved = run_ranks(4, save_body, str(tmp_path), SAVED)
    want = [{name: value for of_rank in saved for name, value in of_rank[i].items()} for i in range(len(SAVED))]
    for world, cells in LOADED.items():
        for rank, of_rank in enumerate(run_ranks(world, load_body, str(tmp_path), len(SAVED), cells)):
            for i, got in of_rank:
                for name, value in got.items():
                    assert torch.equal(value, want[i][name]), (world, rank, SAVED[i], name, value, want[i][name])


def refused_body(rank: int, world: int, folder: str) -> str:
    with make((2, 2), 3, 7, checkpoint={"format": "deepspeed"}) as engine, pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_saving_deepspeeds_files_at_stage_3_is_refused_before_anything_is_written(tmp_path):
    for said in run_ranks(2, refused_body, str(tmp_path)):
        assert "mixtures of experts at stage 3" in said and "Fix: " in said, said
    assert list(tmp_path.iterdir()) == []
