"""The parity oracle: stages, precisions, accumulation, world sizes and model traits against one plain-torch fp32 process.

Tolerances. fp32: sums over ranks and micro-batches are taken in another order, so a few ulp a step: 2e-5 relative plus 2e-6.
bf16 and fp16 compute in 8 and 11 bits of mantissa: losses and norms to 4 % and 1 %; weights, after four steps of size 0.02 each, to
0.004 and 0.001 on average and to ten times that where they differ most. A contribution lost or counted twice moves the norm by a third and more.
"""

from __future__ import annotations

import copy
import itertools

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

STAGES = (0, 1, 2, 3)
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
    trait: str, dtype: str, world: int, cells: list[tuple[int, int]], extra: dict | None = None, make_optimizer=None
) -> None:
    """Runs ``cells``, each a stage and a number of micro-batches, and compares every rank with the oracle."""
    oracles = {gas: plain_run(TRAITS[trait], world, gas, make_optimizer) for gas in {gas for _, gas in cells}}
    results = run_ranks(world, engine_runs, trait, dtype, cells, extra or {}, timeout=120)
    parts = TRAITS[trait].n_backwards
    for rank, runs in enumerate(results):
        for (stage, gas), got in zip(cells, runs, strict=True):
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


# Each trait with each arrangement on three ranks, where nothing divides evenly; on two, with one micro-batch, every other pair.
FINE_CELLS = [
    (trait, fine, world, 3 if world == 3 else 1)
    for t, trait in enumerate(TRAITS)
    for f, fine in enumerate(FINE)
    for world in (2, 3)
    if world == 3 or (t + f) % 2 == 0
]


@pytest.mark.parametrize("trait, fine, world, gas", FINE_CELLS)
def test_parity_of_fine_units(trait: str, fine: str, world: int, gas: int) -> None:
    """Stage 3 with several gather units. The trait whose ranks take different branches is a leaf: that is what leaves are for."""
    zero = dict(FINE[fine])
    if trait == "unused":
        zero["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
    check_cells(trait, "fp32", world, [(3, gas)], {"zero_optimization": zero})


WORLDS = (1, 2, 3)


def half_of_the_cells(trait: str, dtype: str, world: int) -> list[tuple[int, int]]:
    """Every stage with one micro-batch or with three, in turn along each of the axes trait, precision, world and stage.

    So any four of the five axes (with the number of micro-batches) still meet in all their values: what is left out needs all five to go wrong.
    """
    turn = list(TRAITS).index(trait) + list(DTYPES).index(dtype) + WORLDS.index(world)
    return [(stage, (1, 3)[(turn + stage) % 2]) for stage in STAGES]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("trait", list(TRAITS))
def test_parity(trait: str, dtype: str, world: int) -> None:
    check_cells(trait, dtype, world, half_of_the_cells(trait, dtype, world))


def test_the_half_that_is_run_holds_any_four_axes_in_full() -> None:
    run = {
        (trait, dtype, world, *cell)
        for trait, dtype, world in itertools.product(TRAITS, DTYPES, WORLDS)
        for cell in half_of_the_cells(trait, dtype, world)
    }
    every = list(itertools.product(TRAITS, DTYPES, WORLDS, STAGES, (1, 3)))
    assert 2 * len(run) == len(every)
    for axis in range(5):
        missing = {(*cell[:axis], *cell[axis + 1 :]) for cell in every} - {(*c[:axis], *c[axis + 1 :]) for c in run}
        assert not missing, f"without axis {axis}: {sorted(missing, key=str)[:3]}"
