"""One engine has units over different groups: they are sharded along one axis of a mesh and copied along the other. The
engine is compared with plain torch in one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import deepspeed_c
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.engine import shard
from deepspeed_c.errors import ConfigError
from deepspeed_c.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from deepspeed_c.zero.layout.layout import lay_out
from tests.cells import cells
from tests.deepspeed_c.zero.test_oracle import by_rank, check, make_config
from tests.deepspeed_c.zero.traits import STEPS, TRAITS, Run, batch, make_groups, make_model, plain_run
from tests.ranks import on_ranks, run_ranks
from tests.training import engine_of, update

WORLD = 4
# The axes over which parameters are sharded, in turn. Along the other axes they are copied.
MIXED = (("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard"), ())
TRAITS_HERE = ("plain", "tied", "two_backwards", "checkpoint_reentrant", "frozen", "zero_size", "unused", "groups")
TRAITS_HERE += ("sparse_embedding", "tiny_buckets", "no_overlap", "all_reduce", "prescale", "predivide")


def mixed_units():
    """Within this context engines shard their parameters over the axes of ``MIXED`` in turn. The turn follows the order
    of parameters in the model, which is the same on all ranks."""

    def shard_axes(names: dict[int, int], param: torch.nn.Parameter) -> tuple[str, ...]:
        return MIXED[names[id(param)] % len(MIXED)]

    def mixed(model, *args, **settings):
        turns = {id(p): i for i, (_, p) in enumerate(model.named_parameters())}
        return lay_out(model, *args, **settings, shard_axes=partial(shard_axes, turns))

    return mock.patch.object(shard, "lay_out", mixed)


def make_engine(model: torch.nn.Module, groups, config: dict, kind: str):
    """``kind`` says how the engine gets its mesh of 2 x 2, and over which axes parameters are sharded."""
    if kind == "mics":
        config["zero_optimization"]["mics_shard_size"] = 2
        mesh = None
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with mixed_units() if kind == "mixed" else nullcontext():
        return deepspeed_c.initialize(model=model, model_parameters=groups, config=config, mesh_device=mesh)[0]


def params_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = safe_get_full_fp32_param(p)
        if found[name] is None:
            with deepspeed_c.zero.GatheredParameters(p):
                found[name] = p.detach().float().clone()
    return found


def train(
    engine, rank: int, gas: int, parts: int, steps: int = STEPS, first: int = 0
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(gas):
            for part in range(parts):
                x, y = batch(step, micro, rank, part)
                loss = engine(x.to(next(engine.module.parameters()).dtype), y)
                losses.append(loss.item())
                engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def groups_in(engine) -> set[tuple[int, ...]]:
    """The groups of ranks over which trained units of the engine are sharded."""
    return {tuple(unit.comm.global_ranks) for unit in engine._layout.trained}


def parity_body(rank: int, world: int, kind: str, cells: list[tuple[str, int, int]]) -> list[Run]:
    runs = []
    for trait_name, stage, gas in cells:
        trait = TRAITS[trait_name]
        model = make_model(trait)
        config = make_config(stage, "fp32", gas, {**trait.config})
        if trait_name == "unused":  # ranks take different branches, with several gather units
            config["zero_optimization"]["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
        with make_engine(model, make_groups(model, trait.groups), config, kind) as engine:
            if stage == 0:
                assert groups_in(engine) == {(rank,)}
            elif kind == "mixed":
                assert len(groups_in(engine)) > 1, groups_in(engine)
            else:
                assert groups_in(engine) == {(0, 1) if rank < 2 else (2, 3)}
            losses, norms = train(engine, rank, gas, trait.n_backwards)
            runs.append(Run(losses, norms, params_of(model), []))
    return runs


@pytest.mark.parametrize("kind", ["mics", "device_mesh", "mixed"])
def test_parity(kind: str) -> None:
    """Each trait runs at two of the stages. Each stage runs with one micro-batch and with three."""
    cells = [
        (trait, stage, (1, 3)[(t + stage) % 2])
        for t, trait in enumerate(TRAITS_HERE[:: 3 if kind == "device_mesh" else 1])
        for stage in ((1, 2, 3) if kind == "mixed" else (0 if t % 4 == 0 else 1 + t % 3, 3 - t % 2))
    ]
    results = run_ranks(WORLD, parity_body, kind, cells)
    oracles = {}
    for i, (trait_name, stage, gas) in enumerate(cells):
        trait = TRAITS[trait_name]
        want = oracles.setdefault((trait_name, gas), plain_run(trait, WORLD, gas))
        for rank, runs in enumerate(results):
            label = f"{kind} {trait_name} stage {stage} accumulation {gas} rank {rank}"
            check(label, runs[i], want, by_rank(want.losses, WORLD, gas, trait.n_backwards, rank))


def optimizers_body(rank: int, world: int, kind: str, optimizer: dict, dtype: str, stage: int) -> list:
    found = []
    for of in (kind, None):
        model = make_model(TRAITS["tied"])
        config = make_config(stage, dtype, 2, {"optimizer": optimizer})
        made = engine_of(model, config) if of is None else make_engine(model, model.parameters(), config, of)
        with made as engine:
            losses, norms = train(engine, rank, 2, 1)
            found.append((losses, norms, params_of(model)))
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), cells(("Lamb", "Muon", "Lion", "AdamW"), ("fp32", "bf16", "fp16"), at_once=1)
)
def test_other_optimizers_and_precisions_as_without_a_mesh(name: str, dtype: str) -> None:
    """LAMB needs norms and Muon needs matrices of whole parameters, wherever their pieces lie. In 16 bits sums are
    rounded in other places than without a mesh."""
    optimizer = {"type": name, "params": {"lr": 0.01, "weight_decay": 0.1}}
    if name in ("Lamb", "AdamW"):  # a tiny gradient divided by its own size would magnify its rounding error
        optimizer["params"]["eps"] = 1e-3
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == "fp32" else {"rtol": 0.02, "atol": 0.02}
    for stage in (2, 3):
        for rank, (got, want) in enumerate(run_ranks(WORLD, optimizers_body, "mixed", optimizer, dtype, stage)):
            for what, a, b in (("losses", got[0], want[0]), ("norms", got[1], want[1])):
                assert torch.allclose(torch.tensor(a), torch.tensor(b), **tolerance), (stage, rank, what, a, b)
            for key, value in want[2].items():
                assert torch.allclose(got[2][key], value, **tolerance), (stage, rank, key, got[2][key], value)


def checkpoint_body(rank: int, world: int, folder: str, kinds: list[str | None], stage: int) -> list:
    """Trains two steps in the first arrangement, saves, and trains two more steps in each of the other arrangements."""

    def make(kind: str | None):
        model = make_model(TRAITS["groups"])
        config = make_config(stage, "bf16", 1, {})
        groups = make_groups(model, 2)
        if kind is None:
            return deepspeed_c.initialize(model=model, model_parameters=groups, config=config)[0]
        return make_engine(model, groups, config, kind)

    with make(kinds[0]) as engine:
        train(engine, rank, 1, 1, 2)
        engine.save_checkpoint(folder, tag="t")
        want = params_of(engine.module), states_of(engine)
    found = []
    for kind in kinds[1:]:
        with make(kind) as engine:
            engine.load_checkpoint(folder, tag="t")
            found.append((params_of(engine.module), states_of(engine)))
            train(engine, rank, 1, 1, 1, first=2)
    return [want, *found]


def states_of(engine) -> dict[str, torch.Tensor]:
    return {n: safe_get_full_optimizer_state(p, "exp_avg_sq") for n, p in engine.module.named_parameters()}


@pytest.mark.parametrize(
    ("kinds", "stage"),
    cells((["mixed", "mixed", None, "mics"], [None, "mixed", "mics"], ["mics", None, "mixed"]), (1, 3), at_once=1),
)
def test_checkpoints_of_one_mesh_are_loaded_on_another(tmp_path, kinds: list[str | None], stage: int) -> None:
    for rank, (want, *found) in enumerate(run_ranks(WORLD, checkpoint_body, str(tmp_path), kinds, stage)):
        for kind, got in zip(kinds[1:], found, strict=True):
            for mine, theirs in zip(got, want, strict=True):
                for name, value in theirs.items():
                    assert torch.equal(mine[name], value), (rank, kinds[0], kind, name, mine[name], value)
    with open_checkpoint(str(tmp_path), "t") as source:
        axes = {"dp_shard": 4} if kinds[0] is None else {"dp_replicate": 2, "dp_shard": 2}
        assert source.topology.axes == axes


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(WORLD)
def test_reading_editing_and_freezing(rank: int, world: int, stage: int) -> None:
    model = make_model(TRAITS["plain"])
    engine = make_engine(model, model.parameters(), make_config(stage, "bf16", 1, {}), "mixed")
    with engine:
        x, y = batch(0, 0, rank, 0)
        engine.backward(engine(x.bfloat16(), y))
        for name, p in model.named_parameters():
            grad = safe_get_full_grad(p)
            everyone = engine._comm.all_gather_list(grad.reshape(-1))
            assert all(torch.equal(other, everyone[0]) for other in everyone), (name, everyone)
        engine.step()
        for name, p in model.named_parameters():
            value = torch.full(tuple(p.ds_shape) if stage == 3 else p.shape, 0.5)
            safe_set_full_fp32_param(p, value)
            assert torch.equal(safe_get_full_fp32_param(p), value), name
            with deepspeed_c.zero.GatheredParameters(p):
                assert torch.equal(p.detach().float(), value), (name, p)
            # Some ranks share no group with rank 3.
            with deepspeed_c.zero.GatheredParameters(p, modifier_rank=3), torch.no_grad():
                p.fill_(float(rank))
            if stage == 3:
                assert torch.equal(safe_get_full_fp32_param(p), torch.full_like(value, 3.0)), name
        first = next(n for n, _ in model.named_parameters())
        engine.set_trainable([first])
        train(engine, rank, 1, 1, 1)
        engine.set_trainable(["*"])
        train(engine, rank, 1, 1, 1)
        finals = params_of(model)
    for name, value in finals.items():
        everyone = deepspeed_c.comm.get_world_size()
        assert everyone == world and torch.isfinite(value).all(), name
    if stage == 3:  # weights that outlive the engine are gathered over their own group
        for p in model.parameters():
            with deepspeed_c.zero.GatheredParameters(p):
                assert torch.isfinite(p).all()


def nonfinite_body(rank: int, world: int) -> tuple[bool, dict[str, bool]]:
    model = make_model(TRAITS["plain"])
    with make_engine(model, model.parameters(), make_config(2, "fp16", 1, {}), "mixed") as engine:
        before = params_of(model)
        x, y = batch(0, 0, rank, 0)
        loss = engine(x.half(), y)
        update(engine, loss * (float("inf") if rank == 2 else 1.0) if rank != 2 else loss * 1e30)
        return engine.was_step_applied(), {n: torch.equal(v, before[n]) for n, v in params_of(model).items()}


def test_one_ranks_overflow_skips_the_step_of_all() -> None:
    for applied, unchanged in run_ranks(WORLD, nonfinite_body):
        assert not applied and all(unchanged.values()), unchanged


@on_ranks(3)
def test_a_size_that_does_not_divide_the_ranks(rank: int, world: int) -> None:
    for size in (2, 4, 5):
        config = make_config(3, "fp32", 1, {"zero_optimization": {"mics_shard_size": size}})
        with pytest.raises(ConfigError, match=r"(?s)mics_shard_size.*divisor of 3"):
            deepspeed_c.initialize(model=make_model(TRAITS["plain"]), config=config)
