"""safe_get and safe_set functions: they return the optimizer's whole tensors and local pieces, and writes reach
masters, weights and the next step."""

from __future__ import annotations

import logging

import pytest
import torch

import deepspeed_c
from deepspeed_c import errors, utils
from deepspeed_c.zero.weights.param import shape_of
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch, make_model
from tests.log_lines import LogLines
from tests.ranks import on_ranks, run_ranks
from tests.training import whole_weights

FULL = {
    "master": (utils.safe_get_full_fp32_param, utils.safe_set_full_fp32_param),
    "exp_avg": (utils.safe_get_full_optimizer_state, utils.safe_set_full_optimizer_state),
}


def start(stage: int, precision: str, trait: str = "zero_size", gas: int = 1):
    model = make_model(TRAITS[trait])
    config = make_config(stage, precision, gas, {})
    return model, deepspeed_c.initialize(model=model, config=config)[0]


def run_backward(engine, rank: int, step: int = 0):
    x, y = batch(step, 0, rank, 0)
    engine.backward(engine(x.to(next(engine.parameters()).dtype), y))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 3])
@on_ranks()
def test_round_trip(rank: int, world: int, stage: int, precision: str) -> None:
    model, engine = start(stage, precision)
    with engine:
        run_backward(engine, rank)
        engine.step()
        for i, (name, p) in enumerate(model.named_parameters()):
            value = torch.full(shape_of(p), float(i) + 1 / 3)
            utils.safe_set_full_fp32_param(p, value)
            assert torch.equal(utils.safe_get_full_fp32_param(p), value), name
            assert torch.equal(whole_weights(model)[name].float(), value.to(p.dtype).float()), name
            for key in ("exp_avg", "exp_avg_sq"):
                utils.safe_set_full_optimizer_state(p, value + 1, key)
                assert torch.equal(utils.safe_get_full_optimizer_state(p, key), value + 1), (name, key)
            local = utils.safe_get_local_fp32_param(p)
            utils.safe_set_local_fp32_param(p, local * 2)
            assert torch.equal(utils.safe_get_full_fp32_param(p), value * 2), name
            local = utils.safe_get_local_optimizer_state(p, "exp_avg")
            utils.safe_set_local_optimizer_state(p, local * 2, "exp_avg")
            assert torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg"), (value + 1) * 2), name
        p = model.inp.weight
        special = torch.full(shape_of(p), -0.0)
        special[0, 0], special[0, 1] = float("nan"), float("inf")
        utils.safe_set_full_fp32_param(p, special)
        back = utils.safe_get_full_fp32_param(p)
        assert torch.equal(back.view(torch.int32), special.view(torch.int32)), "bits of -0.0, NaN and inf"
        with pytest.raises(errors.StateError, match="does not fit"):
            utils.safe_set_full_fp32_param(p, torch.zeros(3))
        with pytest.raises(errors.StateError, match="no state 'nope'"):
            # All ranks raise, also ranks that own nothing of the parameter.
            utils.safe_get_full_optimizer_state(p, "nope")
        with pytest.raises(errors.StateError, match="no state 'nope'"):
            utils.safe_get_full_optimizer_state(model.scalar, "nope")
        assert utils.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(1))) is None


def gradient_body(rank: int, world: int, stage: int, gas: int) -> dict[str, torch.Tensor]:
    model, engine = start(stage, "fp32", gas=gas)
    with engine:
        p = model.inp.weight
        assert utils.safe_get_full_grad(p) is None
        for micro in range(gas):
            x, y = batch(0, micro, rank, 0)
            engine.backward(engine(x, y))
            if micro < gas - 1:
                assert utils.safe_get_full_grad(p) is None
                engine.step()
        return {n: utils.safe_get_full_grad(q) for n, q in model.named_parameters()}


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_the_average_over_ranks_and_micro_batches(stage, gas):
    model = make_model(TRAITS["zero_size"])
    for rank in range(2):
        for micro in range(gas):
            (model(*batch(0, micro, rank, 0)) / (2 * gas)).backward()
    for got in run_ranks(2, gradient_body, stage, gas):
        for name, p in model.named_parameters():
            worst = (got[name] - p.grad).abs().max().item() if p.numel() else 0.0
            assert torch.allclose(got[name], p.grad, rtol=1e-5, atol=1e-7), f"{name} is off by {worst:g}"


def edited_gradient_body(rank: int, world: int, stage: int) -> tuple:
    """A written gradient changes the norm and the step. A backward after a read adds to the gradient."""
    model, engine = start(stage, "fp32", "plain")
    with engine:
        run_backward(engine, rank)
        for p in model.parameters():
            utils.safe_set_full_grad(p, torch.zeros(p.shape))
        p = model.out.bias
        utils.safe_set_full_grad(p, torch.full(p.shape, 2.0))
        local = utils.safe_get_local_grad(p)
        utils.safe_set_local_grad(p, local * 1.5)
        assert torch.equal(utils.safe_get_full_grad(p), torch.full(p.shape, 3.0))
        engine.step()
        norm = engine.get_global_grad_norm()
        run_backward(engine, rank, 1)
        once = utils.safe_get_full_grad(p)
        run_backward(engine, rank, 1)
        twice = utils.safe_get_full_grad(p)
        engine.step()
        with pytest.raises(errors.StateError, match="no gradient"):
            utils.safe_set_full_grad(p, once)
        return norm, once, twice


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_can_be_read_edited_and_added_to(stage, world):
    for norm, once, twice in run_ranks(world, edited_gradient_body, stage):
        assert norm == pytest.approx(3.0 * 5**0.5), norm
        assert torch.allclose(twice, 2 * once, rtol=1e-5, atol=1e-7), f"{twice} != 2 * {once}"


@on_ranks(2)
def test_vectorized_update(rank: int, world: int) -> None:
    model, engine = start(2, "fp32", "plain")
    with engine:
        run_backward(engine, rank)
        before = [utils.safe_get_full_grad(p) for p in model.parameters()]
        utils.safe_update_full_grad_vectorized(list(model.parameters()), lambda g, p: g * 2 + 1)
        for old, p in zip(before, model.parameters()):
            assert torch.allclose(utils.safe_get_full_grad(p), old * 2 + 1, rtol=1e-5, atol=1e-6)


class Branches(torch.nn.Module):
    """Two layers; the second is used only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 7), torch.nn.Linear(5, 7)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.a(x)
        return (y + self.b(x) if both else y).square().mean()


EDIT_OPTIMIZER = {"lr": 0.1, "weight_decay": 0.1}
EDITS = ["same", "local", "vectorized", "of_an_unused", "zeros_on_an_unused"]


def branch_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def edited_branches(rank: int, stage: int, offload: str, edit: str) -> dict[str, torch.Tensor]:
    """Only the first step uses the second layer. A gradient is written in the second step."""
    torch.manual_seed(3)
    model = Branches()
    zero = {"offload_optimizer": {"device": "cpu"}} if offload == "cpu" else {}
    config = make_config(stage, "fp32", 1, {"zero_optimization": zero, "gradient_clipping": 0.0})
    config["optimizer"] = {"type": "AdamW", "params": EDIT_OPTIMIZER}
    with deepspeed_c.initialize(model=model, config=config)[0] as engine:
        for step in range(3):
            engine.backward(engine(branch_batch(rank, step), step == 0))
            p = model.a.weight
            if step != 1:
                pass
            elif edit == "same":
                utils.safe_set_full_grad(p, utils.safe_get_full_grad(p))
            elif edit == "local":
                utils.safe_set_local_grad(p, utils.safe_get_local_grad(p))
            elif edit == "vectorized":
                utils.safe_update_full_grad_vectorized(list(model.parameters()), lambda g, p: g * 2 + 1)
            else:
                value = torch.full(shape_of(p), 0.0 if edit == "zeros_on_an_unused" else 2.0)
                utils.safe_set_full_grad(model.b.weight, value)
            engine.step()
        return {name: utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}


def edited_branches_body(rank: int, world: int, stage: int, offload: str) -> dict[str, dict[str, torch.Tensor]]:
    return {edit: edited_branches(rank, stage, offload, edit) for edit in EDITS}


def edited_branches_in_plain_torch(world: int, edit: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), **EDIT_OPTIMIZER)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(world):
            (model(branch_batch(rank, step), step == 0) / world).backward()
        if step == 1 and edit == "vectorized":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = p.grad * 2 + 1
        elif step == 1 and edit.endswith("unused"):
            model.b.weight.grad = torch.full_like(model.b.weight, 0.0 if edit == "zeros_on_an_unused" else 2.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "stage", "offload"),
    [*((world, stage, "none") for world in (1, 2) for stage in range(4)), *((2, stage, "cpu") for stage in (1, 2, 3))],
)
def test_a_written_gradient_makes_its_parameter_count_as_used_and_no_other(world, stage, offload):
    results = run_ranks(world, edited_branches_body, stage, offload)
    for edit in EDITS:
        want = edited_branches_in_plain_torch(world, edit)
        for got in results:
            for name, value in want.items():
                worst = (got[edit][name] - value).abs().max().item()
                assert worst < 2e-5, f"{edit}: {name} is off by {worst:g}"


def own_norm(model: torch.nn.Module) -> float:
    """As many scripts compute it: parameters without a gradient are left out."""
    return sum(float(p.grad.norm() ** 2) for p in model.parameters() if p.grad is not None) ** 0.5


CLIPS = (
    lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    lambda model: torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5, norm_type=float("inf"), foreach=False),
    lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.5),
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gas", [1, 2])
@on_ranks(2)
def test_clipping_of_gradients_that_the_engine_holds_is_not_silent(rank: int, world: int, stage: int, gas: int) -> None:
    model, engine = start(stage, "fp32", gas=gas)
    with engine, LogLines(logging.WARNING) as records:
        for clip in CLIPS[:2]:
            clip(model)  # without a gradient there is nothing to clip, as in plain torch
        for step in range(2):
            for micro in range(gas):
                run_backward(engine, rank, step)
                for clip in CLIPS if stage else CLIPS[:0]:
                    with pytest.raises(errors.StateError) as raised:
                        clip(model)
                    for word in ("gradient_clipping", "engine.get_global_grad_norm()", "safe_get_full_grad"):
                        assert word in str(raised.value), f"stage {stage}: {word} not in {raised.value}"
                said = own_norm(model)
                if stage == 0 and micro == gas - 1:
                    found = torch.nn.utils.clip_grad_norm_(model.parameters(), said / 2)
                    assert float(found) == pytest.approx(said) and said > 0.0, (found, said)
                    assert own_norm(model) == pytest.approx(said / 2, rel=1e-3)
                engine.step()
            assert engine.get_global_grad_norm() > 0.0
            for clip in CLIPS[:2]:
                clip(model)
        told = [line for line in records.lines if "param.grad" in line]
        # Ranks other than 0 log nothing. Reads before the first backward and after the step are no mistake.
        assert len(told) == (1 if stage and rank == 0 else 0), told
        assert all(__name__ in line and "gradient_clipping" in line for line in told), told
