"""Rollouts by a server: a stand-in for OpenAI's completions answers with numbers of tokens, with text alone, with
mistakes, or not at all."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_c.errors import CommError, ConfigError, FeatureError, StateError
from deepspeed_c.rollout import OpenAIRollout, OpenAIRolloutConfig, RolloutRequest, SamplingConfig, build_rollout
from tests import waits

END, PAD = 7, 0
TOKENIZER = SimpleNamespace(
    pad_token_id=PAD, eos_token_id=END, encode=lambda text, add_special_tokens: [ord(letter) for letter in text]
)
REQUEST = RolloutRequest(torch.tensor([[0, 5, 6], [11, 12, 13]]), torch.tensor([[0, 1, 1], [1, 1, 1]]))


def respond(body: dict[str, Any], how: str) -> dict[str, Any]:
    """Sample i of a prompt repeats its last token i + 1 times, and ends."""
    choices = []
    for i in range(body["n"]):
        words = [body["prompt"][-1]] * (i + 1) + [END]
        choice: dict[str, Any] = {"index": i, "finish_reason": "stop", "text": "".join(map(chr, words[:-1]))}
        report = {"token_logprobs": [-0.5 * (place + 1) for place in range(len(words))]}
        if how == "ids":
            choice |= {"token_ids": words, "logprobs": report}
        elif how == "numbered":
            choice["logprobs"] = {**report, "tokens": [f"token_id:{word}" for word in words]}
        elif how == "short":
            choice |= {"token_ids": words, "logprobs": {"token_logprobs": [-1.0]}}
        choices.append(choice)
    if how == "few":
        choices.pop()
    return {"error": "no"} if how == "nothing" else {"choices": choices[::-1]}


@contextmanager
def server(how: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(its address, the bodies that it gets)."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
            if how == "silent":
                released.wait(20)
                return
            text = b"<html>" if how == "html" else json.dumps(respond(body, how)).encode()
            self.send_response(503 if how == "busy" else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    released = threading.Event()
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}/", bodies
    finally:
        released.set()
        found.shutdown()
        waits.joined(thread)
        found.server_close()


@pytest.mark.parametrize("how", ["ids", "numbered", "text"])
def test_responses_of_a_server(how: str) -> None:
    sampling = SamplingConfig(9, temperature=0.7, top_p=0.9, top_k=5, n_samples_per_prompt=3)
    with server(how) as (address, bodies):
        cfg = OpenAIRolloutConfig(base_url=address, model="m", api_key="k")
        rollout = build_rollout(cfg, tokenizer=TOKENIZER)
        batch = rollout.generate(REQUEST, sampling, seed=4)
    rows = [[word] * (i + 1) + [END] for word in (6, 13) for i in range(3)]
    for row, words in enumerate(rows):
        assert batch.input_ids[row].tolist() == [
            *REQUEST.prompt_ids[row // 3].tolist(),
            *words,
            *[PAD] * (4 - len(words)),
        ]
        assert batch.attention_mask[row, 3:].tolist() == [1] * len(words) + [0] * (4 - len(words))
        if how != "text":
            expected = [-0.5 * (place + 1) for place in range(len(words))] + [0.0] * (4 - len(words))
            assert batch.logprobs[row].tolist() == expected
    assert (batch.logprobs is None) == (how == "text")
    bodies.sort(key=lambda body: body["seed"])
    assert [body["prompt"] for body in bodies] == [[5, 6], [11, 12, 13]]
    first = {
        "n": 3,
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 4,
        "model": "m",
        "logprobs": 1,
    }
    assert first.items() <= bodies[0].items() and bodies[0]["return_token_ids"] is True
    assert bodies[0]["path"] == "/v1/completions" and bodies[0]["key"] == "Bearer k"


@pytest.mark.parametrize(
    "how, text",
    [
        ("busy", "answered 503"),
        ("html", "gave no answer"),
        ("silent", "gave no answer: timed out"),
        ("nothing", "answered without choices of tokens: KeyError 'choices'"),
        ("few", r"answered with responses of \[2\] tokens; 2 of 1 to 4 were asked for"),
        ("short", "1 log-probabilities came for"),
    ],
)
def test_a_server_that_fails(how: str, text: str) -> None:
    with server(how) as (address, _):
        rollout = OpenAIRollout(TOKENIZER, OpenAIRolloutConfig(base_url=address, timeout_s=0.5, extra={}))
        with pytest.raises(CommError, match=text):
            rollout.generate(REQUEST, SamplingConfig(4, n_samples_per_prompt=2))


def test_what_is_refused_before_a_request() -> None:
    rollout = OpenAIRollout(TOKENIZER, OpenAIRolloutConfig(base_url="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="temperature: is nan"):
        rollout.generate(REQUEST, SamplingConfig(4, temperature=math.nan))
    with pytest.raises(StateError, match="prompt 1 is padded on the right"):
        rollout.generate(RolloutRequest(REQUEST.prompt_ids, torch.tensor([[0, 1, 1], [1, 1, 0]])), SamplingConfig(4))
    with pytest.raises(CommError, match="gave no answer"):
        rollout.generate(REQUEST, SamplingConfig(4))
    with pytest.raises(ConfigError, match="base_url: is 'host:80'"):
        OpenAIRollout(TOKENIZER, OpenAIRolloutConfig(base_url="host:80"))
    with pytest.raises(ConfigError, match="need a tokenizer"):
        build_rollout(OpenAIRolloutConfig())


def test_weights_go_the_way_that_the_caller_gives() -> None:
    steps: list[int] = []
    rollout = build_rollout(OpenAIRolloutConfig(), tokenizer=TOKENIZER, send=steps.append)
    rollout.sync_weights(3)
    rollout.shutdown()
    assert steps == [3]
    with pytest.raises(FeatureError, match="nothing sends the weights"):
        OpenAIRollout(TOKENIZER).sync_weights(3)
