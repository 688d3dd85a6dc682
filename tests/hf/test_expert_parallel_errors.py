"""Bad input for experts over ranks: all ranks raise alike before a weight moves. Models of one's own are named by
patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.errors import DeepSpeedCError
from tests.hf.expert_families import N_EXPERTS, WIDTH, assert_equal_tensors, fill, make
from tests.hf.stack import on_ranks
from tests.hf.test_expert_parallel import settings, whole_state
from tests.training import descend_together, engine_of, update

INNER, N_CHOSEN, STEP_SIZE = 20, 2, 1.0


class OwnExperts(nn.Module):
    """Stacked experts with names of their own."""

    def __init__(self, n_experts: int = N_EXPERTS) -> None:
        super().__init__()
        self.n_mine = n_experts
        self.wa = nn.Parameter(torch.empty(n_experts, INNER, WIDTH))
        self.wb = nn.Parameter(torch.empty(n_experts, WIDTH, INNER))
        self.wc = nn.Parameter(torch.empty(n_experts, INNER, WIDTH))

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate = torch.einsum("th,eih->tei", x, self.wa)
        hidden = nn.functional.gelu(gate) * torch.einsum("th,eih->tei", x, self.wc)
        out = torch.einsum("tei,ehi->teh", hidden, self.wb)
        chosen = torch.zeros(x.shape[0], self.n_mine).scatter_add(1, indices, weights)
        return torch.einsum("teh,te->th", out, chosen)


class OwnBlock(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, N_EXPERTS, bias=False)
        self.parts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.router(x).softmax(-1).topk(N_CHOSEN)
        return x + self.parts(x, indices, weights)


class OwnModel(nn.Module):
    """A mixture that no rule knows."""

    def __init__(self, experts: type[nn.Module] = OwnExperts) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OwnBlock(experts()) for _ in range(2)])
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.tanh().square().mean()


class ListBlock(nn.Module):
    """A mixture with a list of experts, as models of transformers 4 had them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(N_EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts).square().mean()


OWN = {
    "moe_layer_pattern": r"blocks\.\d+", "expert_pattern": "parts", "expert_w1": "wa", "expert_w2": "wb", "expert_w3": "wc",
    "num_experts_attr": "n_mine", "expert_activation": "gelu",
}  # fmt: skip


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5 + rank, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def own_plain_body(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = OwnModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
    for step in range(3):
        descend_together(optimizer, [model(data(step, rank)) / 4 for rank in range(4)])
    for name, value in model.state_dict().items():
        assert (value - before[name]).abs().max() > 1e-3, name
    return model.state_dict()


def own_body(rank: int, world: int, cases: list[tuple]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage, n_ranks, section in cases:
        given = {"expert_parallel": {"enabled": True, "autoep_size": n_ranks, **section}}
        with engine_of(OwnModel(), settings(stage, n_ranks, lr=STEP_SIZE, **given)) as engine:
            for step in range(3):
                update(engine, engine(data(step, rank)))
            n_rows = sum(len(data(0, rank)) for rank in range(world))
            assert [sum(load.tokens) for load in engine.expert_load().values()] == [N_CHOSEN * n_rows] * 2
            found.append(whole_state(engine))
    return found


def test_a_model_of_ones_own_is_named_by_patterns() -> None:
    (expected,) = on_ranks(1, own_plain_body)
    cases = [(0, 4, OWN), (1, 2, OWN), (3, 2, OWN), (2, 1, OWN)]
    for found in on_ranks(4, own_body, cases)[0]:
        assert_equal_tensors(found, expected, rtol=1e-5, atol=1e-5)


def made(kind: str) -> nn.Module:
    if kind == "own":
        return OwnModel()
    if kind == "list":
        return ListBlock()
    if kind == "dense":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    if kind == "llama":
        from tests.hf.stack import llama

        return llama()
    return make(kind)


# model, the section, parts of the message
WRONG: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("mixtral", {"autoep_size": 3}, ("autoep_size", "3")),
    ("mixtral", {"autoep_size": 8}, ("autoep_size", "8")),
    ("own", {**OWN, "autoep_size": 3}, ("autoep_size", "cannot be divided")),
    ("mixtral", {"preset_model": "mixtrl"}, ("preset_model", "write 'mixtral'")),
    ("qwen3_moe", {"preset_model": "deepseek_v3"}, ("preset_model", "write 'qwen3_moe'")),
    ("dense", {}, ("has no mixture of experts", "enabled")),
    ("llama", {}, ("LlamaForCausalLM has no mixture of experts",)),
    ("list", {}, ("no rule knows the experts of 1 layers", "a list of modules")),
    ("own", {}, ("no rule knows the experts of 2 layers", "blocks.0.parts")),
    ("own", {**OWN, "moe_layer_pattern": "blocks"}, ("blocks.parts", "expert_pattern")),
    ("own", {**OWN, "moe_layer_pattern": "layers.*"}, ("moe_layer_pattern", "layers.*")),
    ("own", {**OWN, "moe_layer_pattern": "blocks.(0"}, ("moe_layer_pattern", "is no regular expression")),
    ("own", {**OWN, "expert_pattern": "experts"}, ("expert_pattern", "blocks.0.experts")),
    ("own", {**OWN, "expert_w2": "wd"}, ("has no parameter wd", "expert_w2")),
    ("own", {**OWN, "expert_activation": "gellu"}, ("expert_activation", "gellu")),
    ("own", {**OWN, "expert_activation": None}, ("expert_activation", "is not known")),
    ("mixtral", {"expert_tensor_parallel_size": 2}, ("expert_tensor_parallel_size", "set it to 1")),
]


def wrong_body(rank: int, world: int) -> list[str]:
    found = []
    for kind, section, _ in WRONG:
        model = made(kind)
        before, names = {name: value.clone() for name, value in model.state_dict().items()}, type(model)
        given = {"expert_parallel": {"enabled": True, "autoep_size": 2, **section}}
        with pytest.raises(DeepSpeedCError) as caught:
            engine_of(model, settings(1, 2, **given))
        assert_equal_tensors(model.state_dict(), before)
        assert type(model) is names and not any("Routed" in type(module).__name__ for module in model.modules())
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_bad_input_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    of_ranks = on_ranks(4, wrong_body)
    assert all(found == of_ranks[0] for found in of_ranks)
    for (kind, section, parts), said in zip(WRONG, of_ranks[0], strict=True):
        for part in parts:
            assert part in said, (kind, section, said)


def again_body(rank: int, world: int) -> str:
    model = make("mixtral")
    engine_of(model, settings(1, 2)).destroy()
    with pytest.raises(DeepSpeedCError) as caught:
        engine_of(model, settings(1, 2))
    return str(caught.value)


def test_a_second_engine_needs_a_new_model() -> None:
    for said in on_ranks(2, again_body):
        assert "have been spread over 2 ranks already" in said and "build the model anew" in said


def pipeline_body(rank: int, world: int) -> str:
    from deepspeed_c.pipe import PipelineModule

    # The first stage has no experts.
    model = PipelineModule([nn.Linear(WIDTH, WIDTH), OwnBlock(OwnExperts())], num_stages=2, loss_fn=torch.sum)
    section = {"enabled": True, **OWN, "moe_layer_pattern": "1"}
    with pytest.raises(DeepSpeedCError) as caught:
        engine_of(model, settings(1, 1, expert_parallel=section))
    return str(caught.value)


def test_a_pipeline_is_refused() -> None:
    for said in on_ranks(2, pipeline_body):
        assert "experts of a pipeline's layers" in said, said
