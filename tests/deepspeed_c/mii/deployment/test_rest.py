"""The HTTP server of a deployment: answers, statuses of mistakes, and the limit of its threads."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from pathlib import Path

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.mii.deployment.start import start
from tests import waits
from tests.deepspeed_c.mii.deployments import FAKE, config_of, deployed, gone, supervisor_of, tree_of, until

FOLDER = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MII_CACHE_PATH", str(tmp_path))
    monkeypatch.chdir(FOLDER)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def served(**keys):
    port = free_port()
    with deployed(enable_restful_api=True, restful_api_port=port, **keys) as client:
        yield client, port


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=waits.LIMIT_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def post(port, message, path="/mii/fake"):
    body = message if isinstance(message, bytes) else json.dumps(message)
    status, text = ask(port, "POST", path, body, {"Content-Type": "application/json"})
    return status, json.loads(text)


def test_answers_and_mistakes():
    with served() as (_, port):
        whole = {"prompt_length": 3, "generated_length": 2, "finish_reason": "stop"}
        good = {"prompts": ["a b", "c d"]}
        answers = (200, [{"generated_text": "<a b>", **whole}, {"generated_text": "<c d>", **whole}])
        assert post(port, good) == answers
        assert post(port, {"prompts": "a b", "max_new_tokens": 5}) == (200, answers[1][:1])
        assert ask(port, "GET", "/healthz") == (200, "ok")

        mistakes = [
            (post(port, {"prompts": "a", "unknown": 1}), 400, "ConfigError", "unknown", "is unknown"),
            (post(port, b'{"prompts": "a", "temperature": NaN}'), 400, "ConfigError", "temperature", "is nan"),
            (post(port, {"prompts": "a", "stream": True}), 400, "ConfigError", "stream", "whole answers"),
            (post(port, {"prompts": []}), 400, "ConfigError", "prompts", "no list of strings"),
            (post(port, {"prompts": [1]}), 400, "ConfigError", "prompts", "no list of strings"),
            (post(port, {}), 400, "ConfigError", "prompts", "no list of strings"),
            (post(port, b"{"), 400, "ConfigError", "the body", "is no JSON"),
            (post(port, b"[" * 100_000), 400, "ConfigError", "the body", "is no JSON"),
            (post(port, b"[1]"), 400, "ConfigError", "the body", "not an object"),
            (post(port, b"x" * 10_000_001), 413, "ConfigError", "the body", "10000001 bytes; the limit is 10000000"),
            (post(port, {"prompts": "break"}), 500, "DeepSpeedCError", "a request", "ZeroDivisionError: a defect"),
            (post(port, good, "/mii/other"), 404, "FeatureError", "/mii/other", "no such page"),
        ]
        for (status, answer), expected, kind, where, what in mistakes:
            error = answer["error"]
            assert (status, error["kind"], error["where"]) == (expected, kind, where), error
            assert what in error["what"], error
            assert post(port, good) == answers
        assert ask(port, "GET", "/mii/fake")[0] == 404
        assert ask(port, "PUT", "/mii/fake", "x")[0] == 501
        assert ask(port, "POST", "/mii/fake", iter([b"{}"]))[0] == 411  # in chunks, without a length
        # A page in a browser may send requests to this host, and says where it is from.
        for path, method in (("/terminate", "GET"), ("/mii/fake", "POST")):
            assert ask(port, method, path, b"{}", {"Sec-Fetch-Site": "cross-site"})[0] == 403

        pids = tree_of(supervisor_of("fake"))
        assert ask(port, "GET", "/terminate") == (200, "Shutting down RESTful API gateway server")
        for pid in pids:
            gone(pid)


def test_the_most_handlers_at_one_time():
    with served(restful_processes=2) as (client, port):
        pid = supervisor_of("fake")
        n_threads = lambda: len(list(Path(f"/proc/{pid}/task").iterdir()))
        idle = n_threads()
        hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        body = b'{"prompts": ["hang"]}'
        for connection in hanging:
            connection.sendall(b"POST /mii/fake HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        running = lambda: client("count")[0].generated_text.split("/")[2]
        until(lambda: running() == "2", "two requests have come")
        assert n_threads() == idle + 2
        # Clients that leave make room, and their requests are cancelled.
        for connection in hanging[:2]:
            connection.close()
        until(lambda: running() == "2" and n_threads() == idle + 2, "the others have come")
        for connection in hanging[2:]:
            connection.close()
        until(lambda: running() == "0" and n_threads() == idle, "all have gone")
        assert ask(port, "GET", "/healthz") == (200, "ok")


def test_a_request_that_runs_at_the_end_gets_an_error():
    with served() as (client, port):
        answer = []
        asking = threading.Thread(target=lambda: answer.append(post(port, {"prompts": "hang"})))
        asking.start()
        until(lambda: client("count")[0].generated_text.endswith("/1"), "the request has come")
        client.terminate_server()
        waits.joined(asking)
        ((status, message),) = answer
        assert (status, message["error"]["kind"]) == (500, "StateError"), message


def test_a_port_in_use_is_an_error_of_the_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"restful_api_port: cannot listen at 127.0.0.1, port {port}: Address already"
        ):
            start(config_of("fake", enable_restful_api=True, restful_api_port=port), f"{FAKE}:build")
    assert list((tmp_path / "deployments").iterdir()) == []


def test_it_listens_on_this_host_alone():
    with served() as (_, port):
        table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        addresses = [row[1].split(":")[0] for row in table if int(row[1].split(":")[1], 16) == port and row[3] == "0A"]
        assert addresses == ["0100007F"], addresses
