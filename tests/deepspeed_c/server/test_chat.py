"""Prompts of chats: templates of models in their sandbox, and messages that are refused with the path of the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_c.server.chat import render, template_of
from deepspeed_c.server.errors import RequestRefused
from tests.deepspeed_c.serving.folders import byte_tokenizer

pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "ü"]}'}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = byte_tokenizer()
    found.chat_template = CHATML
    return found


def refusal(tokenizer: Any, messages: Any, *args: Any, **kwargs: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        render(tokenizer, messages, *args, **kwargs)
    assert found.value.status == 400
    return found.value


def test_messages_become_the_text_of_the_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert render(tokenizer, messages) == "<|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    assert render(tokenizer, messages, add_generation_prompt=False).endswith("Hi<|end|>\n")
    assert render(tokenizer, [USER], template="{{ messages[0].content }}!") == "Hi!"
    assert render(tokenizer, [USER], template="{{ mood }}", kwargs={"mood": "calm"}) == "calm"


def test_a_last_message_is_continued(tokenizer: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    text = render(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>Hi<|end|>\n<|assistant|>Well, "
    error = refusal(tokenizer, messages, continue_final_message=True)
    assert error.param == "continue_final_message"
    error = refusal(tokenizer, [USER], add_generation_prompt=False, continue_final_message=True)
    assert error.param == "messages[0]"


def test_parts_of_a_text_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|user|>a\nb<|end|>" in render(tokenizer, [{"role": "user", "content": parts}])
    assert "<|user|><|end|>" in render(tokenizer, [{"role": "user", "content": []}])


def test_arguments_of_calls_are_objects_for_the_template(tokenizer: Any) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc", "content": "5"},
    ]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    )
    assert render(tokenizer, messages, template=template) == '{"a": [1, "ü"]}'
    empty = {**CALL, "function": {"name": "f", "arguments": ""}}
    assert render(tokenizer, [{"role": "assistant", "tool_calls": [empty]}], template=template) == "{}"
    assert messages[1]["tool_calls"] == [CALL]


def test_a_developer_is_a_system_where_the_template_has_none(tokenizer: Any) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render(tokenizer, messages, add_generation_prompt=False) == "<|system|>x<|end|>\n"
    assert render(tokenizer, messages, template="{{ messages[0].role }} {# developer #}") == "developer "


@pytest.mark.parametrize(
    ("message", "path", "what"),
    [
        (3, "", "no object"),
        ({"content": "x"}, ".role", "None"),
        ({"role": "robot", "content": "x"}, ".role", "robot"),
        ({"role": ["user"], "content": "x"}, ".role", "user"),
        ({"role": "user"}, ".content", "no content"),
        ({"role": "assistant"}, ".content", "no content"),
        ({"role": "assistant", "tool_calls": []}, ".content", "no content"),
        ({"role": "user", "content": 3}, ".content", "3"),
        ({"role": "user", "content": "\ud800"}, ".content", "surrogate"),
        ({"role": "user", "content": ["x"]}, ".content[0]", "no object"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "None"),
        ({"role": "user", "content": [{}]}, ".content[0].type", "None"),
        ({"role": "user", "content": [{"type": "text", "text": "\udfff"}]}, ".content[0].text", "surrogate"),
        ({"role": "assistant", "audio": {"id": "x"}}, ".audio", "no such field"),
        ({"role": "assistant", "function_call": {"name": "x"}}, ".function_call", "no such field"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, ".tool_calls", "only an assistant"),
        ({"role": "assistant", "tool_calls": {}}, ".tool_calls", "no list"),
        ({"role": "assistant", "tool_calls": [3]}, ".tool_calls[0]", "no call"),
        ({"role": "assistant", "tool_calls": [CALL, {"function": {}}]}, ".tool_calls[1]", "no call"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ".tool_calls[0].function.arguments",
            "no JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            ".tool_calls[0].function.arguments",
            "no JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
            ".tool_calls[0].function.arguments",
            "no JSON object",
        ),
    ],
)
def test_wrong_messages_are_refused_with_their_path(tokenizer: Any, message: Any, path: str, what: str) -> None:
    error = refusal(tokenizer, [USER, USER, message])
    assert (error.param, what in str(error)) == (f"messages[2]{path}", True), str(error)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "file"])
def test_images_and_sounds_are_refused_with_their_path(tokenizer: Any, kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:,"}}]
    error = refusal(tokenizer, [USER, USER, {"role": "user", "content": parts}])
    assert error.param == "messages[2].content[1].type"
    assert kind in error.what


def test_a_chat_needs_messages_and_a_template(tokenizer: Any) -> None:
    assert refusal(tokenizer, []).param == "messages"
    without = byte_tokenizer()
    error = refusal(without, [USER])
    assert error.param == "messages" and "no chat template" in error.what
    assert render(without, [USER], template="{{ messages[0].content }}") == "Hi"


def test_a_template_for_tools_is_found(tokenizer: Any) -> None:
    two = byte_tokenizer()
    two.chat_template = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}
    assert (render(two, [USER]), render(two, [USER], [CLOCK])) == ("plain", "with clock")
    assert (template_of(two), template_of(two, [CLOCK])) == ("plain", "with {{ tools[0].function.name }}")
    assert refusal(two, [USER], [{"type": "web_search"}]).param == "tools[0].type"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ('%s' | attr('format')).__self__.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% import 'os' as os %}",
        "{% from 'os' import path %}",
        "{% include '/etc/hostname' %}",
        "{% extends 'x' %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_templates_reach_nothing_of_python(tokenizer: Any, template: str) -> None:
    error = refusal(tokenizer, [USER], template=template)
    assert error.param == "messages" and "template" in error.what


@pytest.mark.parametrize("template", ["{{ ''.__class__ }}", "{{ messages.__class__ }}", "{{ __builtins__ }}"])
def test_an_attribute_of_python_is_empty_text(tokenizer: Any, template: str) -> None:
    assert render(tokenizer, [USER], template=template) == ""


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].none.deep }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 'x' + 1 }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_a_refusal(tokenizer: Any, template: str, what: str) -> None:
    error = refusal(tokenizer, [USER], template=template)
    assert error.param == "messages" and what in error.what


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "tokenize",
        "tools",
        "messages",
        "conversations",
        "return_dict",
        "max_length",
        "__class__",
        "self",
    ],
)
def test_names_of_the_server_stay_its_own(tokenizer: Any, name: str) -> None:
    assert refusal(tokenizer, [USER], kwargs={name: "x"}).param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2"])
def test_templates_of_models_write_tools_and_calls(tokenizer: Any, name: str) -> None:
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "half past"}]},
    ]
    text = render(tokenizer, messages, [CLOCK], template=(folder / f"{name}.jinja").read_text())
    assert all(each in text for each in ("Be brief.", "Hi", '"clock"', '{"a": [1, "ü"]}', "half past")), text
