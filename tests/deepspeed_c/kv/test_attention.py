"""kv/attention.py: rules of masks are compared in pieces, for every pair of query and key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("transformers")

from deepspeed_c.kv import attention

Rule = Callable[..., torch.Tensor]
BATCH, QUERIES, KEYS = 2, 5, 7


def windowed(window: int | None) -> Rule:
    def rule(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= query) if window is None else (key <= query) & (key > query - window)
        return seen.expand(BATCH, 1, *seen.shape[2:])

    return rule


@pytest.mark.parametrize("places", [1, 14, 15, 1000])
@pytest.mark.parametrize("window", [None, 3])
def test_a_rule_is_compared_at_each_pair(window: int | None, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MASK_PLACES", places)
    own = windowed(window)

    def is_causal(rule: Rule) -> bool:
        return attention._is_causal(rule, BATCH, QUERIES, KEYS, KEYS - QUERIES, 0, window)

    assert is_causal(own)
    for place in [(b, q, k) for b in range(BATCH) for q in range(KEYS - QUERIES, KEYS) for k in range(KEYS)]:

        def other(batch, head, query, key, place=place):
            at = (batch == place[0]) & (query == place[1]) & (key == place[2])
            return own(batch, head, query, key) ^ at

        assert not is_causal(other), place
    assert not is_causal(lambda *_: True)
