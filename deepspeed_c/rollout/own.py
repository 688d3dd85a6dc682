"""Responses by transformers' ``generate``: for models without the ragged engine, and for ranks with experts on all of
them, because these run each forward together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_c.rollout.base import RolloutRequest, SamplingConfig

__all__ = ["write"]

_NO_END = -1  # no token has this number


class _Draw:
    """A logits processor that draws tokens by ``choose``, and leaves no other choice."""

    def __init__(self, choose: Callable[..., tuple[list[int], list[float]]]) -> None:
        self._choose = choose
        self.drawn: list[tuple[list[int], list[float]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        n_rows, place = len(scores), len(self.drawn)
        words, log_probs = self._choose(scores, range(n_rows), [place] * n_rows)
        self.drawn.append((words, log_probs))
        chosen = torch.tensor(words, device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def write(
    model: Any,
    request: RolloutRequest,
    sampling: SamplingConfig,
    choose: Callable[..., tuple[list[int], list[float]]],
    pad: int,
    ends: frozenset[int],
) -> tuple[list[list[int]], list[list[float]]]:
    """(the response of each sample with its end token, its log-probabilities). choose: as of ``SeededChoice``."""
    draw, mask = _Draw(choose), request.prompt_attention_mask
    with torch.random.fork_rng(devices=[]):  # transformers draws from the one token that is left
        model.generate(
            inputs=request.prompt_ids.masked_fill(mask == 0, pad),
            attention_mask=(mask != 0).long(),
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=sampling.n_samples_per_prompt,
            do_sample=True,
            num_beams=1,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            pad_token_id=pad,
            eos_token_id=sorted(ends) or _NO_END,
            logits_processor=_processors(draw),
        )
    n_rows = len(request.prompt_ids) * sampling.n_samples_per_prompt
    tokens, log_probs = [list[int]() for _ in range(n_rows)], [list[float]() for _ in range(n_rows)]
    for words, numbers in draw.drawn:
        for row in range(n_rows):
            if not _has_ended(tokens[row], ends):
                tokens[row].append(words[row])
                log_probs[row].append(numbers[row])
    return tokens, log_probs


def _has_ended(tokens: Sequence[int], ends: frozenset[int]) -> bool:
    return bool(tokens) and tokens[-1] in ends


def _processors(draw: _Draw) -> Any:
    from transformers import LogitsProcessorList

    return LogitsProcessorList([draw])
