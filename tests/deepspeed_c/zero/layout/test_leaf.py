"""Leaf modules: ways to mark them, and ranks that take different branches in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c import utils
from deepspeed_c.errors import ModelError
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero.layout.leaf import find_expert_blocks, is_leaf, mark_fine_modules
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import OPTIMIZER
from tests.ranks import run_ranks
from tests.toys import Mlp
from tests.training import descend_together

WIDTH, EXPERTS, STEPS = 7, 4, 4


class Mixture(nn.Module):
    """The first element of each row picks its expert, so the data decide which modules run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Mlp(WIDTH, 11) for _ in range(EXPERTS))

    def forward(self, x, chosen):
        h = self.gate(x)
        return x + self.experts[chosen](h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Mixture(), Mixture()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x, chosen):
        return self.out(self.second(self.first(self.inp(x), chosen), (chosen + 1) % EXPERTS)).square().mean()


def batch(step: int, rank: int) -> tuple[torch.Tensor, int]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=g), (step + 2 * rank) % EXPERTS


def mixture_body(rank: int, world: int, bucket: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = Model()
    zero = {"reduce_bucket_size": bucket, "stage3_prefetch_bucket_size": 200}
    config = make_config(3, "fp32", 1, {"zero_optimization": zero, "gradient_clipping": 0})
    with deepspeed_c.initialize(model=model, config=config)[0] as engine:
        assert is_leaf(model.first) and is_leaf(model.second) and not is_leaf(model)
        below = {n for n, p in engine.module.named_parameters() if utils.z3_leaf_parameter(model=p)}
        assert below == {n for n, _ in model.named_parameters() if n.startswith(("first.", "second."))}, below
        for step in range(STEPS):
            engine.backward(engine(*batch(step, rank)))
            engine.step()
        engine.eval()
        with torch.no_grad():
            engine(*batch(99, rank))
        return {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bucket", [60, 300])
def test_ranks_use_different_experts(bucket: int, world: int) -> None:
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        descend_together(optimizer, (model(*batch(step, rank)) / world for rank in range(world)))
    for rank, got in enumerate(run_ranks(world, mixture_body, bucket)):
        for name, p in model.named_parameters():
            worst = (got[name] - p).abs().max().item()
            assert torch.allclose(got[name], p, rtol=2e-5, atol=2e-6), f"rank {rank}, {name}: off by {worst:g}"


def test_marks_by_class_name_suffix_and_single_module() -> None:
    model = Model()
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [Mixture]) == [model.first, model.second]
    assert utils.z3_leaf_module(model.first) and not utils.z3_leaf_module(model)
    assert utils.unset_z3_leaf_modules(model, ["Mixture"]) == [model.first, model.second]
    # A single class or name may be given instead of a list.
    assert utils.set_z3_leaf_modules(model, Mixture) == utils.unset_z3_leaf_modules(model, "Mixture")
    assert utils.set_z3_leaf_modules_by_name(model, "first") == ([model.first], [])
    assert utils.set_z3_leaf_modules_by_suffix(model, "second") == ([model.second], [])
    utils.unset_z3_leaf_modules(model, Mixture)
    assert utils.get_z3_leaf_modules(model) == []
    full = f"{Mlp.__module__}.{Mlp.__qualname__}"
    assert len(utils.set_z3_leaf_modules(model, [full])) == 2 * EXPERTS
    utils.unset_z3_leaf_modules(model, [Mlp])
    found, missing = utils.set_z3_leaf_modules_by_name(model, ["first", "third"])
    assert found == [model.first] and missing == ["third"]
    found, missing = utils.set_z3_leaf_modules_by_suffix(model, ["experts.1", "experts.9"])
    assert found == [model.first.experts[1], model.second.experts[1]] and missing == ["experts.9"]
    utils.set_z3_leaf_module(model.out)
    assert model.out in utils.get_z3_leaf_modules(model)
    utils.set_z3_leaf_module(model.out, False)
    assert model.out not in utils.get_z3_leaf_modules(model)
    for call in (
        lambda: utils.set_z3_leaf_modules(model, ["Nope"]),
        lambda: utils.set_z3_leaf_modules_by_name(model, ["nope"]),
        lambda: utils.set_z3_leaf_modules_by_suffix(model, ["nope"]),
        lambda: utils.set_z3_leaf_modules(model, [int]),
    ):
        with pytest.raises(ModelError):
            call()
    assert utils.set_z3_leaf_modules(model, ["Nope"], raise_if_not_found=False) == []


def test_what_holds_a_list_of_experts_is_found() -> None:
    model = Model()
    assert find_expert_blocks(model) == [model.first, model.second]
    alone = nn.Module()
    alone.experts = nn.ModuleList([Mlp(WIDTH, 11)])
    mixed = nn.Module()
    mixed.experts = nn.ModuleList([Mlp(WIDTH, 11), nn.Linear(2, 2)])
    layers = nn.Module()
    layers.layers = nn.ModuleList([Mlp(WIDTH, 11), Mlp(WIDTH, 11)])
    assert find_expert_blocks(nn.ModuleList([alone, mixed, layers])) == []


def test_fine_modules_are_marked_from_the_top() -> None:
    model = Model()
    per_module = {
        name: sum(p.numel() for p in m.parameters()) // max(sum(1 for _ in m.modules()) - 1, 1)
        for name, m in model.named_children()
    }
    found = mark_fine_modules(model, per_module["first"])
    assert found == [model.second, model.first] or found == [model.first, model.second]
    assert mark_fine_modules(Model(), 0) == []


def config_body(rank: int, world: int) -> list[bool]:
    model = Model()
    zero = {"leaf_module": {"names": ["first"], "name_suffixes": ["experts.0"], "classes": ["Nope"]}}
    with deepspeed_c.initialize(model=model, config=make_config(3, "fp32", 1, {"zero_optimization": zero}))[0]:
        return [is_leaf(m) for m in (model.first, model.second.experts[0], model.inp)]


def test_the_configuration_names_leaves() -> None:
    assert run_ranks(2, config_body) == [[True, True, False]] * 2
