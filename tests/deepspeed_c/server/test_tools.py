"""Calls of tools in answers: the same wherever an answer is cut, broken calls as text, the forms of templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from deepspeed_c.server.errors import RequestRefused
from deepspeed_c.server.tools import (
    AnswerPiece,
    HermesToolParser,
    Llama3ToolParser,
    MistralToolParser,
    ToolFunction,
    chosen_functions,
    hidden_tag,
    parser_of,
    read_functions,
)
from tests.deepspeed_c.serving.folders import byte_tokenizer

LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name}. {{ tools }}'
HERMES = "{{ tools }} <tool_call>"
MISTRAL = "{{ tools }} [TOOL_CALLS]"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}

Calls = list[tuple[str, Any]]
# Form -> answers: (text, text that is no call, calls).
ANSWERS: dict[type, list[tuple[str, str, Calls]]] = {
    HermesToolParser: [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ('\n\n<tool_call>{"arguments": {}, "name": "f"}</tool_call>\n', "", [("f", {})]),
        (
            """Let me look.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>
            <tool_call> {"name": "g", "arguments": {"b": [{}, "}"]}}</tool_call>\n""",
            "Let me look.\n",
            [("f", {}), ("g", {"b": [{}, "}"]})],
        ),
        # The closing tag, an opening one and quotes in a text.
        (
            json.dumps({"name": "f", "arguments": {"a": '</tool_call> \\" <tool_call>{ 🙂'}}).join(
                ["<tool_call>", "</tool_call>"]
            ),
            "",
            [("f", {"a": '</tool_call> \\" <tool_call>{ 🙂'})],
        ),
        # The answer ends before the closing tag, or in the middle of it.
        ('<tool_call>\n{"name": "f", "arguments": {}}', "", [("f", {})]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call> done', " done", [("f", {})]),
        (
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        # Tags that are text, and broken calls, which come as text.
        ("a <tool_call> b", "a <tool_call> b", []),
        ("a <tool_cal", "a <tool_cal", []),
        ("1 < 2 <<tool <tool_call", "1 < 2 <<tool <tool_call", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', '<tool_call>{"name": "f", "arguments": {"a": 1}', []),
        ('<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": f}</tool_call>', []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        ('<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}',) * 2 + ([],),
        ("<tool_call>" + '{"a":[' * 5000 + "]}" * 5000,) * 2 + ([],),
        (
            '<tool_call>{"name": "f", <tool_call>{"name": "g", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", ',
            [("g", {})],
        ),
        ('{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        (" \n", " \n", []),
        ("", "", []),
    ],
    Llama3ToolParser: [
        ('{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
        (' \n<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"c": null}};',
            "",
            [("f", {}), ("g", {"c": None})],
        ),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('{"name": "f", "parameters": {}} and text {', "and text {", [("f", {})]),
        ('text {"name": "f", "parameters": {}}', 'text {"name": "f", "parameters": {}}', []),
        ('{x} <|python_tag|>{"name": "f", "parameters": {}}', "{x} ", [("f", {})]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ],
    MistralToolParser: [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", {}), ("g", {})]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "012345678"}]', "", [("f", {})]),
        ('[{"name": "f", "arguments": {}}]',) * 2 + ([],),
        ('So: [TOOL_CALLS][{"name": "f", "arguments": {}}]', "So: ", [("f", {})]),
        ("[1] is a source", "[1] is a source", []),
        ("[TOOL] is a tag", "[TOOL] is a tag", []),
        ("[]", "[]", []),
        ("[TOOL_CALLS][{]", "[TOOL_CALLS][{]", []),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]',) * 2 + ([],),
        ("[[TOOL_CALLS]x", "[[TOOL_CALLS]x", []),
    ],
}
CASES = [(form, *answer) for form, answers in ANSWERS.items() for answer in answers]


def joined(pieces: list[AnswerPiece]) -> tuple[str, Calls]:
    """The text and the calls. The pieces of a call are whole, and in order."""
    calls = [piece for piece in pieces if piece.index is not None]
    assert [call.index for call in calls] == [*range(len(calls))]
    assert len({call.id for call in calls}) == len(calls) and all(len(call.id) == 9 for call in calls)
    assert all(not call.content for call in calls)
    return "".join(piece.content for piece in pieces), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_answers_are_read_the_same_wherever_they_are_cut(form: type, text: str, content: str, calls: Calls) -> None:
    draw = random.Random(text)
    whole = form()
    assert joined(whole.add(text) + whole.finish()) == (content, calls)
    for _ in range(40 if len(text) < 1000 else 2):
        parser, pieces, i = form(), [], 0
        while i < len(text):
            n = draw.choice((1, 1, 2, 3, 7, 20)) if len(text) < 1000 else 997
            pieces += parser.add(text[i : i + n])
            i += n
        assert joined(pieces + parser.finish()) == (content, calls)


@pytest.mark.parametrize("form", ANSWERS)
def test_texts_of_random_parts_lose_nothing(form: type) -> None:
    """Text without a call comes back to the letter."""
    parts = [
        form.tag,
        form.tag[:3],
        form.tag[1:],
        form.closing,
        "{",
        "[",
        '"',
        "\\",
        "}",
        "]",
        " ",
        "\n",
        "a",
        ";",
        "é",
    ]
    draw = random.Random(3)
    for _ in range(400):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 25)))
        parser = form()
        pieces = parser.add(text[:7]) + parser.add(text[7:]) + parser.finish()
        assert ("".join(piece.content for piece in pieces), len(text)) == (text, len(text))


def test_text_comes_at_once_and_half_a_tag_is_held_back() -> None:
    parser = HermesToolParser()
    assert parser.add("Hello <") == [AnswerPiece("Hello ")]
    assert parser.add("tool_c") == []
    assert parser.add("ase") == [AnswerPiece("<tool_case")]
    assert parser.add("<tool_call>") == []
    assert parser.add('{"name": "f", "arguments": {') == []
    (call,) = parser.add("}}")
    assert (call.index, call.name, call.arguments) == (0, "f", "{}")
    assert parser.add("</tool_call>") == parser.finish() == []


def test_a_long_call_is_read() -> None:
    """400,000 characters in pieces, with tags in a string; white space before and behind."""
    text = json.dumps({"name": "f", "arguments": {"text": "<tool_call>{</tool_call>" * 16_000}})
    text = " " * 20_000 + "<tool_call>" + " " * 20_000 + text + " " * 20_000
    parser = HermesToolParser()
    pieces = []
    for i in range(0, len(text), 4):
        pieces += parser.add(text[i : i + 4])
    assert joined(pieces + parser.finish()) == ("", [("f", {"text": "<tool_call>{</tool_call>" * 16_000})])


@pytest.mark.parametrize(
    ("template", "form"), [(HERMES, HermesToolParser), (LLAMA, Llama3ToolParser), (MISTRAL, MistralToolParser)]
)
def test_the_form_is_that_of_the_template(template: str, form: type) -> None:
    assert parser_of(template) is form


@pytest.mark.parametrize(
    "template",
    ["", "{{ tools }}", "<tool_call>", HERMES + "<function=", HERMES + "<arg_key>", MISTRAL + "[ARGS]", "<|tool_call>"],
)
def test_other_forms_are_refused(template: str) -> None:
    with pytest.raises(RequestRefused, match="no calls of tools in a form") as found:
        parser_of(template)
    assert (found.value.param, found.value.status) == ("tools", 400)


def test_templates_of_models_have_the_form_of_their_documents() -> None:
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    forms = {
        "qwen2_5": HermesToolParser,
        "qwen3": HermesToolParser,
        "llama3_1": Llama3ToolParser,
        "llama3_2": Llama3ToolParser,
        **dict.fromkeys(("qwen3_5_think", "glm4moe", "gptoss", "gemma", "phi3", "llama3", "cohere")),
    }
    for name, form in forms.items():
        template = (folder / f"{name}.jinja").read_text()
        if form is not None:
            assert parser_of(template) is form, name
            continue
        with pytest.raises(RequestRefused):
            parser_of(template)


def test_a_tag_is_shown_where_decoding_hides_it() -> None:
    pytest.importorskip("transformers")
    tokenizer = byte_tokenizer()
    assert hidden_tag(MistralToolParser, tokenizer) == ()  # no token: text
    tokenizer.add_tokens(["<tool_call>"])
    assert hidden_tag(HermesToolParser, tokenizer) == ()  # a token, which decoding shows
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    token = len(tokenizer) - 1
    assert tokenizer.decode([token], skip_special_tokens=True) == ""
    assert hidden_tag(MistralToolParser, tokenizer) == ((token, "[TOOL_CALLS]"),)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([3], "tools[0].type"),
        ([{}], "tools[0].type"),
        ([CLOCK, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 3}}], "tools[0].function.name"),
        ([CLOCK, CLOCK], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "tools[0].function.parameters",
        ),
    ],
)
def test_wrong_tools_are_refused(tools: list[Any], param: str) -> None:
    with pytest.raises(RequestRefused) as found:
        read_functions(tools)
    assert found.value.param == param


def test_a_choice_names_functions() -> None:
    tools = [WEATHER, CLOCK]
    weather = ToolFunction("weather", {"type": "object"})
    clock = ToolFunction("clock", {"type": "object", "properties": {}, "additionalProperties": False})
    assert [chosen_functions(tools, each) for each in (None, "none", "auto")] == [None] * 3
    assert chosen_functions(tools, "required") == [weather, clock]
    assert chosen_functions(tools, {"type": "function", "function": {"name": "clock"}}) == [clock]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "required", "tool_choice"),
        ([CLOCK], "any", "tool_choice"),
        ([CLOCK], 3, "tool_choice"),
        ([CLOCK], {"type": "allowed_tools"}, "tool_choice"),
        ([CLOCK], {"type": "function", "function": {"name": "weather"}}, "tool_choice.function.name"),
        ([CLOCK], {"type": "function", "function": {}}, "tool_choice.function.name"),
    ],
)
def test_wrong_choices_are_refused(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as found:
        chosen_functions(tools, choice)
    assert found.value.param == param
