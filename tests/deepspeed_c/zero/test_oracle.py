"""The parity oracle: every stage, precision, accumulation, world size and model trait against one plain-torch fp32 process.

Tolerances. fp32: sums over ranks and micro-batches are taken in another order, so a few ulp a step: 2e-5 relative plus 2e-6.
bf16 and fp16 compute in 8 and 11 bits of mantissa: losses and norms to 4 % and 1 %; weights, after four steps of size 0.02 each, to
0.004 and 0.001 on average and to ten times that where they differ most. A contribution lost or counted twice moves the norm by a third and more.
"""

from __future__ import annotations

import copy

import pytest
import torch

import deepspeed_c
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.deepspeed_c.zero.traits import (
    CLIP,
    OPTIMIZER,
    STEPS,
    TRAITS,
    Run,
    batch,
    make_groups,
    make_model,
    plain_run,
)
from tests.ranks import run_ranks

DTYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
LOSS = {
    "fp32": {"rtol": 2e-5, "atol": 2e-6},
    "bf16_masters": {"rtol": 4e-2, "atol": 4e-3},
    "bf16": {"rtol": 4e-2, "atol": 4e-3},
    "fp16": {"rtol": 1e-2, "atol": 1e-3},
}
# How far weights may be off on average. bf16 masters are themselves rounded to 8 bits in every step.
MEAN = {"fp32": 2e-5, "bf16": 4e-3, "fp16": 1e-3, "bf16_masters": 1e-2}
PARAM = {
    "fp32": {"rtol": 2e-5, "atol": 2e-6},
    "bf16_masters": {"rtol": 0, "atol": 4e-2},
    "bf16": {"rtol": 0, "atol": 4e-2},
    "fp16": {"rtol": 0, "atol": 1e-2},
}


def make_config(stage: int, dtype: str, gas: int, extra: dict) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": CLIP,
        # The models are small: without the threshold all of their parameters would stay whole at stage 3.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **copy.deepcopy(DTYPES[dtype]),
    }
    for key, value in copy.deepcopy(extra).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    if "optimizer" not in config:
        config["optimizer"] = {"type": "AdamW", "params": OPTIMIZER}
    return config


def engine_run(rank: int, world: int, trait_name: str, stage: int, dtype: str, gas: int, extra: dict) -> Run:
    trait = TRAITS[trait_name]
    model = make_model(trait)
    config = make_config(stage, dtype, gas, {**trait.config, **extra})
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=make_groups(model, trait.groups), config=config)
    to = next(model.parameters()).dtype
    losses, norms = [], []
    with engine:
        for step in range(STEPS):
            for micro in range(gas):
                for part in range(trait.n_backwards):
                    x, y = batch(step, micro, rank, part)
                    loss = engine(x.to(to), y)
                    losses.append(loss.item())
                    if trait.user_backward:
                        loss.backward()
                    else:
                        engine.backward(loss)
                engine.step()
            norms.append(engine.get_global_grad_norm())
            assert engine.was_step_applied()
        params = {}
        for name, p in model.named_parameters():
            params[name] = safe_get_full_fp32_param(p)
            if params[name] is None:
                with deepspeed_c.zero.GatheredParameters(p):
                    params[name] = p.detach().float().clone()
    return Run(losses, norms, {n: p.detach().clone() for n, p in params.items()})


def engine_runs(
    rank: int, world: int, trait_name: str, dtype: str, cells: list[tuple[int, int]], extra: dict
) -> list[Run]:
    return [engine_run(rank, world, trait_name, stage, dtype, gas, extra) for stage, gas in cells]


def by_rank(losses: list[float], world: int, gas: int, parts: int, rank: int) -> list[float]:
    return torch.tensor(losses).view(STEPS, gas, world, parts)[:, :, rank].reshape(-1).tolist()


def check(label: str, got: Run, want: Run, want_losses: list[float], dtype: str) -> None:
    for what, a, b in (("losses", got.losses, want_losses), ("gradient norms", got.norms, want.norms)):
        a, b = torch.tensor(a), torch.tensor(b)
        assert torch.allclose(a, b, **LOSS[dtype]), f"{label}: {what}\n  got  {a.tolist()}\n  want {b.tolist()}"
    assert got.params.keys() == want.params.keys()
    for name, b in want.params.items():
        a = got.params[name]
        assert a.shape == b.shape, f"{label}: {name} has shape {tuple(a.shape)}, want {tuple(b.shape)}"
        worst = (a - b).abs().max().item() if b.numel() else 0.0
        assert torch.allclose(a, b, **PARAM[dtype]), f"{label}: {name} is off by {worst:g}\n  got  {a}\n  want {b}"
        mean = (a - b).abs().mean().item() if b.numel() else 0.0
        assert mean <= MEAN[dtype], f"{label}: {name} is off by {mean:g} on average\n  got  {a}\n  want {b}"


def check_cells(
    trait: str,
    dtype: str,
    world: int,
    extra: dict | None = None,
    make_optimizer=None,
    gases=(1, 3),
    stages=(0, 1, 2, 3),
) -> None:
    cells = [(stage, gas) for stage in stages for gas in gases]
    oracles = {gas: plain_run(TRAITS[trait], world, gas, make_optimizer) for gas in gases}
    results = run_ranks(world, engine_runs, trait, dtype, cells, extra or {}, timeout=120)
    parts = TRAITS[trait].n_backwards
    for rank, runs in enumerate(results):
        for (stage, gas), got in zip(cells, runs):
            want = oracles[gas]
            label = f"{trait} stage {stage} {dtype} accumulation {gas} world {world} rank {rank}"
            check(label, got, want, by_rank(want.losses, world, gas, parts, rank), dtype)


# Each layer in a gather unit of its own or cut across several, gathered ahead or not, kept for reuse or not.
FINE = {
    "units": {"reduce_bucket_size": 60},
    "eager": {"reduce_bucket_size": 60, "stage3_prefetch_bucket_size": 10_000},
    "frugal": {
        "reduce_bucket_size": 150,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    },
    "half_whole": {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 30},
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("fine", list(FINE))
@pytest.mark.parametrize("trait", list(TRAITS))
def test_parity_of_fine_units(trait: str, fine: str, world: int) -> None:
    """Stage 3 with several gather units. The trait whose ranks take different branches is a leaf: that is what leaves are for."""
    zero = dict(FINE[fine])
    if trait == "unused":
        zero["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
    gases = (3,) if fine != "units" else (1, 3)
    check_cells(trait, "fp32", world, {"zero_optimization": zero}, stages=(3,), gases=gases)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("trait", list(TRAITS))
def test_parity(trait: str, dtype: str, world: int) -> None:
    check_cells(trait, dtype, world)
