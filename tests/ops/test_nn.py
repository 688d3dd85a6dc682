"""Operators of transformer layers against their PyTorch formulas in float64, forward and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from deepspeed_c.errors import BackwardError
from deepspeed_c.ops import nn, reference
from tests.ops.data import DTYPES, bits, normal, on_each_setup

# Largest difference between an operator and its formula in float64: one rounding to the dtype, and sums in float32.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def leaf(*shape, seed, dtype, scale=1.0):
    n = torch.Size(shape).numel()
    return normal(n, seed, dtype, scale).view(shape).requires_grad_()


def check(ours, formula, operands, dtype):
    """``ours(*operands)`` equals ``formula(*operands)`` in float64, and the gradients of all operands are equal too."""
    wide = [operand.detach().double().requires_grad_() for operand in operands]
    got, want = ours(*operands), formula(*wide)
    pairs = list(zip(got, want)) if isinstance(got, tuple) else [(got, want)]
    gradients = [normal(y.numel(), i, dtype).view(y.shape) for i, (y, _) in enumerate(pairs)]
    torch.autograd.backward([y for y, _ in pairs], gradients)
    torch.autograd.backward([y for _, y in pairs], [gradient.double() for gradient in gradients])
    for y, wanted in pairs:
        assert y.dtype == dtype
        close(y, wanted, dtype, "result")
    for i, (operand, wanted) in enumerate(zip(operands, wide)):
        assert operand.grad.dtype == operand.dtype and operand.grad.shape == operand.shape
        close(operand.grad, wanted.grad, operand.dtype, f"gradient of operand {i}")


def close(got, wanted, dtype, what):
    size = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(
        got.detach().double(), wanted.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * size, msg=what
    )


SHAPES = [(0, 5), (1, 1), (3, 7, 33), (257, 64), (2, 1025)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(dtype, shape):
    def operands(n_vectors, has_residual):
        tensors = [leaf(*shape, seed=1, dtype=dtype, scale=2)]
        tensors += [leaf(shape[-1], seed=2 + i, dtype=dtype) for i in range(n_vectors)]
        return tensors + [leaf(*shape, seed=9, dtype=dtype)] * has_residual

    check(
        lambda x, w, b: nn.layer_norm(x, w, b, 1e-2),
        lambda x, w, b: reference.nn_norm(x, None, w, b, 1e-2, False)[0],
        operands(2, False),
        dtype,
    )
    check(
        lambda x, w: nn.rms_norm(x, w, 1e-2),
        lambda x, w: reference.nn_norm(x, None, w, None, 1e-2, True)[0],
        operands(1, False),
        dtype,
    )


@pytest.mark.parametrize("is_rms", [False, True])
def test_norm_with_residual(is_rms):
    # Both results are used: the gradients through the sum and through the norm are added.
    x, w, r = (
        leaf(5, 33, seed=1, dtype=torch.float32),
        leaf(33, seed=2, dtype=torch.float32),
        leaf(5, 33, seed=3, dtype=torch.float32),
    )
    ours = nn.rms_norm if is_rms else nn.layer_norm
    check(
        lambda x, w, r: ours(x, w, eps=1e-2, residual=r),
        lambda x, w, r: reference.nn_norm(x, r, w, None, 1e-2, is_rms),
        [x, w, r],
        torch.float32,
    )
    # Only one result is used.
    for use in range(2):
        x.grad = r.grad = w.grad = None
        ours(x, w, eps=1e-2, residual=r)[use].sum().backward()
        plain = [tensor.detach().double().requires_grad_() for tensor in (x, w, r)]
        reference.nn_norm(plain[0], plain[2], plain[1], None, 1e-2, is_rms)[use].sum().backward()
        close(x.grad, plain[0].grad, torch.float32, f"result {use}")
        assert torch.equal(x.grad, r.grad)


def test_norms_are_torchs_own():
    x, weight, bias = normal(64 * 96, 1).view(64, 96), normal(96, 2), normal(96, 3)
    torch.testing.assert_close(nn.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (96,), weight, bias))
    torch.testing.assert_close(nn.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (96,), weight, 1e-6))


def test_norm_weights_of_another_dtype():
    x = leaf(7, 33, seed=1, dtype=torch.bfloat16)
    weight, bias = leaf(33, seed=2, dtype=torch.float32), leaf(33, seed=3, dtype=torch.float32)
    nn.layer_norm(x, weight, bias).sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
    assert torch.equal(bias.grad, torch.full((33,), 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu", "relu", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations(dtype, act, shape):
    x, bias = leaf(*shape, seed=1, dtype=dtype, scale=3), leaf(shape[-1], seed=2, dtype=dtype)
    if act == "relu":  # the slope at 0 is arbitrary
        x, bias = leaf(*shape, seed=1, dtype=torch.float32, scale=3), torch.zeros(shape[-1], requires_grad=True)
    check(
        lambda x, bias: nn.bias_act(x, bias, act),
        lambda x, bias: reference.nn_bias_act(x, bias, act),
        [x, bias],
        x.dtype,
    )
    gate, up = leaf(*shape, seed=3, dtype=dtype), leaf(*shape, seed=4, dtype=dtype)
    gated = torch.ops.deepspeed_c.nn_gated
    check(lambda gate, up: gated(gate, up, act), lambda gate, up: reference.nn_gated(gate, up, act), [gate, up], dtype)
    both = leaf(*shape[:-1], 2 * shape[-1], seed=5, dtype=dtype)
    check(lambda x: gated(x, None, act), lambda x: reference.nn_gated(x, None, act), [both], dtype)


def test_activations_are_torchs_own():
    x, up = normal(5000, 1, scale=4).view(50, 100), normal(5000, 2).view(50, 100)
    torch.testing.assert_close(nn.bias_gelu(x), torch.nn.functional.gelu(x))
    torch.testing.assert_close(nn.bias_gelu(x, approximate="tanh"), torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(nn.swiglu(x, up), torch.nn.functional.silu(x) * up)
    torch.testing.assert_close(nn.geglu(x, up), torch.nn.functional.gelu(x) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout(dtype, p, shape):
    x, residual = leaf(*shape, seed=1, dtype=dtype), leaf(*shape, seed=3, dtype=dtype)
    seed = 0x1234_5678_9ABC_DEF0
    check(
        lambda x, bias, residual: torch.ops.deepspeed_c.nn_dropout(x, bias, residual, p, seed),
        lambda x, bias, residual: reference.nn_dropout(x, bias, residual, p, seed),
        [x, leaf(shape[-1], seed=2, dtype=dtype), residual],
        dtype,
    )


def test_dropout_follows_its_generator_and_its_probability():
    x = torch.ones(400, 500)
    torch.manual_seed(3)
    first = nn.bias_dropout_residual(x, p=0.2)
    torch.manual_seed(3)
    assert torch.equal(first, nn.bias_dropout_residual(x, p=0.2))
    second = nn.bias_dropout_residual(x, p=0.2)
    assert not torch.equal(first, second)
    # 200,000 draws: four standard deviations are 0.0036. Two masks are independent.
    share, both = float((first > 0).double().mean()), float(((first > 0) & (second > 0)).double().mean())
    assert share == pytest.approx(0.8, abs=0.004) and both == pytest.approx(0.64, abs=0.005)
    before = torch.get_rng_state()
    assert torch.equal(nn.bias_dropout_residual(x, p=0.2, training=False), x)
    assert torch.equal(before, torch.get_rng_state())


def test_philox_is_the_published_one():
    # The known answers of Random123, the library of Philox's authors, for a counter and a key of zeros.
    assert reference.philox(0, 4).tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("pairs, head_dim", [(4, 8), (3, 9), (33, 66)])
def test_rotary(dtype, is_interleaved, is_shared, is_transposed, pairs, head_dim):
    angles = normal(2 * 5 * pairs, 1).view(2, 5, pairs)[: 1 if is_shared else 2]
    cos, sin = angles.cos(), angles.sin()

    def layout(x):
        return x.transpose(1, 2) if is_transposed else x

    x = leaf(2, *((3, 5) if is_transposed else (5, 3)), head_dim, seed=2, dtype=dtype)
    check(
        lambda x: nn.rotary(layout(x), cos, sin, is_interleaved=is_interleaved),
        lambda x: reference.nn_rotary(layout(x), cos.double(), sin.double(), is_interleaved, False),
        [x],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "keep", "add"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 5), (3, 9), (2, 1500)])
def test_softmax(dtype, mask, is_causal, queries, keys):
    x = leaf(2, 3, queries, keys, seed=1, dtype=dtype, scale=3)
    given = None
    if mask == "keep":
        given = normal(2 * keys, 2).view(2, 1, 1, keys) > -0.5
        given[0] = False  # all keys of these rows are hidden
    elif mask == "add":
        given = normal(3 * queries * keys, 2, dtype).view(1, 3, queries, keys)
    check(
        lambda x: nn.masked_softmax(x, given, 0.3, is_causal=is_causal),
        lambda x: reference.nn_softmax(x, None if given is None else given.expand(x.shape), 0.3, is_causal),
        [x],
        dtype,
    )


def test_a_learnt_mask_has_its_gradient():
    x, mask = leaf(2, 3, 4, 5, seed=1, dtype=torch.float32), leaf(1, 3, 4, 5, seed=2, dtype=torch.float32)
    check(
        lambda x, mask: nn.masked_softmax(x, mask, 0.3),
        lambda x, mask: reference.nn_softmax(x, mask.expand(x.shape), 0.3, False),
        [x, mask],
        torch.float32,
    )


def test_the_same_bits_for_any_thread_count_and_instruction_set():
    sizes = ((700, 300), (300,), (700, 300))
    x, weight, residual = (leaf(*size, seed=1 + i, dtype=torch.bfloat16) for i, size in enumerate(sizes))

    def run():
        x.grad = weight.grad = None
        y, total = nn.layer_norm(x, weight, residual=residual)
        out = nn.bias_gelu(y) + nn.swiglu(y, total)
        out.backward(residual.detach())
        return tuple(bytes(bits(tensor).numpy()) for tensor in (out, x.grad, weight.grad))

    assert len(set(on_each_setup(run).values())) == 1


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: nn.layer_norm(torch.ones(2, 3), torch.ones(4)), "weight has 4 elements; 3 belong to x"),
        (lambda: nn.layer_norm(torch.ones(2, 3, dtype=torch.float64)), "x is of float64"),
        (lambda: nn.layer_norm(torch.ones(2, 3), residual=torch.ones(3, 3)), "residual has 9 elements; 6 belong to x"),
        (lambda: nn.layer_norm(torch.ones(())), "x has no dimension"),
        (lambda: nn.rms_norm(torch.ones(2, 3), torch.ones(3), -1.0), "eps is -1"),
        (lambda: nn.layer_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3).half()), "bias must have weight's dtype"),
        (
            lambda: nn.bias_act(torch.ones(2, 3), None, "swish"),
            'no activation "swish"; there are: gelu gelu_tanh silu relu sigmoid',
        ),
        (lambda: nn.swiglu(torch.ones(2, 3)), "rows of 3 elements, which are no two halves"),
        (lambda: nn.swiglu(torch.ones(2, 3), torch.ones(2, 3).half()), "up is of float16, unlike x"),
        (lambda: nn.bias_dropout_residual(torch.ones(2, 3), p=1.5), "p is 1.5"),
        (lambda: nn.rotary(torch.ones(2, 3, 4), torch.ones(1, 3, 2), torch.ones(1, 3, 2)), "must be [batch, tokens"),
        (lambda: nn.rotary(torch.ones(1, 3, 1, 4), torch.ones(1, 2, 2), torch.ones(1, 2, 2)), "[1 or 1, 3, rotary_dim"),
        (lambda: nn.rotary(torch.ones(1, 3, 1, 4), torch.ones(1, 3, 3), torch.ones(1, 3, 3)), "rotary_dim is 6"),
        (lambda: nn.masked_softmax(torch.ones(2, 3)), "must be [batch, heads, queries, keys]"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def test_compiled_in_one_graph():
    def block(x, weight, up):
        y, total = nn.rms_norm(x, weight, residual=x)
        return nn.swiglu(y, up) + total

    x, weight, up = (leaf(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate([(4, 8), (8,), (4, 8)]))
    want = block(x, weight, up)
    got = torch.compile(block, backend="aot_eager", fullgraph=True)(x, weight, up)
    assert torch.equal(got, want)


def attend(x):
    return nn.attention(x, x, x, causal=True, window=2, return_lse=True)


@pytest.mark.parametrize(
    "call, shape",
    [
        (lambda x: nn.layer_norm(x, torch.ones(8), torch.ones(8)), (3, 8)),
        (lambda x: nn.rms_norm(x, torch.ones(8), residual=x.detach()), (3, 8)),
        (lambda x: nn.rms_norm(torch.ones(3, 8), x), (8,)),
        (lambda x: nn.bias_gelu(torch.ones(3, 8), x), (8,)),
        (nn.bias_gelu, (3, 8)),
        (nn.swiglu, (3, 8)),
        (lambda x: nn.geglu(torch.ones(3, 8), x), (3, 8)),
        (nn.masked_softmax, (1, 2, 3, 8)),
        (lambda x: nn.masked_softmax(torch.ones(1, 2, 3, 8), x), (1, 1, 3, 8)),
        (attend, (1, 2, 3, 8)),
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_second_derivative_is_an_error_and_no_lost_term(call, shape, is_weighted):
    x = leaf(*shape, seed=1, dtype=torch.float32)

    def loss():
        results = call(x)
        results = results if isinstance(results, tuple) else (results,)
        return sum(y.pow(3).sum() if is_weighted else y.sum() for y in results)

    (gradient,) = torch.autograd.grad(loss(), x, create_graph=True)
    assert torch.equal(gradient, torch.autograd.grad(loss(), x)[0])  # reading this gradient is allowed
    penalty = gradient.pow(2).sum() + x.sum()  # a second path leads to x
    with pytest.raises(BackwardError, match=r"deepspeed_c\.ops\.nn\..*has none") as caught:
        torch.autograd.grad(penalty, x, retain_graph=True)
    assert "Fix: " in str(caught.value)
    with pytest.raises(BackwardError):
        penalty.backward()
    assert x.grad is None or torch.equal(x.grad, torch.ones_like(x)), x.grad  # at most the gradient of the second path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_of_linear_operators(dtype):
    x, bias = leaf(2, 3, 4, 6, seed=1, dtype=dtype), leaf(6, seed=2, dtype=dtype)
    angles = normal(3 * 3, 3).view(1, 3, 3)

    def ours(x, bias):
        torch.manual_seed(5)
        return nn.rotary(nn.bias_dropout_residual(x, bias, x, 0.4), angles.cos(), angles.sin())

    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))

    def formula(x, bias):
        dropped = reference.nn_dropout(x, bias, x, 0.4, seed)
        return reference.nn_rotary(dropped, angles.cos().double(), angles.sin().double(), False, False)

    found = []
    for call, operands in (
        (ours, (x, bias)),
        (formula, (x.detach().double().requires_grad_(), bias.detach().double().requires_grad_())),
    ):
        first = torch.autograd.grad(call(*operands).pow(2).sum(), operands, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.pow(2).sum() for each in first), operands)])
    for got, want in zip(*found, strict=True):
        scale = want.abs().max()
        assert got.dtype == dtype and (got.double() - want).abs().max() < 32 * TOLERANCE[dtype] * scale, (got, want)


@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (0, 8), (2, 0, 8)])
def test_empty_rows_answer_as_torchs(shape):
    n = shape[-1]
    empty = [
        torch.ones(shape, requires_grad=True),
        torch.ones(n, requires_grad=True),
        torch.ones(n, requires_grad=True),
    ]
    calls = (
        (nn.layer_norm, lambda x, w, b: F.layer_norm(x, (n,), w, b)),
        (lambda x, w, b: nn.rms_norm(x, w, residual=x)[0], lambda x, w, b: F.rms_norm(x + x, (n,), w)),
        (lambda x, w, b: nn.bias_gelu(x, w), lambda x, w, b: F.gelu(x + w)),
        (lambda x, w, b: nn.swiglu(x), lambda x, w, b: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
        (lambda x, w, b: nn.bias_dropout_residual(x, w, x, 0.5), lambda x, w, b: F.dropout(x + w) + x),
    )
    for ours, torchs in calls:
        found = []
        for call in (ours, torchs):
            y = call(*empty)
            grads = torch.autograd.grad(y.sum(), empty, allow_unused=True)
            found.append((y.shape, [None if grad is None else grad.tolist() for grad in grads]))
        assert found[0] == found[1], found
    with pytest.raises(ValueError, match="weight has 4 elements; 0 belong to x"):
        nn.rms_norm(torch.ones(3, 0), torch.ones(4))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_empty_tensors_of_heads_answer_as_torchs(shape):
    x = torch.ones(shape, requires_grad=True)
    angles = torch.ones(1, shape[1], shape[3] // 2)
    for y in (nn.rotary(x, angles, angles), nn.masked_softmax(x), nn.attention(x, x, x, causal=True)):
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert y.shape == grad.shape == torch.Size(shape)
    # Without queries, no query attends to the keys.
    q, k = torch.ones(1, 2, 0, 4, requires_grad=True), torch.ones(1, 2, 3, 4, requires_grad=True)
    nn.attention(q, k, k).sum().backward()
    assert q.grad.shape == q.shape and torch.equal(k.grad, torch.zeros_like(k)), (q.grad, k.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [0, 2, 5])
def test_weights_of_any_stride(dtype, stride):
    x, whole = leaf(4, 8, seed=1, dtype=dtype), leaf(40, seed=2, dtype=dtype)
    factor = normal(32, 3, dtype).view(4, 8)

    def column(whole):
        return whole.as_strided((8,), (stride,), 3)

    for ours, formula in (
        (lambda x, w: nn.layer_norm(x, w, w), lambda x, w: F.layer_norm(x, (8,), w, w)),
        (lambda x, w: nn.rms_norm(x, w), lambda x, w: F.rms_norm(x, (8,), w, 1e-6)),
        (lambda x, w: nn.bias_gelu(x, w), lambda x, w: F.gelu(x + w)),
        (lambda x, w: nn.bias_dropout_residual(x, w, x, 0.0), lambda x, w: x + w + x),
    ):
        found = []
        for call, operands in (
            (ours, (x, whole)),
            (formula, (x.detach().double().requires_grad_(), whole.detach().double().requires_grad_())),
        ):
            y = call(operands[0], column(operands[1]))
            found.append([y, *torch.autograd.grad((y * factor).sum(), operands)])
        for got, want in zip(*found, strict=True):
            assert (got.double() - want).abs().max() < 16 * TOLERANCE[dtype] * want.abs().max(), (got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_is_compiled_in_one_graph(dtype):
    def block(x, bias):
        return nn.bias_dropout_residual(nn.bias_dropout_residual(x, bias, x, 0.5), None, x, 0.25)

    x, bias = leaf(40, 8, seed=1, dtype=dtype), leaf(8, seed=2, dtype=dtype)
    found = []
    for call in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(4)
        y = call(x, bias)
        found.append([y, *torch.autograd.grad(y.float().pow(2).sum(), (x, bias))])
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want), (got, want)
