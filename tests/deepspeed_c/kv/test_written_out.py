"""Attention that a layer writes out: the ways to write it give one call over blocks, and others are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepspeed_c.kv.group import CallNeedsOwnCache, NeedsOwnCache
from deepspeed_c.kv.written_out import Keys

BATCH, HEADS, TOKENS, DIM = 2, 3, 5, 7
MASK = torch.tensor([[False] + [True] * (TOKENS - 1), [True] * TOKENS])


def attention(
    view: Any, query: torch.Tensor, mask: torch.Tensor | None, scale: float, slopes: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention of the tokens in ``view`` in plain torch, [batch, tokens, heads, dim]."""
    key, value = view
    scores = scale * query @ key.mT
    place = torch.arange(TOKENS)
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * (place[:, None] - place).abs()
    seen = place[:, None] >= place
    if mask is not None:
        seen = seen & mask[:, None, None]
    shares = torch.nan_to_num(torch.softmax(scores.masked_fill(~seen, -math.inf), -1))
    return (shares @ value).transpose(1, 2)


def states() -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(BATCH, HEADS, TOKENS, DIM, generator=random) for _ in "qkv")


def keys_of(key: torch.Tensor, value: torch.Tensor) -> Any:
    return Keys(key, (key, value), attention)


@pytest.mark.parametrize("mask", [None, MASK])
def test_ways_to_write_attention(mask: torch.Tensor | None) -> None:
    query, key, value = states()
    wanted = attention((key, value), query, mask, DIM**-0.5, None).transpose(1, 2)
    keys = keys_of(key, value)
    assert keys.shape == key.shape
    scores = torch.matmul(query, keys.to(torch.float32).transpose(-1, -2)) / math.sqrt(DIM) + mask
    shares = F.dropout(F.softmax(scores, dim=-1), p=0.5, training=False).to(value.dtype)
    torch.testing.assert_close(torch.matmul(shares, value), wanted)
    scores = query @ keys.transpose(-1, -2)
    scores /= math.sqrt(DIM)
    torch.testing.assert_close(F.softmax(scores + mask, dim=-1, dtype=torch.float32) @ value, wanted)


@pytest.mark.parametrize("n_seen", [1, TOKENS])
def test_slopes_of_a_bias(n_seen: int) -> None:
    query, key, value = states()
    slopes = torch.tensor([0.5, 0.3, 2.0])
    places = torch.arange(TOKENS).clamp(max=n_seen - 1)
    alibi = (slopes[:, None, None] * places).repeat(BATCH, 1, 1)
    flat = (BATCH * HEADS, -1, DIM)
    keys = keys_of(key, value).reshape(*flat).transpose(-1, -2)
    scores = alibi.baddbmm(batch1=query.reshape(flat), batch2=keys, beta=1.0, alpha=0.25)
    shares = F.softmax(scores.view(BATCH, HEADS, TOKENS, -1), dim=-1).view(BATCH * HEADS, TOKENS, -1)
    found = torch.bmm(shares, value.reshape(flat)).view(BATCH, HEADS, TOKENS, DIM)
    wanted = attention((key, value), query, None, 0.25, slopes if n_seen > 1 else None).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


def test_other_ways_are_refused_by_name() -> None:
    query, key, value = states()
    keys = keys_of(key, value)
    scores = query @ keys
    for act, words in (
        (lambda: torch.einsum("bhqd,bhkd->bhqk", query, keys), "einsum"),
        (lambda: query + keys, "add"),
        (lambda: keys.sum(), "sum"),
        (lambda: keys.transpose(1, 2), "dimensions 1 and 2"),
        (lambda: scores + torch.zeros(TOKENS, TOKENS), "a bias of positions"),
        (lambda: torch.sigmoid(scores), "sigmoid"),
        (lambda: F.softmax(scores, dim=-1).argmax(), "argmax"),
    ):
        with pytest.raises(NeedsOwnCache) as caught:
            act()
        assert words in str(caught.value), (words, str(caught.value))
    with pytest.raises(CallNeedsOwnCache) as drops:
        F.dropout(F.softmax(scores, dim=-1), p=0.1, training=True)
    assert "drops" in str(drops.value)
