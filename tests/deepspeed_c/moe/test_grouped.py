"""Products of rows with stacked weights equal one product for each expert."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.moe.grouped import grouped_linear

COUNTS = (2, 0, 3, 0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_in_out", [False, True])
def test_each_expert_multiplies_its_rows(is_in_out, has_bias):
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(COUNTS), 6, generator=rng).requires_grad_()
    weight = torch.randn(*((4, 6, 5) if is_in_out else (4, 5, 6)), generator=rng).requires_grad_()
    bias = torch.randn(4, 5, generator=rng).requires_grad_() if has_bias else None
    given = [rows, weight, *([] if bias is None else [bias])]
    matrices = weight if is_in_out else weight.transpose(1, 2)
    parts = [part @ matrices[i] + (0 if bias is None else bias[i]) for i, part in enumerate(rows.split(COUNTS))]
    upstream = torch.randn(sum(COUNTS), 5, generator=rng)
    expected = torch.autograd.grad(torch.cat(parts), given, upstream)
    torch.full_like(weight, torch.nan)  # freed memory that may become a gradient holds no zeros
    out = grouped_linear(rows, COUNTS, weight, bias, is_in_out=is_in_out)
    found = torch.autograd.grad(out, given, upstream)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
