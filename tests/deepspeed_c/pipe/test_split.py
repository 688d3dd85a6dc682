"""A backward in two halves gives the same bits as a whole one, and runs no operation twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from deepspeed_c.pipe.split import SplitBackward


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Branch(nn.Module):
    """Has a part of the result that does not depend on an input, and a weight that is not in a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(12))
        self.table = nn.Embedding(5, 12)

    def forward(self, x):
        return x * self.scale + self.table(torch.arange(5)).relu().sum(0)


class _ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, of_product, of_sum):
        x, w = ctx.saved_tensors
        return of_product * w + of_sum, (of_product * x + of_sum).sum((0, 1))


class TwoOutputs(nn.Module):
    """Nodes with a weight and two outputs: both are used of the first, and the second one of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        product, total = _ProductAndSum.apply(x, self.w)
        return _ProductAndSum.apply(product.sin() * total, self.v)[1]


MODELS = {
    "linear": lambda: nn.Linear(12, 12),
    "attention": lambda: nn.Sequential(Attention(), Attention(), nn.LayerNorm(12)),
    "twice": lambda: nn.Sequential(linear := nn.Linear(12, 12), nn.ReLU(), linear),
    "branch": lambda: nn.Sequential(nn.Linear(12, 12), Branch(), nn.Tanh()),
    "frozen": lambda: nn.Sequential(nn.Linear(12, 12).requires_grad_(False), nn.Linear(12, 12)),
    "two outputs": TwoOutputs,
    "no weights": nn.Tanh,
    "convolution": lambda: nn.Sequential(nn.Conv1d(7, 7, 3, padding=1), nn.GELU(), nn.Conv1d(7, 7, 1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_a_whole_backward(name):
    torch.manual_seed(3)
    model = MODELS[name]()
    whole = copy.deepcopy(model)
    data, grad = torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    x = data.clone().requires_grad_()
    whole(x).backward(grad)

    y = data.clone().requires_grad_()
    out = model(y)
    half = SplitBackward([get_gradient_edge(out)], [grad], [y])
    (found,) = half.input_half()
    assert torch.equal(found, x.grad)
    assert half.is_whole == (name == "twice")
    if not half.is_whole:
        assert all(p.grad is None for p in model.parameters())
    half.weight_half()
    for (key, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        assert p.grad is None or torch.equal(p.grad, q.grad), f"{key}: {p.grad} and {q.grad}"


def test_inputs_without_gradient_leave_all_to_the_second_half():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(9, 12), Attention())
    whole = copy.deepcopy(model)
    ids, grad = torch.randint(9, (2, 7)), torch.randn(2, 7, 12)
    whole(ids).backward(grad)
    half = SplitBackward([get_gradient_edge(model(ids))], [grad], [])
    assert half.input_half() == []
    assert model[0].weight.grad is None
    half.weight_half()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_operations_between_the_weights_run_once():
    """The node that uses a weight runs in both halves, for another part of its gradients in each. Nodes between such
    nodes run once."""
    ran = []
    x = torch.randn(3, requires_grad=True)
    w = [torch.randn(3, requires_grad=True) for _ in range(2)]
    hidden = torch.sin(x * w[0])
    hidden.grad_fn.register_prehook(lambda grads: ran.append("sin"))
    out = hidden * w[1]
    half = SplitBackward([get_gradient_edge(out)], [torch.ones(3)], [x])
    half.input_half()
    half.weight_half()
    assert ran == ["sin"]
    assert torch.equal(w[1].grad, hidden.detach())


def test_several_outputs_and_a_missing_gradient():
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    whole = copy.deepcopy(model)
    data = torch.randn(5, 4)
    x, y = data.clone().requires_grad_(), data.clone().requires_grad_()
    torch.autograd.backward([whole[0](x)], [torch.ones(5, 4)])
    outs = [model[0](y), model[1](y)]
    half = SplitBackward([get_gradient_edge(outs[0])], [torch.ones(5, 4)], [y])
    assert torch.equal(half.input_half()[0], x.grad)
    half.weight_half()
    assert model[1].weight.grad is None
    assert torch.equal(model[0].weight.grad, whole[0].weight.grad)
