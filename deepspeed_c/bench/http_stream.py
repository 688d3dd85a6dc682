"""HTTP/1.1 requests over asyncio's streams, and the events of answers that come as a stream (SSE).

Each request has a connection of its own, as each user has: no request waits for the connection of another one.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

import msgspec

from deepspeed_c.errors import ConfigError

__all__ = [
    "Address", "EventParser", "FailedRequest", "ResponseHead", "body_pieces", "error_text", "exchange", "parse_url", "read_head",
    "whole_body",
]  # fmt: skip

_LINE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 16
_EVENT_BYTES = 1 << 20
_MOST_HEADERS = 200
_MOST_BODY_BYTES = 1 << 22
_HEX = re.compile(r"[0-9a-fA-F]{1,15}")
# A CR at the end of a piece may be the first half of CRLF.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


class FailedRequest(Exception):
    """A request without a whole answer. kind: a word to count by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class Address(NamedTuple):
    """Where a server listens."""

    is_secure: bool
    host: str
    port: int
    root: str
    """The path above ``/v1``; "" mostly."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}{self.root}"


class ResponseHead(NamedTuple):
    """The first lines of an answer. The names of headers are in lower case."""

    status: int
    headers: dict[str, str]


def parse_url(url: str, where: str) -> Address:
    """The address of ``http://HOST:PORT``, with or without ``/v1`` at its end. Raises ConfigError."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), None
    is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path.isascii() and " " not in url
    if not is_whole or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"{url!r} is no address of a server", where=where, fix="write http://HOST:PORT or https://HOST[:PORT]"
        )
    is_secure = parts.scheme == "https"
    root = parts.path.rstrip("/").removesuffix("/v1")
    return Address(is_secure, parts.hostname, port or (443 if is_secure else 80), root)


def _request_bytes(address: Address, method: str, path: str, key: str, body: bytes | None) -> bytes:
    """A request. path: below the root of the address. key: for the header ``Authorization``; "": without it."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"{method} {address.root}{path} HTTP/1.1",
        f"Host: {host}:{address.port}",
        "User-Agent: deepspeed_c-bench",
        "Accept: text/event-stream, application/json",
        "Connection: close",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


@asynccontextmanager
async def exchange(
    address: Address, method: str, path: str, key: str = "", body: bytes | None = None
) -> AsyncIterator[tuple[ResponseHead, AsyncIterator[bytes]]]:
    """Sends a request. The context has the head of the answer and the pieces of its body, and ends the connection.

    Raises FailedRequest of the kinds "connection" (there is none), "cut" (it has ended) and "malformed".
    """
    try:
        reader, writer = await asyncio.open_connection(
            address.host,
            address.port,
            ssl=ssl.create_default_context() if address.is_secure else None,
            limit=_LINE_BYTES,
        )
    except OSError as error:
        raise FailedRequest("connection", f"{address}: {error}") from error
    try:
        # Without drain: a server that refuses a request may answer before it has read all of it.
        writer.write(_request_bytes(address, method, path, key, body))
        head = await read_head(reader)
        async with aclosing(body_pieces(reader, head)) as pieces:
            yield head, pieces
    except OSError as error:
        raise FailedRequest("cut", f"the connection failed: {error}") from error
    finally:
        writer.transport.abort()


async def whole_body(pieces: AsyncIterator[bytes]) -> bytes:
    """A body that is no stream. Raises FailedRequest."""
    found = b""
    async for piece in pieces:
        found += piece
        if len(found) > _MOST_BODY_BYTES:
            raise FailedRequest("malformed", f"the body has more than {_MOST_BODY_BYTES} bytes")
    return found


async def read_head(reader: asyncio.StreamReader) -> ResponseHead:
    """The head of the final answer. Raises FailedRequest."""
    while True:
        line = await _line(reader)
        version, _, rest = line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise FailedRequest("malformed", f"the answer begins with {line[:60]!r}, which is not HTTP/1.1")
        headers: dict[str, str] = {}
        n_headers = 0
        while line := await _line(reader):
            name, colon, value = line.partition(":")
            n_headers += 1
            if not colon or n_headers > _MOST_HEADERS:
                raise FailedRequest("malformed", f"header {n_headers} of the answer is {line[:60]!r}")
            headers[name.strip().lower()] = value.strip()
        if int(rest[:3]) >= 200:  # others announce it
            return ResponseHead(int(rest[:3]), headers)


async def body_pieces(reader: asyncio.StreamReader, head: ResponseHead) -> AsyncIterator[bytes]:
    """The bytes of a body as they come (RFC 9112, section 6). Raises FailedRequest."""
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        while n_left := _chunk_size(await _line(reader)):
            async for piece in _exactly(reader, n_left):
                yield piece
            if rest := await _line(reader):
                raise FailedRequest("malformed", f"a chunk is longer than its size: {rest[:60]!r} follows")
        while await _line(reader):
            pass  # trailers
    elif (length := head.headers.get("content-length")) is not None:
        if not length.isdecimal():
            raise FailedRequest("malformed", f"the content-length is {length[:60]!r}")
        async for piece in _exactly(reader, int(length)):
            yield piece
    else:
        while piece := await reader.read(_PIECE_BYTES):
            yield piece


async def _exactly(reader: asyncio.StreamReader, n_left: int) -> AsyncIterator[bytes]:
    while n_left:
        piece = await reader.read(min(n_left, _PIECE_BYTES))
        if not piece:
            raise FailedRequest("cut", f"the connection ended {n_left} bytes before its chunk or body")
        n_left -= len(piece)
        yield piece


def _chunk_size(line: str) -> int:
    size = line.partition(";")[0].strip()
    if not _HEX.fullmatch(size):
        raise FailedRequest("malformed", f"the size of a chunk is {line[:60]!r}")
    return int(size, 16)


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\n")).decode("latin-1").rstrip("\r\n")
    except asyncio.IncompleteReadError as error:
        raise FailedRequest("cut", "the connection ended before the answer did") from error
    except asyncio.LimitOverrunError as error:
        raise FailedRequest("malformed", f"a line has more than {_LINE_BYTES} bytes") from error


class EventParser:
    """The data of server-sent events (HTML standard, section 9.2.6), from pieces of any length."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece. Raises FailedRequest for a line that is too long."""
        text, begin = self._rest + piece, 0
        events = []
        while end := _LINE_END.search(text, begin):
            line, begin = text[begin : end.start()], end.end()
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data = []
            elif line == b"data" or line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        self._rest = text[begin:]
        if len(self._rest) > _EVENT_BYTES:
            raise FailedRequest("malformed", f"an event has more than {_EVENT_BYTES} bytes")
        return events


class _ErrorText(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


def error_text(body: bytes) -> str:
    """The message of an answer with an error: of OpenAI's error object, or the begin of the body."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:200].decode(errors="replace").strip()
