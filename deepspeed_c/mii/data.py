"""The answer to one prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepspeed_c.errors import ConfigError
from deepspeed_c.mii.constants import GenerationFinishReason

__all__ = ["Response"]


@dataclasses.dataclass(repr=False)
class Response:
    """Generated text and its lengths in tokens. ``repr`` and ``str`` are the text, as in MII."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: GenerationFinishReason

    @staticmethod
    def from_msg_dict(msg: Mapping[str, Any]) -> Response:
        """The response from ``to_msg_dict``.

        Raises:
            ConfigError: a field is missing, unknown or of another type.
        """
        want = {field.name for field in dataclasses.fields(Response)}
        if msg.keys() != want:
            raise ConfigError(
                f"has the fields {', '.join(sorted(map(str, msg)))}",
                where="Response",
                fix=f"send {', '.join(sorted(want))}",
            )
        lengths = (msg["prompt_length"], msg["generated_length"])
        if not isinstance(msg["generated_text"], str) or any(type(each) is not int or each < 0 for each in lengths):
            raise ConfigError(
                f"has a text of {type(msg['generated_text']).__name__} and the lengths {lengths}",
                where="Response",
                fix="send a text and two numbers >= 0",
            )
        try:
            reason = GenerationFinishReason(msg["finish_reason"])
        except ValueError:
            raise ConfigError(
                f"is {msg['finish_reason']!r}",
                where="Response.finish_reason",
                fix=f"send one of {', '.join(each.value for each in GenerationFinishReason)}",
            ) from None
        return Response(msg["generated_text"], *lengths, reason)

    def to_msg_dict(self) -> dict[str, str | int]:
        """The fields as values of JSON."""
        return {**vars(self), "finish_reason": GenerationFinishReason(self.finish_reason).value}

    def __repr__(self) -> str:
        return self.generated_text
