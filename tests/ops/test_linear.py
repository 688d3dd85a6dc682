"""``ops.nn.linear`` against products in float64 and against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_c.ops import nn
from tests.ops.data import errors

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
# Sizes around the steps of the loops: 3, 4, 6, 8, 16, 48, 64, 96, 128, 256, 1024.
SHAPES = [
    ((1,), 1, 1), ((7,), 3, 5), ((2, 3), 17, 11), ((3, 1, 5), 1025, 67), ((131,), 130, 9), ((0, 4), 5, 3), ((4,), 0, 3),
    ((5,), 8, 0), ((), 33, 4),
]  # fmt: skip


def operands(rows: tuple[int, ...], n_cols: int, n_outputs: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7 * n_cols + n_outputs)
    shapes = ((*rows, n_cols), (n_outputs, n_cols), (n_outputs,), (*rows, n_outputs))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def gradients(function, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in (x, weight, bias) if value is not None]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, n_cols, n_outputs", SHAPES)
def test_no_further_from_float64_than_torch(rows, n_cols: int, n_outputs: int, dtype: torch.dtype) -> None:
    for has_bias in (True, False):
        x, weight, bias, dy = operands(rows, n_cols, n_outputs, dtype)
        given = (x, weight, bias if has_bias else None)
        wide = [value if value is None else value.double() for value in given]
        wanted = gradients(F.linear, *wide, dy.double())
        ours, theirs = gradients(nn.linear, *given, dy), gradients(F.linear, *given, dy)
        assert [value.dtype for value in ours] == [dtype] * len(ours)
        assert [value.shape for value in ours] == [value.shape for value in wanted]
        # The result is rounded once at least.
        unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
        mine, other = errors(ours, wanted), errors(theirs, wanted)
        print(rows, n_cols, n_outputs, mine, other)
        assert all(a <= max(unit, b) for a, b in zip(mine, other, strict=True)), (mine, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight, bias, dy = operands((67,), 1100, 131, dtype)
    y, dx, *_ = gradients(nn.linear, x, weight, bias, dy)
    for i in (0, 1, 33, 66):
        alone = gradients(nn.linear, x[i], weight, bias, dy[i])
        assert torch.equal(alone[0], y[i]) and torch.equal(alone[1], dx[i]), i
    few = gradients(nn.linear, x[5:16], weight, bias, dy[5:16])
    assert torch.equal(few[0], y[5:16]) and torch.equal(few[1], dx[5:16])


def test_any_strides() -> None:
    x, weight, bias, dy = operands((6, 4), 10, 8, torch.bfloat16)
    wanted = gradients(nn.linear, x, weight, bias, dy)
    strided = [value.transpose(0, 1).contiguous().transpose(0, 1) for value in (x, weight)]
    spread = torch.stack([bias, bias], 1)[:, 0]
    found = gradients(nn.linear, *strided, spread, dy.transpose(0, 1).contiguous().transpose(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_derivatives_of_higher_order() -> None:
    x, weight, bias, _ = (value.requires_grad_() for value in operands((3,), 5, 4, torch.float32))

    def bent(function) -> list[Tensor]:
        y = function(x, weight, bias).tanh()
        first = torch.autograd.grad(y.square().sum(), (x, weight, bias), create_graph=True)
        second = torch.autograd.grad(sum(grad.pow(3).sum() for grad in first), (x, weight, bias), create_graph=True)
        third = torch.autograd.grad(sum(grad.square().sum() for grad in second), (x, weight, bias))
        return [*first, *second, *third]

    for ours, theirs in zip(bent(nn.linear), bent(F.linear), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4), (ours, theirs)


def test_autocast_casts_as_torch_does() -> None:
    x, weight, bias, dy = operands((5,), 9, 7, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (gradients(function, x, weight, bias, dy.bfloat16()) for function in (nn.linear, F.linear))
    assert [value.dtype for value in ours] == [value.dtype for value in theirs]
    assert max(errors(ours, [value.double() for value in theirs])) <= 2**-7


def test_only_what_is_needed_is_computed() -> None:
    x, weight, bias, dy = operands((3,), 6, 4, torch.bfloat16)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [v.detach().requires_grad_(needed) for v, needed in zip((x, weight, bias), needs, strict=True)]
        nn.linear(*leaves).backward(dy)
        assert tuple(leaf.grad is not None for leaf in leaves) == needs


def test_inputs_that_do_not_fit() -> None:
    x, weight, bias, _ = operands((3,), 6, 4, torch.bfloat16)
    cases = {
        "argument weight has 5 columns, x has 6": lambda: nn.linear(x, weight[:, :5]),
        "argument weight must have 2 dimensions": lambda: nn.linear(x, weight[0]),
        "argument bias has 3": lambda: nn.linear(x, weight, bias[:3]),
        "argument weight is of float32, unlike x": lambda: nn.linear(x, weight.float()),
        "argument x has no dimension": lambda: nn.linear(x[0, 0], weight),
    }
    for words, call in cases.items():
        with pytest.raises((ValueError, RuntimeError)) as info:
            call()
        assert words in str(info.value), (words, str(info.value))


def test_layers_of_one_input_have_the_bits_of_linear_each() -> None:
    layers = torch.ops.deepspeed_c.nn_layers
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n_terms in (0, 1, 67):
            x, weight, bias, _ = operands((2, 3), n_terms, 9, dtype)
            weights = [weight, weight[:4], weight.t().contiguous().t(), weight[:0]]
            biases = [bias, None, bias[::2].repeat_interleave(2)[:9], bias[:0]]
            found = layers(x, weights, biases)
            wanted = [nn.linear(x, w.contiguous(), b) for w, b in zip(weights, biases, strict=True)]
            assert all(torch.equal(y, z) for y, z in zip(found, wanted, strict=True)), (dtype, n_terms, found, wanted)
    assert layers(x, [], []) == []


def test_layers_that_do_not_fit_their_input() -> None:
    x, weight, bias, _ = operands((3,), 6, 4, torch.bfloat16)
    cases = {
        "argument weights[1] has 5 columns, x has 6": ([weight, weight[:, :5]], [None, None]),
        "argument weights[0] must have 2 dimensions": ([weight[0]], [None]),
        "argument weights[1] is of float32, unlike x": ([weight, weight.float()], [None, None]),
        "argument biases has 1 entries, weights has 2": ([weight, weight], [None]),
        "argument biases has 3": ([weight], [bias[:3]]),
        "9 products": ([weight] * 9, [None] * 9),
    }
    for words, operands_given in cases.items():
        with pytest.raises((ValueError, RuntimeError)) as info:
            torch.ops.deepspeed_c.nn_layers(x, *operands_given)
        assert words in str(info.value), (words, str(info.value))


def test_a_compiled_function_has_the_same_bits() -> None:
    x, weight, bias, dy = operands((5,), 40, 7, torch.bfloat16)
    compiled = torch.compile(nn.linear, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(
        gradients(compiled, x, weight, bias, dy), gradients(nn.linear, x, weight, bias, dy), strict=True
    ):
        assert torch.equal(ours, theirs)
