"""Prompts of chats: messages become a text by the template of the model's tokenizer.

A template is a program that comes with a model, so it runs in the sandbox of transformers alone: it reads the messages,
and reaches no attribute of Python, no file and no module.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.server.errors import RequestRefused
from deepspeed_c.server.tools import read_functions

__all__ = ["render", "template_of"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN_CHARACTERS = 300
# Names that transformers' functions give the template or take themselves, besides the parameters of
# apply_chat_template. ``chat_template`` or ``tokenize`` from a request would replace the server's choice.
_RESERVED = frozenset({"self", "conversation", "conversations", "messages", "tools", "documents", "raise_exception"})


def render(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat. It has its special tokens already: encode it without further ones.

    Args:
        tokenizer: of transformers.
        messages: of OpenAI's API. Parts of a text are joined by line ends, as in vLLM; arguments of tool calls become
            objects, and a "developer" becomes a "system" where the template does not know the word.
        template: in place of the tokenizer's own.
        kwargs: further names for the template: ``chat_template_kwargs``.

    Raises RequestRefused with the path of a wrong field, for a tokenizer without a template, and for a template that
    fails or refuses the messages.
    """
    if not messages:
        raise RequestRefused("there are no messages", param="messages", fix="send one at least")
    text = template_of(tokenizer, tools, template)
    names = kwargs or {}
    reserved = _RESERVED | inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    for name in names:
        if name in reserved or name.startswith("_"):
            raise RequestRefused(
                "this name belongs to the server", param=f"chat_template_kwargs.{name}", fix="leave it out"
            )
    if tools:
        read_functions(tools)
    read = [_message(each, f"messages[{i}]") for i, each in enumerate(messages)]
    if "developer" not in text:
        read = [{**each, "role": "system"} if each["role"] == "developer" else each for each in read]
    if continue_final_message:
        _check_continued(read[-1], len(read) - 1, add_generation_prompt)
    try:
        found = tokenizer.apply_chat_template(
            read,
            tools=[*tools] if tools else None,
            chat_template=text,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **names,
        )
    except Exception as error:  # the template is a program, and raises what it likes
        raise RequestRefused(
            f"the model's chat template refuses them: {type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]}",
            param="messages",
            fix="send messages in the order and with the roles that the model was trained with",
        ) from error
    return _text(found, "messages")


def template_of(tokenizer: Any, tools: Sequence[Any] | None = None, template: str | None = None) -> str:
    """The template that ``render`` uses: ``template`` itself, the tokenizer's own, or its one for tools.

    Raises RequestRefused where there is none.
    """
    try:
        return tokenizer.get_chat_template(template, [*tools] if tools else None)
    except ValueError as error:
        raise RequestRefused(
            "the model's tokenizer has no chat template",
            param="messages",
            fix="send a prompt to /v1/completions, or start the server with --chat-template",
        ) from error


def _message(message: Any, path: str) -> dict[str, Any]:
    """A message as templates read it: its content a text, or absent."""
    if not isinstance(message, dict):
        raise RequestRefused("is no object", param=path, fix='write {"role": ..., "content": ...}')
    role = message.get("role")
    if role not in _ROLES:
        raise RequestRefused(
            f"the role {_shown(role)} is unknown", param=f"{path}.role", fix=f"write one of {', '.join(_ROLES)}"
        )
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            fix = "write tool_calls" if name == "function_call" else "send text"
            raise RequestRefused("messages of this server have no such field", param=f"{path}.{name}", fix=fix)
    found = {name: value for name, value in message.items() if value is not None}
    calls = found.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise RequestRefused("is no list", param=f"{path}.tool_calls", fix="write a list of calls")
    if calls:
        if role != "assistant":
            raise RequestRefused(
                f"a message of the role {role} has calls",
                param=f"{path}.tool_calls",
                fix="only an assistant calls tools",
            )
        found["tool_calls"] = [_call(each, f"{path}.tool_calls[{i}]") for i, each in enumerate(calls)]
    if "content" in found:
        found["content"] = _content(found["content"], f"{path}.content")
    elif not calls:
        raise RequestRefused("there is no content", param=f"{path}.content", fix="write a text")
    return found


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return _text(content, path)
    if not isinstance(content, list):
        raise RequestRefused(
            f"{_shown(content)} is no text", param=path, fix="write a text, or a list of parts of the type text"
        )
    texts = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if not isinstance(part, dict):
            raise RequestRefused("is no object", param=where, fix='write {"type": "text", "text": ...}')
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise RequestRefused(
                f"a part of the type {_shown(kind)} cannot be read: the model reads text alone",
                param=f"{where}.type",
                fix='send parts of the type "text"',
            )
        texts.append(_text(part.get(kind), f"{where}.{kind}"))
    return "\n".join(texts)


def _call(call: Any, path: str) -> dict[str, Any]:
    """A call of an earlier answer, its arguments an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(
            "is no call of a function",
            param=path,
            fix='write {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestRefused(
            "the arguments are no JSON object",
            param=f"{path}.function.arguments",
            fix="write an object of JSON as a text",
        )
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _check_continued(message: Mapping[str, Any], place: int, add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestRefused(
            "it is asked for together with add_generation_prompt",
            param="continue_final_message",
            fix="write add_generation_prompt: false",
        )
    if message["role"] != "assistant" or "content" not in message:
        raise RequestRefused(
            "continue_final_message needs a last message of the assistant, with a content",
            param=f"messages[{place}]",
            fix="send such a message as the last one",
        )


def _text(text: Any, path: str) -> str:
    if not isinstance(text, str):
        raise RequestRefused(f"{_shown(text)} is no text", param=path, fix="write a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(
            f"the character {error.start} is half of a surrogate pair", param=path, fix="send whole characters"
        ) from error
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
