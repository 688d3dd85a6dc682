"""The linear layer of stage 3, compared with torch's: values, gradients, autocast, and sharded training."""

import pytest
import torch

import deepspeed_c
from deepspeed_c.compat.zero_linear import LinearModuleForZeroStage3, zero3_linear_wrap
from tests import training
from tests.ranks import on_ranks


def pair(bias, n_in=37, n_out=23):
    torch.manual_seed(3)
    ours = LinearModuleForZeroStage3(n_in, n_out, bias=bias)
    torch.manual_seed(3)
    return ours, torch.nn.Linear(n_in, n_out, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(37,), (5, 37), (2, 3, 37), (0, 37)])
@pytest.mark.parametrize("autocasts", [False, True])
def test_it_is_torchs(bias, shape, autocasts):
    ours, theirs = pair(bias)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters())), "initialised otherwise"
    assert not isinstance(ours, torch.nn.Linear) and ours.extra_repr() == theirs.extra_repr()
    x = torch.randn(shape)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
        outputs = [layer(value) for layer, value in zip((ours, theirs), inputs)]
    assert outputs[0].dtype == outputs[1].dtype and torch.equal(*outputs), outputs
    for output in outputs:
        output.float().square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a.grad, b.grad), (a.grad, b.grad)
    assert torch.equal(
        zero3_linear_wrap(x, ours.weight, ours.bias), torch.nn.functional.linear(x, *theirs.parameters())
    )


@on_ranks(2)
def test_it_trains_sharded(rank, world):
    results = []
    for cls in (LinearModuleForZeroStage3, torch.nn.Linear):
        torch.manual_seed(3)
        model = torch.nn.Sequential(cls(37, 23), torch.nn.Tanh(), cls(23, 3))
        config = training.config(3, "AdamW", zero={"stage3_param_persistence_threshold": 0}, lr=0.01)
        engine = deepspeed_c.initialize(model=model, config=config)[0]
        losses = []
        for step in range(3):
            losses.append(training.update(engine, engine(torch.linspace(-1, 1, 37) + step + rank).square().sum()))
        results.append(losses)
        engine.close()
    assert results[0] == results[1], results
