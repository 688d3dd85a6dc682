"""Keys, bounds, clients that go or do not read, and the end of a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
running = pytest.importorskip("tests.deepspeed_c.server.running")
limits = pytest.importorskip("deepspeed_c.server.limits")

PROMPT = "def main(self, value): " * 3
KEYS = ("key-of-ada", "key-of-bob")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = running.chat_folder(tmp_path_factory.mktemp("model"))
    with running.served(folder, max_context=900, memory_config={"mode": "allocate", "size": 120}) as found:
        yield found.model


@contextlib.contextmanager
def serving(model: Any, key: str = "none", **settings: Any) -> Iterator[tuple[Any, Any]]:
    """(server, client)"""
    with (
        running.listening(model, limits.ServerSettings(**settings)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client,
    ):
        yield server, client


def ask(client: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, **fields})


def is_idle(model: Any) -> bool:
    return (model.counts.running, model.counts.waiting, model.counts.free_blocks) == (0, 0, 120)


def metric(server: Any, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.partition("{")[0].partition(" ")[0] == f"deepspeed_c_{name}"
    )


def test_a_key_is_needed_and_never_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(model, "wrong-key", keys=KEYS) as (server, client):
        with pytest.raises(openai.AuthenticationError) as error:
            ask(client)
        assert error.value.body["code"] == "invalid_api_key" and "wrong-key" not in str(error.value)
        for path in ("/v1/models", "/v1/models/tiny", "/v1/embeddings"):
            assert httpx.get(server.url + path).status_code == 401
        for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
            assert httpx.post(server.url + path, json={}).status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Basic {KEYS[0]}"}).status_code == 401
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200
        for key in KEYS:
            assert ask(client.with_options(api_key=key)).choices[0].text
        assert "key-of" not in repr(limits.ServerSettings(keys=KEYS))
    logged = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("deepspeed_c", "uvicorn"))
    )
    assert "key-of" not in logged and "wrong-key" not in logged and PROMPT[:20] not in logged


def test_requests_are_logged_if_asked(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed_c.logging import logger

    logger.addHandler(caplog.handler)
    try:
        with serving(model, KEYS[0], keys=KEYS, logs_requests=True) as (_, client):
            ask(client)
    finally:
        logger.removeHandler(caplog.handler)
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "cmpl-" in logged and PROMPT[:20] in logged and "key-of" not in logged


@pytest.mark.parametrize("shares", [False, True])
def test_prefixes_are_shared_within_a_key(model: Any, shares: bool) -> None:
    prompt = f"{shares} is the value of this: {PROMPT}"
    with serving(model, KEYS[0], keys=KEYS, shares_prefixes=shares) as (_, client):
        found = []
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            usage = ask(client.with_options(api_key=key), prompt=prompt).usage
            found.append(usage.prompt_tokens_details.cached_tokens > 0)
        salted = ask(client, prompt=prompt, extra_body={"cache_salt": "mine"}).usage
    assert found == [False, True, shares]
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_bounds_of_answers_and_of_a_key(model: Any) -> None:
    with serving(model, KEYS[0], keys=KEYS, max_requests=3, max_requests_per_key=1, max_n=4) as (server, client):
        with pytest.raises(openai.RateLimitError) as error:
            ask(client, n=4)
        assert error.value.response.headers["retry-after"] == "1"
        with ask(client, stream=True, max_tokens=800, logit_bias={"0": -100}) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="of this key"):
                ask(client)
            other = client.with_options(api_key=KEYS[1])
            with pytest.raises(openai.RateLimitError, match="3 are the most"):
                ask(other, n=3)
            assert len(ask(other, n=2).choices) == 2
        running.until(lambda: is_idle(model), lambda: model.counts)
        running.until(lambda: server.app.state.gate.n_answers == 0)
        assert ask(client).choices[0].text
        assert metric(server, "refused_total") == 3
        assert metric(server, "cancelled_total") == 1


def test_a_body_beyond_its_limit_is_not_read(model: Any) -> None:
    with serving(model, max_body_bytes=1000) as (server, client):
        with pytest.raises(openai.APIStatusError) as error:
            ask(client, prompt="a" * 1000)
        assert error.value.status_code == 413 and error.value.body["param"] == "body"

        def pieces() -> Iterator[bytes]:
            for _ in range(3):
                yield b"a" * 500

        assert httpx.post(f"{server.url}/v1/completions", content=pieces()).status_code == 413
        # The header alone is enough.
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
            assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_client_that_goes_ends_its_answers(model: Any) -> None:
    """Streams and whole answers, of one prompt or several."""

    async def main(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            for fields in ({"stream": True}, {"stream": True, "n": 3}, {"stream": True, "prompt": ["a", "b"]}):
                stream = await ask(client, max_tokens=800, logit_bias={"0": -100}, **fields)
                await stream.__anext__()
                await stream.close()
            for fields in ({}, {"n": 2, "prompt": ["a", "b"]}):
                while not is_idle(model):
                    await asyncio.sleep(0.001)
                n_before = model.counts.new_tokens
                task = asyncio.create_task(ask(client, max_tokens=800, logit_bias={"0": -100}, **fields))
                while model.counts.new_tokens == n_before:
                    await asyncio.sleep(0.001)
                task.cancel()

    with serving(model) as (server, _):
        asyncio.run(main(server.url))
        running.until(lambda: is_idle(model), lambda: model.counts)
        running.until(lambda: server.app.state.gate.n_requests == 0)
        assert metric(server, "cancelled_total") == 5


def test_requests_of_which_a_third_is_cancelled_leave_nothing(model: Any) -> None:
    n_requests = 200

    async def one(client: Any, i: int) -> str:
        fields = {"prompt": f"{PROMPT[: i % 60 + 1]}", "max_tokens": 10, "seed": i, "temperature": 1, "n": i % 3 + 1}
        if i % 3:
            return (await ask(client, **fields)).choices[0].finish_reason
        if i % 2:
            stream = await ask(client, stream=True, **{**fields, "max_tokens": 700})
            await stream.__anext__()
            await stream.close()
        else:
            task = asyncio.create_task(ask(client, **{**fields, "max_tokens": 700}))
            await asyncio.sleep(i / 2000)
            task.cancel()
        return ""

    async def main(url: str) -> list[str]:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=http) as client:
            return await asyncio.gather(*(one(client, i) for i in range(n_requests)))

    with serving(model, max_requests_per_key=1000) as (server, client):
        before = ask(client).choices[0].text
        reasons = asyncio.run(main(server.url))
        running.until(lambda: is_idle(model), lambda: model.counts)
        running.until(lambda: server.app.state.gate.n_requests == 0)
        assert server.app.state.gate.n_answers == 0
        assert ask(client).choices[0].text == before
        running.until(lambda: len(server.http.server_state.connections) <= 1)
    assert sum(bool(each) for each in reasons) == n_requests - (n_requests + 2) // 3


def test_a_reader_that_reads_nothing_is_cut_off(model: Any) -> None:
    """Its socket takes no more bytes; after the limit its connection is gone, and its answers have ended."""
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": 800, "n": 16, "stream": True, "logprobs": 20, "ignore_eos": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(model, stall_s=0.5) as (server, client):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = server.url.removeprefix("http://").split(":")
        raw.settimeout(60)
        raw.connect((host, int(port)))
        with raw:
            raw.sendall(head + body)
            running.until(lambda: server.app.state.gate.n_requests == 1)
            running.until(lambda: server.app.state.gate.n_requests == 0)
            running.until(lambda: is_idle(model), lambda: model.counts)
            running.until(lambda: not server.http.server_state.connections)
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := raw.recv(1 << 20):
                    found += piece
            assert b"data: {" in found and b"[DONE]" not in found and not found.endswith(b"0\r\n\r\n")
        assert ask(client).choices[0].text


def test_a_step_that_fails_answers_with_500_and_the_next_one_is_well(model: Any) -> None:
    put = model.engine.put

    def faulty(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a planted fault")

    with serving(model) as (server, client):
        before = ask(client).choices[0].text
        model.engine.put = faulty
        try:
            with pytest.raises(openai.InternalServerError, match="planted") as error:
                ask(client)
            assert error.value.body["type"] == "server_error"
            with pytest.raises(openai.APIError, match="planted"):
                for _ in ask(client, stream=True):
                    pass
        finally:
            model.engine.put = put
        assert ask(client).choices[0].text == before
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_end_lets_running_requests_end(model: Any) -> None:
    with serving(model) as (server, client):
        stream = iter(ask(client, stream=True, max_tokens=600, logit_bias={"0": -100}))
        n_pieces = len([next(stream)])
        server.call(server.http.drain)
        running.until(lambda: server.app.state.gate.is_draining)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        with pytest.raises(openai.InternalServerError) as error:
            ask(client)
        assert error.value.status_code == 503 and error.value.response.headers["retry-after"]
        *_, last = stream
        assert n_pieces and last.choices[0].finish_reason == "length"
        running.until(lambda: not server.http.started or server.http.should_exit)
    assert is_idle(model) and model.is_alive


def test_requests_that_do_not_end_get_an_error(tmp_path: Any) -> None:
    with running.served(
        running.model_folder(tmp_path), drain_s=0.01, max_context=8000, memory_config={"mode": "allocate", "size": 501}
    ) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            stream = iter(ask(client, stream=True, max_tokens=7900, logit_bias={"0": -100}))
            next(stream)
            server.call(server.http.drain)
            with pytest.raises(openai.APIError, match="closed"):
                for _ in stream:
                    pass
        running.until(lambda: not server.model.is_alive)
