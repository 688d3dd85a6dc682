"""Operators of mixtures of experts against loops in Python and formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_c.errors import BackwardError, RoutingError
from deepspeed_c.ops import moe, moe_reference, reference
from tests.ops.data import DTYPES, bits

# Tokens, experts, choices: nothing, one of everything, primes, every expert chosen, and several chunks of threads.
SHAPES = [
    (0, 1, 1),
    (0, 8, 2),
    (1, 1, 1),
    (3, 7, 7),
    (17, 5, 0),
    (31, 8, 2),
    (127, 13, 3),
    (1009, 64, 6),
    (2048, 256, 8),
]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_indices(n_tokens, n_experts, k, seed=0, unused=0.2):
    logits = torch.rand(n_tokens, n_experts, generator=random(seed))
    indices = logits.argsort(-1)[:, :k].int()
    return indices.where(torch.rand(n_tokens, k, generator=random(seed + 1)) >= unused, -1)


# The choice of experts.


def scores_of(row, score):
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    largest = max(row)
    if largest == -math.inf:
        return [0.0] * len(row)
    terms = [math.exp(x - largest) for x in row]
    return [term / math.fsum(terms) for term in terms]


def chosen(row, k, score, bias, n_groups, n_limited_groups):
    """The definition, for one token: a list of experts, best first."""
    n_experts = len(row)
    biased = [s + b for s, b in zip(scores_of(row, score), bias or [0.0] * n_experts)]
    values = row if bias is None else biased
    size = n_experts // n_groups
    goodness = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_groups)]
    groups = sorted(range(n_groups), key=lambda g: (-goodness[g], g))[:n_limited_groups]
    experts = [e for g in groups for e in range(g * size, (g + 1) * size)]
    return sorted(experts, key=lambda e: (-values[e], e))[:k]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_route_is_the_definition(shape, has_bias, score):
    n_tokens, n_experts, k = shape
    logits = 3 * torch.randn(n_tokens, n_experts, generator=random(n_tokens))
    bias = torch.randn(n_experts, generator=random(5)) * 0.1 if has_bias else None
    got = moe.route(logits, k, score=score, bias=bias)
    assert got.dtype == torch.int32 and got.shape == (n_tokens, k)
    want = [chosen(row, k, score, bias.tolist() if has_bias else None, 1, 1) for row in logits.tolist()]
    assert_choices(got, want, logits, score, bias)


def assert_choices(got, want, logits, score, bias):
    """Equal choices, except where values differ by less than the rounding of a score in float32."""
    for t, (mine, expected) in enumerate(zip(got.tolist(), want)):
        if mine == expected:
            continue
        assert bias is not None, (t, mine, expected)
        values = [s + b for s, b in zip(scores_of(logits[t].tolist(), score), bias.tolist())]
        for a, b in zip(mine, expected):
            assert abs(values[a] - values[b]) < 3e-7, (t, mine, expected, values[a], values[b])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "n_experts, n_groups, n_limited, k", [(8, 4, 2, 3), (16, 4, 1, 4), (6, 6, 3, 2), (256, 8, 4, 8)]
)
def test_route_within_the_best_groups(n_experts, n_groups, n_limited, k, has_bias, score):
    logits = torch.randn(97, n_experts, generator=random(n_experts))
    bias = torch.randn(n_experts, generator=random(5)) * 0.3 if has_bias else None
    got = moe.route(logits, k, score=score, bias=bias, n_groups=n_groups, n_limited_groups=n_limited)
    want = [chosen(row, k, score, bias.tolist() if has_bias else None, n_groups, n_limited) for row in logits.tolist()]
    n_equal = sum(a == b for a, b in zip(got.tolist(), want))
    # Two groups may be as good as each other in float32; random logits make this rare.
    assert n_equal >= 96, (n_equal, got.tolist()[:3], want[:3])


def test_ties_go_to_the_lower_expert():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, -0.0, 0.0], [-1e30, 5.0, 3e38, 5.0]])
    assert moe.route(logits, 4).tolist() == [[1, 2, 0, 3], [0, 1, 2, 3], [0, 1, 2, 3], [2, 1, 3, 0]]
    assert moe.route(logits, 2, bias=torch.zeros(4)).tolist() == [[1, 2], [0, 1], [0, 1], [2, 0]]
    assert moe.route(logits[1:2], 2, n_groups=2, n_limited_groups=1).tolist() == [[0, 1]]


def test_large_logits_are_told_apart_although_their_scores_round_to_the_same_number():
    assert moe.route(torch.tensor([[30.0, 40.0, 35.0]]), 3, score="sigmoid").tolist() == [[1, 2, 0]]


def test_experts_that_are_masked_out_come_last():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0], [-torch.inf] * 4])
    for score in ("softmax", "sigmoid"):
        for bias in (None, torch.zeros(4)):
            assert moe.route(logits, 4, score=score, bias=bias).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]], (score, bias)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_without_a_score_is_refused_with_its_token_and_expert(bad):
    logits = torch.randn(5000, 8, generator=random(0))
    logits[4321, 6] = bad
    logits[4999, 0] = bad
    with pytest.raises(RoutingError, match=f"token 4321 for expert 6 is {bad}"):
        moe.route(logits, 2)


def test_arguments_of_route_that_do_not_fit_are_refused():
    logits = torch.zeros(3, 8)
    for arguments, message in [
        ({"k": 9}, "k is 9, must be 0 to 8"),
        ({"k": 2, "n_groups": 3}, "n_groups is 3, must divide 8"),
        ({"k": 2, "n_groups": 4, "n_limited_groups": 5}, "n_limited_groups is 5, must be 1 to 4"),
        ({"k": 3, "n_groups": 4, "n_limited_groups": 1}, "only 2 experts"),
        ({"k": 1, "score": "tanh"}, "score is 'tanh'"),
        ({"k": 1, "bias": torch.zeros(7)}, r"bias has shape \[7\], must be \[8\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            moe.route(logits, **arguments)
    with pytest.raises(ValueError, match=r"logits is torch\.bfloat16, must be torch\.float32"):
        moe.route(logits.bfloat16(), 1)


# Places within experts.


def placed(indices, n_experts, capacity, order, priority):
    n_tokens, k = len(indices), len(indices[0]) if indices else 0
    slots = [(t, j) for t in range(n_tokens) for j in range(k) if indices[t][j] >= 0]
    if order == "choice":
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    kept, places, counts = [[-1] * k for _ in indices], [[0] * k for _ in indices], [0] * n_experts
    for e in range(n_experts):
        mine = [slot for slot in slots if indices[slot[0]][slot[1]] == e]
        counts[e] = len(mine)
        if capacity >= 0 and order == "priority":
            mine = sorted(sorted(mine, key=lambda slot: -priority[slot[0]][slot[1]])[:capacity])
        elif capacity >= 0:
            mine = mine[:capacity]
        for i, (t, j) in enumerate(mine):
            kept[t][j], places[t][j] = e, i
    return kept, places, counts


@pytest.mark.parametrize("order", ["choice", "token", "priority"])
@pytest.mark.parametrize("capacity", [-1, 0, 1, 4, 100_000])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_place_is_the_definition(shape, capacity, order):
    n_tokens, n_experts, k = shape
    indices = some_indices(*shape)
    # Few different priorities, so that ties are frequent; infinite ones and both zeros among them.
    levels = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 0.5, 1.0, torch.inf])
    priority = levels[torch.randint(0, 7, (n_tokens, k), generator=random(3))] if order == "priority" else None
    got = moe.place(indices, n_experts, capacity, order=order, priority=priority)
    want = placed(indices.tolist(), n_experts, capacity, order, priority is not None and priority.tolist())
    assert [x.dtype for x in got] == [torch.int32, torch.int32, torch.int64]
    assert [x.shape for x in got] == [(n_tokens, k), (n_tokens, k), (n_experts,)]
    for mine, expected, name in zip(got, want, ("indices", "locations", "counts")):
        assert mine.tolist() == expected, name


def test_one_expert_may_take_every_token():
    indices = torch.zeros(5001, 1, dtype=torch.int32)
    kept, locations, counts = moe.place(indices, 3, 4000, order="token")
    assert counts.tolist() == [5001, 0, 0]
    assert locations[:4000, 0].tolist() == list(range(4000)) and not locations[4000:].any()
    assert (kept[:4000] == 0).all() and (kept[4000:] == -1).all()


def test_arguments_of_place_that_do_not_fit_are_refused():
    indices = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    nan = torch.tensor([[0.0, 0.0], [0.0, math.nan]])
    for arguments, message in [
        ({"n_experts": 2, "capacity": 1}, r"indices\[1, 0\] is 2, must be -1 or one of 2 experts"),
        ({"n_experts": 3, "capacity": -2}, "capacity is -2"),
        ({"n_experts": 3, "capacity": 1, "order": "random"}, "order is 'random'"),
        ({"n_experts": 3, "capacity": 1, "order": "priority"}, "priority is missing"),
        ({"n_experts": 3, "capacity": 1, "priority": nan}, "priority is given"),
        ({"n_experts": 3, "capacity": 1, "order": "priority", "priority": nan}, r"priority\[1, 1\] is nan"),
        ({"n_experts": 3, "capacity": 1, "order": "priority", "priority": nan[:1]}, r"priority has shape \[1, 2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            moe.place(indices, **arguments)
    with pytest.raises(ValueError, match=r"indices\[0, 1\] is -2"):
        moe.sort_slots(torch.tensor([[0, -2]], dtype=torch.int32), 3)
    with pytest.raises(ValueError, match=r"indices is torch\.int64"):
        moe.sort_slots(torch.tensor([[0, -1]]), 3)


# Random numbers.


def philox_word(seed, i):
    """Word i of Philox4x32-7, in Python's integers."""
    counter = i // 4
    c, key = [counter % 2**32, counter >> 32, 0, 0], [seed % 2**32, seed >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b % 2**32, a >> 32 ^ c[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c[i % 4]


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 1021, 2**34 - 2, 2**40 + 5])
@pytest.mark.parametrize("n", [0, 1, 7, 1009])
def test_uniform_numbers_are_words_of_philox(n, offset):
    seed = 0x123456789ABCDEF
    got = moe.uniform((n,), seed, offset, "cpu")
    assert got.dtype == torch.float32
    want = [(philox_word(seed, offset + i) >> 8) / 2**24 for i in range(n)]
    assert got.tolist() == want


def test_uniform_numbers_depend_on_seed_and_place_alone():
    whole = moe.uniform((101, 64), 7, 0, "cpu")
    assert torch.equal(whole[50:].flatten(), moe.uniform((51 * 64,), 7, 50 * 64, "cpu"))
    assert not torch.equal(whole, moe.uniform((101, 64), 8, 0, "cpu"))
    assert 0 <= whole.min() and whole.max() < 1 and abs(whole.mean() - 0.5) < 0.02
    with pytest.raises(ValueError, match="offset is -1"):
        moe.uniform((2,), 7, -1, "cpu")


# Sorting.


@pytest.mark.parametrize("shape", SHAPES)
def test_sorted_slots_are_a_stable_sort(shape):
    n_tokens, n_experts, k = shape
    indices = some_indices(*shape)
    order, inverse, counts = moe.sort_slots(indices, n_experts)
    flat = indices.flatten().tolist()
    want = sorted((slot for slot, e in enumerate(flat) if e >= 0), key=lambda slot: flat[slot])
    assert order.tolist() == want and order.dtype == torch.int64
    place_of = {slot: i for i, slot in enumerate(want)}
    assert inverse.flatten().tolist() == [place_of.get(slot, -1) for slot in range(len(flat))]
    assert inverse.shape == (n_tokens, k) and inverse.dtype == torch.int64
    assert counts.tolist() == [flat.count(e) for e in range(n_experts)] and counts.dtype == torch.int64


# Rows.

WIDTHS = [1, 17, 512]
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}


def sorted_case(shape, width, dtype, seed=0):
    n_tokens, n_experts, _ = shape
    order, inverse, _ = moe.sort_slots(some_indices(*shape, seed=seed), n_experts)
    x = torch.randn(n_tokens, width, generator=random(seed + 9)).to(dtype)
    return x, order, inverse


def near(got, want, dtype, n_terms, scale):
    """Equal up to one rounding to dtype and n_terms roundings in float32."""
    error = (got.double() - want).abs()
    limit = UNIT[dtype] * want.abs() + n_terms * 2**-24 * scale + (2**-25 if dtype == torch.float16 else 0)
    assert (error <= limit).all(), (float((error - limit).max()), float(error.max()))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_gathered_rows_and_their_gradient(shape, width, dtype):
    k = shape[2]
    x, order, inverse = sorted_case(shape, width, dtype)
    x.requires_grad_()
    rows = moe.gather_rows(x, order, k, inverse)
    assert rows.shape == (len(order), width) and rows.dtype == dtype
    for i, slot in enumerate(order.tolist()):
        assert torch.equal(rows[i], x[slot // k])
    drows = torch.randn(rows.shape, generator=random(4)).to(dtype)
    rows.backward(drows)
    want, scale = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for i, slot in enumerate(order.tolist()):
        want[slot // k] += drows[i].double()
        scale[slot // k] += drows[i].double().abs()
    near(x.grad, want, dtype, max(k - 1, 0), scale)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_combined_rows_and_their_gradients(shape, width, dtype):
    _, order, inverse = sorted_case(shape, width, dtype)
    n_tokens, k = inverse.shape
    rows = torch.randn(len(order), width, generator=random(1)).to(dtype).requires_grad_()
    weights = torch.randn(n_tokens, k, generator=random(2)).requires_grad_()
    out = moe.combine_rows(rows, inverse, weights)
    assert out.shape == (n_tokens, width) and out.dtype == dtype
    dout = torch.randn(out.shape, generator=random(3)).to(dtype)
    out.backward(dout)
    zeros = torch.zeros(out.shape, dtype=torch.float64)
    want, scale, drows = zeros.clone(), zeros.clone(), torch.zeros(rows.shape, dtype=torch.float64)
    dweights, dscale = (torch.zeros(n_tokens, k, dtype=torch.float64) for _ in range(2))
    for t in range(n_tokens):
        for j in range(k):
            i = int(inverse[t, j])
            if i >= 0:
                term = weights[t, j].detach().double() * rows[i].detach().double()
                want[t] += term
                scale[t] += term.abs()
                drows[i] = weights[t, j].detach().double() * dout[t].double()
                products = dout[t].double() * rows[i].detach().double()
                dweights[t, j], dscale[t, j] = products.sum(), products.abs().sum()
    near(out, want, dtype, 2 * k, scale)
    near(rows.grad, drows, dtype, 1, drows.abs())
    near(weights.grad, dweights, torch.float32, width + 1, dscale)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("n_rows, width", [(0, 3), (1, 1), (31, 17), (1009, 64)])
def test_permuted_rows_and_their_gradient(n_rows, width, dtype):
    rows = torch.randn(n_rows, width, generator=random(1)).to(dtype).requires_grad_()
    order = torch.randperm(n_rows, generator=random(2))
    out = moe.permute_rows(rows, order)
    assert torch.equal(bits(out), bits(rows.detach()[order]))
    dout = torch.randn(out.shape, generator=random(3)).to(dtype)
    out.backward(dout)
    for i, at in enumerate(order.tolist()):
        assert torch.equal(rows.grad[at], dout[i])


def test_shapes_of_rows_that_do_not_fit_are_refused():
    x, order, inverse = sorted_case((31, 8, 2), 5, torch.float32)
    rows, weights = x[:1].expand(len(order), 5), torch.ones(31, 2)
    for call, message in [
        (lambda: moe.gather_rows(x[1:], order, 2, inverse), r"inverse has shape \[31, 2\], must be \[30, 2\]"),
        (lambda: moe.gather_rows(x, order, 3, inverse), r"inverse has shape \[31, 2\], must be \[31, 3\]"),
        (lambda: moe.gather_rows(x, order.int(), 2, inverse), "order is torch.int32"),
        (lambda: moe.combine_rows(rows, inverse, weights[1:]), r"weights has shape \[30, 2\]"),
        (lambda: moe.combine_rows(rows, inverse, weights.half()), "weights is torch.float16"),
        (lambda: moe.permute_rows(rows, order[1:]), "order has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_philox_from_a_later_counter_is_the_rest_of_the_words():
    assert torch.equal(reference.philox(3, 40)[8:], reference.philox(3, 32, first_counter=2))


def test_orders_that_do_not_fit_their_rows_are_refused():
    x, order, inverse = sorted_case((31, 8, 2), 5, torch.float32)
    rows, weights = torch.randn(len(order), 5, requires_grad=True), torch.ones(31, 2)
    double, far = inverse.clone(), inverse.clone()
    slots = (inverse >= 0).nonzero().tolist()
    double[tuple(slots[-1])] = inverse[tuple(slots[0])]
    far[tuple(slots[0])] = len(order)
    with pytest.raises(ValueError, match="but inverse has"):
        moe.gather_rows(x, order.flip(0), 2, inverse)
    with pytest.raises(ValueError, match=f"is {len(order)}, must be -1 or one of {len(order)} rows"):
        moe.combine_rows(rows, far, weights)
    with pytest.raises(ValueError, match="which another slot has too"):
        moe.combine_rows(rows, double, weights).sum().backward()
    with pytest.raises(ValueError, match="no permutation"):
        moe.permute_rows(rows, torch.zeros(len(order), dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_have_the_bits_of_the_formulas(dtype):
    """Where no logarithm or exponential is computed, C and PyTorch round the same numbers in the same order."""
    x, order, inverse = sorted_case((1009, 64, 6), 33, dtype)
    weights = torch.randn(inverse.shape, generator=random(2))
    rows = moe.gather_rows(x, order, 6, inverse)
    assert torch.equal(rows, moe_reference.gather_rows(x, order, 6))
    assert torch.equal(moe.combine_rows(rows, inverse, weights), moe_reference.combine_rows(rows, inverse, weights))
    assert torch.equal(moe.uniform((1009,), 3, 17), moe_reference.uniform((1009,), 3, 17, torch.device("cpu")))


def test_operands_may_have_any_strides():
    indices = some_indices(6, 31, 2).t().contiguous().t()
    wide = torch.randn(17, 31, generator=random(1)).t()
    assert not wide.is_contiguous() and torch.equal(moe.route(wide, 2), moe.route(wide.contiguous(), 2))
    for mine, dense in zip(moe.place(indices, 31, 1), moe.place(indices.contiguous(), 31, 1)):
        assert torch.equal(mine, dense)
    x, order, inverse = sorted_case((31, 8, 2), 5, torch.float32)
    turned = x.t().contiguous().t()
    rows = moe.gather_rows(turned, order, 2, inverse.t().contiguous().t())
    assert torch.equal(rows, moe.gather_rows(x, order, 2, inverse))
    weights = torch.rand(2, 31, generator=random(2)).t()
    out = moe.combine_rows(rows.t().contiguous().t(), inverse, weights)
    assert torch.equal(out, moe.combine_rows(rows, inverse, weights.contiguous()))


def test_a_second_derivative_raises_or_is_right():
    x, order, inverse = sorted_case((31, 8, 2), 5, torch.float32)
    x.requires_grad_()
    rows = moe.gather_rows(x, order, 2, inverse)
    (grad,) = torch.autograd.grad((rows**2).sum(), x, create_graph=True)
    with pytest.raises(BackwardError, match=r"ops\.moe\.gather_rows"):
        grad.sum().backward()
    rows, weights = rows.detach().requires_grad_(), torch.ones(31, 2, requires_grad=True)
    (grad,) = torch.autograd.grad((moe.combine_rows(rows, inverse, weights) ** 2).sum(), rows, create_graph=True)
    with pytest.raises(BackwardError, match=r"ops\.moe\.combine_rows"):
        grad.sum().backward()
    permutation = torch.randperm(len(rows), generator=random(3))
    (grad,) = torch.autograd.grad((moe.permute_rows(rows, permutation) ** 3).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), rows)
    torch.testing.assert_close(second, 6 * rows.detach())


def test_compiled_whole_with_its_gradients():
    x, order, inverse = sorted_case((31, 8, 2), 5, torch.float32)
    x.requires_grad_()
    logits = torch.randn(31, 8, generator=random(6))

    def layer(x, logits):
        indices = moe.route(logits, 2)
        kept, _, counts = moe.place(indices, 8, 9)
        weights = logits.softmax(-1).gather(1, indices.long()) * (kept >= 0)
        rows = moe.gather_rows(x, order, 2, inverse)
        return moe.combine_rows(rows.tanh(), inverse, weights), counts, moe.uniform((3,), 5, 1)

    want, counts, numbers = layer(x, logits)
    (grad,) = torch.autograd.grad(want.square().sum(), x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got, compiled_counts, compiled_numbers = compiled(x, logits)
    (compiled_grad,) = torch.autograd.grad(got.square().sum(), x)
    assert torch.equal(got, want) and torch.equal(compiled_grad, grad)
    assert torch.equal(compiled_counts, counts) and torch.equal(compiled_numbers, numbers)


def test_sorted_slots_compile_where_shapes_may_depend_on_data():
    def sort(indices):
        order, inverse, counts = moe.sort_slots(indices, 8)
        return order + 1, inverse, counts

    indices = some_indices(31, 8, 2)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(sort, backend="aot_eager", fullgraph=True)(indices)
    for mine, expected in zip(got, sort(indices)):
        assert torch.equal(mine, expected)
