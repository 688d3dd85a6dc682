"""Parameters are frozen and trained again in mid-run. The same is done in plain torch by ``requires_grad``."""

from __future__ import annotations

import copy

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.utils import safe_get_full_fp32_param
from tests import training
from tests.deepspeed_c.zero.reference import Event, Reference, flow_of, recorded
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import CLIP, OPTIMIZER, TRAITS, batch, make_model
from tests.ranks import on_ranks, run_ranks
from tests.training import descend_together

# The patterns of the trained parameters in each phase. A phase has two steps.
PHASES = (None, ["out.*", "gain"], ["inp.weight", "gain"], None)
STEPS = 2


def chosen(model, patterns):
    return {
        n
        for n, _ in model.named_parameters()
        if patterns is None or n in patterns or n.split(".")[0] + ".*" in patterns
    }


def plain(world: int, keep_state: bool) -> dict[str, torch.Tensor]:
    model = make_model(TRAITS["plain"])
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    step = 0
    for patterns in PHASES:
        names = chosen(model, patterns)
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)
            if name not in names and not keep_state:
                optimizer.state.pop(p, None)
        for _ in range(STEPS):
            descend_together(optimizer, (model(*batch(step, 0, rank, 0)) / world for rank in range(world)), CLIP)
            step += 1
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def rounded(world: int, stage: int, keep_state: bool, orders: list[list[Event]]) -> dict[str, torch.Tensor]:
    """As ``plain``, but in bf16 and rounded where the engine rounds."""
    model = make_model(TRAITS["plain"])
    flow = flow_of(make_config(stage, "bf16", 1, {}), world, model)
    reference = Reference(model, [{"params": model.parameters()}], flow, world, OPTIMIZER, orders)
    step = 0
    for patterns in PHASES:
        if step:
            reference.set_trainable(["*"] if patterns is None else patterns, keep_state=keep_state)
        for _ in range(STEPS):

            def loss_of(rank: int, step=step) -> torch.Tensor:
                x, y = batch(step, 0, rank, 0)
                return model(x.to(flow.dtype), y)

            reference.backward(loss_of)
            reference.step()
            step += 1
    return reference.weights()


def body(
    rank: int, world: int, stage: int, dtype: str, keep_state: bool, zero: dict
) -> tuple[dict[str, torch.Tensor], list[Event]]:
    model = make_model(TRAITS["plain"])
    config = make_config(stage, dtype, 1, {"zero_optimization": zero})
    engine, optimizer, *_ = deepspeed_c.initialize(model=model, config=config)
    step = 0
    with engine, recorded(engine) as order:
        for i, patterns in enumerate(PHASES):
            if i:
                trained = engine.set_trainable(["*"] if patterns is None else patterns, keep_state=keep_state)
                assert set(trained) == chosen(model, patterns)
                assert {n for n, p in model.named_parameters() if p.requires_grad} == set(trained)
                assert engine.optimizer is optimizer, "what the caller holds stays the optimizer"
                assert bool(engine._state.dormant) == (keep_state and patterns is not None)
                n_held = sum(unit.flat_elems for unit in engine._optimizer.units)
                n_trained = sum(slot.numel for slot in engine._optimizer.reducer.slots)
                assert len(engine._optimizer.reducer.slots) == len(trained) and n_held >= n_trained
            for _ in range(STEPS):
                x, y = batch(step, 0, rank, 0)
                training.step(engine, x.to(next(model.parameters()).dtype), y)
                step += 1
        weights = {n: p.float() for n, p in training.whole_weights(model).items()}
        masters = {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
        for name, master in masters.items():
            assert torch.allclose(master, weights[name], rtol=1e-2, atol=1e-3), name
        return masters, order


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world, stage", [(1, 2), (2, 0), (2, 2), (2, 3), (3, 3)])
def test_what_is_trained_changes(world: int, stage: int, dtype: str, keep_state: bool) -> None:
    zero = {"reduce_bucket_size": 60} if keep_state else {}
    gots = run_ranks(world, body, stage, dtype, keep_state, zero)
    is_exact = dtype == "bf16"
    want = rounded(world, stage, keep_state, [order for _, order in gots]) if is_exact else plain(world, keep_state)
    for rank, (got, _) in enumerate(gots):
        for name, b in want.items():
            a = got[name]
            is_right = torch.equal(a, b) if is_exact else torch.allclose(a, b, rtol=3e-5, atol=3e-6)
            assert is_right, f"rank {rank}, {name}: off by {(a - b).abs().max():g}\n{a}\n{b}"


@on_ranks(2)
def test_refusals_change_nothing(rank: int, world: int) -> None:
    model = make_model(TRAITS["plain"])
    engine = deepspeed_c.initialize(model=model, config=make_config(3, "fp32", 2, {}))[0]
    with engine:
        before = copy.deepcopy(training.whole_weights(model))
        with pytest.raises(ModelError, match="no parameter is named 'nope'"):
            engine.set_trainable(["out.weight", "nope"])
        with pytest.raises(ModelError, match="nothing would be left"):
            engine.set_trainable([])
        training.step(engine, *batch(0, 0, rank, 0))
        with pytest.raises(StateError, match="within an accumulation window"):
            engine.set_trainable(["out.weight"])
        training.step(engine, *batch(0, 1, rank, 0))
        assert engine.was_step_applied() and all(p.requires_grad for p in model.parameters())
        after = training.whole_weights(model)
        assert any(not torch.equal(before[n], after[n]) for n in after)


def schedule_body(rank: int, world: int) -> list[float]:
    model = make_model(TRAITS["plain"])
    extra = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}}}
    rates = []
    with deepspeed_c.initialize(model=model, config=make_config(3, "fp32", 1, extra))[0] as engine:
        for step in range(4):
            if step == 2:
                engine.set_trainable(["out.*"])
            training.step(engine, *batch(step, 0, rank, 0))
            rates.append(engine.get_lr()[0])
    return rates


def test_the_schedule_goes_on() -> None:
    for rates in run_ranks(2, schedule_body):
        assert rates == sorted(rates) and len(set(rates)) == 4, rates
