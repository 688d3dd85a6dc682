"""The parity oracle: stages, precisions, accumulation, world sizes and model traits against one process of plain torch.

fp32 is compared with torch.optim.AdamW. It sums over ranks and micro-batches in another order, so a step may differ by
a few ulp; the tolerance is 2e-5 relative plus 2e-6. bf16 and fp16 are compared with a reference that rounds where the
engine does (``reference.py``). Losses and masters are equal bit for bit. Norms are equal to a few ulp of fp64, because
their squares are added in another order. Wrong optimizers (``PLANTED``) test the comparison itself.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

import deepspeed_c
from deepspeed_c.offload import place
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero.layout.unit import Slot
from tests.deepspeed_c.zero.gradients.hooks import Hook, wrapped
from tests.deepspeed_c.zero.reference import flow_of, recorded
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
    rounded_run,
)
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)
DTYPES = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}  # fmt: skip
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
NORM = {"rtol": 1e-12, "atol": 0.0}


def make_config(stage: int, dtype: str, gas: int, extra: dict) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas, "gradient_clipping": CLIP,
        # The models are small. With the default threshold all of their parameters would stay whole at stage 3.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **copy.deepcopy(DTYPES[dtype]),
    }  # fmt: skip
    for key, value in copy.deepcopy(extra).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    if "optimizer" not in config:
        config["optimizer"] = {"type": "AdamW", "params": OPTIMIZER}
    return config


def engine_run(
    rank: int, world: int, trait_name: str, stage: int, dtype: str, gas: int, extra: dict, planted: str = ""
) -> Run:
    """``extra``: keys of the configuration; with deepcompile among them the engine is compiled."""
    trait = TRAITS[trait_name]
    model = make_model(trait)
    config = make_config(stage, dtype, gas, {**trait.config, **extra})
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=make_groups(model, trait.groups), config=config)
    if engine.is_deepcompile_enabled():
        engine.compile(backend="eager")
    to = next(model.parameters()).dtype
    losses, norms = [], []
    with (
        engine,
        (PLANTED | PLANTED_IN_GRAPHS)[planted](engine) if planted else nullcontext(),
        recorded(engine) as order,
    ):
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
    return Run(losses, norms, {n: p.detach().clone() for n, p in params.items()}, order)


def engine_runs(
    rank: int, world: int, trait_name: str, dtype: str, cells: list[tuple[int, int]], extra: dict
) -> list[Run]:
    return [engine_run(rank, world, trait_name, stage, dtype, gas, extra) for stage, gas in cells]


def by_rank(losses: list[float], world: int, gas: int, parts: int, rank: int) -> list[float]:
    return torch.tensor(losses).view(STEPS, gas, world, parts)[:, :, rank].reshape(-1).tolist()


def check(label: str, got: Run, want: Run, want_losses: list[float]) -> None:
    """Compares an engine in fp32 with plain torch."""
    for what, a, b in (("losses", got.losses, want_losses), ("gradient norms", got.norms, want.norms)):
        a, b = torch.tensor(a), torch.tensor(b)
        assert torch.allclose(a, b, **CLOSE), f"{label}: {what}\n  got  {a.tolist()}\n  want {b.tolist()}"
    assert got.params.keys() == want.params.keys()
    for name, b in want.params.items():
        a = got.params[name]
        assert a.shape == b.shape, f"{label}: {name} has shape {tuple(a.shape)}, want {tuple(b.shape)}"
        worst = (a - b).abs().max().item() if b.numel() else 0.0
        assert torch.allclose(a, b, **CLOSE), f"{label}: {name} is off by {worst:g}\n  got  {a}\n  want {b}"


def is_same(got: Run, want: Run, want_losses: list[float]) -> bool:
    norms = torch.tensor(got.norms, dtype=torch.float64), torch.tensor(want.norms, dtype=torch.float64)
    return (
        got.losses == want_losses
        and torch.allclose(*norms, **NORM)
        and got.params.keys() == want.params.keys()
        and all(torch.equal(got.params[name], b) for name, b in want.params.items())
    )


def check_rounded(label: str, gots: Sequence[Run], gas: int, parts: int, want: Run) -> None:
    """Compares an engine in 16 bits, on each of its ranks, with the reference."""
    for rank, got in enumerate(gots):
        losses = by_rank(want.losses, len(gots), gas, parts, rank)
        if is_same(got, want, losses):
            continue
        off = {n: (got.params[n] - b).abs().max().item() for n, b in want.params.items() if b.numel()}
        worst = max(off, key=off.__getitem__)
        raise AssertionError(
            f"{label} rank {rank} has other bits than the reference; most off is {worst}, by {off[worst]:g}"
            f"\nlosses\n  got  {got.losses}\n  want {losses}\nnorms\n  got  {got.norms}\n  want {want.norms}"
        )


def check_cells(
    trait: str, dtype: str, world: int, cells: list[tuple[int, int]], extra: dict | None = None, make_optimizer=None
) -> None:
    """Runs ``cells``, each a stage and a number of micro-batches, and compares every rank with the oracle."""
    results = run_ranks(world, engine_runs, trait, dtype, cells, extra or {})
    check_runs(trait, dtype, cells, extra or {}, results, make_optimizer)


def check_runs(
    trait_name: str,
    dtype: str,
    cells: Sequence[tuple[int, int]],
    extra: dict,
    results: Sequence[Sequence[Run]],
    make_optimizer: Callable | None = None,
) -> None:
    """``results``: by rank, by cell."""
    trait, world = TRAITS[trait_name], len(results)
    parts = trait.n_backwards
    if dtype == "fp32" and not {"bf16", "torch_autocast"} & extra.keys():
        oracles = {gas: plain_run(trait, world, gas, make_optimizer) for gas in {gas for _, gas in cells}}
        for rank, runs in enumerate(results):
            for (stage, gas), got in zip(cells, runs, strict=True):
                want = oracles[gas]
                label = f"{trait_name} stage {stage} {dtype} accumulation {gas} world {world} rank {rank}"
                check(label, got, want, by_rank(want.losses, world, gas, parts, rank))
        return
    for i, (stage, gas) in enumerate(cells):
        gots = [runs[i] for runs in results]
        config = make_config(stage, dtype, gas, {**trait.config, **extra})
        flow = flow_of(config, world, make_model(trait))._replace(by_caller=trait.user_backward)
        label = f"{trait_name} stage {stage} {dtype} accumulation {gas} world {world}"
        check_rounded(label, gots, gas, parts, rounded_run(trait, world, flow, [got.order for got in gots]))


# A layer is a gather unit or cut across several; units are gathered ahead or not, and kept for reuse or not.
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


# Three ranks, which divide nothing evenly, run each pair of a trait and an arrangement. Two ranks run every other pair,
# with one micro-batch.
FINE_CELLS = [
    (trait, fine, world, 3 if world == 3 else 1)
    for t, trait in enumerate(TRAITS)
    for f, fine in enumerate(FINE)
    for world in (2, 3)
    if world == 3 or (t + f) % 2 == 0
]


@pytest.mark.parametrize("trait, fine, world, gas", FINE_CELLS)
def test_parity_of_fine_units(trait: str, fine: str, world: int, gas: int) -> None:
    """Stage 3 with several gather units. The trait whose ranks take different branches is marked as a leaf module."""
    zero = dict(FINE[fine])
    if trait == "unused":
        zero["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
    check_cells(trait, "fp32", world, [(3, gas)], {"zero_optimization": zero})


WORLDS = (1, 2, 3)


def half_of_the_cells(trait: str, dtype: str, world: int) -> list[tuple[int, int]]:
    """Every stage, with one micro-batch or with three. The number alternates along each of trait, precision, world and
    stage.

    So all combinations of any four of the five parameters occur; the fifth is the number of micro-batches. A bug is
    missed only if it needs one combination of all five.
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


# ---- compiled engines ------------------------------------------------------------------------------------------------

DEEP = {"compile": {"deepcompile": True}}
# These traits change the graphs, or which gradients come when.
COMPILED = ("used_twice", "two_backwards", "checkpoint_reentrant", "zero_size", "unused")


def compiled_runs(rank: int, world: int, trait: str, cells: list[tuple[int, int]]) -> list[Run]:
    torch._dynamo.reset()
    return engine_runs(rank, world, trait, "fp32", cells, DEEP)


@pytest.mark.parametrize("trait", COMPILED)
def test_parity_of_compiled_engines(trait: str) -> None:
    cells = [(stage, 3) for stage in (1, 2, 3)]
    results = run_ranks(2, compiled_runs, trait, cells, preload="torch._dynamo")
    check_runs(trait, "fp32", cells, DEEP, results)


def compiled_planted_runs(rank: int, world: int) -> dict[str, Run]:
    runs = {}
    stage, gas = PLANTED_CELL
    for planted in ("", *PLANTED_IN_GRAPHS):
        torch._dynamo.reset()
        runs[planted] = engine_run(rank, world, "plain", stage, "fp32", gas, DEEP, planted)
    return runs


def test_a_wrong_compiled_engine_is_caught() -> None:
    """The comparison must fail for each compiled engine with one planted bug."""
    results = run_ranks(2, compiled_planted_runs, preload="torch._dynamo")
    passed = []
    for planted in ("", *PLANTED_IN_GRAPHS):
        try:
            check_runs("plain", "fp32", [PLANTED_CELL], DEEP, [[of_rank[planted]] for of_rank in results])
        except AssertionError:
            assert planted, "a compiled engine that is right does not pass"
        else:
            passed.append(planted)
    assert passed == [""], f"these pass: {passed[1:]}"


# ---- the comparison notices wrong optimizers -------------------------------------------------------------------------


def hyper(**options) -> Callable:
    """Plants other options in all groups."""

    @contextmanager
    def plant(engine) -> Iterator[None]:
        for group in engine.optimizer.param_groups:
            group.update(options)
        yield

    return plant


@contextmanager
def no_clipping(engine) -> Iterator[None]:
    engine._optimizer.clip = 0.0
    yield


@contextmanager
def l2_instead_of_decoupled(engine) -> Iterator[None]:
    engine._optimizer.optimizer.adam_w_mode = False
    yield


@contextmanager
def averaged_wrongly(engine) -> Iterator[None]:
    """Scales gradients by 3/4, as if there were one rank or micro-batch more than three. Clipping hides most of it."""
    sums = engine._optimizer.reducer.sums
    sums.summing = sums.summing._replace(step_factor=0.75 * sums.summing.step_factor)
    yield


def without_gradient_of(name: str, is_lost: Callable[[int], bool]) -> Callable:
    @contextmanager
    def plant(engine) -> Iterator[None]:
        numbers = itertools.count()

        def losing(slot: Slot, hook: Hook) -> Hook:
            def lossy(param: torch.Tensor) -> None:
                if is_lost(next(numbers)):
                    param.grad = torch.zeros_like(param.grad)
                hook(param)

            return lossy if slot.name == name else hook

        with wrapped(losing, engine):
            yield

    return plant


PLANTED = {
    "no weight decay": hyper(weight_decay=0.0),
    "twice the weight decay": hyper(weight_decay=2 * OPTIMIZER["weight_decay"]),
    "L2 instead of decoupled decay": l2_instead_of_decoupled,
    "learning rate 1 % lower": hyper(lr=0.99 * OPTIMIZER["lr"]),
    "learning rate 20 % higher": hyper(lr=1.2 * OPTIMIZER["lr"]),
    "beta1": hyper(betas=(0.9, 0.95)),
    "beta2": hyper(betas=(0.8, 0.999)),
    "no momentum": hyper(betas=(0.0, 0.95)),
    "eps": hyper(eps=1e-8),
    "no bias correction": hyper(bias_correction=False),
    "no clipping": no_clipping,
    "averaged wrongly": averaged_wrongly,
    "one parameter without gradient": without_gradient_of("out.bias", lambda n: True),
    "one gradient lost": without_gradient_of("out.bias", lambda n: n == 4),
    "moments of 16 bits": nullcontext,  # the configuration plants it
}


@contextmanager
def graphs_that_lose_a_gradient(engine) -> Iterator[None]:
    numbers, reduce = itertools.count(), engine._compiled.reduce

    def losing(gradient: torch.Tensor, slot: int) -> None:
        reduce(torch.zeros_like(gradient) if next(numbers) == 4 else gradient, slot)

    with mock.patch.object(engine._compiled, "reduce", losing):
        yield


@contextmanager
def graphs_that_turn_gradients(engine) -> Iterator[None]:
    """Each gradient is reduced with the opposite sign on rank 0."""
    reduce, sign = engine._compiled.reduce, -1.0 if engine.global_rank == 0 else 1.0
    with mock.patch.object(engine._compiled, "reduce", lambda gradient, slot: reduce(gradient * sign, slot)):
        yield


PLANTED_IN_GRAPHS = {
    **{name: PLANTED[name] for name in ("averaged wrongly", "learning rate 1 % lower")},
    "one gradient lost in a graph": graphs_that_lose_a_gradient,
    "signs turned in graphs": graphs_that_turn_gradients,
}

# The kinds of run in which bugs are planted, by precision and home of the states -> (dtype, configuration, whether
# tests pretend that the device has a memory of its own).
NVME = {"offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True}}
KINDS = {
    "fp32": ("fp32", {}, False),
    "fp16": ("fp16", {}, False),
    "bf16": ("bf16", {}, False),
    "bf16_masters": ("bf16", {"bf16": {"bf16_master_weights_and_grads": True}}, False),
    "autocast_bf16": ("fp32", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, False),
    "nvme": ("bf16", {"zero_optimization": NVME}, False),
    "host": ("bf16", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, True),
    "ahead": ("bf16", {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, True),
    "params": ("fp32", {"zero_optimization": {"offload_param": {"device": "nvme", "max_in_cpu": 0}}}, False),
}
PLANTED_CELL = (3, 2)


def config_of(kind: str, planted: str, folder: str = "") -> dict:
    extra = copy.deepcopy(KINDS[kind][1])
    for name, section in extra.get("zero_optimization", {}).items():
        section.update({"nvme_path": folder} if name.startswith("offload") else {})
    if planted == "moments of 16 bits":
        extra["optimizer"] = {"type": "AdamW", "params": {**OPTIMIZER, "state_dtype": "bf16"}}
    return extra


def planted_runs(rank: int, world: int, kind: str, folder: str) -> dict[str, Run]:
    dtype, _, is_apart = KINDS[kind]
    stage, gas = PLANTED_CELL
    with mock.patch.object(place, "is_apart", lambda device: is_apart):
        return {
            planted: engine_run(rank, world, "plain", stage, dtype, gas, config_of(kind, planted, folder), planted)
            for planted in ("", *PLANTED)
        }


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_wrong_optimizer_is_caught(kind: str, tmp_path) -> None:
    """The comparison must fail for each engine with one planted bug."""
    results = run_ranks(2, planted_runs, kind, str(tmp_path))
    passed = []
    for planted in ("", *PLANTED):
        runs = [[of_rank[planted]] for of_rank in results]
        try:
            check_runs("plain", KINDS[kind][0], [PLANTED_CELL], config_of(kind, ""), runs)
        except AssertionError:
            assert planted, f"{kind}: an engine that is right does not pass"
        else:
            passed.append(planted)
    assert passed == [""], f"{kind}: these pass: {passed[1:]}"
