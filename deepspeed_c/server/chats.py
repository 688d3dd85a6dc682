"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_c.server.fields import Chat
from deepspeed_c.server.replies import TokenNames, chat_logprobs
from deepspeed_c.server.tools import AnswerPiece, ToolParser
from deepspeed_c.serving import AnswerEvent

__all__ = ["ChatWriter"]


class ChatWriter:
    """role: of the answers. parser: the form of calls of tools; None: answers are text alone."""

    whole_object, piece_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, head: dict[str, Any], chat: Chat, names: TokenNames, role: str, parser: type[ToolParser] | None
    ) -> None:
        self.head, self.wish = head, chat.sampling
        self._names, self._role = names, role
        self._is_parallel = chat.parallel_tool_calls
        self._parsers = [parser() for _ in range(self.wish.n)] if parser is not None else []
        self._calling: set[int] = set()  # answers with a call

    def begin(self, answer: int) -> dict[str, Any] | None:
        return _piece(answer, {"role": self._role, "content": ""})

    def pieces(self, answer: int, event: AnswerEvent) -> list[dict[str, Any]]:
        found = [_piece(answer, _delta(each)) for each in self._parsed(answer, event)]
        if event.log_prob is not None:
            found = found or [_piece(answer, {})]
            found[0]["logprobs"] = self._logprobs([event])
        if event.reason is not None:
            found.append({**_piece(answer, {}), "finish_reason": self._reason(answer, event)})
        return found

    def whole(self, answer: int, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        parsed = [piece for event in events for piece in self._parsed(answer, event)]
        text = "".join(each.content for each in parsed)
        calls = [_call(each) for each in parsed if each.index is not None]
        message: dict[str, Any] = {"role": self._role, "content": text, "refusal": None}
        if calls:
            message.update(content=text or None, tool_calls=calls)
        return {
            "index": answer,
            "message": message,
            "logprobs": self._logprobs(events),
            "finish_reason": self._reason(answer, events[-1]),
        }

    def _parsed(self, answer: int, event: AnswerEvent) -> list[AnswerPiece]:
        """Text and calls that are whole now. Without parallel calls those after the first one are left out."""
        if not self._parsers:
            return [AnswerPiece(event.text)] if event.text else []
        parser = self._parsers[answer]
        found = parser.add(event.text) if event.text else []
        if event.reason is not None:
            found += parser.finish()
        if any(each.index is not None for each in found):
            self._calling.add(answer)
        return found if self._is_parallel else [each for each in found if not each.index]

    def _reason(self, answer: int, event: AnswerEvent) -> str | None:
        if event.reason is None:
            return None
        return "tool_calls" if answer in self._calling else event.reason.value

    def _logprobs(self, events: Sequence[AnswerEvent]) -> dict[str, Any] | None:
        return None if self.wish.n_top is None else chat_logprobs(events, self._names)


def _piece(answer: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": answer, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(piece: AnswerPiece) -> dict[str, Any]:
    if piece.index is None:
        return {"content": piece.content}
    return {"tool_calls": [{"index": piece.index, **_call(piece)}]}


def _call(piece: AnswerPiece) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
