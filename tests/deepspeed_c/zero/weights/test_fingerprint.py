"""Checksums by which writes to weights are found."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.zero.weights.fingerprint import fingerprint_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 13, 4099, 10007])
def test_every_element_counts(n: int, dtype: torch.dtype) -> None:
    x = torch.arange(n).remainder(11).to(dtype)
    before = fingerprint_of(x)
    assert fingerprint_of(x.clone()) == before
    for i in {0, n // 2, n - 1}:
        y = x.clone()
        y[i] += 1
        assert fingerprint_of(y) != before
    if n > 1:  # other places of the same values
        assert fingerprint_of(x.roll(1)) != before


def test_bits_count_and_not_values() -> None:
    assert fingerprint_of(torch.tensor([0.0])) != fingerprint_of(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan"), float("inf")])
    assert fingerprint_of(nan) == fingerprint_of(nan.clone())
    other = nan.clone()
    other.view(torch.int32)[0] ^= 1  # another NaN
    assert fingerprint_of(nan) != fingerprint_of(other)


def test_strides_and_empty_tensors() -> None:
    x = torch.arange(35.0).view(5, 7)
    assert fingerprint_of(x.t()) == fingerprint_of(x.t().contiguous()) != fingerprint_of(x)
    assert fingerprint_of(torch.tensor(3.0)) == fingerprint_of(torch.tensor([3.0]))
    assert fingerprint_of(x[:0]) == fingerprint_of(x[:0])
