"""``deepspeed_c serve`` and MII's module as processes: options, signals, ranks."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_c.errors import ConfigError
from tests import waits

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
running = pytest.importorskip("tests.deepspeed_c.server.running")
cli = pytest.importorskip("deepspeed_c.server.cli")
cli_of_mii = pytest.importorskip("deepspeed_c.server.cli_of_mii")

SERVE = [sys.executable, "-m", "deepspeed_c", "serve"]
MII = [sys.executable, "-m", "deepspeed_c", "run", sys.executable, "-m", "mii.entrypoints.openai_api_server", "--model"]
LONG = {"model": "tiny", "prompt": "def main", "max_tokens": 120, "temperature": 0, "logit_bias": {"0": -100}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return running.chat_folder(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, url, its lines so far)"""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"is served at (http\S+)/v1", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield process, found[1], lines
    finally:
        process.kill()
        lines += waits.output_of(process)[1].splitlines(keepends=True)


def test_a_signal_lets_a_stream_end_and_the_exit_code_is_0(folder: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# clients\nada-key\n\nbob-key\n")
    words = [
        "--port",
        "0",
        "--served-model-name",
        "tiny",
        "other",
        "--max-model-len",
        "128",
        "--api-key-file",
        str(keys),
    ]
    with started([*SERVE, folder, *words, "--num-gpu-blocks-override", "40"]) as (process, url, lines):
        assert url.startswith("http://127.0.0.1:")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="bob-key", max_retries=0) as client:
            assert [each.id for each in client.models.list()] == ["tiny", "other"]
            stream = iter(client.completions.create(stream=True, **LONG))
            pieces = [next(stream)]
            process.send_signal(signal.SIGTERM)
            pieces += stream
        assert pieces[-1].choices[0].finish_reason == "length"
        assert waits.ended(process) == 0
    assert not any("-key" in line.replace("api-key", "") for line in lines)


def test_a_stream_longer_than_the_limit_gets_an_error(folder: str) -> None:
    words = ["--port", "0", "--served-model-name", "tiny", "--drain-timeout", "0", "--num-gpu-blocks-override", "40"]
    with started([*SERVE, folder, *words]) as (process, url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = iter(client.completions.create(stream=True, **LONG))
            next(stream)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="closed"):
                for _ in stream:
                    pass
        assert waits.ended(process) == 0


def test_ranks_give_the_answer_of_one(folder: str) -> None:
    words = ["--port", "0", "--served-model-name", "tiny", "--num-gpu-blocks-override", "40"]
    with running.served(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        alone = client.completions.create(**LONG).choices[0].text
    with started([*SERVE, folder, *words, "--tensor-parallel-size", "2"]) as (process, url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(**LONG).choices[0].text == alone
        process.send_signal(signal.SIGTERM)
        assert waits.ended(process) == 0


def test_the_module_of_mii(folder: str) -> None:
    words = [
        "--port",
        "0",
        "--host",
        "127.0.0.1",
        "--api-keys",
        "ada,bob",
        "--max-length",
        "64",
        "--response-role",
        "bot",
    ]
    with started([*MII, folder, *words]) as (process, url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="bob", max_retries=0) as client:
            messages = [{"role": "user", "content": "ist"}]
            found = client.chat.completions.create(model=folder, messages=messages, max_tokens=5)
            assert found.choices[0].message.role == "bot"
            assert next(iter(client.models.list())).max_model_len == 64
        answer = httpx.options(
            f"{url}/v1/models", headers={"Origin": "http://page", "Access-Control-Request-Method": "GET"}
        )
        assert answer.headers["access-control-allow-origin"] == "*"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert waits.ended(process) == 0


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--port", "70000"], "--port"),
        (["--drain-timeout", "nan"], "--drain-timeout"),
        (["--api-key-file", "no-such-file"], "--api-key-file no-such-file"),
        (["--chat-template", "no-such-file"], "--chat-template no-such-file"),
        (["--ssl-keyfile", "a"], "--ssl-keyfile, --ssl-certfile"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1 --port 8000"),
        (["--kv-cache-memory-bytes", "4 gigs"], "--kv-cache-memory-bytes"),
        (["--kv-cache-memory-bytes", "-1"], "--kv-cache-memory-bytes"),
        (
            ["--kv-cache-memory-bytes", "4GiB", "--num-gpu-blocks-override", "9"],
            "--kv-cache-memory-bytes, --num-gpu-blocks-override",
        ),
        (["--kv-cache-memory-bytes", "1kB"], "kv_cache_memory_bytes"),
        (["--kv-cache-memory-bytes", "1e9TiB"], "kv_cache_memory_bytes"),
        (["--generation-config", "no-such-folder"], "--generation-config no-such-folder"),
    ],
)
@pytest.mark.usefixtures("process_group_of_the_engine")
def test_a_wrong_option_is_named(folder: str, words: list[str], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.main([folder, *words])
    assert error.value.where == where and error.value.fix


def openssl(folder: Path, *words: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    waits.ran(["openssl", *words], check=True, cwd=folder)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key and the certificate of 127.0.0.1, another key, and a key with a password."""
    found = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl(found, "req", "-x509", *curve, *name, "-nodes", "-keyout", "key.pem", "-out", "cert.pem")
    openssl(found, "req", "-x509", *curve, *name, "-nodes", "-keyout", "other.pem", "-out", "other-cert.pem")
    openssl(found, "pkey", "-in", "key.pem", "-aes128", "-passout", "pass:secret", "-out", "locked.pem")
    (found / "text.pem").write_text("no key\n")
    return found


def test_a_client_shakes_hands_by_tls(folder: str, certificates: Path) -> None:
    tls = str(certificates / "key.pem"), str(certificates / "cert.pem")
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=tls[1]))
    with running.served(folder, tls=tls) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=trusting) as client:
            found = client.completions.create(**LONG)
            streamed = [piece.choices[0].text for piece in client.completions.create(stream=True, **LONG)]
            assert found.choices[0].text == "".join(streamed) != ""
        context = ssl.create_default_context(cafile=str(certificates / "other-cert.pem"))
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/ready", verify=context)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https:", "http:") + "/ready")


@pytest.mark.parametrize(
    ("key", "certificate", "says"),
    [
        ("other.pem", "cert.pem", "cannot be used.*MISMATCH"),
        ("missing.pem", "cert.pem", "cannot be used.*No such file"),
        ("key.pem", "missing.pem", "cannot be used.*No such file"),
        ("text.pem", "cert.pem", "cannot be used"),
        ("key.pem", "text.pem", "cannot be used"),
        ("locked.pem", "cert.pem", "has a password"),
    ],
)
def test_wrong_files_of_tls_end_the_start(
    folder: str, certificates: Path, monkeypatch: pytest.MonkeyPatch, key: str, certificate: str, says: str
) -> None:
    monkeypatch.setattr(cli, "ServedModel", None)  # no model is loaded
    files = [str(certificates / key), str(certificates / certificate)]
    with pytest.raises(ConfigError, match=says) as error:
        cli.main([folder, "--ssl-keyfile", files[0], "--ssl-certfile", files[1]])
    assert error.value.where == f"--ssl-keyfile {files[0]} --ssl-certfile {files[1]}" and error.value.fix


class _Loaded(Exception):
    """Stands for a model that is loaded."""


def test_options_reach_the_model_and_the_socket(
    folder: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(certificates / name) for name in ("key.pem", "cert.pem")]
    heard: list[Any] = []

    def load(*args: Any) -> None:
        raise _Loaded(*args)

    def bind(listening: Any) -> Any:
        heard.append(listening)
        return contextlib.nullcontext()

    monkeypatch.setattr(cli.ServedModel, "load", load)
    monkeypatch.setattr(cli, "bind", bind)
    for text, n_bytes in (("1.5GiB", 3 << 29), ("4GB", 4 * 10**9), ("123456", 123456)):
        with pytest.raises(_Loaded) as found:
            cli.main([folder, "--kv-cache-memory-bytes", text, "--ssl-keyfile", files[0], "--ssl-certfile", files[1]])
        assert found.value.args[-1] == n_bytes
    assert [heard[0].keyfile, heard[0].certfile] == files
    with pytest.raises(_Loaded) as found:
        cli.main([folder])
    assert (found.value.args[-1], heard[-1].certfile) == (None, None)


def test_a_port_that_is_taken(folder: str) -> None:
    from deepspeed_c.server.listen import Listening, bind

    with bind(Listening(port=0)) as sock:
        sock.listen()
        port = str(sock.getsockname()[1])
        with pytest.raises(ConfigError, match="in use"):
            cli.main([folder, "--port", port])


@pytest.mark.parametrize(
    ("words", "where"),
    [(["--load-balancer", "localhost:50050"], "--load-balancer"), (["--replica-num", "2"], "--replica-num")],
)
def test_what_mii_does_in_other_processes_is_refused(folder: str, words: list[str], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli_of_mii.main(["--model", folder, *words])
    assert error.value.where == where


def test_an_empty_file_of_keys(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# none\n\n")
    with pytest.raises(ConfigError, match="has no keys"):
        cli.main([folder, "--api-key-file", str(file)])


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text("größer {{ a }}\n")
    assert cli._template(str(file)) == "größer {{ a }}\n"
    assert cli._template("größer {{ a }}\\n") == "größer {{ a }}\n"


def test_the_server_needs_its_packages(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'uvicorn' else find(name, *rest)\n"
        "from deepspeed_c.errors import MissingPackageError\n"
        "try:\n    import deepspeed_c.server.cli\n"
        "except MissingPackageError as error:\n    print(error.name, error.fix)\n"
    )
    found: Any = waits.ran([sys.executable, "-c", code], check=True)
    assert found.stdout.split("\n")[0] == 'uvicorn pip install "deepspeed-c[serve]"'
