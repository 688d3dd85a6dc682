"""Experts over ranks at every ZeRO stage against one process of plain torch that has all of them."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import ModelError, RankMismatchError
from deepspeed_c.utils import groups, safe_get_full_fp32_param, safe_get_full_grad
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.deepspeed_c.moe.dense import DenseMoE, Model, batch, fill
from tests.ranks import run_ranks
from tests.training import engine_of, update

STEPS, N_EXPERTS, CLIP = 3, 4, 0.3
CLOSE = {"rtol": 3e-5, "atol": 3e-6}


def config_of(stage: int, gas: int, optimizer: str, extra: dict[str, Any]) -> dict[str, Any]:
    params = {"SGD": {"lr": 0.5}, "AdamW": {"lr": 0.02, "weight_decay": 0.1}}[optimizer]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": CLIP,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **extra.get("zero", {})},
        **{key: value for key, value in extra.items() if key != "zero"},
    }


def whole_params(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """fp32 values by logical name, of this rank's parameters."""
    numbered = ExpertNames(model)
    return {numbered.logical(name): safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}


def engine_run(
    world: int, rank: int, sizes: tuple[int, int], stage: int, k: int, gas: int, optimizer: str, extra: dict
):
    extra = dict(extra)
    with deepspeed_c.zero.Init() if extra.pop("init", False) else nullcontext():
        model = Model(N_EXPERTS, sizes, k)
    engine = engine_of(model, config_of(stage, gas, optimizer, extra))
    with engine:
        fill_engine(engine)
        norms = []
        for step in range(STEPS):
            for micro in range(gas):
                update(engine, engine(*batch(step, micro, rank)))
            norms.append(float(engine.get_global_grad_norm()))
        return norms, whole_params(model)


def fill_engine(engine) -> None:
    """The values of ``fill``, loaded as a state dict of all experts."""
    whole = Model(N_EXPERTS, (1, 1))
    fill(whole)
    engine.load_module_state_dict(whole.state_dict())


def plain_run(world: int, k: int, gas: int, optimizer: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Model(N_EXPERTS, (1, 1), k)
    fill(model)
    params = {"SGD": {"lr": 0.5}, "AdamW": {"lr": 0.02, "weight_decay": 0.1}}[optimizer]
    steps = getattr(torch.optim, optimizer)(model.parameters(), **params)
    norms = []
    for step in range(STEPS):
        for micro, rank in itertools.product(range(gas), range(world)):
            (model(*batch(step, micro, rank)) / (gas * world)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        steps.step()
        steps.zero_grad()
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def runs_body(rank: int, world: int, cells: list[tuple]) -> list:
    return [engine_run(world, rank, *cell) for cell in cells]


CELLS = {
    1: [((1, 1), stage, 2, 1, "SGD", {}) for stage in (0, 3)],
    2: [
        *(((2, 2), stage, 1, 1, "SGD", {}) for stage in range(4)),
        *(((1, 2), stage, 2, 2, "AdamW", {}) for stage in range(4)),
        ((2, 2), 2, 3, 1, "AdamW", {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        ((2, 1), 3, 2, 1, "SGD", {"init": True}),
        ((2, 2), 1, 2, 1, "SGD", {"init": True}),
        ((2, 2), 0, 1, 1, "SGD", {"gradient_predivide_factor": 4.0}),
        ((2, 2), 2, 1, 1, "SGD", {"prescale_gradients": True}),
        (
            (2, 1),
            3,
            2,
            1,
            "AdamW",
            {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        ),
    ],
    4: [
        *(((2, 4), stage, 2, 1, "SGD", {}) for stage in range(4)),
        *(((4, 1), stage, 1, 2, "AdamW", {}) for stage in (1, 3)),
        ((2, 2), 3, 2, 1, "SGD", {"use_data_before_expert_parallelism": True}),
        ((2, 2), 1, 1, 1, "SGD", {"zero": {"mics_shard_size": 2}}),
    ],
}


@pytest.mark.parametrize("world", sorted(CELLS))
def test_training_equals_one_process_with_all_experts(world: int) -> None:
    results = run_ranks(world, runs_body, CELLS[world])
    for i, (sizes, stage, k, gas, optimizer, extra) in enumerate(CELLS[world]):
        want_norms, want = plain_run(world, k, gas, optimizer)
        label = f"world {world} ep {sizes} stage {stage} k {k} gas {gas} {optimizer} {extra}"
        seen: set[str] = set()
        for rank, of_rank in enumerate(results):
            norms, params = of_rank[i]
            assert torch.allclose(torch.tensor(norms), torch.tensor(want_norms), **CLOSE), (label, norms, want_norms)
            seen |= params.keys()
            for name, got in params.items():
                worst = (got - want[name]).abs().max()
                assert torch.allclose(got, want[name], **CLOSE), f"{label} rank {rank}: {name} is off by {worst:g}"
        assert seen == want.keys(), (label, seen ^ want.keys())


def groups_body(rank: int, world: int, data_first: bool) -> dict[str, Any]:
    model = Model(N_EXPERTS, (2, 4))
    config = config_of(1, 1, "SGD", {"use_data_before_expert_parallelism": data_first})
    with engine_of(model, config):
        return {
            name: (
                groups._get_expert_parallel_group_ranks(name),
                groups._get_expert_data_parallel_group_ranks(name),
                groups._get_expert_parallel_rank(name),
                groups._get_expert_data_parallel_rank(name),
                groups._get_expert_parallel_src_rank(name),
                groups._get_expert_broadcast_src_rank(name),
                groups._get_max_expert_size(),
                torch.distributed.get_process_group_ranks(groups._get_expert_parallel_group(name)),
                torch.distributed.get_process_group_ranks(groups._get_expert_data_parallel_group(name)),
            )
            for name in ("ep_size_2", "ep_size_4")
        }


@pytest.mark.parametrize("data_first", [False, True])
def test_groups_of_experts(data_first: bool) -> None:
    pairs, apart = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    experts, same = (apart, pairs) if data_first else (pairs, apart)
    for rank, got in enumerate(run_ranks(4, groups_body, data_first)):
        mine = next(g for g in experts if rank in g)
        data = next(g for g in same if rank in g)
        want = (mine, data, mine.index(rank), data.index(rank), mine[0], data[0], 4, mine, data)
        assert got["ep_size_2"] == want, (rank, got["ep_size_2"], want)
        want = ([0, 1, 2, 3], [rank], rank, 0, 0, rank, 4, [0, 1, 2, 3], [rank])
        assert got["ep_size_4"] == want, (rank, got["ep_size_4"], want)


def refused_body(rank: int, world: int) -> list[str]:
    said = []
    for sizes, kind in (((3, 1), ModelError), ((1, 2 if rank else 1), RankMismatchError)):
        model = Model(12, sizes)
        with pytest.raises(kind) as caught:
            deepspeed_c.initialize(model=model, config=config_of(1, 1, "SGD", {}))
        said.append(str(caught.value))
    model = Model(N_EXPERTS, (1, 1))
    model.first.experts.deepspeed_experts[0][0].weight.group_name = "mine"
    with pytest.raises(ModelError, match="group_name is 'mine'") as caught:
        deepspeed_c.initialize(model=model, config=config_of(1, 1, "SGD", {}))
    said.append(str(caught.value))
    return said


def test_experts_that_fit_no_ranks_are_refused() -> None:
    first, second = run_ranks(2, refused_body)
    print(first)
    assert first == second, (first, second)
    assert "cannot be spread over 3 of the 2 ranks" in first[0] and "ep_size" in first[0], first
    assert "ep_size_1" in first[1] and "ep_size_2" in first[1], first


def gradients_body(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = Model(N_EXPERTS, (2, 2))
    engine = engine_of(model, config_of(2, 1, "SGD", {}))
    with engine:
        fill_engine(engine)
        engine.backward(engine(*batch(0, 0, rank)))
        weight = model.first.experts.deepspeed_experts[1][0].weight
        return safe_get_full_grad(weight), weight.detach().clone()


def test_gradients_of_experts_are_means_over_all_data_parallel_ranks() -> None:
    """DS#5618: not over the ranks that hold the expert alone."""
    model = Model(N_EXPERTS, (1, 1))
    fill(model)
    for rank in range(2):
        (model(*batch(0, 0, rank)) / 2).backward()
    for rank, (got, weight) in enumerate(run_ranks(2, gradients_body)):
        own = model.first.experts.deepspeed_experts[2 * rank + 1][0].weight
        assert torch.equal(weight, own), (rank, weight, own)
        assert torch.allclose(got, own.grad, **CLOSE), (rank, got, own.grad)


def test_a_layer_without_ranks_is_whole() -> None:
    layer = DenseMoE(3, 1)
    out = layer(torch.ones(2, 6))
    assert out.shape == (2, 6), out.shape
