"""Bodies of requests: JSON of OpenAI's API, with the fields that vLLM adds, as objects whose values are in range.

A mistake is a ``RequestRefused`` that names the field, its value and the limit. So is a field that is not known here:
an option without an effect would mislead its sender.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from deepspeed_c.config.nearest import nearest
from deepspeed_c.ops.sample import Rules
from deepspeed_c.server.errors import RequestRefused
from deepspeed_c.serving import SamplingParams

__all__ = [
    "Bounds",
    "Chat",
    "Completion",
    "SamplingFields",
    "Texts",
    "TokenList",
    "decode_body",
    "read_chat",
    "read_completion",
    "read_rules",
    "read_texts",
    "read_tokens",
]

_T = TypeVar("_T")
_SHOWN_CHARACTERS = 60
# Samples of a request have seeds behind one another, below 2^62.
_SEEDS = 1 << 61
_LARGEST_COUNT = 2**31 - 1
_NO_RULES = Rules()
_DEFAULT_TOKENS = 16  # of a completion, in OpenAI's API

# Field -> values that ask for nothing. Others are refused with the text below.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "priority": (0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": (),
    "verbosity": (),
    "logits_processors": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "documents": (),
    "chat_template": (),
}
_OTHER_WAYS = {
    "best_of": "ask for n answers",
    "include_stop_str_in_output": "the string that was found is known to the client",
    "functions": "write tools",
    "function_call": "write tool_choice",
    "modalities": 'answers are text: write ["text"]',
    "audio": "answers are text",
    "chat_template": "the server's owner chooses the template: --chat-template",
    "prompt_logprobs": "logprobs has the new tokens",
}
# Fields about the sender, which no answer depends on.
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id")


@dataclass(frozen=True)
class Bounds:
    """What requests may ask for."""

    n_words: int
    """Tokens of prompts, stop tokens and biases are below this number."""
    max_model_len: int
    """Tokens of a prompt and its answer."""
    ends: frozenset[int] = frozenset()
    """End tokens of the model."""
    max_n: int = 16
    """Answers of one request, those of all its prompts together."""
    max_logprobs: int = 20
    """Most probable tokens beside each token of an answer."""
    max_stop: int = 16
    """Stop strings."""
    max_stop_characters: int = 1024
    """Length of a stop string."""
    rules: Rules = _NO_RULES
    """Of requests that do not give their own."""


@dataclass(frozen=True)
class SamplingFields:
    """The fields of completions and chats alike. ``None`` where a request does not say."""

    model: str
    rules: Rules
    seed: int
    n: int
    max_tokens: int | None
    default_tokens: int | None
    """In place of ``max_tokens``, as far as the context allows. None: what the context allows."""
    min_tokens: int
    stop: tuple[str, ...]
    ends: frozenset[int]
    logit_bias: tuple[tuple[int, float], ...]
    presence_penalty: float
    frequency_penalty: float
    n_top: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str
    structure: Mapping[str, Any] = field(default_factory=dict)
    """Fields about the form of an answer, as they are written: ``response_format``, ``guided_json`` and so on."""

    def params(self, n_new: int, shown: tuple[tuple[int, str], ...], *, continues: bool) -> SamplingParams:
        """The wishes for the loop. n_new: most new tokens."""
        return SamplingParams(
            n_new=n_new,
            rules=self.rules,
            seed=self.seed,
            ends=self.ends,
            n_least=min(self.min_tokens, n_new),
            stop=self.stop,
            logit_bias=self.logit_bias,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            n_top=self.n_top,
            shown=shown,
            continues=continues,
        )


@dataclass(frozen=True)
class Completion:
    """The body of ``/v1/completions``."""

    sampling: SamplingFields
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or tokens."""
    echo: bool
    special: bool
    """Whether texts get the tokenizer's own tokens around them."""


@dataclass(frozen=True)
class Chat:
    """The body of ``/v1/chat/completions``. Messages and tools are checked where they become a prompt."""

    sampling: SamplingFields
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: Any
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    special: bool


@dataclass(frozen=True)
class Texts:
    """The body of ``/tokenize``: a text, or the messages of a chat."""

    model: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    special: bool | None
    """``None``: as the route of completions or chats does."""
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    token_strings: bool


@dataclass(frozen=True)
class TokenList:
    """The body of ``/detokenize``."""

    model: str
    tokens: tuple[int, ...]


def decode_body(body: bytes) -> dict[str, Any]:
    """The object of a body. Raises RequestRefused for anything but an object of JSON (RFC 8259)."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(
            f"the body of {len(body)} bytes is no JSON: {_short(str(error))}", param="body", fix="send a JSON object"
        ) from error
    if not isinstance(found, dict):
        raise RequestRefused(f"the body is {_kind(found)}", param="body", fix="send a JSON object")
    return found


def read_completion(body: dict[str, Any], bounds: Bounds) -> Completion:
    """Raises RequestRefused for a wrong field."""
    fields = _BodyFields(body)
    prompts = _prompts(fields, bounds)
    n_top = fields.integer("logprobs", None, 0, bounds.max_logprobs)
    sampling = _sampling(
        fields, bounds, fields.integer("max_tokens", None, 1, bounds.max_model_len), n_top, _DEFAULT_TOKENS
    )
    if sampling.n * len(prompts) > bounds.max_n:
        raise RequestRefused(
            f"{len(prompts)} prompts with n = {sampling.n} are {sampling.n * len(prompts)} answers, and {bounds.max_n} "
            "are the most of a request",
            param="n",
            fix="send several requests",
        )
    echo = fields.flag("echo", False)
    if echo and n_top is not None:
        raise RequestRefused(
            f"is true, and logprobs is {n_top}: log-probabilities of prompts are not computed",
            param="echo",
            fix="leave one of the two out",
        )
    found = Completion(sampling, prompts, echo, fields.flag("add_special_tokens", True))
    fields.refuse_rest()
    return found


def read_chat(body: dict[str, Any], bounds: Bounds) -> Chat:
    """Raises RequestRefused for a wrong field."""
    fields = _BodyFields(body)
    messages = fields.objects("messages")
    if not messages:
        raise RequestRefused("there are no messages", param="messages", fix="send one at least")
    n_top = fields.integer("top_logprobs", None, 0, bounds.max_logprobs)
    has_logprobs = fields.flag("logprobs", False)
    if n_top is not None and not has_logprobs:
        raise RequestRefused(
            f"is {n_top}, and logprobs is not true", param="top_logprobs", fix="write logprobs: true as well"
        )
    n_new = fields.integer("max_completion_tokens", None, 1, bounds.max_model_len)
    older = fields.integer("max_tokens", None, 1, bounds.max_model_len)
    if n_new is not None and older is not None and n_new != older:
        raise RequestRefused(
            f"is {older}, and max_completion_tokens is {n_new}", param="max_tokens", fix="write one of the two"
        )
    sampling = _sampling(fields, bounds, older if n_new is None else n_new, (n_top or 0) if has_logprobs else None)
    tools = fields.objects("tools")
    found = Chat(
        sampling=sampling,
        messages=messages,
        tools=tools or None,
        tool_choice=fields.take("tool_choice", (str, dict), "a word or an object"),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        template_kwargs=fields.take("chat_template_kwargs", (dict,), "an object") or {},
        special=fields.flag("add_special_tokens", False),
        **_ends_of_template(fields),
    )
    fields.refuse_rest()
    return found


def read_texts(body: dict[str, Any]) -> Texts:
    """Raises RequestRefused for a wrong field."""
    fields = _BodyFields(body)
    prompt, messages = fields.string("prompt"), fields.objects("messages")
    if (prompt is None) == (messages is None):
        what = "there is no prompt" if prompt is None else "there are messages as well"
        raise RequestRefused(what, param="prompt", fix="send prompt or messages")
    found = Texts(
        model=fields.string("model") or "",
        prompt=prompt,
        messages=messages,
        tools=fields.objects("tools") or None,
        special=fields.take("add_special_tokens", (bool,), "true or false"),
        template_kwargs=fields.take("chat_template_kwargs", (dict,), "an object") or {},
        token_strings=fields.flag("return_token_strs", False),
        **_ends_of_template(fields),
    )
    fields.refuse_rest()
    return found


def read_tokens(body: dict[str, Any], bounds: Bounds) -> TokenList:
    """Raises RequestRefused for a wrong field."""
    fields = _BodyFields(body)
    tokens = fields.take("tokens", (list,), "a list of tokens")
    found = TokenList(fields.string("model") or "", _tokens("tokens", tokens or [], bounds))
    fields.refuse_rest()
    return found


def read_rules(values: dict[str, Any]) -> Rules:
    """The rules that some fields give, and no others. Raises RequestRefused for a wrong field."""
    fields = _BodyFields(values)
    found = _rules(fields, _NO_RULES)
    fields.refuse_rest()
    return found


class _BodyFields:
    """The fields of a body. A field that is null is one that is not there."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str, types: tuple[type, ...], words: str) -> Any:
        """The value of a field, or None. words: what ``types`` are."""
        self._known.append(name)
        value = self._body.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise RequestRefused(f"is {_kind(value)}", param=name, fix=f"write {words}")
        return value

    def integer(self, name: str, default: _T, least: int, most: int) -> int | _T:
        value = self.take(name, (int,), f"an integer from {least} to {most}")
        if value is None:
            return default
        if not least <= value <= most:
            raise RequestRefused(
                f"is {_short(value)}, and the limits are {least} and {most}", param=name, fix="write a number within"
            )
        return value

    def number(self, name: str, default: float, least: float, most: float, *, is_open: bool = False) -> float:
        """A number from ``least``, or above it if the range is open there, to ``most``."""
        value = self.take(name, (int, float), "a number")
        if value is None:
            return default
        if not (least < value if is_open else least <= value) or not value <= most:
            text = f"{'above' if is_open else 'from'} {least:g} to {most:g}"
            raise RequestRefused(f"is {_short(value)}", param=name, fix=f"write a number {text}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, (bool,), "true or false")
        return default if value is None else value

    def string(self, name: str) -> str | None:
        return self.take(name, (str,), "a string")

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        found = self.take(name, (list,), "a list of objects")
        for i, each in enumerate(found or []):
            if not isinstance(each, dict):
                raise RequestRefused(f"is {_kind(each)}", param=f"{name}[{i}]", fix="write an object")
        return found

    def refuse_rest(self) -> None:
        """Raises RequestRefused for the first field that nothing has read."""
        for name in _LABELS:
            self._body.pop(name, None)
        for name, value in self._body.items():
            if name in _WITHOUT_EFFECT:
                if value in _WITHOUT_EFFECT[name]:
                    continue
                fix = _OTHER_WAYS.get(name, "leave it out")
                raise RequestRefused(f"is {_short(value)}, which is not done here", param=name, fix=fix)
            near = nearest(name, self._known)
            raise RequestRefused(
                "there is no such field",
                param=_short(name),
                fix=f"did you mean {' or '.join(near)}?" if near else "leave it out",
            )


def _sampling(
    fields: _BodyFields, bounds: Bounds, max_tokens: int | None, n_top: int | None, default: int | None = None
) -> SamplingFields:
    n_words = bounds.n_words
    options = fields.take("stream_options", (dict,), "an object")
    stream = fields.flag("stream", False)
    if options is not None and not stream:
        raise RequestRefused("is given, and stream is not true", param="stream_options", fix="leave it out")
    of_stream = _BodyFields(options or {})
    ends = frozenset(
        _tokens("stop_token_ids", fields.take("stop_token_ids", (list,), "a list of tokens") or [], bounds)
    )
    least = fields.integer("min_tokens", 0, 0, bounds.max_model_len)
    if max_tokens is not None and least > max_tokens:
        raise RequestRefused(
            f"is {least}, and max_tokens is {max_tokens}", param="min_tokens", fix="write at most max_tokens"
        )
    seed = fields.integer("seed", None, -(2**63), 2**64 - 1)
    found = SamplingFields(
        model=fields.string("model") or "",
        rules=_rules(fields, bounds.rules),
        seed=secrets.randbelow(_SEEDS) if seed is None else seed % _SEEDS,
        n=fields.integer("n", 1, 1, bounds.max_n),
        max_tokens=max_tokens,
        default_tokens=default,
        min_tokens=least,
        stop=_stop(fields, bounds),
        ends=ends if fields.flag("ignore_eos", False) else ends | bounds.ends,
        logit_bias=_bias(fields, n_words),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        n_top=n_top,
        stream=stream,
        include_usage=of_stream.flag("include_usage", False),
        continuous_usage=of_stream.flag("continuous_usage_stats", False),
        cache_salt=fields.string("cache_salt") or "",
        structure={
            name: value
            for name in ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
            if (value := fields.take(name, (dict, str, list), "an object, a string or a list")) is not None
        },
    )
    # Obfuscation hides lengths of tokens from observers of encrypted connections; this server adds none.
    of_stream.flag("include_obfuscation", False)
    of_stream.refuse_rest()
    return found


def _rules(fields: _BodyFields, default: Rules) -> Rules:
    return Rules(
        temperature=fields.number("temperature", default.temperature, 0, 2),
        top_k=max(fields.integer("top_k", default.top_k, -1, _LARGEST_COUNT), 0),
        top_p=fields.number("top_p", default.top_p, 0, 1, is_open=True),
        min_p=fields.number("min_p", default.min_p, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", default.repetition_penalty, 0.01, 100),
    )


def _prompts(fields: _BodyFields, bounds: Bounds) -> tuple[str | tuple[int, ...], ...]:
    what = "a text, a list of texts, tokens or a list of lists of tokens"
    found = fields.take("prompt", (str, list), what)
    if found is None:
        raise RequestRefused("there is no prompt", param="prompt", fix=f"send {what}")
    if isinstance(found, str):
        return (found,)
    if not found:
        raise RequestRefused("the list is empty", param="prompt", fix=f"send {what}")
    if isinstance(found[0], int):
        return (_tokens("prompt", found, bounds),)
    if len(found) > bounds.max_n:
        raise RequestRefused(
            f"there are {len(found)} prompts, and {bounds.max_n} are the most",
            param="prompt",
            fix="send several requests",
        )
    prompts: list[str | tuple[int, ...]] = []
    for i, each in enumerate(found):
        if type(each) is not type(found[0]) or not isinstance(each, (str, list)):
            raise RequestRefused(f"is {_kind(each)}", param=f"prompt[{i}]", fix=f"send {what}")
        prompts.append(each if isinstance(each, str) else _tokens(f"prompt[{i}]", each, bounds))
    return tuple(prompts)


def _tokens(name: str, tokens: list[Any], bounds: Bounds) -> tuple[int, ...]:
    if len(tokens) > bounds.max_model_len:
        raise RequestRefused(
            f"there are {len(tokens)} tokens, and {bounds.max_model_len} are the most of a prompt and its answer",
            param=name,
            fix="send fewer",
        )
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < bounds.n_words:
            shown = _short(token) if type(token) is int else _kind(token)
            raise RequestRefused(
                f"is {shown}, and tokens are integers from 0 to {bounds.n_words - 1}",
                param=f"{name}[{i}]",
                fix="encode by the model's own tokenizer",
            )
    return tuple(tokens)


def _stop(fields: _BodyFields, bounds: Bounds) -> tuple[str, ...]:
    found = fields.take("stop", (str, list), "a string or a list of strings")
    strings = [found] if isinstance(found, str) else found or []
    if len(strings) > bounds.max_stop:
        raise RequestRefused(
            f"there are {len(strings)} strings, and {bounds.max_stop} are the most", param="stop", fix="send fewer"
        )
    for i, each in enumerate(strings):
        name = f"stop[{i}]" if isinstance(found, list) else "stop"
        if not isinstance(each, str):
            raise RequestRefused(f"is {_kind(each)}", param=name, fix="write a string")
        if not 1 <= len(each) <= bounds.max_stop_characters:
            raise RequestRefused(
                f"has {len(each)} characters, and the limits are 1 and {bounds.max_stop_characters}",
                param=name,
                fix="write a string of that length",
            )
    return tuple(strings)


def _bias(fields: _BodyFields, n_words: int) -> tuple[tuple[int, float], ...]:
    found = fields.take("logit_bias", (dict,), "an object from tokens to numbers") or {}
    values = _BodyFields(found)
    bias = []
    for name in found:
        try:
            token = int(name) if len(name) <= 10 and name.isascii() and name.isdecimal() else -1
        except ValueError:
            token = -1
        if not 0 <= token < n_words:
            raise RequestRefused(
                f"the token {_short(name)} is none of 0 to {n_words - 1}",
                param=f"logit_bias.{_short(name)}",
                fix="leave it out",
            )
        try:
            bias.append((token, values.number(name, 0.0, -100, 100)))
        except RequestRefused as error:
            raise RequestRefused(
                error.what, param=f"logit_bias.{name}", fix="write a number from -100 to 100"
            ) from None
    return tuple(bias)


def _ends_of_template(fields: _BodyFields) -> dict[str, bool]:
    continues = fields.flag("continue_final_message", False)
    begins = fields.flag("add_generation_prompt", not continues)
    if continues and begins:
        raise RequestRefused(
            "is true, and continue_final_message is true",
            param="add_generation_prompt",
            fix="write false for one of the two",
        )
    return {"add_generation_prompt": begins, "continue_final_message": continues}


def _short(value: Any) -> str:
    """A value for a message. Long ones are cut, and a huge integer is not written in decimals."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)
