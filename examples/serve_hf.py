"""Serves the model that examples/hf_trainer.py has trained, asks it as a client does, and ends it. To start it:

    python examples/serve_hf.py out/hf/model --prompt "def main("

The server is the command ``deepspeed_c serve``. Any client of OpenAI's API can ask it; here Python's own library does.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

LIMIT_S = 120.0
LOOK_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=64, help="length of the continuation")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deepspeed_c", "serve", args.model, "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", "model"])
    try:
        wait_until_ready(server, url)
        print(f"models: {ask(url, '/v1/models')['data'][0]['id']}")
        wish = {"model": "model", "prompt": args.prompt, "max_tokens": args.tokens, "temperature": 0.7, "seed": 1}
        whole = ask(url, "/v1/completions", wish)
        text = whole["choices"][0]["text"]
        print(f"{args.prompt}{text}\n{whole['usage']}")
        pieces = list(stream(url, "/v1/completions", {**wish, "stream": True}))
        print(f"the same as a stream of {len(pieces)} pieces: {''.join(pieces) == text}")
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(LIMIT_S)
    print(f"the server ended with exit code {code}")
    sys.exit(code or "".join(pieces) != text)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=LIMIT_S):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(LOOK_S)
    sys.exit(f"the server is not ready after {LIMIT_S:g} s")


def ask(url: str, path: str, body: dict | None = None) -> dict:
    with urllib.request.urlopen(request(url, path, body), timeout=LIMIT_S) as answer:
        return json.load(answer)


def stream(url: str, path: str, body: dict) -> Iterator[str]:
    """The pieces of text of an answer, as they come."""
    with urllib.request.urlopen(request(url, path, body), timeout=LIMIT_S) as answer:
        for line in answer:
            data = line.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["text"]


def request(url: str, path: str, body: dict | None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})


if __name__ == "__main__":
    main()
