"""Completions by the real ``openai`` client: whole, in pieces, from coroutines, and its classes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.deepspeed_c.serving.folders import model_folder

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
running = pytest.importorskip("tests.deepspeed_c.server.running")

PROMPT = "def main(self, value): "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running.served(model_folder(tmp_path_factory.mktemp("model"))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: Any, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    )


def joined(stream: Any) -> tuple[dict[int, str], dict[int, str], Any, dict[int, list[Any]]]:
    """(texts, reasons, usage, objects of log-probabilities) of a stream, by index."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "a piece behind the last one"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).append(choice.logprobs)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage, logprobs


def test_models_and_health(client: Any, server: Any) -> None:
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_completion_is_what_the_model_says(client: Any, server: Any) -> None:
    found = ask(client)
    model, tokens = server.model.engine.model(), server.model.encode(PROMPT)
    from transformers import AutoModelForCausalLM

    assert model is not None
    reference = AutoModelForCausalLM.from_pretrained(server.model.tokenizer.name_or_path).eval()
    with torch.no_grad():
        whole = reference.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0].tolist()
    expected = server.model.decode(whole)[len(server.model.decode(tokens)) :]
    assert found.choices[0].text == expected
    assert found.usage.prompt_tokens == len(tokens)
    assert found.usage.completion_tokens == len(whole) - len(tokens)
    assert found.object == "text_completion" and found.model == "tiny" and found.id.startswith("cmpl-")


CASES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"n": 3, "temperature": 1.5, "seed": 7},
    {"prompt": ["for each", "größer – ist", "日本語 🙂"], "n": 2, "temperature": 1.0, "seed": 3, "echo": True},
    {"prompt": [5, 9, 11], "echo": True},
    {"prompt": [[5, 9, 11], [7]], "temperature": 1.0, "seed": 2**62 + 5},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 1.7, "seed": 1, "max_tokens": 40},
    {"temperature": 2, "seed": 4, "max_tokens": 60, "stop": ["e", "a "], "top_p": 0.9},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 4}, "temperature": 1, "seed": 2},
    {"presence_penalty": 1.5, "frequency_penalty": -1, "logit_bias": {"70": 5, "71": -100}},
    {"extra_body": {"stop_token_ids": list(range(60, 90)), "ignore_eos": True}, "max_tokens": 30},
]


@pytest.mark.parametrize("fields", CASES, ids=range(len(CASES)))
def test_a_joined_stream_is_the_whole_answer(client: Any, fields: dict[str, Any]) -> None:
    whole = ask(client, **fields)
    texts, reasons, usage, logprobs = joined(ask(client, stream=True, stream_options={"include_usage": True}, **fields))
    prompt = fields.get("prompt", "")
    n_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    n = fields.get("n", 1) * n_prompts
    assert len(whole.choices) == n
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    counts = [(each.prompt_tokens, each.completion_tokens, each.total_tokens) for each in (usage, whole.usage)]
    assert counts[0] == counts[1]
    for choice in whole.choices:
        if choice.logprobs is None:
            assert choice.index not in logprobs
            continue
        pieces = logprobs[choice.index]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for piece in pieces for value in getattr(piece, name)] == getattr(choice.logprobs, name), name


def test_text_has_no_half_character(client: Any) -> None:
    stream = ask(
        client, stream=True, temperature=2, seed=11, max_tokens=200, logit_bias={str(i): 4 for i in range(150, 256)}
    )
    pieces = [choice.text for chunk in stream for choice in chunk.choices]
    whole = ask(client, temperature=2, seed=11, max_tokens=200, logit_bias={str(i): 4 for i in range(150, 256)})
    assert "".join(pieces) == whole.choices[0].text


def test_log_probabilities_are_those_of_the_whole_distribution(client: Any, server: Any) -> None:
    found = ask(client, logprobs=2, max_tokens=3, temperature=0.3, seed=5, top_p=0.5, presence_penalty=1)
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(server.model.tokenizer.name_or_path).double().eval()
    tokens = server.model.encode(PROMPT)
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([tokens])).logits[0, -1, : server.model.n_words], -1)
    values = found.choices[0].logprobs
    best = expected.topk(2).values.tolist()
    assert sorted(values.top_logprobs[0].values(), reverse=True)[:2] == pytest.approx(best, abs=1e-3)


def test_coroutines_of_the_client(server: Any) -> None:
    async def main() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await asyncio.gather(*(ask(client, temperature=1, seed=i) for i in range(8)))
            stream = await ask(client, temperature=1, seed=5, stream=True)
            text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
        return [each.choices[0].text for each in whole], text

    texts, streamed = asyncio.run(main())
    assert len(set(texts)) > 1
    assert streamed == texts[5]


WRONG: list[tuple[dict[str, Any], str, type[Exception]]] = [
    ({"model": "other"}, "model", openai.NotFoundError),
    ({"max_tokens": 0}, "max_tokens", openai.BadRequestError),
    ({"max_tokens": -1}, "max_tokens", openai.BadRequestError),
    ({"max_tokens": 400}, "max_tokens", openai.BadRequestError),
    ({"max_tokens": 10**9}, "max_tokens", openai.BadRequestError),
    ({"max_tokens": "5"}, "max_tokens", openai.BadRequestError),
    ({"max_tokens": True}, "max_tokens", openai.BadRequestError),
    ({"prompt": ""}, "prompt", openai.BadRequestError),
    ({"prompt": []}, "prompt", openai.BadRequestError),
    ({"prompt": [[]]}, "prompt", openai.BadRequestError),
    ({"prompt": [1, "a"]}, "prompt[1]", openai.BadRequestError),
    ({"prompt": [1, 10**6]}, "prompt[1]", openai.BadRequestError),
    ({"prompt": [-1]}, "prompt[0]", openai.BadRequestError),
    ({"prompt": "a " * 2000}, "prompt", openai.BadRequestError),
    ({"prompt": ["a"] * 17}, "prompt", openai.BadRequestError),
    ({"prompt": ["a"] * 9, "n": 2}, "n", openai.BadRequestError),
    ({"n": 0}, "n", openai.BadRequestError),
    ({"n": 17}, "n", openai.BadRequestError),
    ({"temperature": -0.1}, "temperature", openai.BadRequestError),
    ({"temperature": 2.5}, "temperature", openai.BadRequestError),
    ({"top_p": 0}, "top_p", openai.BadRequestError),
    ({"logit_bias": {"100000": 1}}, "logit_bias.100000", openai.BadRequestError),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", openai.BadRequestError),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", openai.BadRequestError),
    ({"extra_body": {"stop_token_ids": [999]}}, "stop_token_ids[0]", openai.BadRequestError),
    ({"extra_body": {"min_tokens": 13}}, "min_tokens", openai.BadRequestError),
    ({"extra_body": {"top_k": -2}}, "top_k", openai.BadRequestError),
    ({"extra_body": {"temprature": 1}}, "temprature", openai.BadRequestError),
    ({"extra_body": {"use_beam_search": True}}, "use_beam_search", openai.BadRequestError),
    ({"best_of": 3}, "best_of", openai.BadRequestError),
    ({"suffix": "x"}, "suffix", openai.BadRequestError),
    ({"stop": ["a"] * 17}, "stop", openai.BadRequestError),
    ({"stop": [""]}, "stop[0]", openai.BadRequestError),
    ({"logprobs": 21}, "logprobs", openai.BadRequestError),
    ({"logprobs": 1, "echo": True}, "echo", openai.BadRequestError),
    ({"stream_options": {"include_usage": True}}, "stream_options", openai.BadRequestError),
]


@pytest.mark.parametrize(("fields", "param", "kind"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_field_is_named(client: Any, fields: dict[str, Any], param: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as error:
        ask(client, **fields)
    body = error.value.body
    assert (body["param"], bool(body["message"]), bool(body["type"])) == (param, True, True), body
