"""Answers as OpenAI's API writes them, whole and in pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from deepspeed_c.server.fields import SamplingFields
from deepspeed_c.server.generation import RequestAnswers
from deepspeed_c.server.sending import event_bytes
from deepspeed_c.serving import AnswerEvent

__all__ = ["Reply", "ReplyWriter", "TokenNames", "chat_logprobs", "completion_logprobs"]

# JSON has no infinity; the number is vLLM's.
_LEAST_LOG_PROB = -9999.0
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_HALF = "\N{REPLACEMENT CHARACTER}"


class TokenNames:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name = functools.lru_cache(maxsize=1 << 16)(self._name)
        """The text of a token. Bytes that are no whole character are written as ``bytes:\\xe6``."""
        self.bytes = functools.lru_cache(maxsize=1 << 16)(self._bytes)
        """The bytes of a token's text."""

    def _name(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        if _HALF not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))

    def _bytes(self, token: int) -> bytes:
        text = self._tokenizer.decode([token])
        if _HALF not in text:
            return text.encode()
        word = self._tokenizer.convert_ids_to_tokens(token)
        if found := _BYTE.fullmatch(word):
            return bytes([int(found[1], 16)])
        table = _bytes_of_characters()
        return bytes(table[each] for each in word) if set(word) <= set(table) else text.encode()


@functools.lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def completion_logprobs(events: Sequence[AnswerEvent], names: TokenNames, offset: int) -> tuple[dict[str, Any], int]:
    """The ``logprobs`` of a choice of a completion, and the offset of the next token in the text. offset: of the first
    token."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        if event.token is None or event.log_prob is None:
            continue
        name, log_prob = names.name(event.token), max(event.log_prob, _LEAST_LOG_PROB)
        found["tokens"].append(name)
        found["token_logprobs"].append(log_prob)
        top = {names.name(token): max(value, _LEAST_LOG_PROB) for token, value in event.top}
        found["top_logprobs"].append({**top, name: log_prob})
        found["text_offset"].append(offset)
        offset += len(name)
    return found, offset


def chat_logprobs(events: Sequence[AnswerEvent], names: TokenNames) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat."""

    def entry(token: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": names.name(token),
            "logprob": max(log_prob, _LEAST_LOG_PROB),
            "bytes": list(names.bytes(token)),
        }

    content = [
        {**entry(event.token, event.log_prob), "top_logprobs": [entry(*each) for each in event.top]}
        for event in events
        if event.token is not None and event.log_prob is not None
    ]
    return {"content": content, "refusal": None}


class ReplyWriter(Protocol):
    """The form of the answers of one route."""

    head: dict[str, Any]
    """The fields ``id``, ``created`` and ``model``."""
    wish: SamplingFields
    whole_object: str
    piece_object: str

    def begin(self, answer: int) -> dict[str, Any] | None:
        """The choice of the first piece of an answer, before its first token."""

    def pieces(self, answer: int, event: AnswerEvent) -> list[dict[str, Any]]:
        """The choices of the pieces for an event."""

    def whole(self, answer: int, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        """The choice of a whole answer."""


class Reply:
    """The answers to one request, in the form of a writer.

    error_object: the body and the status for an error of the engine.
    """

    def __init__(
        self,
        generation: RequestAnswers,
        writer: ReplyWriter,
        n_answers: int,
        error_object: Callable[[Exception], tuple[dict[str, Any], int]],
    ) -> None:
        self._generation, self._writer, self._n_answers = generation, writer, n_answers
        self._error_object = error_object

    async def whole(self) -> tuple[dict[str, Any], int]:
        """The body, and the status."""
        events: list[list[AnswerEvent]] = [[] for _ in range(self._n_answers)]
        async with aclosing(self._generation.events()) as found:
            async for answer, event in found:
                if event.error is not None:
                    return self._error_object(event.error)
                events[answer].append(event)
        writer = self._writer
        choices = [writer.whole(answer, each) for answer, each in enumerate(events)]
        return {**writer.head, "object": writer.whole_object, "choices": choices, "usage": self._usage()}, 200

    async def pieces(self) -> AsyncIterator[bytes]:
        """Events of a stream. The last one is ``[DONE]``, or has an error."""
        writer, wish = self._writer, self._writer.wish
        head = {**writer.head, "object": writer.piece_object}
        if wish.include_usage:
            head["usage"] = None

        def piece(choice: dict[str, Any]) -> bytes:
            usage = {"usage": self._usage()} if wish.continuous_usage and wish.include_usage else {}
            return event_bytes({**head, "choices": [choice], **usage})

        for answer in range(self._n_answers):
            if (choice := writer.begin(answer)) is not None:
                yield piece(choice)
        async with aclosing(self._generation.events()) as found:
            async for answer, event in found:
                if event.error is not None:
                    yield event_bytes(self._error_object(event.error)[0])
                    return
                for choice in writer.pieces(answer, event):
                    yield piece(choice)
        if wish.include_usage:
            yield event_bytes({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _usage(self) -> dict[str, Any]:
        n_prompt, n_new = self._generation.n_prompt, self._generation.n_new
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
            "prompt_tokens_details": {"cached_tokens": self._generation.n_found},
        }
