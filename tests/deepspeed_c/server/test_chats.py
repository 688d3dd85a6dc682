"""Chats by the real ``openai`` client: messages, pieces, calls of tools, forms, wrong fields."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
running = pytest.importorskip("tests.deepspeed_c.server.running")
app = pytest.importorskip("deepspeed_c.server.app")

MESSAGES = [{"role": "system", "content": "def main"}, {"role": "user", "content": "größer – ist 日本語 🙂"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2, 3]}, "word": {"enum": ["größer", "日本語"]}},
    "required": ["size", "word"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "sizes", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = running.chat_folder(tmp_path_factory.mktemp("model"))
    with running.served(folder, max_context=800, memory_config={"mode": "allocate", "size": 150}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: Any, **fields: Any) -> Any:
    defaults = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **fields})


def joined(stream: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """(role, text, calls, reason and log-probabilities by index; usage)."""
    found: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            begin = {"role": None, "content": "", "calls": [], "reason": None, "logprobs": []}
            one = found.setdefault(choice.index, begin)
            assert one["reason"] is None, "a piece behind the last one"
            one["role"] = choice.delta.role or one["role"]
            one["content"] += choice.delta.content or ""
            one["calls"] += [
                (call.index, call.function.name, call.function.arguments) for call in choice.delta.tool_calls or []
            ]
            one["logprobs"] += choice.logprobs.content if choice.logprobs else []
            one["reason"] = choice.finish_reason
    return found, usage


def test_the_prompt_is_what_the_template_writes(client: Any, server: Any) -> None:
    found = ask(client)
    text = "<|system|>def main<|user|>größer – ist 日本語 🙂<|assistant|>"
    assert found.usage.prompt_tokens == len(server.model.encode(text))
    assert found.choices[0].message.role == "assistant"
    completion = client.completions.create(model="tiny", prompt=text, max_tokens=20, temperature=0)
    assert found.choices[0].message.content == completion.choices[0].text


CASES: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.3, "seed": 4},
    {"logprobs": True, "top_logprobs": 2, "temperature": 1, "seed": 9, "max_completion_tokens": 60},
    {"logprobs": True},
    {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_completion_tokens": 200, "parallel_tool_calls": False},
    {"tools": [WEATHER, CLOCK], "tool_choice": NAMED, "max_completion_tokens": 200, "n": 2, "logprobs": True},
    {"tools": [WEATHER], "tool_choice": "auto"},
    {"tools": [WEATHER], "tool_choice": "none"},
    {"response_format": JSON_SCHEMA, "max_completion_tokens": 200, "n": 2, "temperature": 1, "seed": 3},
    {"extra_body": {"guided_regex": "[ab]{3}(ö|日)"}},
    {"extra_body": {"structured_outputs": {"choice": ["größer", "ist"]}}},
    {"extra_body": {"continue_final_message": True}, "messages": [*MESSAGES, {"role": "assistant", "content": "for"}]},
]


@pytest.mark.parametrize("fields", CASES, ids=range(len(CASES)))
def test_a_joined_stream_is_the_whole_answer(client: Any, fields: dict[str, Any]) -> None:
    whole = ask(client, **fields)
    found, usage = joined(ask(client, stream=True, stream_options={"include_usage": True}, **fields))
    for choice in whole.choices:
        message = choice.message
        calls = [(i, each.function.name, each.function.arguments) for i, each in enumerate(message.tool_calls or [])]
        assert found[choice.index] == {
            "role": message.role,
            "content": message.content or "",
            "calls": calls,
            "reason": choice.finish_reason,
            "logprobs": choice.logprobs.content if choice.logprobs else [],
        }
    assert len(found) == len(whole.choices) == fields.get("n", 1)
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_the_first_form_of_a_server_makes_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's tables of a tokenizer take a second for 100,000 words; they are made before ``/ready``."""
    import llguidance.hf

    made, make = [], llguidance.hf.from_tokenizer

    def count(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return make(*args, **kwargs)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", count)
    with running.served(running.chat_folder(tmp_path), max_context=800) as server:
        assert len(made) == 1
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
            answers = [ask(found, **CASES[i]).choices[0] for i in (4, 8, 9)]
    assert answers[0].message.tool_calls and json.loads(answers[1].message.content)["word"]
    assert (len(made), made[0][0]) == (1, server.model.tokenizer)


class Scripted:
    """A form of one text: these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.n_taken = tokens, 0

    def copy(self) -> Scripted:
        return Scripted(self.tokens)

    def mask(self, logits: Any) -> None:
        token = self.tokens[self.n_taken]
        kept = float(logits[token])
        logits[:] = -math.inf
        logits[token] = kept

    def accept(self, token: int) -> None:
        self.n_taken += 1


CALL = '[{"name": "clock", "arguments": {"a": "größer"}}]'
SCRIPTS = [
    (("So: ", CALL), "So: ", 1),
    (("", CALL), None, 1),
    (("ist 日本語 🙂\n", f" {CALL}"), "ist 日本語 🙂\n", 1),
    (("So: ", "no call"), "So: [TOOL_CALLS]no call", 0),
    (("So: ", CALL, "x"), "So: [TOOL_CALLS]x", 1),
    ((CALL,), CALL, 0),
]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a model whose tag of calls is a special token."""
    template = running.TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
    path = running.chat_folder(tmp_path_factory.mktemp("mistral"), template, "[TOOL_CALLS]")
    with running.served(path, max_context=800, memory_config={"mode": "allocate", "size": 150}) as found:
        yield found


@pytest.mark.parametrize(("parts", "content", "n_calls"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_text_before_a_hidden_tag_is_content(
    mistral: Any, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], content: str | None, n_calls: int
) -> None:
    tokenizer, end = mistral.model.tokenizer, mistral.model.tokenizer.eos_token_id
    tag = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert tokenizer.decode([tag], skip_special_tokens=True) == "" and tag < mistral.model.n_words
    tokens: list[int] = []
    for i, part in enumerate(parts):
        tokens += [tag] * (i > 0) + tokenizer.encode(part)
    monkeypatch.setattr(app, "grammar_of", lambda *_: Scripted([*tokens, end]))
    fields: dict[str, Any] = {"tools": [CLOCK], "max_completion_tokens": 200, "logprobs": True}
    with openai.OpenAI(base_url=f"{mistral.url}/v1", api_key="none", max_retries=0) as client:
        whole = ask(client, **fields).choices[0]
        found, _ = joined(ask(client, stream=True, **fields))
        plain = ask(client, max_completion_tokens=200).choices[0].message
    calls = whole.message.tool_calls or []
    assert (whole.message.content, len(calls)) == (content, n_calls)
    assert all(json.loads(call.function.arguments) == {"a": "größer"} for call in calls)
    assert whole.finish_reason == found[0]["reason"] == ("tool_calls" if n_calls else "stop")
    assert found[0]["content"] == (content or "")
    assert found[0]["calls"] == [(i, call.function.name, call.function.arguments) for i, call in enumerate(calls)]
    assert len(whole.logprobs.content) == len(tokens) + 1
    # Without tools the tag stays hidden.
    assert (plain.content, plain.tool_calls) == ("".join(parts), None)


def test_calls_of_tools(client: Any) -> None:
    choice = ask(client, **CASES[4]).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name in ("weather", "clock")
    arguments = json.loads(call.function.arguments)
    assert arguments == {} if call.function.name == "clock" else arguments["place"] in ("Rome", "Oslo")
    answer = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    later = ask(
        client, messages=[*MESSAGES, choice.message.model_dump(exclude_none=True), answer], tools=[WEATHER, CLOCK]
    )
    assert later.choices[0].message.role == "assistant"


def test_forms(client: Any) -> None:
    found = json.loads(ask(client, response_format=JSON_SCHEMA, max_completion_tokens=200).choices[0].message.content)
    assert found["size"] in (1, 2, 3) and found["word"] in ("größer", "日本語")


def test_bytes_of_tokens_join_to_the_text(client: Any) -> None:
    choice = ask(client, logprobs=True, temperature=2, seed=1, max_completion_tokens=100).choices[0]
    joined_bytes = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert joined_bytes.decode(errors="replace") == choice.message.content
    assert any(each.token.startswith("bytes:\\x") for each in choice.logprobs.content)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "a " * 2000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 800}, "max_completion_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}}, "response_format.json_schema.schema"),
    ({"extra_body": {"guided_regex": "["}}, "guided_regex"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"extra_body": {"chat_template": "x"}}, "chat_template"),
    ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs.tokenize"),
    ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "add_generation_prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_field_is_named(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **fields)
    assert error.value.body["param"] == param, error.value.body


def test_routes_of_other_kinds_are_refused(client: Any) -> None:
    for call in (
        lambda: client.embeddings.create(model="tiny", input="a"),
        lambda: client.responses.create(model="tiny", input="a"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            call()
        assert error.value.body["param"] == "input"


def test_a_model_without_a_template_has_no_chats(tmp_path: Any) -> None:
    with (
        running.served(running.model_folder(tmp_path)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client)
        assert error.value.body["param"] == "messages" and "chat template" in error.value.body["message"]


def test_a_template_without_tools_refuses_them(tmp_path: Any) -> None:
    folder = running.chat_folder(tmp_path, "{% for message in messages %}{{ message.content }}{% endfor %}")
    with running.served(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, tools=[WEATHER])
        assert error.value.body["param"] == "tools"
