"""Norm, scale, reduce and cast over flat buffers against float64 and against torch's own."""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path

import pytest
import torch

from deepspeed_c.ops import flat, reference
from tests.ops.data import DTYPES, SIZES, bits, normal, on_each_setup


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_norm_is_the_float64_norm(dtype, offset):
    tensors = [normal(n, n, dtype, offset=offset) for n in SIZES]
    sumsq, n_nonfinite = reference.sumsq(tensors)
    got = flat.norm(tensors)
    assert got.sumsq.tolist() == pytest.approx([sumsq, 0.0], rel=1e-6)
    assert got.value == pytest.approx(math.sqrt(sumsq), rel=1e-6)
    assert n_nonfinite == got.n_nonfinite == 0


def test_norm_of_mixed_dtypes_and_of_nothing():
    tensors = [normal(1009, i, dtype) for i, dtype in enumerate(DTYPES)]
    assert flat.norm(tensors).sumsq.tolist() == pytest.approx([reference.sumsq(tensors)[0], 0.0], rel=1e-6)
    assert flat.norm([]).value == 0.0
    assert flat.norm([torch.zeros(0)]).sumsq.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 7, 8, 4095, 4096, 10_006])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_non_finite_element_is_counted(dtype, at, value):
    tensor = normal(10_007, 1, dtype)
    tensor[at] = value
    tensor[5000] = math.nan
    got = flat.norm([tensor])
    assert got.n_nonfinite == 2 and got.value == math.inf
    assert float(got.sumsq[0]) == pytest.approx(reference.sumsq([tensor])[0], rel=1e-6)


def test_squares_that_overflow_float32_are_finite():
    assert flat.norm([torch.full((4,), 3e38)]).value == pytest.approx(6e38, rel=1e-6)


def test_large_sum_does_not_lose_small_ones():
    tensor = torch.full((2_000_003,), 1e-3)
    tensor[0] = 1000.0
    assert float(flat.norm([tensor]).sumsq[0]) == pytest.approx(
        1e6 + 2_000_002 * float(torch.tensor(1e-3)) ** 2, rel=1e-12
    )


def test_norm_has_the_same_bits_for_any_thread_count_and_instruction_set():
    tensors = [normal(n, n, torch.bfloat16) for n in (5, 700_001, 33)]
    seen = set(on_each_setup(lambda: float(flat.norm(tensors).sumsq[0]).hex()).values())
    assert len(seen) == 1, seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype):
    tensors = [normal(n, n, dtype, offset=1) for n in SIZES]
    want = [(t.float() * 0.3).to(dtype) for t in tensors]
    flat.scale_(tensors, 0.3)
    for got, wanted in zip(tensors, want):
        torch.testing.assert_close(got, wanted, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
    flat.scale_([], 2.0)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_cast_is_torchs(source, target):
    values = torch.cat(
        [normal(4097, 1), torch.tensor([0.0, -0.0, 1e-45, 6e-8, 65504.0, 65520.0, 3e38, math.inf, -math.inf, math.nan])]
    ).to(source)
    got = torch.zeros(len(values), dtype=target)
    flat.cast(values, got)
    want = values.to(target)
    is_nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), is_nan)
    assert torch.equal(bits(got[~is_nan]), bits(want[~is_nan]))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("n_sources", [1, 2, 5])
def test_reduce(source, target, accumulate, n_sources):
    for n in (0, 1, 17, 4097):
        sources = [normal(n, i, source) for i in range(n_sources)]
        into = normal(n, 99, target)
        want = reference.reduce(sources, 0.5, accumulate, into)
        stats = flat.reduce_(sources, into, scale=0.5, accumulate=accumulate)
        rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[target]
        torch.testing.assert_close(into, want, rtol=rtol, atol=1e-6)
        assert stats.sumsq.tolist() == pytest.approx(list(reference.sumsq([into])), rel=1e-6, abs=1e-12)


def test_reduce_in_place_of_a_source():
    a, b = normal(1000, 1), normal(1000, 2)
    want = 0.5 * (a + b)
    flat.reduce_([a, b], a, scale=0.5)
    torch.testing.assert_close(a, want)


def test_zero_of_every_dtype_and_dense_layout():
    tensors = [
        torch.full((200_003,), 3.0),
        torch.full((5, 7), 3, dtype=torch.int8),
        torch.full((2, 3, 4, 5), 3.0, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last),
        torch.full((3, 4), 3.0, dtype=torch.float64).t(),
        torch.empty(0),
        torch.ones((), dtype=torch.bool),
    ]
    before = [tensor._version for tensor in tensors]
    flat.zero_([*tensors, torch.empty(9, device="meta")])
    for tensor, version in zip(tensors, before):
        assert torch.count_nonzero(tensor) == 0, tensor
        assert tensor._version > version
    flat.zero_([])


HUGE = 2 << 20


def advised(begin: int, n_pages: int) -> list[bool]:
    """For each of ``n_pages`` huge pages from ``begin`` on: whether it lies in a mapping with advice for huge pages.

    Reads smaps once.
    """
    found: dict[int, bool] = {}
    pages: list[int] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping:
            low, high = (int(number, 16) for number in mapping.groups())
            pages = [i for i in range(n_pages) if low <= begin + i * HUGE < high]
        elif line.startswith("VmFlags:"):
            found |= dict.fromkeys(pages, "hg" in line.split())
    return [found[i] for i in range(n_pages)]


def fresh() -> tuple[mmap.mmap, torch.Tensor]:
    """A new mapping, and a tensor over seven huge pages of it."""
    memory = mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE
    return memory, whole[skip : skip + 7 * HUGE]


def test_zero_asks_for_huge_pages_within_a_tensor_and_nowhere_else():
    # Gives the same advice by Python's own call, to see whether this system accepts it at the moment.
    memory, pages = fresh()
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        taken = advised(pages.data_ptr(), 7)
    except OSError as error:
        print(f"the system refuses the advice: {error}")
        taken = [False] * 7
    assert len(set(taken)) == 1, taken

    memory, pages = fresh()
    n_elems = 4 * HUGE
    flat.zero_([pages[64 : 64 + n_elems]])  # begins and ends within a huge page
    found = advised(pages.data_ptr(), 7)
    expected = [taken[0] and 1 <= i <= 3 for i in range(7)]
    assert found == expected, (
        f"asked for: {found}, expected: {expected}; if nothing was asked for where a system takes the advice, the"
        " extension may be older than csrc/cpu/flat.c: build it (make)"
    )
    flat.zero_([pages[5 * HUGE : 6 * HUGE - 1]])
    assert advised(pages.data_ptr(), 7) == expected, "less than a huge page"


@pytest.mark.parametrize("view", [lambda x: x[:, :2], lambda x: x[0].expand(5, 4), lambda x: x.to_sparse()])
def test_zero_refuses_what_has_gaps_or_overlaps(view):
    whole, first = torch.ones(4, 4), torch.ones(3)
    with pytest.raises((ValueError, NotImplementedError)):
        flat.zero_([first, view(whole)])
    assert (whole == 1).all() and (first == 1).all()
