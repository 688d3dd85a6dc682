"""A server of ``/v1/completions`` whose answers, right or broken, are given as bytes.

As a program it answers every request: python -m tests.deepspeed_c.bench.fake_server PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from typing_extensions import Self

from tests import waits

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
MODEL = {"id": "fake", "object": "model", "max_model_len": 600}
DONE = b"data: [DONE]\n\n"
Answer = Callable[[int, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str = " a", reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def usage(n_prompt: int, n_new: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_new}})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunked(events: Sequence[bytes]) -> bytes:
    """A body of one chunk for each event."""
    return b"".join(chunk(each) for each in events) + b"0\r\n\r\n"


def with_length(status: bytes, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (status, kind, len(body), body)


def whole(body: dict[str, Any]) -> list[bytes]:
    """The events of a right answer."""
    n_new = body["max_tokens"]
    last = [piece(" z", "length"), usage(len(body["prompt"]), n_new), DONE]
    return [*[piece()] * (n_new - 1), *last]


async def answer_all(number: int, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(whole(body)))


class FakeServer:
    """Answers in a thread. ``answer`` writes the answer to the completion with a number; the first one has number 0.

    After it returns, the connection ends.
    """

    def __init__(self, answer: Answer = answer_all, port: int = 0, models: bytes | None = None) -> None:
        self._answer, self._port = answer, port
        self._models = json.dumps({"data": [MODEL]}).encode() if models is None else models
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        waits.set_within(self._is_open)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set_result, None)
        waits.joined(self._thread)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def run(self) -> None:
        """Answers in this thread, until the process ends."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None] | None] = set()
        server = await asyncio.start_server(self._take, "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        self._is_open.set()
        await self._ended
        server.close()
        for task in self._tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in self._tasks if task is not None), return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if head.startswith(b"GET /ready "):
                writer.write(with_length(b"200 OK", b"{}"))
            elif head.startswith(b"GET /v1/models "):
                writer.write(with_length(b"200 OK", self._models))
            else:
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                await self._answer(len(self.bodies) - 1, body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            self._tasks.discard(asyncio.current_task())
            writer.close()


if __name__ == "__main__":
    FakeServer(port=int(sys.argv[1])).run()
