"""Calls of tools: the functions of a request, and three forms of calls in the answers of models.

Each form is a class. It reads an answer that comes in pieces, and the pieces of text and calls that it gives back are
the same wherever the answer was cut. A call is given back when it is whole, so its arguments are JSON in any case; text
that begins like a call and is none comes back as text, as vLLM's whole answers have it.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from deepspeed_c.server.errors import RequestRefused

__all__ = [
    "AnswerPiece",
    "ToolFunction",
    "ToolParser",
    "chosen_functions",
    "hidden_tag",
    "parser_of",
    "read_functions",
]

_SPACE = " \t\r\n"
# Characters of JSON outside strings: punctuation, numbers, and the letters of true, false and null.
_OUTSIDE_STRINGS = frozenset('{}[]:,"0123456789+-.eEtrufalsn' + _SPACE)
_ID_LETTERS = string.ascii_letters + string.digits
# Mistral's templates refuse ids of another length, and no other template looks at them.
_ID_CHARACTERS = 9
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFunction(NamedTuple):
    """A function that a model may call."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments, an object."""


class AnswerPiece(NamedTuple):
    """A piece of an answer: text, or a call."""

    content: str = ""
    index: int | None = None
    """The number of the call in its answer, from 0. None: the piece is text."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """An object of JSON."""


class ToolParser(Protocol):
    """Reads one answer."""

    tag: ClassVar[str]
    """Comes before calls."""

    def add(self, text: str) -> list[AnswerPiece]:
        """The pieces that ``text`` completes. Text that may become a call is held back."""

    def finish(self) -> list[AnswerPiece]:
        """The rest. A call that is not whole comes as text."""

    @classmethod
    def lark(cls, functions: Sequence[ToolFunction], tokenizer: Any, *, is_parallel: bool) -> str:
        """A grammar in llguidance's Lark: the answer is a call of one of ``functions``. is_parallel: or several calls."""


def read_functions(tools: Sequence[Any]) -> list[ToolFunction]:
    """The functions of the field ``tools``. Raises RequestRefused with the path of a wrong field."""
    found: list[ToolFunction] = []
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise RequestRefused(
                f"the type {str(kind)[:60]!r} is none of this server's tools",
                param=f"{path}.type",
                fix='write "function"',
            )
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise RequestRefused("the function has no name", param=f"{path}.function.name", fix="write one")
        if any(name == each.name for each in found):
            raise RequestRefused(
                f"two functions have the name {name[:60]!r}", param=f"{path}.function.name", fix="write another"
            )
        schema = function.get("parameters")
        schema = _NO_ARGUMENTS if schema is None else schema
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise RequestRefused(
                "the arguments of a function are an object",
                param=f"{path}.function.parameters",
                fix='write a JSON schema of the type "object"',
            )
        found.append(ToolFunction(name, {"type": "object", **schema}))
    return found


def chosen_functions(tools: Sequence[Any] | None, tool_choice: Any) -> list[ToolFunction] | None:
    """The functions to choose from if the answer must be a call. None: the model may also write text.

    Args:
        tool_choice: "none", "auto", "required", or ``{"type": "function", "function": {"name": ...}}``. None: "auto".

    Raises RequestRefused for another choice, and for a function that is not among the tools.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    functions = read_functions(tools or [])
    if not functions:
        raise RequestRefused(
            "there are no tools to choose from", param="tool_choice", fix="send tools, or leave it out"
        )
    if tool_choice == "required":
        return functions
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    if not isinstance(function, dict) or tool_choice.get("type") != "function":
        raise RequestRefused(
            f"{str(tool_choice)[:60]!r} is no choice",
            param="tool_choice",
            fix='write "none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
        )
    named = [each for each in functions if each.name == function.get("name")]
    if not named:
        raise RequestRefused(
            f"the function {str(function.get('name'))[:60]!r} is none of the tools",
            param="tool_choice.function.name",
            fix="name one of the tools",
        )
    return named


def parser_of(template: str) -> type[ToolParser]:
    """The form of a template's calls. Raises RequestRefused if the template has none of the three forms."""
    found: type[ToolParser] | None = None
    if "<tool_call>" in template:
        # Other models write XML within the same tag.
        found = None if any(each in template for each in ("<function=", "<arg_key>")) else HermesToolParser
    elif "[TOOL_CALLS]" in template:
        found = None if "[ARGS]" in template else MistralToolParser
    elif '{"name": function name, "parameters": ' in template:
        found = Llama3ToolParser
    if found is None or "tools" not in template:
        raise RequestRefused(
            "the model's chat template writes no calls of tools in a form that is known here",
            param="tools",
            fix="leave tools out, or serve a model with the form of Hermes and Qwen (<tool_call>), Llama 3 or Mistral "
            "([TOOL_CALLS])",
        )
    return found


def hidden_tag(parser: type[ToolParser], tokenizer: Any) -> tuple[tuple[int, str], ...]:
    """(token, text) of the tag of a form if it is a special token, which decoding hides; else empty. The answer shows
    it then, because without it text before calls reads like text that has no call."""
    token = tokenizer.convert_tokens_to_ids(parser.tag)
    if token is None or tokenizer.convert_ids_to_tokens(token) != parser.tag:
        return ()
    return () if tokenizer.decode([token], skip_special_tokens=True) else ((token, parser.tag),)


class _JsonEnd:
    """Finds the end of an object or a list of JSON, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def take(self, char: str) -> bool | None:
        """Whether ``char`` is the last one. None: the text is no JSON."""
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
            return False
        if char not in _OUTSIDE_STRINGS:
            return None
        if char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class _ParserOfForm:
    """A parser of calls that are a tag and a value of JSON. Each state is a method that takes the next character.

    ```
     begin --> in text --tag--> tagged --> in value --> after --> in text
       +-----value without a tag-------------^  ^---------+ another value
    ```
    """

    tag: ClassVar[str]
    """Comes before calls."""
    closing: ClassVar[str] = ""
    """May come after a call, and is dropped."""
    first: ClassVar[str] = "{"
    """The first character of the value."""
    may_lack_tag: ClassVar[bool] = False
    """Whether an answer may begin with the value."""
    separators: ClassVar[str] = ""
    """Characters between two values without a tag."""
    keys: ClassVar[tuple[str, ...]] = ("arguments",)
    """Names of the field with the arguments, the first one preferred."""

    def __init__(self) -> None:
        self._state: Callable[[str], None] = self._begin
        self._held = ""  # the begin of a tag
        self._prefix: list[str] = []  # the tag before a value, and white space
        self._value: list[str] = []
        self._scan = _JsonEnd()
        self._blank: list[str] = []  # white space at the begin of a text, which is dropped beside calls
        self._is_text = False  # whether the text since the last call has more than white space
        self._n_calls = 0
        self._text: list[str] = []
        self._pieces: list[AnswerPiece] = []

    def add(self, text: str) -> list[AnswerPiece]:
        for char in text:
            self._state(char)
        return self._take_pieces()

    def finish(self) -> list[AnswerPiece]:
        self._say("".join(self._prefix + self._value))
        if self._state != self._after:
            self._say(self._held)
        if not self._n_calls:
            self._text += self._blank
        self._prefix, self._value, self._held, self._blank = [], [], "", []
        return self._take_pieces()

    @classmethod
    def calls_of(cls, value: Any) -> list[Any]:
        """The calls in a value of JSON."""
        return [value]

    def _begin(self, char: str) -> None:
        if char in _SPACE:
            self._say(char)
        elif self.may_lack_tag and char == self.first:
            self._begin_value(char)
        else:
            self._go_on(char)

    def _in_text(self, char: str) -> None:
        held = self._held + char
        n = next(n for n in range(min(len(held), len(self.tag)), -1, -1) if held.endswith(self.tag[:n]))
        self._say(held[: len(held) - n])
        self._held = held[len(held) - n :]
        if n == len(self.tag):
            self._prefix, self._held, self._state = [self.tag], "", self._tagged

    def _tagged(self, char: str) -> None:
        if char in _SPACE:
            self._prefix.append(char)
        elif char == self.first:
            self._begin_value(char)
        else:
            self._give_up()
            self._go_on(char)

    def _begin_value(self, char: str) -> None:
        self._scan, self._state = _JsonEnd(), self._in_value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        is_last = self._scan.take(char)
        if is_last is None and not self._prefix:
            text, self._value = "".join(self._value), []
            self._go_on(text + char)  # a tag may begin within
            return
        if is_last is None:
            self._give_up()
            self._go_on(char)
            return
        self._value.append(char)
        if is_last:
            self._end_value()

    def _end_value(self) -> None:
        calls = self._read("".join(self._value))
        if not calls:
            self._give_up()
            return
        self._pieces += self._take_text()
        for name, arguments in calls:
            number = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_CHARACTERS))
            self._pieces.append(AnswerPiece("", self._n_calls, number, name, arguments))
            self._n_calls += 1
        self._prefix, self._value, self._blank, self._is_text = [], [], [], False
        self._state = self._after

    def _after(self, char: str) -> None:
        text = self._held + char
        if not self._held and char in _SPACE + self.separators:
            return
        if self.closing.startswith(text):
            self._held = text
            if text == self.closing:
                self._held, self._state = "", self._in_text
        elif self.separators and text == self.first:
            self._begin_value(char)
        else:
            self._held = ""
            self._go_on(text)

    def _give_up(self) -> None:
        """Writes the held characters as text."""
        text = "".join(self._prefix + self._value)
        self._prefix, self._value, self._state = [], [], self._in_text
        self._say(text)

    def _go_on(self, text: str) -> None:
        """Reads characters as text, up to the next tag."""
        self._state = self._in_text
        for char in text:
            self._state(char)

    def _say(self, text: str) -> None:
        if not self._is_text:
            if not text.strip(_SPACE):
                self._blank.append(text)
                return
            self._text += self._blank
            self._blank, self._is_text = [], True
        self._text.append(text)

    def _take_text(self) -> list[AnswerPiece]:
        text, self._text = "".join(self._text), []
        return [AnswerPiece(text)] if text else []

    def _take_pieces(self) -> list[AnswerPiece]:
        pieces, self._pieces = self._pieces + self._take_text(), []
        return pieces

    def _read(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments. Empty: the value has no calls, or a wrong one."""
        try:
            found = []
            for call in self.calls_of(json.loads(text)):
                arguments = next((call[key] for key in self.keys if key in call), None)
                if not isinstance(call["name"], str) or not isinstance(arguments, dict):
                    return []
                # A number beyond doubles and half a surrogate pair cannot be sent.
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                (call["name"] + written).encode()
                found.append((call["name"], written))
        except (ValueError, TypeError, KeyError, RecursionError):
            return []
        return found


class HermesToolParser(_ParserOfForm):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen."""

    tag, closing = "<tool_call>", "</tool_call>"

    @classmethod
    def lark(cls, functions: Sequence[ToolFunction], tokenizer: Any, *, is_parallel: bool) -> str:
        call = '"<tool_call>\\n" call "\\n</tool_call>"'
        return _lark(functions, "arguments", f'{call} ("\\n" {call})*' if is_parallel else call)


class Llama3ToolParser(_ParserOfForm):
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between them: Llama 3.1 and later."""

    tag, may_lack_tag, separators, keys = "<|python_tag|>", True, ";", ("parameters", "arguments")

    @classmethod
    def lark(cls, functions: Sequence[ToolFunction], tokenizer: Any, *, is_parallel: bool) -> str:
        # Templates of Llama refuse a message with two calls, so an answer that must have one has one alone.
        return _lark(functions, "parameters", "call")


class MistralToolParser(_ParserOfForm):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral, up to the tokenizers of version 7."""

    tag, first = "[TOOL_CALLS]", "["

    @classmethod
    def calls_of(cls, value: Any) -> list[Any]:
        return list(value)

    @classmethod
    def lark(cls, functions: Sequence[ToolFunction], tokenizer: Any, *, is_parallel: bool) -> str:
        token = tokenizer.get_vocab().get(cls.tag)
        tag = json.dumps(cls.tag) if token is None else f"<[{token}]>"
        more = '(", " call)*' if is_parallel else ""
        return _lark(functions, "arguments", f'{tag} "[" call {more} "]"')


def _lark(functions: Sequence[ToolFunction], key: str, start: str) -> str:
    """Rules for a call of each function. Each schema is a root of its own, so that its references hold."""
    lines = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, (name, schema) in enumerate(functions):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        lines.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps(schema)}")
    return "\n".join(lines)
