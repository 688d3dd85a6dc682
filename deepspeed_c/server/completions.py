"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_c.server.fields import SamplingFields
from deepspeed_c.server.replies import TokenNames, completion_logprobs
from deepspeed_c.serving import AnswerEvent

__all__ = ["CompletionWriter"]


class CompletionWriter:
    """echoed: the text of each prompt, in front of its answers; [] for answers alone."""

    whole_object = piece_object = "text_completion"

    def __init__(self, head: dict[str, Any], wish: SamplingFields, names: TokenNames, echoed: Sequence[str]) -> None:
        self.head, self.wish = head, wish
        self._names, self._echoed = names, echoed
        self._offsets: dict[int, int] = {}

    def begin(self, answer: int) -> dict[str, Any] | None:
        if not self._echoed:
            return None
        return {"index": answer, "text": self._prompt(answer), "logprobs": None, "finish_reason": None}

    def pieces(self, answer: int, event: AnswerEvent) -> list[dict[str, Any]]:
        logprobs = self._logprobs(answer, [event])
        if not event.text and logprobs is None and event.reason is None:
            return []  # a token that completes no text
        reason = None if event.reason is None else event.reason.value
        return [{"index": answer, "text": event.text, "logprobs": logprobs, "finish_reason": reason}]

    def whole(self, answer: int, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        text = self._prompt(answer) + "".join(event.text for event in events)
        reason = events[-1].reason
        return {
            "index": answer,
            "text": text,
            "logprobs": self._logprobs(answer, events),
            "finish_reason": None if reason is None else reason.value,
        }

    def _prompt(self, answer: int) -> str:
        return self._echoed[answer // self.wish.n] if self._echoed else ""

    def _logprobs(self, answer: int, events: Sequence[AnswerEvent]) -> dict[str, Any] | None:
        if self.wish.n_top is None:
            return None
        begin = self._offsets.get(answer, 0)
        found, self._offsets[answer] = completion_logprobs(events, self._names, begin)
        return found
