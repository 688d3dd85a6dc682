"""Sums in a tree against their recursive definition in torch, and exact sums of squares against fractions; on kernels
and on torch's operators."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from deepspeed_c.ops import sums, sums_reference
from tests.ops.data import DTYPES, bits, normal, on_each_setup

OPS = torch.ops.deepspeed_c
PUSHES = {"kernel": OPS.tree_push_, "reference": sums_reference.tree_push_}
SUMS = {"kernel": OPS.tree_sum_, "reference": sums_reference.tree_sum_}
SQUARES = {"kernel": OPS.flat_exact_squares, "reference": sums_reference.exact_squares}


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """The largest power of two of the leaves, by halves, and the rest."""
    if len(leaves) == 1:
        return leaves[0].float()
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return tree_sum(leaves[:half]) + tree_sum(leaves[half:])


def make_levels(n_leaves: int, n: int) -> list[Tensor]:
    return [torch.full((n,), float("nan")) for _ in range(sums.n_levels(n_leaves))]


def push_in_rounds(leaves: list[Tensor], width: int, push=sums.tree_push_) -> list[Tensor]:
    levels = make_levels(len(leaves), leaves[0].numel())
    for done in range(0, len(leaves), width):
        push(levels, done, leaves[done : done + width])
    return levels


def assert_same(got: Tensor, wanted: Tensor, what: str) -> None:
    assert torch.equal(bits(got), bits(wanted)), f"{what}: {got} and {wanted}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("by", PUSHES)
def test_any_rounds_give_the_tree(by, width, dtype):
    for n_leaves in (1, 2, 3, 5, 12, 24, 37):
        leaves = [normal(1025, i, dtype, scale=10.0) for i in range(n_leaves)]
        levels = push_in_rounds(leaves, width, PUSHES[by])
        out = torch.empty(1025)
        SUMS[by](out, levels, n_leaves, 1.0)
        assert_same(out, tree_sum(leaves), f"{n_leaves} leaves")


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 5000])
def test_kernels_have_the_bits_of_the_reference(n):
    for n_leaves in (1, 6, 7, 8):
        leaves = [normal(n, i, DTYPES[i % 3]) for i in range(n_leaves)]
        found = {by: push_in_rounds(leaves, 3, push) for by, push in PUSHES.items()}
        for level, (a, b) in enumerate(zip(*found.values(), strict=True)):
            if n_leaves >> level & 1:
                assert_same(a, b, f"level {level}")
        for dtype in DTYPES:
            a, b = (torch.empty(n, dtype=dtype) for _ in range(2))
            for out, (by, levels) in zip((a, b), found.items()):
                SUMS[by](out, levels, n_leaves, 1 / n_leaves)
            assert_same(a, b, f"{n_leaves} leaves as {dtype}")


def test_mean_is_rounded_once():
    leaves = [normal(100, i) for i in range(3)]
    levels = push_in_rounds(leaves, 2)
    out = torch.empty(100)
    version = out._version
    sums.tree_sum_(out, levels, 3, scale=1 / 3)
    assert_same(out, tree_sum(leaves) * torch.tensor(1 / 3), "mean")
    assert out._version > version


def test_threads_and_instruction_sets_do_not_matter():
    leaves = [normal(100_003, i, DTYPES[i % 3]) for i in range(5)]

    def run() -> bytes:
        out = torch.empty(100_003)
        sums.tree_sum_(out, push_in_rounds(leaves, 2), 5, scale=0.2)
        return bits(out).numpy().tobytes()

    assert len(set(on_each_setup(run).values())) == 1


def test_meta_tensors_are_taken_and_nothing_pushed_is_nothing():
    meta = [torch.empty(3, device="meta") for _ in range(2)]
    sums.tree_push_(meta, 2, meta[:1])
    sums.tree_sum_(meta[0], meta, 3)
    sums.tree_push_([], 0, [])
    level = torch.tensor([2.0])
    sums.tree_push_([level], 1, [])
    assert level.item() == 2.0


@pytest.mark.parametrize("by", PUSHES)
@pytest.mark.parametrize(
    "levels, n_before, leaves, words",
    [
        ([torch.ones(3)], 1, [torch.ones(3)], "1 levels, but 2 leaves need 2"),
        ([torch.ones(3)], 0, [torch.ones(4)], r"leaves\[0\] has 4 elements, levels\[0\] has 3"),
        ([torch.ones(3).half()], 0, [torch.ones(3)], r"levels\[0\] must be of float32"),
        ([torch.ones(3)], 0, [torch.ones(3).long()], r"leaves\[0\] is of .*int64"),
        ([torch.ones(6)[::2]], 0, [torch.ones(3)], r"levels\[0\] must be a contiguous"),
        ([torch.ones(3)], -1, [torch.ones(3)], "n_before is -1"),
    ],
)
def test_pushes_are_refused(by, levels, n_before, leaves, words):
    before = [level.clone() for level in levels]
    with pytest.raises(ValueError, match=words):
        PUSHES[by](levels, n_before, leaves)
    assert all(torch.equal(a, b) for a, b in zip(levels, before))


@pytest.mark.parametrize("by", SUMS)
@pytest.mark.parametrize(
    "out, levels, n_leaves, scale, words",
    [
        (torch.ones(3), [torch.ones(3)], 0, 1.0, "n_leaves is 0"),
        (torch.ones(3), [torch.ones(3)], 2, 1.0, "1 levels, but 2 leaves need 2"),
        (torch.ones(3), [torch.ones(3)], 1, float("nan"), "scale is nan"),
        (torch.ones(4), [torch.ones(3)], 1, 1.0, r"levels\[0\] has 3 elements, out has 4"),
        (torch.ones(3).double(), [torch.ones(3)], 1, 1.0, "out is of .*float64"),
    ],
)
def test_sums_are_refused(by, out, levels, n_leaves, scale, words):
    with pytest.raises(ValueError, match=words):
        SUMS[by](out, levels, n_leaves, scale)
    assert (out == 1).all()


def any_bits(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements of any bits: subnormal, infinite and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        return torch.randint(-(2**31), 2**31, (n,), generator=generator).int().view(dtype)
    return torch.randint(-(2**15), 2**15, (n,), generator=generator).short().view(dtype)


def fraction_of(limbs: Tensor) -> Fraction:
    return sum(Fraction(limb) * Fraction(2) ** (32 * i - 298) for i, limb in enumerate(limbs.tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", SQUARES)
def test_squares_are_exact(by, dtype):
    special = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
    tensors = [
        normal(1025, 1, dtype),
        any_bits(3000, 2, dtype),
        torch.tensor(special).to(dtype),
        torch.zeros(0, dtype=dtype),
    ]
    got = SQUARES[by](tensors)
    elements = [x for tensor in tensors for x in tensor.tolist()]
    finite = [x for x in elements if math.isfinite(x)]
    assert fraction_of(got[: sums.N_LIMBS]) == sum(Fraction(x) ** 2 for x in finite)
    assert got[sums.N_LIMBS] == len(elements) - len(finite)
    assert got.dtype == torch.int64 and len(got) == sums.N_LIMBS + 1
    assert ((got >= 0) & (got < 2**32)).all(), got


def test_squares_of_parts_add_up_in_float64():
    x = any_bits(60_001, 3)
    whole = sums.exact_squares([x])
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(4))]
    parts = shuffled.split([1, 0, 20_000, 40_000])
    limbs = sum(sums.exact_squares([part]).double() for part in parts)
    value = sums.value_of_limbs(limbs[: sums.N_LIMBS].tolist())
    assert value == sums.value_of_limbs(whole[: sums.N_LIMBS].tolist()), (value, whole)
    assert limbs[sums.N_LIMBS] == whole[sums.N_LIMBS]
    assert torch.equal(sums.exact_squares(parts), whole)


def test_squares_on_threads_and_instruction_sets():
    tensors = [normal(100_003, 1), any_bits(100_003, 2), any_bits(5, 3), normal(70_000, 4, torch.bfloat16)]
    found = on_each_setup(lambda: tuple(sums.exact_squares(tensors).tolist()))
    assert set(found.values()) == {tuple(sums_reference.exact_squares(tensors).tolist())}, found


def test_squares_with_subnormal_numbers_flushed():
    x = torch.cat([any_bits(1000, 1), torch.tensor([1e-45, -1e-39] * 600)])
    wanted = sums.exact_squares([x])
    torch.set_flush_denormal(True)  # without effect where a processor can't do it
    try:
        assert torch.equal(sums.exact_squares([x]), wanted)
    finally:
        torch.set_flush_denormal(False)


def test_squares_of_nothing():
    assert sums.exact_squares([]).tolist() == [0] * (sums.N_LIMBS + 1)
    assert sums.exact_squares([torch.zeros(0)]).tolist() == [0] * (sums.N_LIMBS + 1)
    assert sums.exact_squares([torch.zeros(3, device="meta")]).shape == (sums.N_LIMBS + 1,)


@pytest.mark.parametrize("by", SQUARES)
def test_squares_of_other_dtypes_are_refused(by):
    with pytest.raises(ValueError, match=r"flat_exact_squares.*tensors\[1\].*int64"):
        SQUARES[by]([torch.ones(3), torch.ones(3).long()])


def test_limbs_of_numbers():
    numbers = [0.0, -0.0, 1.0, -1.5, 3.4e38, 1e-45, -1e-40, 2.0**341, 2.0**-298, *any_bits(50, 5).tolist()]
    for x in numbers:
        if math.isfinite(x):
            assert sums.value_of_limbs(sums.limbs_of(x)) == x
        else:
            assert math.isnan(sums.value_of_limbs(sums.limbs_of(x)))
    assert math.isnan(sums.value_of_limbs(sums.limbs_of(2.0**342)))
    assert sums.value_of_limbs(sums.limbs_of(2.0**-299)) == 0.0
    columns = list(zip(*map(sums.limbs_of, [1e30, 1.0, -1e30])))
    assert sums.value_of_limbs([sum(column) for column in columns]) == 1.0


def test_values_of_limbs_are_rounded_once():
    draw = random.Random(7)
    for _ in range(200):
        limbs = [draw.randrange(-(2**40), 2**40) if draw.random() < 0.5 else 0 for _ in range(sums.N_LIMBS)]
        wanted = sum(Fraction(limb) * Fraction(2) ** (32 * i - 298) for i, limb in enumerate(limbs))
        assert sums.value_of_limbs(limbs) == float(wanted), limbs
