"""Rollouts by a server with the interface of OpenAI's completions, such as vLLM or SGLang."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from deepspeed_c.errors import CommError, ConfigError, FeatureError
from deepspeed_c.rollout.base import (
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    check_request,
    check_sampling,
    joined,
    special_tokens,
)

__all__ = ["OpenAIRollout", "OpenAIRolloutConfig"]

_ID = "token_id:"  # how servers write a token by its number


@dataclass
class OpenAIRolloutConfig:
    """The configuration of ``OpenAIRollout``."""

    engine: str = "openai"
    base_url: str = "http://127.0.0.1:8000"
    """The address before ``/v1/completions``."""
    model: str = ""
    """The name of the model at the server."""
    api_key: str = ""
    timeout_s: float = 600.0
    """For one prompt and its samples."""
    max_requests: int = 16
    """Prompts that the server has at a time."""
    extra: Mapping[str, Any] = field(
        default_factory=lambda: {"return_token_ids": True, "return_tokens_as_token_ids": True}
    )
    """Further fields of each request. The defaults ask vLLM for numbers of tokens; set {} for a server that refuses
    unknown fields."""


class OpenAIRollout(RolloutEngine):
    """Asks a server for responses: one POST /v1/completions for each prompt, with the numbers of its tokens.

    Args:
        tokenizer: has ``eos_token_id``, ``pad_token_id``, or both; and ``encode``, for a server that answers with text
            alone.
        cfg: an ``OpenAIRolloutConfig``.
        send: called by ``sync_weights`` with the step. It gives the server the weights, for example by
            ``engine.send_weights(target, version=step)`` and a request to the server.

    Log-probabilities are the server's; vLLM's come from the logits before the temperature, unless it is told otherwise.
    """

    name = "openai"

    def __init__(self, tokenizer: Any, cfg: Any = None, send: Callable[[int], Any] | None = None) -> None:
        own = OpenAIRolloutConfig()
        self.cfg = OpenAIRolloutConfig(**{name: getattr(cfg, name, value) for name, value in vars(own).items()})
        if not self.cfg.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"is {self.cfg.base_url!r}", where="OpenAIRolloutConfig.base_url", fix="write http://HOST:PORT"
            )
        self._tokenizer, self._send = tokenizer, send
        self._pad, self._ends = special_tokens(tokenizer)

    @classmethod
    def of_student(cls, cfg: Any, engine: Any, tokenizer: Any, **kwargs: Any) -> OpenAIRollout:
        """As ``build_rollout`` calls it. The student's engine is not asked for anything: ``send`` knows it."""
        if tokenizer is None:
            raise ConfigError("the server's rollouts need a tokenizer", where="build_rollout", fix="pass tokenizer=...")
        return cls(tokenizer, cfg, **kwargs)

    def generate(self, request: RolloutRequest, sampling: SamplingConfig, *, seed: int | None = None) -> RolloutBatch:
        """Asks for ``n_samples_per_prompt`` responses to each prompt. Each rank asks for its own prompts.

        ``seed``: of the request; prompt i gets seed + i. Raises StateError and ConfigError as any rollout engine before
        a request, CommError for a server that refuses, does not answer in time, or answers with something else.
        """
        check_sampling(sampling)
        check_request(request, None)
        prompts = [
            ids[is_token].tolist()
            for ids, is_token in zip(request.prompt_ids.cpu(), request.prompt_attention_mask.cpu() != 0)
        ]
        bodies = [self._body(prompt, sampling, None if seed is None else seed + i) for i, prompt in enumerate(prompts)]
        with ThreadPoolExecutor(max(min(self.cfg.max_requests, len(bodies)), 1)) as threads:
            answers = list(threads.map(lambda body: self._choices(body, sampling), bodies))
        found = [choice for choices in answers for choice in choices]
        log_probs = [numbers for _, numbers in found]
        known = None if any(numbers is None for numbers in log_probs) else [numbers or [] for numbers in log_probs]
        tokens = [words for words, _ in found]
        return joined(request, tokens, known, self._pad, sampling.n_samples_per_prompt)

    def sync_weights(self, step: int) -> None:
        """Calls ``send`` with the step. Raises FeatureError without one: the server would write with old weights."""
        if self._send is None:
            raise FeatureError(
                "nothing sends the weights to the server",
                where="OpenAIRollout.sync_weights",
                fix="pass send=lambda step: engine.send_weights(target, version=step), or a function of your own",
            )
        self._send(step)

    def _body(self, prompt: list[int], sampling: SamplingConfig, seed: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": sampling.max_new_tokens,
            "n": sampling.n_samples_per_prompt,
            "temperature": max(sampling.temperature, 0.0),
            "top_p": sampling.top_p,
            "logprobs": 1,
            **self.cfg.extra,
        }
        if self.cfg.model:
            body["model"] = self.cfg.model
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if seed is not None:
            body["seed"] = seed
        return body

    def _choices(self, body: dict[str, Any], sampling: SamplingConfig) -> list[tuple[list[int], list[float] | None]]:
        """(tokens, log-probabilities or None) of each response, in the order of the server's index."""
        answer = self._post(body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
            found = [self._read(choice) for choice in choices]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._wrong(f"answered without choices of tokens: {type(error).__name__} {error}") from error
        n = sampling.n_samples_per_prompt
        if len(found) != n or not all(0 < len(words) <= sampling.max_new_tokens for words, _ in found):
            lengths = [len(words) for words, _ in found]
            raise self._wrong(
                f"answered with responses of {lengths} tokens; {n} of 1 to {sampling.max_new_tokens} were asked for"
            )
        return found

    def _read(self, choice: dict[str, Any]) -> tuple[list[int], list[float] | None]:
        report = choice.get("logprobs") or {}
        numbers, words = report.get("token_logprobs"), choice.get("token_ids")
        if words is None and all(str(each).startswith(_ID) for each in report.get("tokens") or [""]):
            words = [int(each[len(_ID) :]) for each in report["tokens"]]
        if words is None:
            # The tokenizer may cut the text into other tokens, so the server's numbers would not fit.
            words, numbers = self._tokenizer.encode(choice["text"], add_special_tokens=False), None
            if choice.get("finish_reason") == "stop" and self._ends:
                words = [*words, min(self._ends)]
        words = [int(word) for word in words]
        if numbers is not None and (len(numbers) != len(words) or any(number is None for number in numbers)):
            raise ValueError(f"{len(numbers)} log-probabilities came for {len(words)} tokens")
        return words, None if numbers is None else [float(number) for number in numbers]

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.cfg.api_key:
            headers["Authorization"] = f"Bearer {self.cfg.api_key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.cfg.timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise self._wrong(f"answered {error.code}: {error.read().decode(errors='replace')[:300]}") from error
        except (OSError, ValueError) as error:
            raise self._wrong(f"gave no answer: {error}") from error

    @property
    def _url(self) -> str:
        return f"{self.cfg.base_url.rstrip('/')}/v1/completions"

    def _wrong(self, what: str) -> CommError:
        return CommError(
            f"the server {what}", where=self._url, fix="look at the server's log, and at OpenAIRolloutConfig"
        )
