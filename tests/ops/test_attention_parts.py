"""Merging parts of attention, compared with the softmax over all keys in float64, in every dtype.

Bad arguments are refused.
"""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.ops.attention_parts import merge_
from tests.ops.data import DTYPES

ROWS, WIDTH = 6, 5


def merged(
    parts: list[torch.Tensor], values: torch.Tensor, dtype: torch.dtype, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge of parts of the scores; the last part covers only some rows."""
    out, log_sum = torch.zeros(2, ROWS, WIDTH, dtype=wide), torch.full((2, ROWS), -torch.inf, dtype=wide)
    begin = 0
    for scores in parts:
        of_part = values[:, begin : begin + scores.shape[-1]]
        begin += scores.shape[-1]
        part = scores.softmax(-1) @ of_part
        merge_(out, log_sum, part.to(dtype), torch.logsumexp(scores, -1).to(wide), ROWS - scores.shape[1])
    return out, log_sum


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_parts_become_the_softmax_of_all(dtype: torch.dtype, spread: float) -> None:
    random = torch.Generator().manual_seed(3)
    scores = torch.randn(2, ROWS, 12, generator=random, dtype=torch.float64) * spread
    values = torch.randn(2, 12, WIDTH, generator=random, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, log_sum = merged([scores[..., :3], scores[..., 3:8], scores[:, 2:, 8:]], values, dtype, wide)
    scores[:, :2, 8:] = -torch.inf
    allowed = {torch.float64: 1e-13, torch.float32: 2e-7 * (4 + spread), torch.float16: 3e-3, torch.bfloat16: 2e-2}[
        dtype
    ]
    assert (out - scores.softmax(-1) @ values).abs().max() < allowed
    assert (log_sum - torch.logsumexp(scores, -1)).abs().max() < allowed


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_rows_without_keys_change_nothing(wide: torch.dtype) -> None:
    out, log_sum = torch.ones(1, 2, 3, dtype=wide), torch.tensor([[-torch.inf, 2.0]], dtype=wide)
    merge_(out, log_sum, torch.full((1, 2, 3), torch.nan), torch.full((1, 2), -torch.inf), 0)
    assert out.equal(torch.ones_like(out)) and log_sum.tolist() == [[-torch.inf, 2.0]]


def test_what_does_not_fit_is_refused() -> None:
    out, log_sum = torch.zeros(2, 4, 3), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="part has 12 elements, must have 18"):
        merge_(out, log_sum, torch.zeros(2, 3, 2), torch.zeros(2, 3), 0)
    with pytest.raises(ValueError, match="3 rows from row 2"):
        merge_(out, log_sum, torch.zeros(2, 3, 3), torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="part is int32"):
        merge_(out, log_sum, torch.zeros(2, 3, 3).int(), torch.zeros(2, 3), 0)
    with pytest.raises(ValueError, match="log_sum is float64"):
        merge_(out, log_sum.double(), torch.zeros(2, 3, 3), torch.zeros(2, 3), 0)
    with pytest.raises(ValueError, match="out must be a contiguous"):
        merge_(torch.zeros(2, 3, 4).mT, log_sum, torch.zeros(2, 3, 3), torch.zeros(2, 3), 0)
