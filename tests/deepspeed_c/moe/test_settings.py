"""Settings of a run with experts on two ranks against the same run with all experts on each rank: offload and files,
Muon, frozen experts, LoRA on experts, recomputation, and a run that goes on from a checkpoint with noisy gates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import deepspeed_c
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.moe.layer import MoE
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.utils import groups, safe_get_full_fp32_param
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.deepspeed_c.moe.test_oracle import ALL, DROP, HIDDEN, ROWS, STEPS, Net, batch, config_of, fill
from tests.ranks import run_ranks
from tests.training import engine_of, update

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02}}}
MUON = {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.01}}}
HOST = {"offload_optimizer": {"device": "cpu"}}


class Lora(nn.Module):
    """A linear layer with a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.linspace(-0.5, 0.5, 2 * base.in_features).view(2, -1))
        self.b = nn.Parameter(torch.linspace(0.3, -0.2, 2 * base.out_features).view(-1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def freeze(model: Net) -> None:
    for expert in model.first.deepspeed_moe.experts.deepspeed_experts:
        expert[0].requires_grad_(False)


def add_lora(model: Net) -> None:
    for layer in (model.first, model.second):
        for expert in layer.deepspeed_moe.experts.deepspeed_experts:
            expert[2] = Lora(expert[2])


CHANGES = {"": lambda model: None, "freeze": freeze, "lora": add_lora}
# name -> (stage, change of the model, configuration)
SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "muon 1": (1, "", MUON),
    "muon 3": (3, "", MUON),
    "host 2": (2, "", {**ADAMW, "zero": HOST}),
    "frozen 0": (0, "freeze", ADAMW),
    "frozen 3": (3, "freeze", ADAMW),
    "lora 2": (2, "lora", ADAMW),
    "lora 3": (3, "lora", ADAMW),
    "super offload 2": (2, "", {**ADAMW, "zero": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}),
    "mean of sums 1": (1, "", {**ADAMW, "gradient_allreduce_op": "sum"}),
    "files 3": (3, "", {**ADAMW, "files": True}),
    "8 bits 1": (1, "", {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "state_dtype": "int8"}}}),
}


def body(rank: int, world: int, ep: int, folder: str, names: list[str]) -> list[dict[str, torch.Tensor]]:
    found = []
    for name in names:
        stage, change, extra = SETTINGS[name]
        extra = dict(extra)
        model, whole = Net(ep, 2, **ALL), Net(1, 2, **ALL)
        for each in (model, whole):
            CHANGES[change](each)
        zero = extra.pop("zero", {})
        if extra.pop("files", False):
            place = {"device": "nvme", "nvme_path": folder}
            zero = {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
        config = config_of(stage, 1, extra)
        config["zero_optimization"].update(zero)
        with engine_of(model, config) as engine:
            engine.load_module_state_dict(fill(whole))
            for step in range(STEPS):
                update(engine, engine(*batch(step, 0, rank, ROWS)))
            numbered = ExpertNames(model)
            params = {}
            for own, param in model.named_parameters():
                value = safe_get_full_fp32_param(param)
                if value is None:
                    with deepspeed_c.zero.GatheredParameters(param):
                        value = param.detach().clone()
                params[numbered.logical(own)] = value.clone()
            found.append(params)
    return found


def test_settings_on_two_ranks(tmp_path: Path) -> None:
    names = list(SETTINGS)
    whole = run_ranks(2, body, 1, str(tmp_path), names)[0]
    spread = run_ranks(2, body, 2, str(tmp_path), names)
    start = fill(Net(1, 2, **ALL))
    for i, name in enumerate(names):
        seen: set[str] = set()
        close = {"rtol": 0.05, "atol": 0.02} if name.startswith("8 bits") else CLOSE
        for rank in range(2):
            for key, got in spread[rank][i].items():
                seen.add(key)
                want = whole[i][key]
                worst = (got - want).abs().max()
                assert torch.allclose(got, want, **close), f"{name}, rank {rank}: {key} is off by {worst:g}"
                is_frozen = (
                    name.startswith("frozen") and "first" in key and ".0.weight" in key and "experts" in key
                ) or (".base." in key)
                if key in start and is_frozen:
                    assert torch.equal(got, start[key]), (name, key)
        assert seen == whole[i].keys(), (name, seen ^ whole[i].keys())


def noisy_body(rank: int, world: int, ep: int, folder: str, resumes: bool) -> list[float]:
    """Losses of four steps. With ``resumes``, of the last two, after the checkpoint behind the second."""
    options = {**DROP, "noisy_gate_policy": "RSample", "use_rts": True}
    model = Net(ep, 1, **options)
    torch.manual_seed(100 + rank if not resumes else 7)
    losses = []
    with engine_of(model, config_of(1, 1, ADAMW)) as engine:
        engine.load_module_state_dict(fill(Net(1, 1, **options)))
        if resumes:
            assert engine.load_checkpoint(folder, tag="two")[0] is not None
        for step in range(2 if resumes else 0, 4):
            losses.append(update(engine, engine(*batch(step, 0, rank, ROWS))))
            if step == 1:
                engine.save_checkpoint(folder, tag="two")
    return losses


@pytest.mark.parametrize("ep", [1, 2])
def test_a_resumed_run_draws_what_the_run_would_have_drawn(tmp_path: Path, ep: int) -> None:
    want = run_ranks(2, noisy_body, ep, str(tmp_path), False)
    got = run_ranks(2, noisy_body, ep, str(tmp_path), True)
    for rank in range(2):
        assert got[rank] == pytest.approx(want[rank][2:], rel=1e-6), (rank, got[rank], want[rank])


def recomputing_body(rank: int, world: int, layers: str | None) -> tuple[list[float], int, int]:
    model, gated = Net(2, 2, **DROP), []
    model.first.deepspeed_moe.gate.register_forward_pre_hook(lambda module, args: gated.append(1))
    extra = {**ADAMW, **({} if layers is None else {"activation_checkpointing": {"layers": layers}})}
    with engine_of(model, config_of(3, 1, extra)) as engine:
        engine.load_module_state_dict(fill(Net(1, 2, **DROP)))
        ledger = model.first.deepspeed_moe._ranks.ledger
        losses, begin = [], ledger.last
        for step in range(3):
            losses.append(update(engine, engine(*batch(step, 0, rank, ROWS))))
        entries = ledger.recent(ledger.last - begin)
        return (
            losses,
            sum(1 for entry in entries if entry.label.startswith(("tokens ", "counts of tokens"))),
            len(gated),
        )


def test_recomputed_layers_of_experts_send_once() -> None:
    plain = run_ranks(2, recomputing_body, None)
    again = run_ranks(2, recomputing_body, r"(first|second)")
    for (losses, n_sent, n_gated), (want, n_want, n_gated_once) in zip(again, plain):
        assert losses == want, (losses, want)
        assert n_sent == n_want == 3 * 2 * 3, (n_sent, n_want)
        assert (n_gated, n_gated_once) == (6, 3), "the layers were run again"


class Block(nn.Module):
    """A mixture of experts as a layer of a pipeline."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(HIDDEN, 6), nn.GELU(), nn.Linear(6, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_experts=4, ep_size=ep, k=1, drop_tokens=False, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def pipeline_body(rank: int, world: int, ep: int, experts_at: tuple[int, ...], folder: str) -> list[float]:
    torch.manual_seed(5)
    layers = [Block(ep) if i in experts_at else nn.Linear(HIDDEN, HIDDEN) for i in range(4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    def samples():
        for i in itertools.count():
            x = batch(i, 0, rank % 2, ROWS)[0]
            yield x, x.roll(1, 1)

    losses = []
    config = {**config_of(1, 2, ADAMW), "train_micro_batch_size_per_gpu": ROWS}
    with engine_of(module, config) as engine:
        data = samples()
        for step in range(4):
            losses.append(float(engine.train_batch(data)))
            if step == 1:
                engine.save_checkpoint(folder, tag="one")
    return losses


@pytest.mark.parametrize("experts_at", [(1,), (1, 3)])
def test_experts_in_stages_of_a_pipeline(tmp_path: Path, experts_at: tuple[int, ...]) -> None:
    whole = run_ranks(4, pipeline_body, 1, experts_at, str(tmp_path))
    spread = run_ranks(4, pipeline_body, 2, experts_at, str(tmp_path))
    for rank in range(4):
        assert spread[rank] == pytest.approx(whole[rank], rel=1e-5), (rank, spread[rank], whole[rank])
    with open_checkpoint(str(tmp_path), "one") as source:
        names = {
            name.partition("deepspeed_experts.")[2][:1] for _, name in source.tensors if "deepspeed_experts" in name
        }
        assert names == set("0123"), names


def attributes_body(rank: int, world: int) -> list[Any]:
    with engine_of(Net(2, 1, **ALL), config_of(1, 1, ADAMW)) as engine:
        found = [engine.has_moe_layers, engine.num_experts, len(engine.gate_modules), len(engine.moe_layers)]
        return [*found, sorted(engine.expert_parallel_group), sorted(engine.expert_data_parallel_group)]


def test_attributes_of_an_engine_with_experts() -> None:
    for got in run_ranks(2, attributes_body):
        assert got == [True, [4, 4], 2, 2, ["ep_size_2"], ["ep_size_2"]], got


def mesh_body(rank: int, world: int, sizes: dict[str, int], ep: int, stage: int) -> dict[str, torch.Tensor]:
    model = Net(ep, 2, **ALL)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    extra = {**ADAMW, "sequence_parallel": {"loss": "part"}} if "sp" in sizes else ADAMW
    with engine_of(model, config_of(stage, 1, extra), mesh_device=mesh) as engine:
        engine.load_module_state_dict(fill(Net(1, 2, **ALL)))
        place = rank // sizes["tp"] if "tp" in sizes else rank
        for step in range(STEPS):
            update(engine, engine(*batch(step, 0, place, ROWS)))
        numbered = ExpertNames(model)
        return {numbered.logical(n): safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "sp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
)
def test_experts_beside_other_axes(sizes: dict[str, int], stage: int) -> None:
    whole = run_ranks(4, mesh_body, sizes, 1, stage)[0]
    seen: set[str] = set()
    for rank, params in enumerate(run_ranks(4, mesh_body, sizes, 2, stage)):
        seen |= params.keys()
        for name, got in params.items():
            worst = (got - whole[name]).abs().max()
            assert torch.allclose(got, whole[name], **CLOSE), (
                f"{sizes}, stage {stage}, rank {rank}: {name} off by {worst:g}"
            )
    assert seen == whole.keys(), seen ^ whole.keys()


def across_sequences_body(rank: int, world: int) -> tuple[list[int], list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "sp"))
    extra = {**ADAMW, "sequence_parallel": {"loss": "part"}}
    with engine_of(Net(4, 1, **ALL), config_of(1, 1, extra), mesh_device=mesh) as engine:
        update(engine, engine(*batch(0, 0, rank, ROWS)))
        return groups._get_expert_parallel_group_ranks("ep_size_4"), groups._get_expert_data_parallel_group_ranks(
            "ep_size_4"
        )


def test_experts_are_spread_over_ranks_of_a_sequence_too() -> None:
    """As in DeepSpeed (377a0d15b): all ranks that see different tokens can hold different experts."""
    for rank, got in enumerate(run_ranks(4, across_sequences_body)):
        assert got == ([0, 1, 2, 3], [rank]), (rank, got)
