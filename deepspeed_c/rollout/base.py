"""The interface of rollout engines: request, sampling and batch, under DeepSpeed's names."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.errors import ConfigError, ModelError, StateError

__all__ = [
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "check_request",
    "check_sampling",
    "special_tokens",
]


@dataclass
class RolloutConfig:
    """The choice of a rollout engine."""

    engine: str = "hybrid_engine"
    """A name of ``register_rollout``; "hybrid_engine" and "openai" are there."""
    use_graph_capture: bool = False
    """Has no effect: nothing is captured."""


@dataclass
class SamplingConfig:
    """How tokens are drawn. ``generate`` checks the values."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 or less: the most probable token."""
    top_p: float = 1.0
    """Above 0 and at most 1: keeps the fewest tokens whose probabilities add up to it."""
    top_k: int = -1
    """Keeps so many most probable tokens; -1 and 0: all."""
    n_samples_per_prompt: int = 1


@dataclass
class RolloutRequest:
    """Prompts, padded on the left."""

    prompt_ids: torch.Tensor
    """Integers [B, T_p]."""
    prompt_attention_mask: torch.Tensor
    """[B, T_p], 1 where there is a token of the prompt."""

    def __post_init__(self) -> None:
        ids, mask = self.prompt_ids, self.prompt_attention_mask
        if ids.dim() != 2 or ids.is_floating_point():
            raise ModelError(
                f"prompt_ids is {tuple(ids.shape)} {ids.dtype}",
                where="RolloutRequest",
                fix="pass integers [prompts, tokens]",
            )
        _require_shape(mask, ids.shape, "prompt_attention_mask", "RolloutRequest")


@dataclass
class RolloutBatch:
    """Prompts and responses. B' is B * ``n_samples_per_prompt``; the samples of a prompt are neighbours."""

    input_ids: torch.Tensor
    """Integers [B', T_p + T_r]: the prompts as they were given, then the responses, padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B', T_p + T_r], 1 on tokens of prompts and of responses; the end token is part of a response."""
    response_start_idx: torch.Tensor
    """int64 [B'], T_p for all rows."""
    logprobs: torch.Tensor | None = None
    """float32 [B', T_r]: the logarithm of each response token's probability in softmax(logits / temperature) over the
    whole vocabulary, before ``top_k`` and ``top_p``; with temperature 0, in softmax(logits). 0 on padding. A server
    gives its own numbers."""
    routed_experts: dict[str, torch.Tensor] | None = None
    """For models whose experts ``expert_parallel`` has spread: name of the experts -> int32 [B', T_p + T_r, k], the
    experts of each token. ``replay_routing`` takes each of them as ``.flatten(0, 1)``. A place without a forward
    (padding, the last token of a response) has the experts 0 to k - 1."""

    def __post_init__(self) -> None:
        ids, n_rows = self.input_ids, len(self.input_ids)
        if ids.dim() != 2:
            raise ModelError(
                f"input_ids is {tuple(ids.shape)}", where="RolloutBatch", fix="pass integers [rows, tokens]"
            )
        _require_shape(self.attention_mask, ids.shape, "attention_mask", "RolloutBatch")
        _require_shape(self.response_start_idx, (n_rows,), "response_start_idx", "RolloutBatch")

    @property
    def batch_size(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        return int(self.input_ids.shape[1])


class RolloutEngine(ABC):
    """Writes responses to prompts."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Writes ``n_samples_per_prompt`` responses to each prompt."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Gives the engine the weights of ``step``."""

    def shutdown(self) -> None:
        """Frees memory and connections of the engine."""


def special_tokens(tokenizer: Any) -> tuple[int, frozenset[int]]:
    """(the padding token, the tokens that end a response) of a tokenizer. A tokenizer without a padding token pads with
    its first end token. Raises ConfigError if it has neither."""
    ends = getattr(tokenizer, "eos_token_id", None)
    ends = [] if ends is None else [int(each) for each in torch.as_tensor(ends).flatten()]
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None and not ends:
        raise ConfigError(
            "the tokenizer has neither an end token nor a padding token",
            where="rollout: tokenizer",
            fix="set tokenizer.eos_token_id, at which responses end",
        )
    return int(ends[0] if pad is None else pad), frozenset(ends)


def check_sampling(sampling: SamplingConfig) -> None:
    """Raises ConfigError for a value out of its range."""
    limits = (
        ("max_new_tokens", sampling.max_new_tokens >= 1, "1 or more"),
        ("n_samples_per_prompt", sampling.n_samples_per_prompt >= 1, "1 or more"),
        ("temperature", math.isfinite(sampling.temperature), "a number; 0 takes the most probable token"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1; 1 keeps all tokens"),
        ("top_k", sampling.top_k >= -1, "1 or more, or -1, which keeps all tokens"),
    )
    for name, is_legal, range_ in limits:
        if not is_legal:
            raise ConfigError(
                f"is {getattr(sampling, name)!r}", where=f"SamplingConfig.{name}", fix=f"set it to {range_}"
            )


def check_request(request: RolloutRequest, n_words: int | None) -> None:
    """Raises StateError for a prompt that is not padded on the left alone, or has no token, and for an id that is no
    word of a vocabulary of ``n_words`` (None: unknown)."""
    ids, is_token = request.prompt_ids, request.prompt_attention_mask != 0
    if not len(ids):
        return
    where = "rollout.generate"
    if ids.shape[1] == 0 or bool((wrong := ~is_token.any(1)).any()):
        row = 0 if ids.shape[1] == 0 else int(wrong.nonzero()[0])
        raise StateError(f"prompt {row} has no token", where=where, fix="give each prompt one token or more")
    if len(ends := (is_token[:, :-1] & ~is_token[:, 1:]).nonzero()):
        row, place = ends[0].tolist()
        what = "padded on the right" if not is_token[row, place + 1 :].any() else "padded in its middle"
        raise StateError(
            f"prompt {row} is {what}, after place {place} of {ids.shape[1]}",
            where=where,
            fix='pad prompts on the left (tokenizer.padding_side = "left"): each row of the mask is 0 and then 1',
        )
    if n_words is not None and len(wrong := (is_token & ((ids < 0) | (ids >= n_words))).nonzero()):
        row, place = wrong[0].tolist()
        raise StateError(
            f"token {place} of prompt {row} is {int(ids[row, place])}, and the model has {n_words} words",
            where=where,
            fix="give ids from 0 up to that number; the tokenizer must be the model's own",
        )


def joined(
    request: RolloutRequest,
    responses: list[list[int]],
    logprobs: list[list[float]] | None,
    pad: int,
    n_samples: int,
    experts_of: Callable[[torch.Tensor, int], dict[str, torch.Tensor] | None] | None = None,
) -> RolloutBatch:
    """The batch of the responses to a request, ``n_samples`` neighbours for each prompt.

    experts_of: returns ``routed_experts`` for the batch's mask and the number of places of prompts."""
    prompts = request.prompt_ids.repeat_interleave(n_samples, 0)
    mask = (request.prompt_attention_mask != 0).long().repeat_interleave(n_samples, 0)
    n_columns, device = max(map(len, responses), default=0), prompts.device
    tokens = torch.full((len(responses), n_columns), pad, dtype=prompts.dtype)
    is_token, numbers = torch.zeros(tokens.shape, dtype=torch.int64), torch.zeros(tokens.shape)
    for row, response in enumerate(responses):
        tokens[row, : len(response)] = torch.tensor(response, dtype=prompts.dtype)
        is_token[row, : len(response)] = 1
        if logprobs is not None:
            numbers[row, : len(response)] = torch.tensor(logprobs[row])
    whole_mask = torch.cat([mask, is_token.to(device)], 1)
    return RolloutBatch(
        torch.cat([prompts, tokens.to(device)], 1),
        whole_mask,
        torch.full((len(responses),), prompts.shape[1], dtype=torch.int64, device=device),
        None if logprobs is None else numbers.to(device),
        None if experts_of is None else experts_of(whole_mask, prompts.shape[1]),
    )


def _require_shape(tensor: torch.Tensor, shape: tuple[int, ...], name: str, where: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ModelError(f"{name} is {tuple(tensor.shape)}", where=where, fix=f"pass a tensor of shape {tuple(shape)}")
