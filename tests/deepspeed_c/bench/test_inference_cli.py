"""The command ``deepspeed_c bench inference``: its table and file, the server that it starts, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deepspeed_c.bench import server as bench_server
from deepspeed_c.bench.cli import main
from deepspeed_c.errors import ConfigError, LaunchError
from tests import waits
from tests.deepspeed_c.bench.fake_server import FakeServer, answer_all, with_length

SMALL = ["--rate", "inf", "--requests", "12", "--prompt-tokens", "3:5", "--new-tokens", "2:4"]


def test_a_server_by_its_address(tmp_path, capsys):
    path, key = tmp_path / "found.json", tmp_path / "keys"
    key.write_text("secret\nother\n")
    with FakeServer() as server:
        words = ["--url", f"{server.url}/v1", "--json", str(path), "--api-key-file", str(key), "--seed", "4"]
        assert main(["inference", *words, *SMALL]) == 0
        assert all(b"Authorization: Bearer secret\r\n" in head for head in server.heads)
        bodies = server.bodies[1:]  # the first request comes before the load
    out = capsys.readouterr().out
    assert "time to first token, ms" in out and "answered 12 of 12" in out and "secret" not in out
    text = path.read_text()
    found = json.loads(text)
    assert "secret" not in text
    assert (found["model"], found["load"]["seed"], found["load"]["rate"]) == ("fake", 4, "inf")
    assert found["summary"]["n_new_tokens"] == sum(body["max_tokens"] for body in bodies)
    assert found["summary"]["n_prompt_tokens"] == sum(len(body["prompt"]) for body in bodies)
    assert [row["error"] for row in found["requests"]] == [""] * 12
    assert found["summary"]["between_tokens_s"]["n"] == sum(body["max_tokens"] - 1 for body in bodies)
    assert max(word for body in bodies for word in body["prompt"]) < 1000


def test_failures_are_told_and_the_exit_code_says_so(tmp_path, capsys):
    async def answer(number, body, writer):
        if number % 2:
            writer.write(with_length(b"503 Busy", b'{"error": {"message": "no place"}}'))
        else:
            await answer_all(number, body, writer)

    path = tmp_path / "found.json"
    with FakeServer(answer) as server:
        assert main(["inference", "--url", server.url, "--json", str(path), *SMALL]) == 1
    out = capsys.readouterr().out
    assert "answered 6 of 12; failed: status 503: 6" in out and "status 503, for example: no place" in out
    assert json.loads(path.read_text())["summary"]["errors"] == {"status 503": 6}


def test_words_in_place_of_ids(capsys):
    with FakeServer() as server:
        assert main(["inference", "--url", server.url, "--text", "--allow-eos", "--concurrency", "2", *SMALL]) == 0
        assert all(isinstance(body["prompt"], str) and "ignore_eos" not in body for body in server.bodies)
    assert "prompts of 3 to 5 words" in capsys.readouterr().out


FOLDER = "a folder"


def starts(monkeypatch, command_of):
    """Replaces the command of the server. Returns the processes that are started: the server and its guard."""
    started = []
    popen = subprocess.Popen

    def start(command, **options):
        if "serve" in command:
            command = command_of(command)
        started.append(popen(command, **options))
        return started[-1]

    monkeypatch.setattr(bench_server.subprocess, "Popen", start)
    return started


def test_a_server_is_started_for_a_folder_and_ended(monkeypatch, capsys, tmp_path):
    commands = []

    def command_of(command):
        commands.append(command)
        return [sys.executable, "-m", "tests.deepspeed_c.bench.fake_server", command[command.index("--port") + 1]]

    started, path = starts(monkeypatch, command_of), tmp_path / "found.json"
    words = ["--serve-options", "--max-model-len 64 --x 'a b'", "--json", str(path)]
    assert main(["inference", FOLDER, *words, *SMALL]) == 0
    assert "answered 12 of 12" in capsys.readouterr().out
    assert commands[0][1:5] == ["-m", "deepspeed_c", "serve", FOLDER] and commands[0][5:7] == ["--host", "127.0.0.1"]
    assert commands[0][-4:] == ["--max-model-len", "64", "--x", "a b"]
    assert json.loads(path.read_text())["load"]["n_words"] == 1000
    assert [process.poll() is not None for process in started] == [True, True]


def test_a_server_that_does_not_start(monkeypatch):
    program = "print('loading'); raise SystemExit('no such model')"
    started = starts(monkeypatch, lambda command: [sys.executable, "-c", program])
    with pytest.raises(LaunchError, match="ended with exit code 1; its last lines:\nloading\nno such model\nFix"):
        main(["inference", FOLDER, *SMALL])
    assert [process.poll() is not None for process in started] == [True, True]


def test_a_server_that_does_not_get_ready(monkeypatch):
    started = starts(
        monkeypatch, lambda command: [sys.executable, "-c", f"import time; time.sleep({waits.LIMIT_SECONDS})"]
    )
    monkeypatch.setattr(bench_server, "_READY_LIMIT_S", 0.3)
    with pytest.raises(LaunchError, match="is not ready after 0.3 s"):
        main(["inference", FOLDER, *SMALL])
    assert [process.poll() is not None for process in started] == [True, True]


@pytest.mark.parametrize(
    "words, where",
    [
        ([], "no server to ask"),
        (["FOLDER", "--url", "http://a"], "a folder and a URL"),
        (["--url", "nowhere"], "--url"),
        (["--url", "http://a", "--rate", "0"], "--rate"),
        (["--url", "http://a", "--rate", "nan"], "--rate"),
        (["--url", "http://a", "--requests", "0"], "--requests"),
        (["--url", "http://a", "--seed", "-1"], "--seed"),
        (["--url", "http://a", "--concurrency", "0"], "--concurrency"),
        (["--url", "http://a", "--timeout", "inf"], "--timeout"),
        (["--url", "http://a", "--vocab-size", "0"], "--vocab-size"),
        (["--url", "http://a", "--temperature", "-1"], "--temperature"),
        (["--url", "http://a", "--prompt-tokens", "5:4"], "--prompt-tokens"),
        (["--url", "http://a", "--serve-options", "x"], "--serve-options"),
        (["--url", "http://a", "--json", "/absent/x"], "--json"),
        (["--url", "http://a", "--api-key", "a", "--api-key-file", "b"], "two keys"),
        (["--url", "http://a", "--api-key", "a\r\nb"], "--api-key"),
        (["--url", "http://a", "--api-key-file", "/absent"], "--api-key-file"),
        (["FOLDER", "--api-key", "a"], "has no keys"),
    ],
)
def test_wrong_words_are_refused(words, where):
    with pytest.raises(ConfigError, match=where):
        main(["inference", *words])


@pytest.mark.parametrize("words, n_words", [([], 7), (["--vocab-size", "3"], 3)])
def test_the_vocabulary_is_the_server_s(words, n_words, tmp_path):
    path = tmp_path / "found.json"
    with FakeServer(models=b'{"data": [{"id": "a", "vocab_size": 7}]}') as server:
        assert main(["inference", "--url", server.url, "--json", str(path), *words, *SMALL]) == 0
        ids = {word for body in server.bodies[1:] for word in body["prompt"]}
    assert ids == set(range(n_words)) and json.loads(path.read_text())["load"]["n_words"] == n_words


def test_the_client_needs_no_torch():
    program = (
        "import sys; from deepspeed_c.bench.cli import main\n"
        "try: main(['inference', '--help'])\n"
        "finally: print([name for name in ('torch', 'transformers', 'httpx') if name in sys.modules])"
    )
    done = waits.ran([sys.executable, "-c", program])
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done
