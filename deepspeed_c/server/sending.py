"""Bodies that come in and answers that go out, while somebody is at the other end of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepspeed_c.server.errors import RequestRefused, error_object

__all__ = ["EventStream", "JsonResponse", "event_bytes", "read_body", "refusal", "until_gone"]

_T = TypeVar("_T")
_LOOK_S = 1.0
_encode = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """An object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encode(content)


def refusal(error: RequestRefused) -> JsonResponse:
    """The answer for a refused request."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_object(str(error), error.status, error.param, error.code)
    return JsonResponse(body, error.status, headers)


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body of a request. Raises RequestRefused with the status 413, before more than ``most_bytes`` are kept."""
    given = request.headers.get("content-length", "")
    n_bytes = int(given) if given.isdecimal() else 0
    pieces: list[bytes] = []
    if n_bytes <= most_bytes:
        n_bytes = 0
        async for piece in request.stream():
            n_bytes += len(piece)
            if n_bytes > most_bytes:
                break
            pieces.append(piece)
    if n_bytes > most_bytes:
        raise RequestRefused(
            f"has {n_bytes} bytes or more, and {most_bytes} are the most", param="body", fix="send less", status=413
        )
    return b"".join(pieces)


async def until_gone(
    receive: Receive, work: Coroutine[Any, Any, _T], is_stuck: Callable[[], bool] = lambda: False
) -> _T:
    """The result of ``work``, which is cancelled when the client goes or ``is_stuck``. The body has been read before.

    Raises ClientDisconnect then.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        while not task.done() and not gone.done() and not is_stuck():
            await asyncio.wait({task, gone}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event_bytes(content: Any) -> bytes:
    """An event of a stream (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return b"data: %b\n\n" % _encode(content)


class EventStream(Response):
    """Events as they come. The stream is cut off when the client reads nothing for ``stall_s``.

    close: called at the end in any case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], stall_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._stall_s = events, close, stall_s
        self._sends_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._write(send), self._is_stuck)
        except ClientDisconnect:
            # A client that reads nothing keeps its connection, and the bytes that wait for it.
            if self._is_stuck() and (transport := scope.get("state", {}).get("transport")) is not None:
                transport.abort()
                await asyncio.sleep(0)  # the connection is told of its end
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            self._sends_since = loop.time()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._sends_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_stuck(self) -> bool:
        since = self._sends_since
        return since is not None and asyncio.get_running_loop().time() - since > self._stall_s
