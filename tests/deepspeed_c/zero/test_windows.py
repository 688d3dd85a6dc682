"""Accumulation windows whose ends the caller sets, and precisions that the parity oracle does not cover, against plain
torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.utils import safe_get_full_fp32_param
from tests import training
from tests.deepspeed_c.zero.reference import recorded
from tests.deepspeed_c.zero.test_oracle import by_rank, check, check_runs, make_config
from tests.deepspeed_c.zero.traits import (
    CLIP,
    OPTIMIZER,
    STEPS,
    TRAITS,
    Run,
    batch,
    make_model,
    plain_run,
)
from tests.ranks import run_ranks

GAS = 3


def steered_options(how: str) -> dict:
    if how == "deferred_fp32_accumulation":
        return {"data_types": {"grad_accum_dtype": "fp32"}}
    return {"managed_gradient_accumulation": False} if how == "unmanaged" else {}


def steered_body(rank: int, world: int, stage: int, how: str, dtype: str) -> Run:
    model = make_model(TRAITS["used_twice"])
    config = make_config(stage, dtype, GAS, steered_options(how))
    losses, norms = [], []
    with deepspeed_c.initialize(model=model, config=config)[0] as engine, recorded(engine) as order:
        to = next(model.parameters()).dtype

        def backward(step: int, micro: int) -> None:
            x, y = batch(step, micro, rank, 0)
            loss = engine(x.to(to), y)
            losses.append(loss.item())
            engine.backward(loss)

        for step in range(STEPS):
            if how == "unmanaged":
                for micro in range(GAS):
                    backward(step, micro)
                engine.step()
            elif how == "coalesce":
                engine.set_gradient_accumulation_boundary(True)
                with engine.coalesce_grad_reduction():
                    for micro in range(GAS):
                        backward(step, micro)
                engine.step()
            elif how == "boundary":
                for micro in range(GAS):
                    engine.set_gradient_accumulation_boundary(is_boundary=micro == GAS - 1)
                    backward(step, micro)
                    engine.step()
            else:
                for micro in range(GAS - 1):
                    with engine.no_sync():
                        backward(step, micro)
                    engine.step()
                if how == "no_sync_last_too":
                    with engine.no_sync():
                        backward(step, GAS - 1)
                else:
                    backward(step, GAS - 1)
                engine.step()
            norms.append(engine.get_global_grad_norm())
        params = {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    return Run(losses, norms, params, order=order)


@pytest.mark.parametrize(
    "how", ["unmanaged", "coalesce", "boundary", "no_sync", "no_sync_last_too", "deferred_fp32_accumulation"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_window_steered_by_the_caller_is_the_same_window(stage: int, dtype: str, how: str) -> None:
    gots, label = run_ranks(2, steered_body, stage, how, dtype), f"{how} stage {stage} {dtype}"
    if dtype == "bf16":
        check_runs("used_twice", dtype, [(stage, GAS)], steered_options(how), [[got] for got in gots])
        return
    want = plain_run(TRAITS["used_twice"], 2, GAS)
    for rank, got in enumerate(gots):
        check(label, got, want, by_rank(want.losses, 2, GAS, 1, rank))


LOW_PRECISION = {
    "autocast_bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast_fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}, "fp16": {"initial_scale_power": 8}},
    "bf16_masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16_states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
}


def low_precision_body(rank: int, world: int, stage: int, kind: str) -> Run:
    model = make_model(TRAITS["plain"])
    losses, norms = [], []
    with (
        training.engine_of(model, make_config(stage, "fp32", 1, LOW_PRECISION[kind])) as engine,
        recorded(engine) as order,
    ):
        for step in range(STEPS):
            x, y = batch(step, 0, rank, 0)
            losses.append(training.update(engine, engine(x.to(next(model.parameters()).dtype), y)))
            norms.append(engine.get_global_grad_norm())
        units = engine._optimizer.units
        state = engine.optimizer.state[engine._optimizer.pieces.entries[0].param]["exp_avg"].dtype
        comm = {(str(u.dtype), str(u.comm_dtype)) for u in units}
        if kind.startswith("autocast"):
            short = torch.bfloat16 if kind.endswith("bf16") else torch.float16
            assert comm == {("torch.float32", str(short)), ("torch.float32", "torch.float32")}, comm
        else:
            assert {u.master_dtype for u in units} == {torch.bfloat16} and all(u.master_flat is None for u in units)
            assert state == (torch.bfloat16 if kind == "bf16_states" else torch.float32)
        params = {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    return Run(losses, norms, params, order=order)


@pytest.mark.parametrize("kind", list(LOW_PRECISION))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_low_precision(stage: int, kind: str) -> None:
    results = [[run] for run in run_ranks(2, low_precision_body, stage, kind)]
    check_runs("plain", "fp32", [(stage, 1)], LOW_PRECISION[kind], results)


def late_body(rank: int, world: int, stage: int) -> tuple[list[bool], list[torch.Tensor]]:
    """Whether buckets wait after each step when the hooks of one rank fire late; and the weights."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            from torch.utils.checkpoint import checkpoint

            x = x.clone().requires_grad_()
            for _ in range(2 if rank == 1 else 1):
                x = checkpoint(self.lin, x, use_reentrant=True)
            return x.sum()

    torch.manual_seed(0)
    config = make_config(stage, "fp32", 1, {"zero_optimization": {"overlap_comm": True}})
    with deepspeed_c.initialize(model=Sometimes(), config=config)[0] as engine:
        seen = []
        for _ in range(3):
            training.step(engine, torch.ones(2, 4))
            reducer = engine._optimizer.reducer
            seen.append(bool(reducer.late.waiting))
        return seen, list(training.whole_weights(engine.module).values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_agree_on_late_gradients(stage: int) -> None:
    (seen0, params0), (seen1, params1) = run_ranks(2, late_body, stage)
    # With one gather unit stage 3 reduces at the end of backward, and no gradient comes later.
    assert seen0 == seen1 == [stage != 3] * 3
    for a, b in zip(params0, params1):
        assert torch.equal(a, b), f"{a} != {b}"
    # Plain torch: rank 0 applies the layer once, rank 1 twice.
    torch.manual_seed(0)
    lin = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(lin.parameters(), **OPTIMIZER)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        ((lin(x).sum() + lin(lin(x)).sum()) / 2).backward()
        nn.utils.clip_grad_norm_(lin.parameters(), CLIP)
        optimizer.step()
    for a, b in zip(params0, lin.parameters()):
        assert torch.allclose(a, b, rtol=2e-5, atol=2e-6), f"{a}\n!=\n{b}"


def compiled_body(rank: int, world: int, stage: int) -> Run:
    model = make_model(TRAITS["used_twice"])
    losses, norms = [], []
    with deepspeed_c.initialize(model=model, config=make_config(stage, "fp32", 1, {}))[0] as engine:
        engine.compile(backend="aot_eager")
        assert engine.is_compiled
        for step in range(STEPS):
            losses.append(training.update(engine, engine(*batch(step, 0, rank, 0))))
            norms.append(engine.get_global_grad_norm())
        params = {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    return Run(losses, norms, params)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_compiled_module_trains_the_same(stage: int) -> None:
    want = plain_run(TRAITS["used_twice"], 2, 1)
    for rank, got in enumerate(run_ranks(2, compiled_body, stage)):
        check(f"compiled stage {stage}", got, want, by_rank(want.losses, 2, 1, 1, rank))
