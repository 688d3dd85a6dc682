"""torch's own operators with widened products, against float64, against torch's kernels, and where they must stay
torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_c.ops.products import widen_products
from tests.ops.data import errors

HALVES = (torch.bfloat16, torch.float16)
Function = Callable[..., Tensor]


def are_registered() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")


@pytest.fixture
def widened() -> Iterator[None]:
    end = widen_products(HALVES)
    yield
    end()
    assert not are_registered()


def with_torch(function: Callable[[], Any]) -> Any:
    """The result of ``function`` with torch's kernels; called while products are not widened."""
    assert not are_registered()
    return function()


def with_ours(function: Callable[[], Any]) -> Any:
    end = widen_products(HALVES)
    try:
        return function()
    finally:
        end()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Case:
    """A function and its operands in float32. Gradients are taken for all of them."""

    def __init__(self, function: Function, *operands: Tensor) -> None:
        self.function = function
        self.operands = operands

    def run(self, dtype: torch.dtype, round_to: torch.dtype) -> list[Tensor]:
        """The result and the gradients in ``dtype``; operands have first been rounded to ``round_to``."""
        leaves = [value.to(round_to).to(dtype).detach().requires_grad_() for value in self.operands]
        y = self.function(*leaves)
        dy = randn(*y.shape, seed=9).to(round_to).to(dtype)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
    mask[:, -1] = float("-inf")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.25).softmax(-1) @ v


CASES = {
    "linear": Case(F.linear, randn(7, 33), randn(5, 33), randn(5)),
    "linear of batches": Case(F.linear, randn(2, 3, 17), randn(11, 17), randn(11)),
    "linear without bias": Case(F.linear, randn(2, 3, 17), randn(11, 17)),
    "one row": Case(F.linear, randn(1, 257), randn(3, 257), randn(3)),
    "one element": Case(F.linear, randn(1, 1), randn(1, 1), randn(1)),
    "no rows": Case(F.linear, randn(0, 5), randn(3, 5), randn(3)),
    "no terms": Case(F.linear, randn(4, 0), randn(3, 0), randn(3)),
    "weight [in, out]": Case(lambda x, w, b: torch.addmm(b, x, w), randn(19, 13), randn(13, 7), randn(7)),
    "bias of one element": Case(lambda x, w, b: torch.addmm(b, x, w), randn(5, 6), randn(6, 4), randn(1)),
    "sum": Case(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), randn(5, 4), randn(5, 6), randn(6, 4)),
    "sum of batches": Case(
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), randn(3, 5, 4), randn(3, 5, 6), randn(3, 6, 4)
    ),
    "batches": Case(torch.bmm, randn(3, 5, 7), randn(3, 7, 2)),
    "batch of one row": Case(torch.bmm, randn(4, 1, 9), randn(4, 9, 130)),
    "transposed": Case(lambda a, b: a.mT @ b.mT, randn(2, 7, 5), randn(2, 3, 7)),
    "slices": Case(lambda a, b: a[:, ::2] @ b[1:, 1:], randn(5, 14), randn(8, 9)),
    "slice of one row": Case(lambda a, b: a[:, ::2] @ b, randn(1, 14), randn(7, 9)),
    "slice of one column": Case(lambda a, b: a @ b[::2], randn(3, 7), randn(14, 1)),
    "einsum": Case(lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), randn(2, 3, 4, 5), randn(2, 3, 6, 5)),
    "convolution of lines": Case(
        lambda x, w, b: F.conv1d(x, w, b, padding=1), randn(2, 3, 11), randn(5, 3, 3), randn(5)
    ),
    "depthwise": Case(lambda x, w: F.conv1d(x, w, groups=4), randn(2, 4, 9), randn(4, 1, 4)),
    "convolution": Case(lambda x, w, b: F.conv2d(x, w, b, stride=2), randn(2, 3, 9, 7), randn(4, 3, 3, 3), randn(4)),
    "transposed convolution": Case(F.conv_transpose2d, randn(2, 3, 5, 4), randn(3, 2, 3, 3), randn(2)),
    "attention": Case(attention, randn(2, 3, 7, 16), randn(2, 3, 7, 16, seed=1), randn(2, 3, 7, 16, seed=2)),
    "attention with a mask": Case(masked_attention, randn(1, 2, 5, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8, seed=1)),
    "attention by its formula": Case(by_formula, randn(2, 5, 16), randn(2, 6, 16), randn(2, 6, 16, seed=1)),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_further_from_float64_than_torch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    wanted = case.run(torch.float64, dtype)
    theirs = with_torch(lambda: case.run(dtype, dtype))
    ours = with_ours(lambda: case.run(dtype, dtype))
    assert [(a.dtype, a.shape) for a in ours] == [(a.dtype, a.shape) for a in theirs]
    mine, other = errors(ours, wanted), errors(theirs, wanted)
    print(name, dtype, mine, other)
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    # Attention rounds between its steps, too: its gradient reads the rounded output.
    n_rounded = 3 if "attention" in name else 1
    assert all(a <= max(n_rounded * unit, b) for a, b in zip(mine, other, strict=True)), (mine, other)


def counted(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many products of ``function`` run in the core."""
    from deepspeed_c.ops import products

    calls: list[None] = []
    own = products._product
    monkeypatch.setattr(products, "_product", lambda *args: calls.append(None) or own(*args))
    function()
    return len(calls)


def test_the_core_multiplies_whoever_asks(widened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    x = randn(3, 8).bfloat16().requires_grad_()
    n_of = lambda function: counted(function, monkeypatch)
    assert n_of(lambda: layer(x)) == 1
    assert n_of(lambda: layer(x).sum().backward()) == 3
    with torch.inference_mode():
        assert n_of(lambda: layer(x)) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert n_of(lambda: torch.nn.Linear(8, 4)(randn(3, 8)).sum().backward()) == 2
    assert n_of(lambda: torch.func.vmap(lambda a: a @ x.detach().mT)(randn(5, 3, 8).bfloat16())) == 1
    compiled = torch.compile(lambda x: layer(x).relu(), backend="aot_eager", fullgraph=True)
    assert n_of(lambda: compiled(x).sum().backward()) == 3
    out = torch.empty(3, 3, dtype=torch.bfloat16)
    assert n_of(lambda: torch.mm(x.detach(), x.detach().mT, out=out)) == 1
    assert torch.equal(out, x.detach() @ x.detach().mT)
    added = out.clone().addmm_(x.detach(), x.detach().mT)
    assert errors([added], [out.double() * 2])[0] <= 2**-7


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("uses_gelu", [False, True])
@pytest.mark.parametrize("factors", [{}, {"beta": 0.5, "alpha": 2}], ids=str)
def test_a_sum_with_its_activation(factors: dict[str, float], uses_gelu: bool, dtype: torch.dtype) -> None:
    """torch calls it for layers of ``TransformerEncoderLayer`` that don't train."""
    c, a, b = (value.to(dtype) for value in (randn(7), randn(5, 33), randn(33, 7)))
    run = lambda *operands: torch._addmm_activation(*operands, use_gelu=uses_gelu, **factors)
    wanted = run(c.double(), a.double(), b.double())
    theirs, ours = with_torch(lambda: run(c, a, b)), with_ours(lambda: run(c, a, b))
    assert torch.equal(with_ours(lambda: run(c.float(), a.float(), b.float())), run(c.float(), a.float(), b.float()))
    out = torch.empty(0, dtype=dtype)
    with_ours(lambda: torch._addmm_activation(c, a, b, use_gelu=uses_gelu, out=out, **factors))
    mine, other = errors([ours, out], [wanted] * 2), errors([theirs], [wanted])
    print(dtype, factors, uses_gelu, mine, other)
    assert max(mine) <= max(*other, {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]), (mine, other)


def test_all_products_of_an_encoder_are_widened(widened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dtype=torch.bfloat16).eval()
    x = randn(2, 3, 8).bfloat16()
    with torch.no_grad():  # of queries, keys and values, of scores, of values, of outputs, and two of the MLP
        assert counted(lambda: layer(x), monkeypatch) == 6


def test_others_stay_with_torch(widened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    half, wide = randn(3, 4).bfloat16(), randn(3, 4)
    n_of = lambda function: counted(function, monkeypatch)
    assert n_of(lambda: wide @ wide.mT) == 0
    assert n_of(lambda: wide.double() @ wide.double().mT) == 0
    assert n_of(lambda: half.to("meta") @ half.mT.to("meta")) == 0
    assert n_of(lambda: half.to_sparse() @ half.mT.contiguous()) == 0
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(half)
        assert n_of(lambda: fake @ fake.mT) == 0


MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "shapes": lambda x: x @ x,
    "dtypes": lambda x: torch.mm(x, x.mT.float()),
    "dtype of the bias": lambda x: torch.addmm(torch.ones(3), x, x.mT),
    "dimensions": lambda x: torch.mm(x[0], x),
    "batches": lambda x: torch.bmm(x.expand(2, 3, 4), x.mT.expand(3, 4, 3)),
    "bias": lambda x: torch.addmm(x, x, x.mT[:, :2]),
    "dtype of out": lambda x: torch.mm(x, x.mT, out=torch.empty(3, 3)),
    "channels": lambda x: F.conv1d(x, x[:, :, None]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_the_errors_of_torch(name: str) -> None:
    x = randn(3, 4).bfloat16()
    texts = []
    for run in (with_torch, with_ours):
        with pytest.raises(RuntimeError) as caught:
            run(lambda: MISTAKES[name](x))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_an_out_of_another_shape_is_resized(widened: None) -> None:
    x = randn(3, 4).bfloat16()
    out = torch.empty(0, dtype=torch.bfloat16)
    torch.mm(x, x.mT, out=out)
    assert out.shape == (3, 3) and errors([out], [x.double() @ x.double().mT])[0] <= 2**-8


def test_second_derivatives(widened: None) -> None:
    def bent(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad((x @ x @ x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    x = (randn(5, 5) / 4).bfloat16()
    found, wanted = bent(x.clone().requires_grad_()), bent(x.double().requires_grad_())
    assert errors([found], [wanted])[0] <= 8 * 2**-8, (found, wanted)


def test_a_row_has_the_same_bits_in_any_batch(widened: None) -> None:
    x, weight = randn(67, 300).bfloat16(), randn(130, 300).bfloat16()
    whole = F.linear(x, weight)
    for i in (0, 31, 66):
        assert torch.equal(F.linear(x[i : i + 1], weight)[0], whole[i])
    batch = torch.bmm(x[:66].view(2, 33, 300), weight.mT.expand(2, 300, 130))
    assert torch.equal(batch.view(66, 130), whole[:66])


def test_the_last_holder_of_a_dtype_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = {dtype: randn(3, 3).to(dtype) for dtype in HALVES}

    def ours() -> list[int]:
        return [counted(lambda x=x: x @ x, monkeypatch) for x in halves.values()]

    assert not are_registered() and ours() == [0, 0]
    widen_products(())()
    first = widen_products([torch.bfloat16])
    assert ours() == [1, 0]
    second = widen_products(HALVES)
    assert ours() == [1, 1]
    first()
    first()  # a second end of the same call changes nothing
    assert ours() == [1, 1]
    second()
    assert not are_registered() and ours() == [0, 0]
