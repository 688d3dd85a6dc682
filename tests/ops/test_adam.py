"""FusedAdam and DeepSpeedCPUAdam against torch.optim.Adam and AdamW, and DeepSpeed's signatures."""

from __future__ import annotations

import inspect

import pytest
import torch

from deepspeed_c.errors import OptimizerError
from deepspeed_c.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tests.ops.interchange import check_interchange, check_parity, fresh_params, train

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("check", [check_parity, check_interchange])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_as_torch(check, is_decoupled):
    theirs = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    check(lambda p: FusedAdam(p, adam_w_mode=is_decoupled, **OPTIONS), lambda p: theirs(p, **OPTIONS))
    check(lambda p: DeepSpeedCPUAdam(p, adamw_mode=is_decoupled, **OPTIONS), lambda p: theirs(p, **OPTIONS))


def test_fused_torch_state_loads():
    check_interchange(lambda p: FusedAdam(p, **OPTIONS), lambda p: torch.optim.AdamW(p, fused=True, **OPTIONS))


def test_maximize_comes_with_the_state_dict():
    check_interchange(
        lambda p: FusedAdam([{"params": p, "maximize": True}], **OPTIONS),
        lambda p: torch.optim.AdamW(p, maximize=True, **OPTIONS),
    )


def test_groups_keep_their_own_options():
    def make(cls, params, **kwargs):
        return cls(
            [{"params": params[:2], "lr": 0.1, "weight_decay": 0.0}, {"params": params[2:], "betas": (0.5, 0.9)}],
            **kwargs,
        )

    check_parity(lambda p: make(FusedAdam, p, **OPTIONS), lambda p: make(torch.optim.AdamW, p, **OPTIONS))


def test_signatures_are_deepspeeds():
    def text(function):
        # The format of the states is the only argument that DeepSpeed lacks. It is keyword-only, so it cannot clash.
        parameters = inspect.signature(function).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= {"state_dtype"}
        return [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY][1:]

    assert text(FusedAdam.__init__) == [
        ("params", inspect.Parameter.empty),
        ("lr", 1e-3),
        ("bias_correction", True),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("adam_w_mode", True),
        ("weight_decay", 0.0),
        ("amsgrad", False),
        ("set_grad_none", True),
    ]
    assert text(DeepSpeedCPUAdam.__init__) == [
        ("model_params", inspect.Parameter.empty),
        ("lr", 1e-3),
        ("bias_correction", True),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 0),
        ("amsgrad", False),
        ("adamw_mode", True),
        ("fp32_optimizer_states", True),
    ]


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_amsgrad_is_refused(cls):
    with pytest.raises(OptimizerError, match="AMSGrad"):
        cls(fresh_params(), amsgrad=True)
    theirs = torch.optim.Adam(fresh_params(), amsgrad=True)
    optimizer = cls(fresh_params())
    before = optimizer.state_dict()
    with pytest.raises(OptimizerError, match="AMSGrad"):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state_dict() == before


def test_arguments_of_old_steps_are_refused():
    optimizer = FusedAdam(fresh_params())
    with pytest.raises(OptimizerError, match="step\\(\\) takes no grads, scale"):
        optimizer.step(grads=[], scale=2.0)


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad(set_grad_none):
    params = fresh_params()
    optimizer = FusedAdam(params, set_grad_none=set_grad_none)
    train(optimizer, params, range(1))
    optimizer.zero_grad()
    assert all((p.grad is None) == set_grad_none for p in params)
    assert set_grad_none or all(int(p.grad.count_nonzero()) == 0 for p in params)


def test_integer_step_of_an_old_state_loads():
    params = fresh_params()
    optimizer = FusedAdam(params, **OPTIONS)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    optimizer.load_state_dict(saved)
    train(optimizer, params, range(2, 3))
    step = optimizer.state[params[0]]["step"]
    assert step.dtype == torch.float32 and step.shape == () and float(step) == 3.0
