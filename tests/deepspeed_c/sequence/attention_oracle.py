"""Plain attention over whole sequences in one process: the reference for attention over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def visible(n_tokens: int, ends: Sequence[int], is_causal: bool, window: int) -> torch.Tensor:
    """bool [query, key]: whether the query sees the key, decided for each pair."""
    place = torch.arange(n_tokens)
    distance = place[:, None] - place
    seen = torch.ones(n_tokens, n_tokens, dtype=torch.bool)
    if is_causal:
        seen &= distance >= 0
    if window:
        seen &= distance.abs() < window
    document = torch.bucketize(place, torch.tensor(list(ends), dtype=torch.int64), right=True)
    return seen & (document[:, None] == document)


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Sequence[Sequence[int]],
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over [batch, heads, tokens, width]. Keys may have fewer heads. documents: the ends of the documents in
    each sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.stack([visible(q.shape[2], ends, is_causal, window) for ends in documents])[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v
