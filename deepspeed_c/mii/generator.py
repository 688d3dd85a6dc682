"""A model that answers prompts, for pipelines and deployments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.inference.limits import trained_length
from deepspeed_c.inference.v2 import InferenceEngineV2, build_hf_engine
from deepspeed_c.mii.config import GenerateParamsConfig, ModelConfig
from deepspeed_c.mii.constants import GenerationFinishReason
from deepspeed_c.mii.data import Response
from deepspeed_c.mii.tokenizers import MIITokenizerWrapper, load_tokenizer
from deepspeed_c.ops.sample import Rules
from deepspeed_c.serving import AnswerEvent, CheckedPrompt, RequestLoop, SamplingParams, ServedRequest
from deepspeed_c.serving.tokenizer import end_tokens

__all__ = ["Generator", "Wish"]

_SEED_BITS = 63


class Wish(NamedTuple):
    """A prompt that is ready to be sent."""

    prompt: str
    checked: CheckedPrompt
    is_streamed: bool
    has_prompt: bool
    """Whether the text begins with the prompt."""


class Generator:
    """An engine, its tokenizer and the loop of its requests.

    On tensor-parallel ranks each makes one, and rank 0 sends the requests.
    """

    def __init__(self, engine: InferenceEngineV2, tokenizer: MIITokenizerWrapper, model_config: ModelConfig) -> None:
        self.engine, self.tokenizer, self.model_config = engine, tokenizer, model_config
        self.loop = RequestLoop(engine, tokenizer.decode, tokenizer.vocab_size)
        of_model = end_tokens(engine.model(), None)
        self._ends = end_tokens(engine.model(), _end_of(tokenizer, bool(of_model)))
        lengths = (self.loop.longest, model_config.max_length, trained_length(engine.model()))
        self.max_length = min(length for length in lengths if length is not None)
        """Tokens of a prompt and its answer, for requests that do not say."""

    @classmethod
    def of(cls, model_config: ModelConfig) -> Generator:
        """Loads the model and its tokenizer.

        Raises ModelError and ConfigError for a folder without them, FeatureError for a model whose tokens cannot lie
        behind one another.
        """
        tokenizer = load_tokenizer(model_config)
        engine = build_hf_engine(model_config.model_name_or_path, model_config.inference_engine_config)
        return cls(engine, tokenizer, model_config)

    @property
    def is_rank_0(self) -> bool:
        return torch.distributed.get_rank() == 0

    def prepare(self, prompt: str, fields: Mapping[str, Any], index: int = 0) -> Wish:
        """Checks a request, and encodes its prompt. fields: of ``GenerateParamsConfig``. index: of the prompt in its
        call; the prompts of a call have seeds behind one another.

        Raises ConfigError for a wrong field, ModelError for an empty prompt, SchedulingError for a prompt that can
        never fit.
        """
        if not isinstance(prompt, str) or not prompt:
            raise ModelError(
                f"the prompt is {prompt!r}", where=f"prompts[{index}]", fix="send a text of one character at least"
            )
        tokens = torch.as_tensor(self.tokenizer.encode(prompt)).tolist()
        values = {"max_length": self.max_length, **fields, "prompt_length": len(tokens)}
        wish = GenerateParamsConfig(**values)
        room = wish.max_length - len(tokens)
        n_new = room if wish.max_new_tokens is None else min(wish.max_new_tokens, room)
        rules = Rules(
            temperature=(1.0 if wish.temperature is None else wish.temperature) if wish.do_sample else 0.0,
            top_k=wish.top_k or 0,
            top_p=wish.top_p,
        )
        seed = secrets.randbits(_SEED_BITS) if wish.seed is None else (wish.seed + index) % (1 << _SEED_BITS)
        params = SamplingParams(
            n_new=n_new,
            rules=rules,
            seed=seed,
            ends=frozenset() if wish.ignore_eos else self._ends,
            n_least=min(wish.min_new_tokens, n_new),
            stop=tuple(wish.stop),
            continues=wish.return_full_text,
        )
        return Wish(prompt, self.loop.check(tokens, params), wish.stream, wish.return_full_text)

    def begin(self, wish: Wish, give: Callable[[Response | Exception], None]) -> ServedRequest:
        """Sends a request. ``give`` gets its pieces, the last one with a reason, or its error; called from the thread
        that owns the engine."""
        pieces: list[str] = [wish.prompt] if wish.has_prompt else []
        n_prompt, n_new = len(wish.checked.tokens), 0

        def take(event: AnswerEvent) -> None:
            nonlocal n_new
            if event.error is not None:
                give(event.error)
                return
            n_new += event.token is not None
            pieces.append(event.text)
            if event.reason is None and not (wish.is_streamed and any(pieces)):
                return
            reason = GenerationFinishReason.NONE if event.reason is None else GenerationFinishReason(event.reason.value)
            text = "".join(pieces)
            pieces.clear()
            give(Response(text, n_prompt, n_new, reason))

        return self.loop.submit(wish.checked, take)

    def destroy(self) -> None:
        """Ends the engine."""
        self.loop.close()
        self.engine.destroy()


def _end_of(tokenizer: MIITokenizerWrapper, has_other: bool) -> int | None:
    try:
        return tokenizer.eos_token_id
    except ModelError:
        if has_other:
            return None
        raise
